"""Adam's states in managed memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import CHECKPOINTS, STATES, ReplaceOptimizer, imported, keep_embeddings
from oomproof.plan.technique import CannotApply, Options

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class PagedOptimizer(ReplaceOptimizer):
    """The driver moves the states between GPU and host, page by page. Option ``bits``, 32 or 8."""

    name = "optimizer-paged"
    title = "keep Adam's states in memory that the driver moves to the host where there is no room"
    fidelity = "equal"
    keeps = (
        "parameters, gradients and the states of tensors of less than 100,000 elements. PyTorch allocates less, and an "
        "allocation that fails without it succeeds. But the states lie on the GPU while there is room and while they "
        "are used, so nvidia-smi may show as much memory as before"
    )
    rests_on = "bitsandbytes.optim.PagedAdamW"
    source = "https://huggingface.co/docs/bitsandbytes/main/en/optimizers#paged-optimizers"
    accepts = {"bits": (32, 8)}
    needs = ("bitsandbytes",)
    extra = "bitsandbytes (or oomproof[optimizers])"
    excludes = STATES - {"optimizer-paged"}
    rank = 45

    def fidelity_of(self, options: Options) -> str:
        return "equal" if options.get("bits", 32) == 32 else "approximate"

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        bits = options.get("bits", 32)
        return None if bits == 32 else f"the optimizer's states are rounded to {bits} bits"

    def unfit(self, facts: Facts) -> str | None:
        if "fsdp" in facts.uses:
            return "FSDP's parts of parameters are not what bitsandbytes steps over"
        if any(o.kind == "Adam" and o.options.get("weight_decay") for o in facts.optimizers):
            return "bitsandbytes' Adam decouples weight decay, the script's does not"
        return super().unfit(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if "bitsandbytes" in facts.packages:
            yield {"bits": 32}
            yield {"bits": 8}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            f"{CHECKPOINTS} Where states do not fit beside everything else, each step moves them over the bus, which "
            "takes time that no run on the phantom shows."
        )

    def build(self, injection: Injection, kind: str, params: Any, given: dict[str, Any], options: Options) -> Any:
        optimizer = getattr(imported("bitsandbytes.optim", "bitsandbytes"), _name(kind, options))(
            params,
            lr=float(given["lr"]),
            betas=tuple(float(beta) for beta in given["betas"]),
            eps=given["eps"],
            weight_decay=given["weight_decay"],
        )
        if kind == "Adam" and any(group["weight_decay"] for group in optimizer.param_groups):
            raise CannotApply("bitsandbytes' Adam decouples weight decay, the script's does not")
        if options.get("bits", 32) == 8:
            keep_embeddings(injection, optimizer, self.name)
        return optimizer

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "deepspeed":
            return None
        kind = facts.optimizers[0].kind if facts.optimizers else "AdamW"
        if framework == "trainer" and kind == "AdamW":
            bits = options.get("bits", 32)
            return f'TrainingArguments(..., optim="paged_adamw_{bits}bit")'
        return f"import bitsandbytes as bnb\n\noptimizer = bnb.optim.{_name(kind, options)}(model.parameters(), ...)"


def _name(kind: str, options: Options) -> str:
    return f"Paged{kind}{'8bit' if options.get('bits', 32) == 8 else ''}"


TECHNIQUE = PagedOptimizer()
