"""Structured pruning of a convolutional model's channels."""

from __future__ import annotations

import gc
import importlib
import traceback
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.layers import is_sharded, named_kind, option_of, unwrap
from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class PruneChannels(Technique):
    """The weakest channels of each convolution are taken out, with all that depends on them.

    What depends on what is traced with the first batch's first sample, so it is done when the model is first called
    in training; its optimizer keeps the same parameters, which are smaller then. Options: ``ratio``, the part of each
    convolution's channels; ``model``: the class of the one to change.
    """

    name = "prune-channels"
    title = "take out a part of each convolution's channels"
    fidelity = "changes-model"
    lowers = ("parameter", "gradient", "optimizer_state", "activation")
    keeps = (
        "the accuracy: it needs fine-tuning after; and the head's outputs. For ResNet-50, 36 to 44 % fewer parameters "
        "are published at ratios of 0.20 to 0.25; activations fall by less, and the whole model is on the GPU for a "
        "moment"
    )
    rests_on = "torch_pruning.pruner.BasePruner(model, example_inputs, importance, pruning_ratio=...)"
    source = "https://github.com/VainF/Torch-Pruning"
    accepts = {"ratio": float, "model": str}
    needs = ("torch_pruning",)
    extra = "torch-pruning (or oomproof[pruning])"
    excludes = frozenset(("lora", "qlora", "int8-frozen", "share-blocks"))
    rank = 75

    def unfit(self, facts: Facts) -> str | None:
        if "torch-pruning" not in facts.packages:
            return f"torch-pruning is not beside the script's torch; pip install {self.extra}"
        if not any(model.convolutions > 1 for model in facts.models):
            return "the models have no convolutions: what pruning other layers changes is fixed in a model's own code"
        for use, why in (("fsdp", "sharded"), ("ddp", "made parallel")):
            if use in facts.uses:
                return f"the model is {why} before its first call"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        convolutional = [model for model in facts.models if model.convolutions > 1]
        named = option_of(convolutional[0]) if convolutional else {}
        for ratio in (0.2, 0.25, 0.5):
            yield {"ratio": ratio, **named}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "the model is worse until it has been fine-tuned; an average of weights or a checkpoint made before has "
            "other shapes"
        )

    def install(self, injection: Injection, options: Options) -> None:
        ratio = float(options.get("ratio", 0.2))
        if not 0 < ratio < 1:
            raise CannotApply("ratio is a part of the channels: more than 0 and less than 1")
        optimizers: list[Any] = []
        weak: Any = importlib.import_module("weakref")
        waiting: Any = weak.WeakKeyDictionary()
        done: Any = weak.WeakSet()
        injection.on_optimizer.append(optimizers.append)

        def wait(model: Any) -> None:
            outer = named_kind(model, options.get("model"))
            if outer is None:
                return
            inner = unwrap(outer)
            if is_sharded(inner) or type(outer).__name__ == "DistributedDataParallel":
                raise CannotApply("the model is split over GPUs already; prune it before")
            if inner._compiled_call_impl is not None:
                raise CannotApply("Module.compile() was called already; prune the model before")
            # a compiled model may come twice: as the optimizer's module, and as what torch.compile put around it
            handles = waiting.setdefault(inner, [])

            def first(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if not (module.training and injection.torch.is_grad_enabled()) or inner in done:
                    return
                done.add(inner)
                while handles:
                    handles.pop().remove()
                injection.guarded(self.name, _prune, injection, inner, args, kwargs, ratio, optimizers)

            if inner not in done:
                handles.append(outer.register_forward_pre_hook(first, with_kwargs=True))

        injection.on_model.append(wait)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework in ("deepspeed", "fsdp"):
            return None
        return (
            "import torch_pruning\n\n"
            "pruner = torch_pruning.pruner.BasePruner(  # before the optimizer is built\n"
            "    model,\n"
            "    example_inputs,\n"
            "    importance=torch_pruning.importance.MagnitudeImportance(p=1),\n"
            f"    pruning_ratio={options.get('ratio', 0.2)},\n"
            "    ignored_layers=[head],\n"
            ")\n"
            "pruner.step()"
        )


def _prune(
    injection: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ratio: float, optimizers: list[Any]
) -> None:
    torch = injection.torch
    parameters = dict(model.named_parameters())
    if any(p in o.state for o in optimizers for p in parameters.values()):
        raise CannotApply("the optimizer has states of the whole model already")
    count = sum(p.numel() for p in parameters.values())
    modes = [(module, module.training) for module in model.modules()]
    frozen = [p for p in parameters.values() if not p.requires_grad]
    args, kwargs = _one_sample(torch, args, kwargs)

    def run() -> list[Any]:
        return [t for t in _tensors(torch, model(*args, **kwargs)) if t.is_floating_point()]

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        # the script's own random numbers stay as they are, and no statistics are taken
        with torch.random.fork_rng(devices), torch.enable_grad():
            model.eval()
            torch.clear_autocast_cache()  # of weights as they were, here and after
            for p in frozen:
                p.requires_grad_(True)  # the graph is traced through gradients
            shapes = [tuple(t.shape) for t in run()]
            _step(injection, model, run, ratio)
            after = [tuple(t.shape) for t in run()]
    except CannotApply:
        raise
    except Exception as error:  # whatever a model's own code or the tracing of it fails with
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion without words
        raise CannotApply(
            f"what depends on what could not be traced in {type(model).__name__}: {type(error).__name__}: {why}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if after != shapes:
        raise CannotApply(f"{type(model).__name__}'s outputs would change from {shapes} to {after}")
    # the traced graph knows the old shapes; while it lives, so would the parameters' accumulators of gradients
    torch.clear_autocast_cache()
    gc.collect()
    for name, new in list(model.named_parameters()):
        old = parameters[name]
        if new is not old:
            data = new.data
            if old.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last) and not old.is_contiguous():
                data = data.contiguous(memory_format=torch.channels_last)
            old.data, old.grad = data, None  # what the optimizer and the script hold is the same object
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._parameters[last] = old
    for p in model.parameters():
        p.grad = None
    for p in frozen:
        p.requires_grad_(False)
    left = sum(p.numel() for p in model.parameters())
    if left == count:
        raise CannotApply(f"{type(model).__name__} has no convolution whose channels are its own")
    what = f"{count:,} parameters become {left:,} (-{1 - left / count:.0%}) at a ratio of {ratio}"
    injection.say(PruneChannels.name, what, type(model).__name__)


def _step(injection: Any, model: Any, run: Any, ratio: float) -> None:
    pruning: Any = importlib.import_module("torch_pruning")
    torch = injection.torch
    convolution = torch.nn.modules.conv._ConvNd

    def by_place(group: Any) -> Any:
        """On the phantom there are no weights to compare; how many channels go is the same."""
        return torch.arange(len(group[0].idxs), dtype=torch.float32)

    importance = by_place if injection.rehearsal else pruning.importance.MagnitudeImportance(p=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that it takes for element-wise ones: the outputs are compared
        pruner = pruning.pruner.BasePruner(
            model,
            None,
            importance=importance,
            pruning_ratio=ratio,
            ignored_layers=_last(torch, model, run, (convolution, torch.nn.Linear)),
            root_module_types=[convolution],
            in_channel_groups={},  # its defaults are shared by all pruners of a process
            out_channel_groups={},
            num_heads={},
            forward_fn=lambda _model, _inputs: run(),
        )
        pruner.step()


def _last(torch: Any, model: Any, run: Any, kinds: Any) -> list[Any]:
    """Return the layers that give the outputs their channels: the first ones of these kinds on every way back."""
    made: dict[Any, Any] = {}

    def note(module: Any, _: Any, output: Any) -> None:
        made[output.grad_fn] = module

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, kinds)]
    outputs = run()
    for hook in hooks:
        hook.remove()
    found, seen, todo = [], set(), [t.grad_fn for t in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in made:
            found.append(made[node])
        else:
            todo += [following for following, _ in node.next_functions]
    return found


def _one_sample(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments with the first sample alone, where the first dimension of all tensors is the batch."""
    tensors = [t for t in _tensors(torch, [args, kwargs]) if t.ndim]
    sizes = {t.shape[0] for t in tensors}
    if len(sizes) != 1 or not sizes - {1}:
        return args, kwargs

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:1].detach() if value.ndim else value
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(cut(v) for v in value)
        return {k: cut(v) for k, v in value.items()} if type(value) is dict else value

    return cut(args), cut(kwargs)


def _tensors(torch: Any, value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(torch, v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(torch, v)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in _tensors(torch, getattr(value, name))]
    return []


TECHNIQUE = PruneChannels()
