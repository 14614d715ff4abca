"""One of several processes that train a script together, each on a GPU of its own.

What all techniques have to do that spread a script over GPUs: find the process's place, give each rank its part of a
batch, keep files to one writer, and refuse where the result would not be that of the script. Runs in the user's
process, which torchrun started or which is a rank of a phantom world. Python 3.9; standard library and torch.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oomproof.plan.technique import CannotApply
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.injection import Injection

#: Batches whose values are compared between the ranks; later ones come from the same random numbers.
COMPARED_BATCHES = 3
_IGNORED = -100  # the target that PyTorch's losses leave out of their mean by default

#: Frameworks that start the process group by themselves, and the class whose construction shows it.
_FRAMEWORKS = (
    ("lightning.pytorch.trainer.trainer", "Trainer", "Lightning"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "Lightning"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "DeepSpeed"),
)
#: Those whose own switches ``plan.frameworks`` sets.
_SWITCHED = (
    ("accelerate.accelerator", "Accelerator", "accelerate"),
    ("transformers.training_args", "TrainingArguments", "transformers.Trainer"),
)


class Ranks:
    """This process among the ``size`` that train together; ``here`` is false where it is not one of them.

    That is torchrun's own process, which trains nothing. A process that trains and is no rank is refused.
    ``slices`` says whether each rank reads its own part of a batch (data parallel) or all of it (tensor parallel).
    """

    def __init__(
        self, injection: Injection, technique: str, size: int, *, slices: bool = True, switched: bool = False
    ) -> None:
        self.injection = injection
        self.technique = technique
        self.size = size
        self.slices = slices
        self.rank = int(os.environ.get("RANK", "0"))
        self.here = "RANK" in os.environ and injection.world_size == size
        self.theirs: str | None = None  # the framework that shards by itself
        self.batches = 0  # that were sliced
        self._switched = switched
        self._place = {name: os.environ.get(name) for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
        self._torch: Any = injection.torch
        self._models: list[weakref.ref[Any]] = []
        self._passed = 0  # batches that went to the script whole while gradients were on
        self._starting = False
        self._started = False
        self._weight = 1.0
        self._in_backward = False
        self._forwards = 0  # of the models, since the last backward pass
        self._counted: set[int] = set()
        self._compared = 0
        injection.on_model.append(self._model)
        if self.here:
            self._take_own_gpu()
            self._watch_others()
            self._watch_backward()
            if slices:
                injection.on_loader.append(self._check_loader)
                injection.on_batches.append(self._sliced)

    # ---- this process's place ------------------------------------------------------------------------------------

    def _take_own_gpu(self) -> None:
        """Let this process see its own GPU alone, so that "cuda", "cuda:0" and a device left out all mean it.

        torchrun --virtual-local-rank does the same. In children of this process it changes nothing more.
        """
        local = int(os.environ.get("LOCAL_RANK", "0"))
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(n) for n in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]
        if local >= len(names):
            raise CannotApply(
                f"CUDA_VISIBLE_DEVICES has {len(names)} GPUs and this is process {local} on the machine, counted from 0"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local]
        os.environ["LOCAL_RANK"] = "0"

    def yield_to(self, framework: str) -> None:
        """Leave everything to a framework that spreads the script by itself, this process's place included."""
        if self.theirs is not None:
            return
        self.theirs = framework
        if not self._torch.cuda.is_initialized():
            for name, value in self._place.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def start(self) -> None:
        """Join the other ranks: make the process group, once, on the GPU where there is one."""
        if self._started:
            return
        distributed = self._torch.distributed
        cuda = self._torch.cuda.is_available()
        self._starting = True
        try:
            if cuda:
                self._torch.cuda.init()  # a device mesh would choose a GPU by LOCAL_RANK where CUDA is not there yet
            distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        finally:
            self._starting = False
        self._started = True

    @property
    def device_type(self) -> str:
        """Where the ranks' process group is: "cuda", or "cpu" on a machine without a GPU."""
        return "cuda" if self._torch.cuda.is_available() else "cpu"

    def mesh(self) -> Any:
        """Return the device mesh of all ranks."""
        self.start()
        return importlib.import_module("torch.distributed.device_mesh").init_device_mesh(self.device_type, (self.size,))

    def refuse(self, reason: str) -> None:
        """End the process: from places that the injection does not call."""
        self.injection.refuse(self.technique, reason)

    # ---- scripts that cannot be spread -----------------------------------------------------------------------------

    def _watch_others(self) -> None:
        distributed = self._torch.distributed
        original = distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if not self._starting and self.theirs is None:
                self.refuse("the script starts torch.distributed by itself; use its own options for several GPUs")
            return original(*args, **kwargs)

        for module in (distributed, distributed.distributed_c10d):
            module.init_process_group = init_process_group
        for name, kind, what in _FRAMEWORKS if self._switched else (*_FRAMEWORKS, *_SWITCHED):
            self.injection.when_imported(name, functools.partial(self._watch_framework, kind, what))
        compile_original = self._torch.compile

        @functools.wraps(compile_original)
        def compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, self._torch.nn.Module):
                self.refuse("the script compiles the model; what is compiled is not what would be sharded")
            return compile_original(model, *args, **kwargs)

        self._torch.compile = compiled

    def _watch_framework(self, kind: str, what: str, module: Any) -> None:
        cls = getattr(module, kind)
        original = cls.__init__

        @functools.wraps(original)
        def init(instance: Any, *args: Any, **kwargs: Any) -> None:
            self.refuse(f"{what} spreads a script over GPUs by its own switches; use those (see the code)")
            original(instance, *args, **kwargs)

        cls.__init__ = init

    def _model(self, model: Any) -> None:
        if not self.here:
            raise CannotApply(
                f"it is for {self.size} processes and this is one of {self.injection.world_size}; start the script "
                f"with oomproof apply, or with torchrun --nproc-per-node {self.size}"
            )
        if self.theirs is None and any(p.numel() for p in model.parameters()):
            self.register(model)

    def register(self, model: Any) -> None:
        """Note a model that is trained. Raises CannotApply for a second one."""
        known = [m for m in (reference() for reference in self._models) if m is not None]
        if any(model is m for m in known):
            return
        inside = {id(m) for m in model.modules()}
        known = [m for m in known if id(m) not in inside]
        if known:
            raise CannotApply(
                f"the script trains several models ({type(known[0]).__name__} and {type(model).__name__}); each needs "
                "a wrapper of its own"
            )
        if self._passed and self.slices:
            raise CannotApply("a batch was read before the model was known; build the optimizer first")
        if any(self._torch.nn.parameter.is_lazy(p) for p in model.parameters()):
            raise CannotApply("the model has parameters without a shape (lazy modules); call it once before")
        self._models = [weakref.ref(model)]
        self.count_calls(model)

    def count_calls(self, model: Any) -> None:
        """Notice when the script calls a model: one that it does not call is not what it trains."""
        if id(model) not in self._counted:
            self._counted.add(id(model))
            weakref.finalize(model, self._counted.discard, id(model))
            wrap_forward(model, self._called)

    def _called(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._torch.is_grad_enabled():
            self._forwards += 1
            if not self.slices and self._compared < COMPARED_BATCHES and not self.injection.rehearsal:
                self._compared += 1
                self._compare((args, kwargs), "the ranks give the model different inputs, and have to work on the same")
        return forward(*args, **kwargs)

    def _training(self) -> bool:
        models = [m for m in (reference() for reference in self._models) if m is not None]
        return bool(self._torch.is_grad_enabled()) and (not models or any(m.training for m in models))

    # ---- batches -------------------------------------------------------------------------------------------------

    def _check_loader(self, loader: Any) -> None:
        """Refuse a data set whose last batch has too few samples, before hours are spent on the others."""
        sampler = self._torch.utils.data.distributed.DistributedSampler
        if isinstance(loader.sampler, sampler):
            raise CannotApply("the script's DataLoader has a DistributedSampler: it spreads its batches by itself")
        size = loader.batch_size
        if size is not None and size < self.size:
            raise CannotApply(f"a batch of {size} has less than one sample for each of {self.size} GPUs")

    def _sliced(self, loader: Any, iterator: Any) -> Any:
        return _Sliced(self, loader, iterator)

    def part(self, loader: Any, batch: Any) -> Any:
        """Return this rank's part of a batch, or all of it where the script does not train with it."""
        if self.theirs is not None or not self._training():
            return batch
        if not any(reference() is not None for reference in self._models):
            self._passed += 1
            return batch
        count = batch_size(self._torch, batch)
        if count is None:
            self.refuse(
                f"a batch of {type(loader.dataset).__name__} is not made of tensors with one sample in each row of "
                "the first dimension; read a part of the data in each rank by hand"
            )
        assert count is not None
        if count < self.size:
            self.refuse(
                f"a batch has {count} samples for {self.size} GPUs, each needs one at least; "
                "DataLoader(..., drop_last=True) leaves the last, smaller one out"
            )
        if self.batches < COMPARED_BATCHES and not self.injection.rehearsal:
            self._compare(batch, "the ranks read different batches, so their parts would not make the script's batch")
        start, stop = place(count, self.size, self.rank)
        self._weight = (stop - start) * self.size / count
        what = f"each batch of {count} is spread over {self.size} GPUs" if self.batches == 0 else None
        self._look_for_ignored(batch, count)
        self.batches += 1
        if what:
            self.injection.say(self.technique, what, f"DataLoader of {type(loader.dataset).__name__}")
        return rows(self._torch, batch, count, start, stop)

    def _compare(self, batch: Any, otherwise: str) -> None:
        """Make sure that all ranks have the same: they take parts of it, or work on it together."""
        self.start()
        digest = hashlib.sha256()
        for tensor in tensors(self._torch, batch):
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(self._torch.uint8).numpy().tobytes())
        found = [""] * self.size
        self._torch.distributed.all_gather_object(found, digest.hexdigest())
        if len(set(found)) > 1:
            self.refuse(
                f"{otherwise}; seed everything that the data depends on (random.seed, numpy.random.seed, "
                "torch.manual_seed)"
            )

    def _look_for_ignored(self, batch: Any, count: int) -> None:
        """Say where a mean over targets that count is not the mean of the ranks' means."""
        for tensor in tensors(self._torch, batch):
            if tensor.is_floating_point() or tensor.dim() < 2 or tensor.device.type != "cpu":
                continue
            counted = (tensor != _IGNORED).reshape(count, -1).sum(1)
            parts = [float(counted[slice(*place(count, self.size, r))].float().mean()) for r in range(self.size)]
            if max(parts) != min(parts):
                self.injection.say(
                    self.technique,
                    "targets of -100 are not equally many on all ranks: a loss that is a mean over the others weighs "
                    "the ranks alike, so the step differs a little from that on one GPU",
                    "batches",
                )

    # ---- the backward pass ---------------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        """Weigh the losses of unequal parts, and make sure that what was trained went through the model."""
        graph = self._torch.autograd.graph
        original = graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(outputs: Any, gradients: Any = (), *args: Any, **kwargs: Any) -> Any:
            if (
                self.theirs is not None
                or self._in_backward
                or not kwargs.get("accumulate_grad", True)
                or not self._models
            ):
                return original(outputs, gradients, *args, **kwargs)
            self._before_backward()
            if self._weight != 1.0:
                gradients = tuple(None if g is None else g * self._weight for g in gradients)
            self._in_backward = True
            try:
                return original(outputs, gradients, *args, **kwargs)
            finally:
                self._in_backward = False

        graph._engine_run_backward = run_backward
        self._torch.autograd._engine_run_backward = run_backward

    def _before_backward(self) -> None:
        if self.slices and not self.batches and not self.injection.rehearsal:
            self.refuse(
                "no DataLoader gives the training batches, so each rank would train on the same samples; have each "
                "rank read a different part (see the code)"
            )
        if not self._forwards:
            model = self._models[0]()
            self.refuse(
                f"the script trains {type(model).__name__} without calling it (a method or a part of it is called "
                "instead), so its gradients would not be averaged over the GPUs"
            )
        self._forwards = 0

    # ---- what is saved -------------------------------------------------------------------------------------------

    def one_writer(self, whole: Callable[[Any], Any] = lambda obj: obj) -> None:
        """Have rank 0 alone write what torch.save saves to a file, made whole with ``whole`` on all ranks."""
        original = self._torch.save

        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if self.theirs is not None:
                return original(obj, f, *args, **kwargs)
            obj = whole(obj)
            if self.rank == 0 or hasattr(f, "getvalue"):
                original(obj, f, *args, **kwargs)
            if self._started and not hasattr(f, "getvalue"):
                self._torch.distributed.barrier()  # who loads it again finds it
            return None

        self._torch.save = self._torch.serialization.save = save


