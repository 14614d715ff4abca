"""Lion in place of Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import CHECKPOINTS, STATES, ReplaceOptimizer, imported, keep_embeddings
from oomproof.plan.technique import Options

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class TakeLion(ReplaceOptimizer):
    """One state for each parameter. Options: ``library``, "lion-pytorch" or "bitsandbytes"; ``bits``, 32 or 8."""

    name = "lion"
    title = "train with Lion in place of Adam"
    fidelity = "changes-model"
    keeps = "parameters and gradients; half of Adam's states"
    rests_on = "lion_pytorch.Lion, bitsandbytes.optim.Lion and Lion8bit"
    source = "https://github.com/lucidrains/lion-pytorch"
    accepts = {"library": ("lion-pytorch", "bitsandbytes"), "bits": (32, 8)}
    needs = ("lion_pytorch", "bitsandbytes")
    extra = "lion-pytorch (or bitsandbytes; both: oomproof[optimizers])"
    excludes = STATES - {"lion"}
    rank = 60

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if "bitsandbytes" in facts.packages and "fsdp" not in facts.uses:
            yield {"library": "bitsandbytes", "bits": 32}
            yield {"library": "bitsandbytes", "bits": 8}
        elif "lion-pytorch" in facts.packages:
            yield {"library": "lion-pytorch", "bits": 32}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "Another optimizer trains another model. Lion needs a learning rate 3 to 10 times smaller than Adam's and "
            f"a weight decay as much larger; the script's are taken as they are: change them. {CHECKPOINTS}"
        )

    def build(self, injection: Injection, kind: str, params: Any, given: dict[str, Any], options: Options) -> Any:
        known = {"lr": float(given["lr"]), "betas": (0.9, 0.99), "weight_decay": given["weight_decay"]}
        if options["library"] == "lion-pytorch":
            return imported("lion_pytorch", "lion-pytorch").Lion(params, **known)
        optimizer = getattr(imported("bitsandbytes.optim", "bitsandbytes"), _name(options))(params, **known)
        if options["bits"] == 8:
            keep_embeddings(injection, optimizer, self.name)
        return optimizer

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        rate = "# a rate 3 to 10 times smaller than Adam's, weight decay as much larger"
        if framework == "deepspeed":
            return None
        if framework == "trainer" and options["library"] == "bitsandbytes":
            return f'TrainingArguments(..., optim="lion_{options["bits"]}bit", learning_rate=...)  {rate}'
        if options["library"] == "bitsandbytes":
            built = f"import bitsandbytes as bnb\n\noptimizer = bnb.optim.{_name(options)}("
        else:
            built = "from lion_pytorch import Lion\n\noptimizer = Lion("
        return f"{built}model.parameters(), lr=..., betas=(0.9, 0.99), weight_decay=...)\n{rate}"


def _name(options: Options) -> str:
    return "Lion8bit" if options["bits"] == 8 else "Lion"


TECHNIQUE = TakeLion()
