"""Finding out about a script what the planner wants to know: the Facts. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata
from types import ModuleType
from typing import Any

from oomproof.inject.imports import when_imported
from oomproof.measure.modules import is_library
from oomproof.plan import losses
from oomproof.plan.facts import BlockGroup, Facts, Loader, Model, Optimizer
from oomproof.plan.layers import linear_layers
from oomproof.plan.repeated import find_blocks

#: Distributions that techniques rest on.
PACKAGES = ("bitsandbytes", "torchao", "peft", "liger-kernel", "cut-cross-entropy", "torch-pruning", "transformers",
            "accelerate", "lightning", "deepspeed", "lion-pytorch")  # fmt: skip

#: Modules that are imported with a framework, the class whose construction shows that it is used, and its name.
_FRAMEWORKS = (
    ("transformers.trainer", "Trainer", "trainer"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "lightning"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "lightning"),
    ("accelerate.accelerator", "Accelerator", "accelerate"),
)
_FIRST = ("deepspeed", "fsdp", "lightning", "trainer", "accelerate", "code")  # HF's Trainer uses accelerate


class Survey:
    """Watches a script's use of PyTorch; ``changed`` is called when there is something new."""

    def __init__(self, torch: ModuleType, changed: Callable[[], None]) -> None:
        self._torch: Any = torch
        self._changed = changed
        self._models: list[Model] = []
        self._optimizers: list[Optimizer] = []
        self._loaders: list[list[Any]] = []  # loader's id, Loader
        self._last_loader: int | None = None
        self._frameworks = {"code"}
        self._uses: set[str] = set()
        self._frozen: dict[int, int] = {}  # weights, their bytes
        self._backwards = 0
        self._steps = 0
        self._nodes_at_step = 0

    def install(self) -> None:
        """Wrap what tells how a script trains."""
        torch = self._torch
        for module, kind, framework in _FRAMEWORKS:
            when_imported(module, functools.partial(self._watch_framework, kind, framework))
        when_imported("deepspeed", self._watch_deepspeed)
        clip = importlib.import_module("torch.nn.utils.clip_grad")
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrapped = self._noting(getattr(clip, name), name.rstrip("_").replace("_", "-"))
            for place in (clip, torch.nn.utils):
                setattr(place, name, wrapped)
        checkpoint: Any = importlib.import_module("torch.utils.checkpoint")
        checkpoint.checkpoint = self._noting(checkpoint.checkpoint, "checkpoint")
        torch.compile = self._noting_compile(torch.compile)
        if torch.distributed.is_available():
            for place in (torch.distributed, torch.distributed.distributed_c10d):
                place.init_process_group = self._noting(place.init_process_group, "distributed")
        self._watch_autocast()
        self._watch_scaler()
        losses.watch(torch)
        self._watch_backward()
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_post_hook(self._stepped)
        zero_grad = torch.optim.Optimizer.zero_grad

        @functools.wraps(zero_grad)
        def zeroed(optimizer: Any, set_to_none: bool = True) -> Any:
            if not set_to_none:
                self._note("keeps-gradients")
            self._zeroed(p for group in optimizer.param_groups for p in group["params"])
            return zero_grad(optimizer, set_to_none)

        torch.optim.Optimizer.zero_grad = zeroed
        zero_module = torch.nn.Module.zero_grad

        @functools.wraps(zero_module)
        def zeroed_module(module: Any, set_to_none: bool = True) -> Any:
            if not set_to_none:
                self._note("keeps-gradients")
            self._zeroed(module.parameters())
            return zero_module(module, set_to_none)

        torch.nn.Module.zero_grad = zeroed_module

    # ---- told by the injection -----------------------------------------------------------------------------------

    def model(self, model: Any) -> None:
        """Look at a model that is trained."""
        torch = self._torch
        kind = type(model)
        parameters = {id(p): p for p in model.parameters()}
        dtypes: Counter[str] = Counter()
        for p in parameters.values():
            dtypes[str(p.dtype).replace("torch.", "")] += p.numel()
        modules = list(model.modules())
        head, vocabulary = vocabulary_head(torch, model)
        linear = [m for _, m in linear_layers(torch, model)]
        frozen = {id(m.weight): m.weight for m in linear if not m.weight.requires_grad}
        named = sum(1 for _ in model.named_parameters(remove_duplicate=False))
        self._models.append(
            Model(
                kind=kind.__name__,
                module=kind.__module__,
                parameters=sum(p.numel() for p in parameters.values()),
                trainable=sum(p.numel() for p in parameters.values() if p.requires_grad),
                parameter_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
                dtypes=tuple(name for name, _ in dtypes.most_common()),
                blocks=tuple(BlockGroup(b.container, b.kind, b.names, b.parameter_bytes()) for b in find_blocks(model)),
                batch_norms=sum(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in modules),
                dropouts=sum(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in modules),
                head=head,
                vocabulary=vocabulary,
                shared=named > len(parameters),
                linear_layers=len(linear),
                convolutions=sum(isinstance(m, torch.nn.modules.conv._ConvNd) for m in modules),
                frozen_linear_bytes=sum(w.numel() * w.element_size() for w in frozen.values()),
            )
        )
        for module in modules:
            name = type(module).__name__
            if name == "DistributedDataParallel" or name.startswith("FSDP") or name == "FullyShardedDataParallel":
                self._frameworks.add("fsdp" if name[0] == "F" else "code")
                self._uses.add("fsdp" if name[0] == "F" else "ddp")
        self._changed()

    def moved(self, module: Any) -> None:
        """Look at a module that is moved or cast: a frozen teacher or encoder is never trained."""
        layers = [m for _, m in linear_layers(self._torch, module) if not m.weight.requires_grad]
        self._frozen.update({id(m.weight): m.weight.numel() * m.weight.element_size() for m in layers})

    def optimizer(self, optimizer: Any) -> None:
        """Look at an optimizer that was built."""
        kind = type(optimizer)
        groups = optimizer.param_groups
        options = {k: v for k, v in groups[0].items() if isinstance(v, (bool, int, float)) or v is None}
        self._optimizers.append(
            Optimizer(kind.__name__, kind.__module__, options, sum(p.numel() for g in groups for p in g["params"]))
        )
        self._changed()

    def loader(self, loader: Any) -> None:
        """Look at a DataLoader that was made."""
        dataset = loader.dataset
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self._loaders.append([id(loader), Loader(size, _length(dataset), bool(loader.drop_last), False)])
        self._changed()

    def iterated(self, loader: Any) -> None:
        """Note which DataLoader gives batches now."""
        self._last_loader = id(loader)

    # ---- told by what is wrapped ---------------------------------------------------------------------------------

    def _note(self, what: str) -> None:
        if what not in self._uses:
            self._uses.add(what)
            self._changed()

    def _noting(self, original: Any, what: str) -> Any:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._note(what)
            return original(*args, **kwargs)

        return called

    def _noting_compile(self, original: Any) -> Any:
        """Note that the script compiles something; libraries do so to functions of theirs when they are imported."""

        @functools.wraps(original)
        def called(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            code = getattr(model, "__code__", None)
            if isinstance(model, self._torch.nn.Module) or (code is not None and not is_library(code.co_filename)):
                self._note("compile")
            return original(model, *args, **kwargs)

        return called

    def _watch_framework(self, kind: str, framework: str, module: ModuleType) -> None:
        cls = getattr(module, kind)
        original = cls.__init__

        @functools.wraps(original)
        def init(instance: Any, *args: Any, **kwargs: Any) -> None:
            self._frameworks.add(framework)
            original(instance, *args, **kwargs)

        cls.__init__ = init

    def _watch_deepspeed(self, module: Any) -> None:
        original = module.initialize

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self._frameworks.add("deepspeed")
            return original(*args, **kwargs)

        module.initialize = initialize

    def _watch_autocast(self) -> None:
        kind = self._torch.amp.autocast_mode.autocast
        enter = kind.__enter__

        def entered(context: Any) -> Any:
            if context._enabled and context.device == "cuda":
                self._note("autocast-bf16" if context.fast_dtype == self._torch.bfloat16 else "autocast-fp16")
            return enter(context)

        kind.__enter__ = entered

    def _watch_scaler(self) -> None:
        kind = self._torch.amp.GradScaler
        scale = kind.scale

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                self._note("grad-scaler")
            return scale(scaler, outputs)

        kind.scale = scaled

    def _watch_backward(self) -> None:
        graph = self._torch.autograd.graph
        original = graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._torch.compiler.is_compiling():
                self._backwards += 1
                self._train_on_last_loader()
                if kwargs.get("accumulate_grad"):
                    self._look_at_loss(losses.of(tensors))
            return original(tensors, *args, **kwargs)

        graph._engine_run_backward = run_backward
        self._torch.autograd._engine_run_backward = run_backward

    def _look_at_loss(self, loss: Any) -> None:
        self._note("loss-other" if loss is None else f"loss-{loss.kind}")
        if loss is not None and loss.in_batch:
            self._note("loss-in-batch")

    def _train_on_last_loader(self) -> None:
        for place, (key, loader) in enumerate(self._loaders):
            if key == self._last_loader and not loader.used_in_training:
                self._loaders[place][1] = loader._replace(used_in_training=True)
                self._changed()

    def _zeroed(self, parameters: Iterable[Any]) -> None:
        """Gradients are cleared: only now, when a forward pass has run beside them?"""
        if self._steps and self._nodes() != self._nodes_at_step and any(p.grad is not None for p in parameters):
            self._note("late-zero-grad")

    def _nodes(self) -> int:
        """Return how many nodes of autograd's graphs this thread has made."""
        return int(self._torch._C._autograd._get_sequence_nr())

    def _stepped(self, *_: Any) -> None:
        self._nodes_at_step = self._nodes()
        self._steps += 1
        if self._steps <= 3:
            self._changed()

    def facts(self) -> dict[str, Any]:
        """Return what is known by now, as ``Facts.from_json`` reads it."""
        torch = self._torch
        optimizers = max(1, len(self._optimizers))
        rounds = self._steps / optimizers
        used = torch.cuda.is_initialized()
        return Facts(
            models=tuple(self._models),
            optimizers=tuple(self._optimizers),
            loaders=tuple(loader for _, loader in self._loaders),
            framework=next(name for name in _FIRST if name in self._frameworks),
            packages=_versions(),
            torch=torch.__version__,
            capability=tuple(torch.cuda.get_device_capability()) if used else (0, 0),
            uses=frozenset(self._uses),
            backwards_per_step=max(1, round(self._backwards / rounds)) if rounds >= 1 else 1,
            allocator_config=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
            frozen_linear_bytes=sum(self._frozen.values()),
            script=_script_hash(),
        ).to_json()


def vocabulary_head(torch: Any, model: Any) -> tuple[str | None, int | None]:
    """Return the last Linear of a model if it is much wider than what it reads: the projection onto a vocabulary."""
    last = None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            last = name, module
    if last is None or last[1].out_features < max(4096, 4 * last[1].in_features):
        return None, None
    return last[0], last[1].out_features


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # an iterable dataset has none
        return None


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _script_hash() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path or not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