class _Sliced:
    """A DataLoader's iterator that gives this rank's part of each training batch."""

    def __init__(self, ranks: Ranks, loader: Any, iterator: Any) -> None:
        self._ranks = ranks
        self._loader = loader
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ranks.part(self._loader, next(self._iterator))

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def place(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return the first sample of a rank and the one after its last; the first ranks have one more where it's uneven."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def tensors(torch: Any, batch: Any) -> Iterator[Any]:
    """Yield the tensors in a batch of nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(torch, value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors(torch, value)


def batch_size(torch: Any, batch: Any) -> int | None:
    """Return how many samples a batch has, None where its tensors do not have as many rows as one another."""
    if isinstance(batch, torch.nn.utils.rnn.PackedSequence) or not _is_plain(torch, batch):
        return None
    sizes = {tensor.shape[0] for tensor in tensors(torch, batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _is_plain(torch: Any, batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return all(_is_plain(torch, value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return all(_is_plain(torch, value) for value in batch)
    if isinstance(batch, torch.Tensor):
        return not batch.is_sparse and not batch.is_nested
    return batch is None or isinstance(batch, (str, bytes, int, float, bool))


def rows(torch: Any, batch: Any, count: int, start: int, stop: int) -> Any:
    """Return a batch with the samples from ``start`` to ``stop`` of all its ``count``."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, Mapping):
        part: Any = copy.copy(batch)
        for key, value in batch.items():
            part[key] = rows(torch, value, count, start, stop)
        return part
    if isinstance(batch, (list, tuple)):
        if len(batch) == count and not any(True for _ in tensors(torch, batch)):
            return batch[start:stop]  # a name or a text for each sample
        values = [rows(torch, value, count, start, stop) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
