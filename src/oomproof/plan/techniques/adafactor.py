"""Adafactor in place of Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan.optimizers import CHECKPOINTS, STATES, ReplaceOptimizer, imported
from oomproof.plan.technique import CannotApply, Options

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class TakeAdafactor(ReplaceOptimizer):
    """The second moment as a row and a column for each matrix, and no first.

    Option ``library``, "torch" (from 2.5 on) or "transformers".
    """

    name = "adafactor"
    title = "train with Adafactor in place of Adam"
    fidelity = "changes-model"
    keeps = "parameters and gradients; a vector keeps a second moment of its own size"
    rests_on = "torch.optim.Adafactor, before 2.5 transformers.optimization.Adafactor"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html"
    accepts = {"library": ("torch", "transformers")}
    needs = ("transformers",)
    extra = "transformers, or PyTorch 2.5 or newer"
    excludes = STATES - {"adafactor"}
    rank = 50

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if versions.numbers(facts.torch)[:2] >= (2, 5):
            yield {"library": "torch"}
        elif "transformers" in facts.packages:
            yield {"library": "transformers"}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "Another optimizer trains another model: Adafactor scales updates by itself and has no momentum. The "
            f"script's learning rate is taken as it is and needs to be chosen anew. {CHECKPOINTS}"
        )

    def build(self, injection: Injection, kind: str, params: Any, given: dict[str, Any], options: Options) -> Any:
        known = {"lr": given["lr"], "weight_decay": given["weight_decay"]}
        if options["library"] == "torch":
            if not hasattr(injection.torch.optim, "Adafactor"):
                raise CannotApply("this PyTorch has no Adafactor; it came with 2.5")
            return injection.torch.optim.Adafactor(params, foreach=False, **known)
        library = imported("transformers.optimization", "transformers")
        return library.Adafactor(params, scale_parameter=False, relative_step=False, **known)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "deepspeed":
            return None
        if framework == "trainer":
            return (
                'TrainingArguments(..., optim="adafactor", learning_rate=...)  # another rate than for Adam; this is '
                "transformers' Adafactor: rows and columns like PyTorch's"
            )
        if options["library"] == "torch":
            return "torch.optim.Adafactor(model.parameters(), lr=..., foreach=False)  # another rate than for Adam"
        return (
            "from transformers.optimization import Adafactor\n\n"
            "optimizer = Adafactor(model.parameters(), lr=..., scale_parameter=False, relative_step=False)"
        )


TECHNIQUE = TakeAdafactor()
