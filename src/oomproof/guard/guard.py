"""The guard: one optimizer step, retried as the same step until it fits. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from oomproof.errors import UsageError
from oomproof.guard.exactness import doubts
from oomproof.guard.failure import Failure, let_go, recognise
from oomproof.guard.ladder import Ladder
from oomproof.guard.refusal import GuardError
from oomproof.guard.safe_point import SafePoint
from oomproof.plan import splitting
from oomproof.plan.technique import CannotApply

_log = logging.getLogger("oomproof.guard")


class Guard:
    """Does training steps that survive an out-of-memory.

    ``sizes`` are the micro-batches to try below the whole batch, in samples; by default its divisors, each at most
    half of the one before. ``retries`` is how often one step may be tried again. After ``grow_after`` good steps the
    next larger size is tried; never where None. ``restore`` puts parameters and the optimizer's state back as they
    were before the step: it is called where the optimizer had begun to write; without it the guard then refuses.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        sizes: Iterable[int] | None = None,
        scaler: Any = None,
        retries: int = 12,
        grow_after: int | None = None,
        restore: Callable[[], object] | None = None,
    ) -> None:
        if retries < 0 or (grow_after is not None and grow_after < 1):
            raise UsageError("retries must be at least 0 and grow_after at least 1, or None")
        self._torch: Any = importlib.import_module("torch")
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._ladder = Ladder(sizes)
        self._retries = retries
        self._grow_after = grow_after
        self._restore = restore
        self._good = 0  # steps since the size last changed
        self._largest = 1  # samples of a batch: a short last one must not decide what a size grows to
        self._phase = "forward"
        self._writing = False
        self._hooked = hasattr(optimizer, "register_step_pre_hook")  # torch's optimizers, from 2.0 on
        if self._hooked:
            optimizer.register_step_pre_hook(self._on_step)
        self.size: int | None = None  # samples of a micro-batch; None: the whole batch
        self.notes: list[str] = []  # why steps in micro-batches are not those of whole batches

    def step(self, batch: Any, loss_fn: Callable[[Any], Any], *, count: Callable[[Any], Any] | None = None) -> Any:
        """Do forward, backward, optimizer step and zero_grad of one batch; return its loss, detached.

        ``loss_fn`` gets the batch or a part of it and returns its mean loss; ``count`` returns what that is a mean
        over, such as the tokens that are not padding; samples by default. Raises GuardError where the step cannot be
        done as the same step; what is no out-of-memory is raised as it came.
        """
        outside = sys.exc_info()[1]
        total, uncut = self._samples(batch)
        size = total if self.size is None else min(self.size, total)
        point = SafePoint(self._torch, self._model, self._optimizer, self._scaler)
        same_size = True  # whether this size may be tried again
        for _ in range(self._retries + 1):
            result = self._attempt(batch, total, size, loss_fn, count, outside)
            if not isinstance(result, Failure):
                self._went_well(total)
                return result
            self._recover(point, result)
            if result.fragmented and same_size:
                same_size = False
                _log.warning("%s: %s; memory is fragmented: once more at the same size", result.phase, result.message)
                continue
            smaller = None if uncut else self._ladder.below(total, size)
            if smaller is None:
                why = uncut or f"micro-batches of {size} are the smallest"
                self._refuse(f"out of memory in {result.phase}, and no smaller size is left: {why}", result)
            _log.warning("%s: %s; micro-batches of %d samples from now on", result.phase, result.message, smaller)
            self._shrink(smaller, total)
            size = smaller
        self._refuse(f"out of memory after {self._retries} retries of one step (retries=)", result)

    # ---- one attempt ---------------------------------------------------------------------------------------------

    def _attempt(
        self, batch: Any, total: int, size: int, loss_fn: Any, count: Any, outside: BaseException | None
    ) -> Failure | Any:
        self._writing = False
        try:
            return self._whole_step(batch, total, size, loss_fn, count)
        except Exception as error:
            failure = recognise(error, self._phase, outside)
            if failure is None:
                raise
            let_go(error, outside)
        return failure  # past the except block, which would keep the error alive

    def _whole_step(self, batch: Any, total: int, size: int, loss_fn: Any, count: Any) -> Any:
        self._phase = "forward"
        pieces, weights = [batch], [1.0]
        if size < total:
            sizes = splitting.sizes(total, -(-total // size))
            pieces = list(splitting.split(self._torch, batch, sizes))
            shares = sizes if count is None else [float(count(piece)) for piece in pieces]
            if sum(shares) <= 0:
                raise UsageError("count() gives 0 for the whole batch: its loss is a mean over nothing")
            weights = [share / sum(shares) for share in shares]
            self._doubt(sizes, count is not None)
        whole = None
        for piece, weight in zip(pieces, weights):
            self._phase = "forward"
            loss = loss_fn(piece)
            if weight == 0:
                continue  # a mean over nothing is NaN, and would stay so times 0
            if weight != 1:
                loss = loss * weight
            self._phase = "backward"
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            whole = loss.detach() if whole is None else whole + loss.detach()
            del loss  # the next forward needs its room
        self._phase = "optimizer"
        if not self._hooked:
            self._writing = True
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return whole

    def _on_step(self, *_: Any) -> None:
        self._writing = True

    # ---- after an attempt ----------------------------------------------------------------------------------------

    def _recover(self, point: SafePoint, failure: Failure) -> None:
        """Make all as it was before the attempt. Raises GuardError where that cannot be."""
        if self._writing or point.parameters_changed():
            if self._restore is None:
                self._refuse(
                    "out of memory when the optimizer had begun to write: parameters or its states may be half "
                    "updated, and no restore= was given; go on from the last checkpoint",
                    failure,
                )
            _log.warning("%s: %s; the optimizer had begun to write: restoring", failure.phase, failure.message)
            self._restore()
        point.put_back()
        gc.collect()
        if self._torch.cuda.is_initialized():
            self._torch.cuda.empty_cache()

    def _went_well(self, total: int) -> None:
        self._good += 1
        self._largest = max(self._largest, total)
        if self.size is not None and self._grow_after is not None and self._good >= self._grow_after:
            larger = self._ladder.above(self._largest, self.size)
            self.size = None if larger >= self._largest else larger
            self._good = 0
            _log.info("micro-batches of %d samples are tried again", larger)

    def _shrink(self, size: int, total: int) -> None:
        self.size = size
        self._largest = max(self._largest, total)
        self._good = 0

    def _samples(self, batch: Any) -> tuple[int, str | None]:
        """Return a batch's samples, and why it cannot be cut; it is then taken whole."""
        try:
            return splitting.batch_size(self._torch, batch), None
        except CannotApply as error:
            return 1, str(error)

    def _doubt(self, sizes: list[int], counted: bool) -> None:
        for doubt in doubts(self._torch, self._model, sizes, counted):
            if doubt not in self.notes:
                self.notes.append(doubt)
                _log.warning("not exact: %s", doubt)

    def _refuse(self, why: str, failure: Failure) -> NoReturn:
        message = f"{why} ({failure.finding.kind}: {failure.finding.why})"
        _log.error("%s", message)
        raise GuardError(message)
