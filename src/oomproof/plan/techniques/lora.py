"""Low-rank adapters in place of training the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.adapters import CAUTION, Adapters, code_of_lora, unfit_for_adapters
from oomproof.plan.layers import named_kind
from oomproof.plan.technique import Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class LoRA(Technique):
    """Train two narrow matrices beside each linear layer; what the model had stays as it is.

    Options: ``rank``; ``alpha``, twice the rank where it is missing; ``targets``: "all-linear", "architecture" (the
    layers that peft names for a transformers model) or names of layers; ``model``: the class of the one to change.
    """

    name = "lora"
    title = "train low-rank adapters, and freeze the model"
    fidelity = "changes-model"
    lowers = ("gradient", "optimizer_state")
    keeps = (
        "the weights, which stay where they are in their own precision; and the activations, which are hardly less and "
        "may be more: gradients still flow through every frozen layer, and each adapter keeps its layer's input"
    )
    rests_on = "peft.inject_adapter_in_model(LoraConfig(...), model)"
    source = "https://huggingface.co/docs/peft/package_reference/lora"
    accepts = {"rank": int, "alpha": float, "targets": (str, list), "model": str}
    needs = ("peft",)
    extra = "peft (or oomproof[lora])"
    excludes = frozenset(("qlora", "prune-channels"))
    rank = 60

    def unfit(self, facts: Facts) -> str | None:
        if "peft" not in facts.packages:
            return f"peft is not beside the script's torch; pip install {self.extra}"
        return unfit_for_adapters(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {"rank": 16}
        if any(model.module.startswith("transformers.") for model in facts.models):
            yield {"rank": 8, "targets": "architecture"}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return CAUTION

    def install(self, injection: Injection, options: Options) -> None:
        adapters = Adapters(injection, self.name, options)

        def put_in(model: Any) -> None:
            chosen = named_kind(model, options.get("model"))
            if chosen is not None:
                adapters.put_in(chosen)

        adapters.install(put_in)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        return code_of_lora(options, framework) if framework != "deepspeed" else None


TECHNIQUE = LoRA()
