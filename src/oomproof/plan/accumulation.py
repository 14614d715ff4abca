"""Several backward passes for one batch: a loop sees pieces, its optimizer and schedule see batches.

Runs in the user's process; Python 3.9, torch only inside functions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from oomproof.plan import losses, splitting
from oomproof.plan.technique import CannotApply

if TYPE_CHECKING:
    from oomproof.plan.injection import Injection


class Piece(NamedTuple):
    """Which part of its batch a loop is working on."""

    first: bool
    last: bool
    samples: int
    total: int  # samples of the batch


class Accumulation:
    """What happens once a batch happens with its last piece; each backward pass counts by its share of the batch.

    ``by_samples``: losses need not be recognised. A framework that accumulates by itself sets ``scale``: what it
    divides every loss by, to be undone; then only backward passes are touched.
    """

    def __init__(self, injection: Injection, technique: str, by_samples: bool) -> None:
        self._injection = injection
        self._torch: Any = injection.torch
        self._technique = technique
        self._by_samples = by_samples
        self.piece: Piece | None = None
        self.scale: int | None = None
        self._owner: Any = None  # the iterator whose piece it is
        self._optimizers: list[Any] = []
        self._replicas: list[Any] = []  # DistributedDataParallel modules
        self._pending = False  # gradients that no step has used
        self._stepped = False  # ever
        self._inside = False  # a backward pass
        self._backwards = 0  # in this piece
        self._asked = False  # in this piece, for a step
        self._weights: list[Any] = []  # what the pieces' cross-entropies were divided by
        self._elements = 0  # targets of the first piece
        self._watched: list[tuple[Any, int]] = []  # parameters and the versions of their gradients

    # ---- pieces --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether some loop is in the middle of its batches."""
        return self._owner is not None

    def begin(self, owner: Any, piece: Piece) -> None:
        """A loop, known by its iterator, goes on with a piece. Raises CannotApply where another is not done."""
        if self._owner is not owner and self.piece is not None and not self.piece.last:
            raise CannotApply("two DataLoaders are read in turn: their pieces would not belong together")
        if piece.first:
            if self._pending and not self._stepped and self.scale is None:
                raise CannotApply(
                    "no optimizer of torch's steps after each batch: where the script accumulates gradients by itself, "
                    "lower its batch size and raise its number of accumulated batches"
                )
            self._pending = False
            self._weights, self._watched = [], []
        self._owner, self.piece = owner, piece
        self._backwards, self._asked = 0, False
        for replica in self._replicas:
            replica.require_backward_grad_sync = piece.last

    def end(self, owner: Any) -> None:
        """A loop is over, or was left."""
        if self._owner is owner:
            self._owner = self.piece = None
            for replica in self._replicas:
                replica.require_backward_grad_sync = True

    def _waits(self) -> bool:
        """Whether what happens once a batch must wait for a later piece."""
        return self.piece is not None and not self.piece.last and self.scale is None

    # ---- wrapping torch ------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap what a training loop calls for each batch."""
        torch = self._torch
        losses.watch(torch, count=True)
        self._injection.on_model.append(self._on_model)
        self._injection.on_optimizer.append(self._on_optimizer)
        self._wrap_backward()
        self._wrap_schedules()
        clip: Any = importlib.import_module("torch.nn.utils.clip_grad")
        by_norm, by_value = self._clips(clip.clip_grad_norm_), self._later(clip.clip_grad_value_)
        for place in (clip, torch.nn.utils):
            place.clip_grad_norm_, place.clip_grad_value_ = by_norm, by_value
        scaler = torch.amp.GradScaler
        for name in ("unscale_", "update"):
            setattr(scaler, name, self._later(getattr(scaler, name)))
        scaler.step = self._steps(scaler.step)
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            kind.zero_grad = self._zeroes(kind.zero_grad)
        averaged = importlib.import_module("torch.optim.swa_utils").AveragedModel
        averaged.update_parameters = self._later(averaged.update_parameters)

    def _later(self, original: Any) -> Any:
        @functools.wraps(original)
        def once_a_batch(*args: Any, **kwargs: Any) -> Any:
            return None if self._waits() else original(*args, **kwargs)

        return once_a_batch

    def _clips(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not self._waits():
                return original(parameters, max_norm, norm_type, *args, **kwargs)
            given = [parameters] if isinstance(parameters, self._torch.Tensor) else list(parameters)
            norm = self._torch.linalg.vector_norm  # what scripts log
            norms = [norm(p.grad.detach(), norm_type) for p in given if p.grad is not None]
            return norm(self._torch.stack(norms), norm_type) if norms else self._torch.tensor(0.0)

        return clip

    def _steps(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.piece is None or self.scale is not None:
                return original(owner, *args, **kwargs)
            if self._inside:
                self.refuse("the optimizer steps inside the backward pass: each piece would step by itself")
            if any(map(callable, (*args[:1], kwargs.get("closure")))):
                self.refuse("the optimizer is given a closure, which it calls as often as it likes")
            self._asked = True
            if not self.piece.last:
                return None
            result = original(owner, *args, **kwargs)
            self._pending, self._stepped = False, True
            return result

        return step

    def _zeroes(self, original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.piece is not None and self._pending and self.scale is None:
                return None  # before the step it would drop the pieces' gradients
            return original(owner, *args, **kwargs)

        return zero_grad

    def _wrap_schedules(self) -> None:
        schedules: Any = importlib.import_module("torch.optim.lr_scheduler")
        base = schedules.LRScheduler
        later = self._later

        def wrap(kind: Any) -> None:
            step = kind.__dict__.get("step")
            if step is not None and not hasattr(step, "once_a_batch"):
                kind.step = later(step)
                kind.step.once_a_batch = True

        for kind in [k for k in vars(schedules).values() if isinstance(k, type) and issubclass(k, base)]:
            wrap(kind)
        init = base.__init__

        @functools.wraps(init)
        def made(schedule: Any, *args: Any, **kwargs: Any) -> None:
            for kind in type(schedule).__mro__:  # a script's own
                if issubclass(kind, base):
                    wrap(kind)
            init(schedule, *args, **kwargs)

        base.__init__ = made

    def _on_model(self, model: Any) -> None:
        replica = self._torch.nn.parallel.DistributedDataParallel
        self._replicas += [module for module in model.modules() if isinstance(module, replica)]

    def _on_optimizer(self, optimizer: Any) -> None:
        self._optimizers.append(optimizer)
        kind = type(optimizer)
        if not hasattr(kind.step, "once_a_batch"):
            kind.step = self._steps(kind.step)
            kind.step.once_a_batch = True
        if "zero_grad" in kind.__dict__:
            kind.zero_grad = self._zeroes(kind.zero_grad)

    # ---- backward passes -----------------------------------------------------------------------------------------

    def _wrap_backward(self) -> None:
        graph = self._torch.autograd.graph
        original = graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(tensors: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                self.piece is None
                or self._inside  # checkpointing with reentrant autograd
                or not kwargs.get("accumulate_grad")
                or self._torch.compiler.is_compiling()
            ):
                return original(tensors, grads, *args, **kwargs)
            try:
                share = self._share(self.piece, tensors)
            except CannotApply as error:
                self.refuse(str(error))
            self._inside = True
            try:
                result = original(tensors, tuple((g * share).to(g.dtype) for g in grads), *args, **kwargs)
            finally:
                self._inside = False
            self._pending = True
            self._watch()
            return result

        graph._engine_run_backward = run_backward
        self._torch.autograd._engine_run_backward = run_backward

    def _share(self, piece: Piece, tensors: Any) -> Any:
        """Return what a backward pass's gradients are multiplied by."""
        self._backwards += 1
        if self._asked:
            raise CannotApply("the optimizer steps between two backward passes over a batch")
        if self._backwards > 1:
            raise CannotApply("there are several backward passes over a batch")
        if not piece.first:
            self._check_gradients()
        scale = self.scale or 1
        loss = losses.of(tensors)
        if loss is None and not self._by_samples:
            raise CannotApply("the loss is none of torch's means here, as it was when the plan was made")
        if loss is None or loss.weight is None:
            if self._weights:
                raise CannotApply("the loss is not the same for all pieces of a batch")
            return scale * piece.samples / piece.total
        if not piece.first and not self._weights:
            raise CannotApply("the loss is not the same for all pieces of a batch")
        return scale * self._share_of_targets(piece, loss)

    def _share_of_targets(self, piece: Piece, loss: losses.Loss) -> Any:
        """Return the share of a cross-entropy, whose mean is over the targets that are not ignored.

        How many the whole batch has is known only before the last piece's backward pass: the gradients that are there
        by then were scaled by a guess, which is put right. On a device none of this waits for it.
        """
        if piece.first:
            self._elements = loss.elements * piece.total // piece.samples
        self._weights.append(loss.weight.double() if loss.weight.device.type != "mps" else loss.weight.float())
        if not piece.last:
            return self._weights[-1] / self._elements
        every = self._torch.stack(self._weights).sum()
        every = self._torch.where(every == 0, 1, every)
        if not piece.first:
            for gradient in self._gradients():
                gradient.mul_(self._elements / every)
        return self._weights[-1] / every

    def _gradients(self) -> Iterator[Any]:
        plain = (self._torch.Tensor, self._torch.nn.Parameter)
        seen = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None or id(parameter) in seen:
                        continue
                    seen.add(id(parameter))
                    if type(parameter.grad) not in plain:
                        raise CannotApply("gradients are sharded: token counts of the pieces cannot be put right")
                    yield parameter.grad

    def _watch(self) -> None:
        """Remember gradients, to see that the script leaves them alone until the next piece."""
        self._watched = []
        for optimizer in self._optimizers:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            first = next((p for p in parameters if p.grad is not None), None)
            if first is not None:
                self._watched.append((first, first.grad._version))

    def _check_gradients(self) -> None:
        for parameter, version in self._watched:
            if parameter.grad is None or parameter.grad._version != version:
                raise CannotApply("the script changes or drops gradients by itself between two pieces of a batch")

    def refuse(self, reason: str) -> None:
        """End the process: the script cannot be trained this way."""
        self._injection.refuse(self._technique, reason)


class Pieces:
    """Iterates over a DataLoader's batches in pieces; ``size`` is what the loader's full batches have."""

    def __init__(
        self, accumulation: Accumulation, injection: Injection, loader: Any, iterator: Any, parts: int
    ) -> None:
        self._accumulation = accumulation
        self._torch: Any = injection.torch
        self._iterator = iterator
        self._parts = parts
        self._size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self._fewer = _length(loader) == 1  # a data set smaller than a batch
        self._left: Iterator[tuple[Piece, Any]] = iter(())

    def __iter__(self) -> Pieces:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __next__(self) -> Any:
        try:
            return self._next()
        except CannotApply as error:
            self._accumulation.refuse(str(error))

    def _next(self) -> Any:
        piece, cut = next(self._left, (None, None))
        if piece is None:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._accumulation.end(self)
                raise
            self._left = self._cut(batch)
            piece, cut = next(self._left)
        self._accumulation.begin(self, piece)
        return cut

    def _cut(self, batch: Any) -> Iterator[tuple[Piece, Any]]:
        total = splitting.batch_size(self._torch, batch)
        if self._size is None or total > self._size or (total < self._size and not self._fewer):
            raise CannotApply(
                f"tensors with first dimension {total} come from a DataLoader whose batch size is {self._size}: it is "
                "not known along which dimension the samples lie"
            )
        self._fewer = True  # from now on: the last batch may have fewer
        sizes = splitting.sizes(total, self._parts)
        for place, cut in enumerate(splitting.split(self._torch, batch, sizes)):
            yield Piece(place == 0, place == len(sizes) - 1, sizes[place], total), cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

    def __del__(self) -> None:
        self._accumulation.end(self)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of an iterable dataset without a length
        return None


class SplitBatches:
    """A batch sampler that gives each batch of another in pieces; ``pieces`` are those given so far.

    For frameworks that accumulate by themselves: each batch but the last has exactly ``parts`` of them.
    """

    def __init__(self, batches: Any, parts: int) -> None:
        self.batches = batches
        self.parts = parts
        self.pieces: list[Piece] = []

    def __iter__(self) -> Iterator[Any]:
        self.pieces = []
        short = False
        for batch in self.batches:
            if short:
                raise CannotApply(f"a batch that is not the last has fewer than {self.parts} samples")
            sizes = splitting.sizes(len(batch), self.parts)
            short = len(sizes) < self.parts
            start = 0
            for place, size in enumerate(sizes):
                self.pieces.append(Piece(place == 0, place == len(sizes) - 1, size, len(batch)))
                yield batch[start : start + size]
                start += size

    def __len__(self) -> int:
        """Return how many pieces there are: only the last batch can have fewer than ``parts``."""
        count = len(self.batches)
        sampler, size = getattr(self.batches, "sampler", None), getattr(self.batches, "batch_size", None)
        rest = len(sampler) % size if sampler is not None and size else 0
        if rest == 0 or getattr(self.batches, "drop_last", False):
            return count * self.parts
        return (count - 1) * self.parts + min(rest, self.parts)

    def __getattr__(self, name: str) -> Any:  # batch_size, sampler, drop_last, set_epoch
        return getattr(self.__dict__["batches"], name)
