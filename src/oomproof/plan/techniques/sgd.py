"""SGD in place of Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import CHECKPOINTS, STATES, ReplaceOptimizer
from oomproof.plan.technique import Options

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class TakeSGD(ReplaceOptimizer):
    """Option ``momentum``, 0.9 or 0: with it one state for each parameter, without it none."""

    name = "sgd"
    title = "train with SGD in place of Adam"
    fidelity = "changes-model"
    keeps = "parameters and gradients; with momentum, half of Adam's states"
    rests_on = "torch.optim.SGD"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html"
    accepts = {"momentum": float}
    excludes = STATES - {"sgd"}
    rank = 70

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {"momentum": 0.9}
        yield {"momentum": 0.0}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "Another optimizer trains another model, and transformers often train badly with SGD. The learning rate "
            f"that suits Adam does not suit SGD, which mostly takes one 10 to 100 times as large: choose it anew. "
            f"{CHECKPOINTS}"
        )

    def build(self, injection: Injection, kind: str, params: Any, given: dict[str, Any], options: Options) -> Any:
        return injection.torch.optim.SGD(
            params,
            lr=given["lr"],
            momentum=options["momentum"],
            weight_decay=given["weight_decay"],
            foreach=given.get("foreach"),
            fused=given.get("fused"),
        )

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "trainer" and not options["momentum"]:
            return 'TrainingArguments(..., optim="sgd", learning_rate=...)  # another rate than for Adam'
        if framework == "trainer":
            return (
                'TrainingArguments(..., optim="sgd", optim_args="momentum=0.9", learning_rate=...)  # another rate\n'
                "# where this transformers does not read optim_args for sgd: Trainer(optimizer_cls_and_kwargs=\n"
                '#     (torch.optim.SGD, {"lr": ..., "momentum": 0.9}))'
            )
        if framework == "deepspeed":
            return f'{{"optimizer": {{"type": "SGD", "params": {{"lr": ..., "momentum": {options["momentum"]}}}}}}}'
        return (
            f"torch.optim.SGD(model.parameters(), lr=..., momentum={options['momentum']})  # another rate than for Adam"
        )


TECHNIQUE = TakeSGD()
