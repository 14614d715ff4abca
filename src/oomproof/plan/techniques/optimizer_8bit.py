"""Adam's states in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import (
    CHECKPOINTS,
    STATES,
    ReplaceOptimizer,
    bare_step,
    imported,
    keep_embeddings,
    pretend,
)
from oomproof.plan.technique import CannotApply, Options

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class Optimizer8bit(ReplaceOptimizer):
    """Both moments in blocks of one byte or half a byte an element, each block with a scale.

    Options: ``library``, "bitsandbytes" or "torchao"; ``bits``, 8 or, with torchao, 4; ``embeddings``, the bits of
    embeddings' states, 32 by default with bitsandbytes, which advises it for stable training, as HF's Trainer does.
    """

    name = "optimizer-8bit"
    title = "keep Adam's states in 8 or 4 bits"
    fidelity = "approximate"
    keeps = (
        "parameters and gradients; the states of tensors of less than 4,096 elements; with bitsandbytes those of "
        "embeddings; with torchao those of tensors that do not divide into blocks of 256 (4 bits: 128) elements. "
        "A step in 4 bits has about six temporaries of the largest parameter's size"
    )
    rests_on = "bitsandbytes.optim.AdamW8bit, torchao.optim.AdamW8bit and AdamW4bit"
    source = "https://huggingface.co/docs/bitsandbytes/main/en/reference/optim/adamw"
    accepts = {"library": ("bitsandbytes", "torchao"), "bits": (8, 4), "embeddings": (8, 32)}
    needs = ("bitsandbytes", "torchao")
    extra = "bitsandbytes (or torchao; both: oomproof[optimizers])"
    excludes = STATES - {"optimizer-8bit"}
    rank = 40

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if "bitsandbytes" in facts.packages and "fsdp" not in facts.uses and not _couples_decay(facts):
            yield {"library": "bitsandbytes", "bits": 8}
        elif "torchao" in facts.packages:
            yield {"library": "torchao", "bits": 8}
        if "torchao" in facts.packages:
            yield {"library": "torchao", "bits": 4}

    def slow_to_try(self, options: Options) -> bool:
        return options.get("bits") == 4  # its step is compiled, and there is one of 8 bits

    def caution(self, facts: Facts, options: Options) -> str | None:
        compiled = " The first step compiles a kernel for each shape of parameter." if _is_torchao(options) else ""
        return CHECKPOINTS + compiled

    def build(self, injection: Injection, kind: str, params: Any, given: dict[str, Any], options: Options) -> Any:
        known = {
            "lr": float(given["lr"]),
            "betas": tuple(float(beta) for beta in given["betas"]),
            "eps": given["eps"],
            "weight_decay": given["weight_decay"],
        }
        if _is_torchao(options):
            return _torchao(injection, kind, params, known, options["bits"])
        if options["bits"] != 8:
            raise CannotApply("bitsandbytes has 8 bits only; 4 bits need torchao")
        return _bitsandbytes(kind, params, known, options.get("embeddings", 32), injection)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        bits, torchao = options["bits"], _is_torchao(options)
        if framework == "deepspeed":
            return None
        if framework == "trainer":
            return f'TrainingArguments(..., optim="{f"adamw_torch_{bits}bit" if torchao else "adamw_bnb_8bit"}")'
        kind = facts.optimizers[0].kind if facts.optimizers else "AdamW"
        if torchao:
            lines = [
                f"from torchao.optim import {kind}{bits}bit",
                "",
                f"optimizer = {kind}{bits}bit(model.parameters(), ...)",
                "# its learning rate is a tensor: param_groups[0]['lr'].fill_(rate); LR schedulers do so by themselves",
            ]
        else:
            lines = [
                "import bitsandbytes as bnb",
                "",
                "for module in model.modules():",
                "    if isinstance(module, torch.nn.Embedding):",
                "        bnb.optim.GlobalOptimManager.get_instance().register_module_override(",
                '            module, "weight", {"optim_bits": 32})',
                f"optimizer = bnb.optim.{kind}8bit(model.parameters(), ...)",
            ]
        return "\n".join(lines)


def _is_torchao(options: Options) -> bool:
    return bool(options["library"] == "torchao")


def _couples_decay(facts: Facts) -> bool:
    """Return whether an Adam adds weight decay to its gradients, which bitsandbytes' does not."""
    return any(o.kind == "Adam" and o.options.get("weight_decay") for o in facts.optimizers)


def _bitsandbytes(kind: str, params: Any, known: dict[str, Any], embeddings: int, injection: Injection) -> Any:
    bitsandbytes = imported("bitsandbytes.optim", "bitsandbytes")
    optimizer = getattr(bitsandbytes, f"{kind}8bit")(params, **known)
    if kind == "Adam" and any(group["weight_decay"] for group in optimizer.param_groups):
        raise CannotApply("bitsandbytes' Adam decouples weight decay, torch's does not; take torchao")
    if embeddings == 32:
        keep_embeddings(injection, optimizer, Optimizer8bit.name)
    return optimizer


def _torchao(injection: Injection, kind: str, params: Any, known: dict[str, Any], bits: int) -> Any:
    optimizer = getattr(imported("torchao.optim", "torchao"), f"{kind}{bits}bit")(params, **known)
    return with_plain_rates(injection.torch, optimizer)


def with_plain_rates(torch: Any, optimizer: Any) -> Any:
    """Have an optimizer of torchao take learning rates that are numbers, as torch's do.

    Its own step needs tensors in ``param_groups``, and raises once a script sets ``group["lr"] = 1e-4``.
    """
    inner: Any = bare_step(optimizer)
    tensors: list[Any] = []

    def step(self: Any, closure: Any = None) -> Any:
        groups = self.param_groups
        rates = [group["lr"] for group in groups]
        while len(tensors) < len(groups):
            tensors.append(torch.zeros((), dtype=torch.float32))
        for group, rate, tensor in zip(groups, rates, tensors):
            group["lr"] = tensor.fill_(float(rate))  # the same tensor each time: no compiling again
        try:
            return inner(self, closure)
        finally:
            for group, rate in zip(groups, rates):
                group["lr"] = rate

    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    kind = type(optimizer)
    pretend(optimizer, kind, step=hooked)
    return optimizer


TECHNIQUE = Optimizer8bit()
