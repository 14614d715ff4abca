"""Mixed precision for a script that has none: autocast, and a gradient scaler where it is needed."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

_SHORT = {"bfloat16": "bf16", "float16": "fp16"}
_LIGHTNING = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}


class Autocast(Technique):
    """Matrix products and convolutions in 16 bits, and so what they keep for the backward pass; weights in 32.

    Option ``dtype``: "bfloat16" or "float16". A framework's own setting is made where one runs the training; otherwise
    the outermost model's forward runs under autocast and its outputs are given back in float32, as accelerate does.
    """

    name = "autocast"
    title = "compute in 16 bits (mixed precision)"
    fidelity = "approximate"
    lowers = ("activation",)
    keeps = (
        "weights, gradients and optimizer states: they stay float32, and each weight has a copy in 16 bits until the "
        "backward pass has used it, so that a large model with a small batch can need more"
    )
    rests_on = "torch.autocast and torch.amp.GradScaler"
    source = "https://docs.pytorch.org/docs/stable/amp.html"
    accepts = {"dtype": ("bfloat16", "float16")}
    excludes = frozenset(("pure-bf16",))
    rank = 5

    def unfit(self, facts: Facts) -> str | None:
        own = sorted(use for use in facts.uses if use.startswith("autocast") or use == "grad-scaler")
        if own:
            return f"the script has mixed precision of its own ({', '.join(own)})"
        if facts.models and all(model.dtypes and model.dtypes[0] in _SHORT for model in facts.models):
            return "the models' weights are in 16 bits already"
        if facts.framework in ("deepspeed", "fsdp"):
            return "sharded training sets its precision by itself: DeepSpeed's bf16, FSDP's mixed precision policy"
        if facts.capability < (8, 0) and self._plain_fp16(facts):
            return self._plain_fp16(facts)
        return None

    def _plain_fp16(self, facts: Facts) -> str | None:
        if facts.framework == "code" and len(facts.optimizers) > 1:
            return "several optimizers need a gradient scaler each, and only the script knows which loss is whose"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        # before compute capability 8.0, bfloat16 is emulated: slow, and cuDNN and cuBLAS take no part in it
        yield {"dtype": "bfloat16" if facts.capability >= (8, 0) else "float16"}

    def caution(self, facts: Facts, options: Options) -> str | None:
        if options["dtype"] == "float16" and facts.framework == "code":
            return (
                "gradients are scaled between backward() and the step; clip_grad_norm_ and clip_grad_value_ get them "
                "unscaled, but code of the script that reads .grad itself does not"
            )
        if facts.framework == "code":
            return "losses computed outside the model's forward get its outputs in float32"
        return None

    def install(self, injection: Injection, options: Options) -> None:
        name = str(options["dtype"])
        of_library = _Libraries(injection, self.name, name)
        of_library.install()
        plain = _PlainLoop(injection, self.name, getattr(injection.torch, name), of_library)
        plain.install()

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        name = str(options["dtype"])
        short = _SHORT[name]
        if framework == "trainer":
            return f"TrainingArguments(..., {short}=True)"
        if framework == "lightning":
            return f'Trainer(..., precision="{_LIGHTNING[name]}")'
        if framework == "accelerate":
            return f'Accelerator(mixed_precision="{short}")'
        if framework == "deepspeed":
            return f'{{"{short}": {{"enabled": true}}}}  # in the DeepSpeed configuration'
        if framework == "fsdp":
            return (
                "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n\n"
                f"policy = MixedPrecisionPolicy(param_dtype=torch.{name}, reduce_dtype=torch.float32)\n"
                "fully_shard(model, mp_policy=policy)"
            )
        inside = f'with torch.autocast("cuda", torch.{name}):\n    loss = loss_of(model(batch))\n'
        if name == "bfloat16":
            return f"{inside}loss.backward()"
        return (
            f'scaler = torch.amp.GradScaler("cuda")\n\n{inside}scaler.scale(loss).backward()\n'
            "scaler.unscale_(optimizer)  # before clip_grad_norm_\nscaler.step(optimizer)\nscaler.update()"
        )


class _Libraries:
    """Sets the precision where a library runs the training; ``used`` tells that one does."""

    def __init__(self, injection: Injection, technique: str, name: str) -> None:
        self.used = False
        self._injection = injection
        self._technique = technique
        self._name = name

    def install(self) -> None:
        watch = self._injection.when_imported
        watch("transformers.training_args", self._training_arguments)
        watch("accelerate.accelerator", self._accelerator)
        for place in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"):
            watch(place, self._lightning)

    def _say(self, what: str) -> None:
        self.used = True
        self._injection.say(self._technique, what)

    def _training_arguments(self, module: Any) -> None:
        kind = module.TrainingArguments
        original = kind.__post_init__
        short = _SHORT[self._name]

        @functools.wraps(original)
        def __post_init__(arguments: Any, *args: Any, **kwargs: Any) -> None:
            if not (getattr(arguments, "bf16", False) or getattr(arguments, "fp16", False)):
                setattr(arguments, short, True)
                self._say(f"TrainingArguments({short}=True)")
            original(arguments, *args, **kwargs)

        kind.__post_init__ = __post_init__

    def _accelerator(self, module: Any) -> None:
        kind = module.Accelerator
        original = kind.__init__
        short = _SHORT[self._name]

        @functools.wraps(original)
        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            # HF's Trainer has set its own by the environment or by this argument
            if len(args) < 3 and str(kwargs.get("mixed_precision") or "no") == "no":
                kwargs["mixed_precision"] = short
                self._say(f'Accelerator(mixed_precision="{short}")')
            self.used = True
            original(accelerator, *args, **kwargs)

        kind.__init__ = init

    def _lightning(self, module: Any) -> None:
        kind = module.Trainer
        original = kind.__init__
        value = _LIGHTNING[self._name]

        @functools.wraps(original)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if str(kwargs.get("precision") or "32-true") in ("32", "32-true"):
                kwargs["precision"] = value
                self._say(f'Trainer(precision="{value}")')
            original(trainer, *args, **kwargs)

        kind.__init__ = init


class _PlainLoop:
    """Autocast around the outermost model, and a gradient scaler for float16, where no library trains."""

    def __init__(self, injection: Injection, technique: str, dtype: Any, libraries: _Libraries) -> None:
        self._injection = injection
        self._torch = injection.torch
        self._technique = technique
        self._dtype = dtype
        self._libraries = libraries
        self._wrapped: list[str] = []
        self._entered = False
        self._scaler: Any = None
        self._optimizer: Any = None
        self._stepping = False
        self._unscaled = False

    def install(self) -> None:
        self._injection.on_model.append(self._on_model)
        hook = importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
        hook(self._before_step)
        if self._dtype == self._torch.float16:
            self._injection.on_optimizer.append(self._on_optimizer)
            self._wrap_backward()
            self._wrap_clipping()

    # ---- autocast ------------------------------------------------------------------------------------------------

    def _on_model(self, model: Any) -> None:
        if self._libraries.used:
            return
        wrap_forward(model, functools.partial(self._around, model))
        self._wrapped.append(type(model).__name__)
        what = f"its forward runs under autocast in {self._dtype}; its outputs are float32"
        self._injection.say(self._technique, what, type(model).__name__)

    def _around(self, model: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        torch = self._torch
        kind = next((p.device.type for p in model.parameters()), "cpu")
        if self._libraries.used or torch.is_autocast_enabled(kind):
            return forward(*args, **kwargs)
        self._entered = True
        with torch.autocast(kind, self._dtype):
            output = forward(*args, **kwargs)
        return widened(torch, output)

    def _before_step(self, *_: Any) -> None:
        if self._wrapped and not self._entered and not self._libraries.used:
            self._injection.refuse(
                self._technique,
                f"the script trains {', '.join(self._wrapped)} without calling it as a whole; put torch.autocast "
                "around the parts that it calls",
            )

    # ---- the scaler ----------------------------------------------------------------------------------------------

    def _on_optimizer(self, optimizer: Any) -> None:
        if self._libraries.used:
            return
        if self._optimizer is not None:
            raise CannotApply("several optimizers: only the script knows which loss is whose. Put in GradScalers there")
        self._optimizer = optimizer
        original = optimizer.step

        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, original, *args, **kwargs)

        optimizer.step = types.MethodType(step, optimizer)  # LR schedulers bind it again

    def _start_scaler(self, kind: str) -> Any:
        if self._scaler is None:
            self._scaler = self._torch.amp.GradScaler(kind)
            self._injection.say(self._technique, "a GradScaler scales the loss and steps the optimizer")
        return self._scaler

    def _wrap_backward(self) -> None:
        autograd = self._torch.autograd
        original, grad = autograd.backward, autograd.grad

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            single = isinstance(tensors, self._torch.Tensor)
            idle = self._optimizer is None or self._libraries.used or not self._entered
            if idle or self._inside_backward():  # reentrant checkpoints have a backward pass within
                return original(tensors, grad_tensors, *args, **kwargs)
            if grad_tensors is not None:
                self._refuse_gradients("calls backward() with gradients of its own")
            losses = [tensors] if single else list(tensors)
            scaler = self._start_scaler(losses[0].device.type)
            return original([scaler.scale(loss) for loss in losses], None, *args, **kwargs)

        @functools.wraps(grad)
        def gradients(*args: Any, **kwargs: Any) -> Any:
            if self._entered and not self._libraries.used and not self._inside_backward():
                self._refuse_gradients("takes gradients with torch.autograd.grad")
            return grad(*args, **kwargs)

        autograd.backward = backward
        autograd.grad = gradients

    def _inside_backward(self) -> bool:
        return bool(self._torch._C._current_graph_task_id() != -1)

    def _refuse_gradients(self, what: str) -> None:
        self._injection.refuse(self._technique, f"the script {what}: a GradScaler has to be put in there by hand")

    def _wrap_clipping(self) -> None:
        utils = self._torch.nn.utils
        module = importlib.import_module("torch.nn.utils.clip_grad")
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(module, name)
            wrapped = functools.wraps(original)(functools.partial(self._clip, original))
            setattr(module, name, wrapped)
            setattr(utils, name, wrapped)

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._scaler is not None and not self._libraries.used:
            self._unscale()
        return original(*args, **kwargs)

    def _unscale(self) -> None:
        if not self._unscaled and _has_gradients(self._optimizer):
            self._scaler.unscale_(self._optimizer)
            self._unscaled = True

    def _step(self, optimizer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stepping or self._scaler is None or self._libraries.used or not _has_gradients(optimizer):
            return original(*args, **kwargs)
        if args or kwargs.get("closure") is not None:
            self._injection.refuse(self._technique, "the optimizer's step has a closure, and GradScaler takes none")
        self._stepping = True
        try:
            done = self._scaler.step(optimizer)
            self._scaler.update()
        finally:
            self._stepping, self._unscaled = False, False
        return done


def _has_gradients(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def widened(torch: Any, output: Any) -> Any:
    """Return a model's output with every tensor of 16 bits in it in float32; other objects are left alone."""
    from torch.utils._pytree import tree_map_only

    half = (torch.float16, torch.bfloat16)

    def widen(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype in half else tensor

    if isinstance(output, dict) and type(output) is not dict:  # transformers' ModelOutput: a dict with attributes
        for key in list(output.keys()):
            output[key] = widened(torch, output[key])
        return output
    return tree_map_only(torch.Tensor, widen, output)


TECHNIQUE = Autocast()
