"""Weights, gradients and optimizer states in bfloat16."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from oomproof.plan.technique import Options, Technique
from oomproof.plan.techniques.autocast import widened
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class PureBf16(Technique):
    """A model's parameters become bfloat16 before they reach the GPU, its floating inputs where it is called.

    Batch norms keep float32, whose running averages would stand still otherwise, and so do rotary frequencies
    (``inv_freq``) and whatever is complex.
    """

    name = "pure-bf16"
    title = "keep weights, gradients and optimizer states in bfloat16"
    fidelity = "approximate"
    lowers = ("parameter", "gradient", "optimizer_state", "activation")
    keeps = "what the script's loss makes of the outputs, which it gets in float32"
    rests_on = "torch.nn.Module.to(torch.bfloat16)"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.to"
    excludes = frozenset(("autocast",))
    rank = 60

    def unfit(self, facts: Facts) -> str | None:
        if facts.capability < (8, 0):
            return "bfloat16 needs compute capability 8.0 (A100) or later"
        if facts.models and all(model.dtypes and model.dtypes[0] in ("bfloat16", "float16") for model in facts.models):
            return "the models' weights are in 16 bits already"
        if "autocast-fp16" in facts.uses or "grad-scaler" in facts.uses:
            return "the script computes in float16 with a gradient scaler: take both out first"
        if facts.framework in ("deepspeed", "fsdp") or "fsdp" in facts.uses:
            return "sharded training sets its precision by itself: DeepSpeed's bf16, FSDP's mixed precision policy"
        return None

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "a bfloat16 weight has 8 significant bits: an update below 1/512 of it is lost, and with small learning "
            "rates most are. Use an optimizer that rounds stochastically or keeps the remainder (torchao's AdamW with "
            "bf16_stochastic_round, optimi's Kahan summation), and compare the loss over more than a few steps"
        )

    def install(self, injection: Injection, options: Options) -> None:
        torch = injection.torch
        depth = threading.local()
        done: weakref.WeakSet[Any] = weakref.WeakSet()
        norms = torch.nn.modules.batchnorm._BatchNorm

        def convert(model: Any) -> int:
            """Convert in place, tied parameters once; return the bytes of what was on a GPU already."""
            late = 0
            for module in model.modules():
                if isinstance(module, norms):
                    continue
                for parameter in module.parameters(recurse=False):
                    if parameter.is_floating_point() and parameter.dtype != torch.bfloat16:
                        late += parameter.nbytes if parameter.is_cuda else 0
                        parameter.data = parameter.data.to(torch.bfloat16)
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point() and not name.endswith("inv_freq"):
                        module._buffers[name] = buffer.to(torch.bfloat16)
            return late

        def narrow(tensor: Any) -> Any:
            return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

        def around(forward: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.utils._pytree import tree_map_only

            if getattr(depth, "inside", False):
                return forward(*args, **kwargs)
            depth.inside = True
            try:
                args, kwargs = tree_map_only(torch.Tensor, narrow, args), tree_map_only(torch.Tensor, narrow, kwargs)
                return widened(torch, forward(*args, **kwargs))
            finally:
                depth.inside = False

        def apply(model: Any) -> None:
            parameters = list(model.parameters())
            if model in done or not any(p.requires_grad for p in parameters):
                return
            if any(map(torch.nn.parameter.is_lazy, parameters)):  # it is called once before it trains
                return
            done.update(model.modules())
            late = convert(model)
            wrap_forward(model, around)
            kept = sum(isinstance(m, norms) for m in model.modules())
            what = "parameters and floating inputs are bfloat16, outputs float32"
            if kept:
                what += f"; {kept} batch norms keep float32"
            if late:
                what += f"; {late:,} B of parameters were on the GPU in more bits before"
            injection.say(self.name, what, type(model).__name__)

        injection.on_moving.append(apply)
        injection.on_model.append(apply)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "lightning":
            return 'Trainer(..., precision="bf16-true")'
        if framework == "deepspeed":
            return '{"bf16": {"enabled": true}}  # keeps a float32 copy of the weights, sharded, for the optimizer'
        if framework == "fsdp":
            return "model = model.to(torch.bfloat16)  # before fully_shard"
        return (
            "model = model.to(torch.bfloat16)  # before it is moved to the GPU and before its optimizer is built\n"
            "# and float inputs, not token ids: model(images.to(torch.bfloat16)); the loss of outputs.float()"
        )


TECHNIQUE = PureBf16()
