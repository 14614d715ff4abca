"""A language model's loss without its logits."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan.survey import vocabulary_head
from oomproof.plan.technique import CannotApply, Options, Technique, in_code
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: What can compute it beside this tool's own blocks, and its package. Their gradients are made in the forward pass,
#: before a GradScaler's scale is known: in float16 they would underflow.
#: cut-cross-entropy is not among them: it makes its buffers by how many tokens are ignored, which its own compiled code
#: counts, and which the phantom does not know.
_LIBRARIES = {"liger": "liger-kernel"}


class ChunkedCrossEntropy(Technique):
    """The logits that only a cross entropy reads are made a block of the vocabulary at a time, and again in backward.

    Option ``use``: "blocks" (this tool's own, of PyTorch's operators), "torch" (``F.linear_cross_entropy`` of torch
    2.14) or "liger". Option ``blocks``: how many blocks, 16 where it is missing.
    """

    name = "chunked-cross-entropy"
    title = "compute the loss a block of the vocabulary at a time: the logits never exist"
    fidelity = "equal"
    lowers = ("activation", "temporary")
    keeps = "the head's weight and its gradient; and nothing where the script reads the logits for more than the loss"
    rests_on = "torch.nn.functional.linear_cross_entropy, liger-kernel, or PyTorch's own operators"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html"
    accepts = {"use": ("blocks", "torch", "liger"), "blocks": int}
    excludes = frozenset(("compile-budget",))
    rank = 15

    def unfit(self, facts: Facts) -> str | None:
        if not any(model.head for model in facts.models):
            return "no model ends in a Linear onto a vocabulary (4,096 classes or more, and four times its input)"
        if "compile" in facts.uses:
            return "the script compiles: the head's output cannot be put off inside a compiled model"
        if facts.framework in ("fsdp", "deepspeed") or "fsdp" in facts.uses:
            return "the head's weight is sharded: it is gone again when the loss is computed"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {}
        if "autocast-fp16" in facts.uses or "grad-scaler" in facts.uses:
            return
        if versions.numbers(facts.torch)[:2] >= (2, 14):
            yield {"use": "torch"}
        for use, package in _LIBRARIES.items():
            if package in facts.packages:
                yield {"use": use}

    def caution(self, facts: Facts, options: Options) -> str | None:
        use = options.get("use", "blocks")
        said = "what reads the logits beside the loss (an accuracy, say) makes them exist again, and nothing is saved"
        if use == "blocks":
            return f"{said}; the head's product is computed twice"
        if use in _LIBRARIES:
            return (
                f"{said}; {_LIBRARIES[use]} runs Triton kernels, which the phantom does not: its memory is proved "
                "here, its numbers are not. Not for float16"
            )
        return f"{said}; gradients are made in the forward pass, before a GradScaler's scale is known: not for float16"

    def install(self, injection: Injection, options: Options) -> None:
        from oomproof.plan import lazy_logits

        torch = injection.torch
        compute = _losses(options)
        heads: list[str] = []

        def refuse(reason: str) -> None:
            injection.refuse(self.name, reason)

        def loss(*args: Any) -> Any:
            try:
                return compute(*args)
            except CannotApply as error:  # in the script's own call, where nobody else waits for it
                refuse(str(error))

        def read(name: str) -> None:
            injection.say(self.name, f"not saved here: {name} reads the logits")

        def wrap(model: Any) -> None:
            name, _ = vocabulary_head(torch, model)
            if name is None:
                return
            head = model.get_submodule(name)
            if type(head).forward is not torch.nn.Linear.forward or "forward" in vars(head):
                raise CannotApply(f"{name} is no plain Linear: {type(head).__module__}.{type(head).__qualname__}")
            used = functools.partial(
                injection.say, self.name, f"a cross entropy is computed without the logits of {name}"
            )
            told = lazy_logits.Told(loss, used, read, refuse)
            wrap_forward(head, functools.partial(around, head, told))
            heads.append(name)

        def around(head: Any, told: Any, forward: Any, hidden: Any) -> Any:
            weight, bias = head.weight, head.bias
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and head.training):
                return forward(hidden)
            dtype, kind = hidden.dtype, hidden.device.type
            if torch.is_autocast_enabled(kind) and torch.float64 not in (dtype, weight.dtype):
                dtype = torch.get_autocast_dtype(kind)
            elif weight.dtype != dtype:
                return forward(hidden)
            plain = type(hidden) in (torch.Tensor, torch.nn.Parameter) and type(weight) is torch.nn.Parameter
            if not plain or not dtype.is_floating_point or hidden.dim() < 2 or not hidden.numel():
                return forward(hidden)
            if not (hidden.requires_grad or weight.requires_grad):
                return forward(hidden)
            return lazy_logits.lazy_linear(hidden, weight, bias, dtype, told)

        def stepped(*args: Any) -> None:
            lazy_logits.note_step(*args)
            if not heads:
                refuse("no model that is trained ends in a Linear onto a vocabulary")

        injection.on_model.append(wrap)
        importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(stepped)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        use = options.get("use", "blocks")
        head = in_code(next((model.head for model in facts.models if model.head), "lm_head"))
        hidden = "hidden = ...  # (tokens, features): what the model's forward gives to its head, without calling it"
        if framework == "trainer" and use == "liger":
            return "TrainingArguments(..., use_liger_kernel=True)  # pip install liger-kernel"
        if use == "liger":
            return (
                "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss\n\n"
                f"{hidden}\nloss = LigerFusedLinearCrossEntropyLoss()({head}.weight, hidden, targets)"
            )
        if use == "torch":
            return (
                f"{hidden}\nloss = torch.nn.functional.linear_cross_entropy(\n"
                f"    hidden, {head}.weight, targets, options=torch.nn.LinearCrossEntropyOptions()\n)"
            )
        return (
            "from torch.utils.checkpoint import checkpoint\n\n"
            "def part(hidden, targets):\n"
            f"    logits = {head}(hidden).float()\n"
            '    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")\n\n'
            f"{hidden}\n"
            "parts = zip(hidden.chunk(16), targets.chunk(16))\n"
            "loss = sum(checkpoint(part, h, t, use_reentrant=False) for h, t in parts) / (targets != -100).sum()"
        )


def _losses(options: Options) -> Any:
    """Return what computes the loss of hidden states, the weight and the targets."""
    from oomproof.plan.linear_cross_entropy import linear_cross_entropy

    use = options.get("use", "blocks")
    blocks = int(options.get("blocks", 16))

    def own(hidden: Any, weight: Any, bias: Any, target: Any, loss: Any, dtype: Any) -> Any:
        return linear_cross_entropy(hidden, weight, bias, target, loss, dtype=dtype, blocks=blocks)

    if use == "blocks":
        return own
    name, attribute, build = {
        "torch": ("torch.nn.functional", "linear_cross_entropy", _of_torch),
        "liger": ("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", _of_liger),
    }[use]
    # imported when it is first used: its kernels are compiled at import, and the phantom is not all there yet
    if use in _LIBRARIES and importlib.util.find_spec(name.partition(".")[0]) is None:
        raise CannotApply(
            f"{_LIBRARIES[use]} is not beside the script's torch; pip install {_LIBRARIES[use]} (or oomproof[losses])"
        )
    if use == "torch" and not hasattr(importlib.import_module(name), attribute):
        raise CannotApply("torch.nn.functional.linear_cross_entropy needs torch 2.14")
    return build(own, lambda: getattr(importlib.import_module(name), attribute))


def _same_dtype(hidden: Any, *others: Any) -> tuple[Any, ...]:
    if str(hidden.dtype) == "torch.float16":
        raise CannotApply("gradients are made before the loss is scaled: in float16 they would underflow")
    return tuple(None if t is None else t.to(hidden.dtype) for t in others)


def _of_torch(own: Any, function: Any) -> Any:
    options = importlib.import_module("torch.nn").LinearCrossEntropyOptions()

    def compute(hidden: Any, weight: Any, bias: Any, target: Any, loss: Any, dtype: Any) -> Any:
        if loss.label_smoothing:  # it makes the whole logits then
            return own(hidden, weight, bias, target, loss, dtype)
        weight, bias, mass = _same_dtype(hidden, weight, bias, loss.weight)
        return function()(
            hidden,
            weight,
            target,
            linear_bias=bias,
            weight=mass,
            reduction=loss.reduction,
            ignore_index=loss.ignore_index,
            options=options,
        ).to(dtype)

    return compute


def _of_liger(own: Any, function: Any) -> Any:
    def compute(hidden: Any, weight: Any, bias: Any, target: Any, loss: Any, dtype: Any) -> Any:
        if loss.reduction == "none" or not hidden.is_cuda:
            return own(hidden, weight, bias, target, loss, dtype)
        weight, bias = _same_dtype(hidden, weight, bias)
        mass = None if loss.weight is None else loss.weight.float()
        found = function().apply(
            hidden, weight, target, bias, mass, loss.ignore_index, 0.0, loss.label_smoothing, loss.reduction
        )
        return (found[0] if isinstance(found, tuple) else found).to(dtype)

    return compute


TECHNIQUE = ChunkedCrossEntropy()
