"""Weights of frozen linear layers in eight bits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.layers import is_conv1d, linear_layers
from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class Int8Frozen(Technique):
    """Frozen linear layers keep int8 weights and one scale a row; what is trained stays as it is.

    torchao's own layers keep a copy of each weight in full for the backward pass where gradients flow through them;
    here the weight is made again instead.
    """

    name = "int8-frozen"
    title = "keep the weights of frozen linear layers in 8 bits"
    fidelity = "changes-model"
    lowers = ("parameter",)
    keeps = (
        "anything but frozen weights: those take 75 % less than in fp32 and 50 % less than in fp16 or bf16, minus the "
        "scales; trained weights, gradients, optimizer states and activations stay, and one layer's weight at a time "
        "is there in full while it is used"
    )
    rests_on = "torchao.quantization.quantize_(model, Int8WeightOnlyConfig(), filter_fn=...)"
    source = "https://docs.pytorch.org/ao/stable/api_reference/generated/torchao.quantization.Int8WeightOnlyConfig.html"
    needs = ("torchao",)
    extra = "torchao (or oomproof[int8])"
    excludes = frozenset(("qlora", "prune-channels"))
    rank = 55

    def unfit(self, facts: Facts) -> str | None:
        if "torchao" not in facts.packages:
            return f"torchao is not beside the script's torch; pip install {self.extra}"
        if not any(model.frozen_linear_bytes for model in facts.models) and not facts.frozen_linear_bytes:
            return "the script has no frozen linear layers; int8 weights cannot be trained"
        if "fsdp" in facts.uses:
            return "the model is sharded before its optimizer is built"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return "the frozen weights are rounded to 8 bits: check what the frozen part gives before training on it"

    def install(self, injection: Injection, options: Options) -> None:
        torch = injection.torch
        linear = _linear(torch)
        done: Any = importlib.import_module("weakref").WeakSet()

        def convert(model: Any) -> None:
            layers = [
                (name, module)
                for name, module in linear_layers(torch, model)
                if module not in done and _is_frozen(module) and not is_conv1d(module)
            ]
            uses: dict[int, int] = {}
            for module in model.modules():
                for p in module.parameters(recurse=False):
                    uses[id(p)] = uses.get(id(p), 0) + 1
            layers = [(name, module) for name, module in layers if uses[id(module.weight)] == 1]  # tied to an embedding
            if not layers:
                return
            chosen = {id(module) for _, module in layers}
            before = sum(m.weight.numel() * m.weight.element_size() for _, m in layers)
            quantization: Any = importlib.import_module("torchao.quantization")
            quantization.quantize_(
                model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda module, name: id(module) in chosen
            )
            for _, module in layers:
                wrap_forward(module, linear(module))
                module._register_state_dict_hook(_write_in_full)
                done.add(module)
            what = f"{len(layers)} frozen linear layers have 8-bit weights: {before:,} bytes before"
            injection.say(self.name, what, type(model).__name__)

        def stays_frozen(model: Any, groups: list[Any]) -> list[Any]:
            if any(module.weight.requires_grad for module in done):
                raise CannotApply("a layer that was frozen when it was moved is trained after all")
            return groups

        injection.on_parameters.append(stays_frozen)
        injection.on_moving.append(convert)
        injection.on_model.append(convert)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework in ("deepspeed", "fsdp"):
            return None
        return (
            "from torchao.quantization import Int8WeightOnlyConfig, quantize_\n\n"
            "quantize_(  # before the model is moved to the GPU\n"
            "    model,\n"
            "    Int8WeightOnlyConfig(),\n"
            "    filter_fn=lambda module, name: isinstance(module, nn.Linear) and not module.weight.requires_grad,\n"
            ")"
        )


def _is_frozen(module: Any) -> bool:
    return not module.weight.requires_grad and module.weight.is_floating_point() and module.weight.ndim == 2


def _write_in_full(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have state dicts hold a weight that any copy of the model can load, on the CPU: the GPU may have no room."""
    state[f"{prefix}weight"] = module.weight.detach().cpu().dequantize()


def _linear(torch: Any) -> Any:
    """Return what makes a layer's forward: a product that keeps the int8 weight for the backward pass, nothing else."""

    class Int8Linear(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.weight, ctx.bias, ctx.dtype = weight, bias, x.dtype
            if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
                x = x.to(torch.get_autocast_dtype(x.device.type))
            return torch.nn.functional.linear(
                x, weight.dequantize(output_dtype=x.dtype), None if bias is None else bias.to(x.dtype)
            )

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            of_input = of_bias = None
            if ctx.needs_input_grad[0]:
                of_input = (gradient @ ctx.weight.dequantize(output_dtype=gradient.dtype)).to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias.dtype)
            return of_input, None, of_bias

    def around(module: Any) -> Any:
        def forward(_: Any, x: Any) -> Any:
            return Int8Linear.apply(x, module.weight, module.bias)

        return forward

    return around


TECHNIQUE = Int8Frozen()
