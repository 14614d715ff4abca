"""Activation checkpointing of a model's repeated blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomproof.plan.activations import RECOMPUTE, Activations, chooser, unfit_blocks
from oomproof.plan.technique import Options, Technique, in_code

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class CheckpointBlocks(Technique):
    """Keep a block's input alone, and compute its activations again in the backward pass.

    Option ``blocks``: the names of the blocks, all of them where it is missing.
    """

    name = "checkpoint-blocks"
    title = "compute each block's activations again in the backward pass"
    fidelity = "exact"
    lowers = ("activation",)
    keeps = "parameters, gradients and optimizer states; and the activations of one block at a time"
    rests_on = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    source = "https://docs.pytorch.org/docs/stable/checkpoint.html"
    accepts = {"blocks": list}
    excludes = frozenset(("checkpoint-selective", "offload-activations", "block-actions", "compile-budget"))
    rank = 20

    def unfit(self, facts: Facts) -> str | None:
        return unfit_blocks(facts)

    def install(self, injection: Injection, options: Options) -> None:
        activations = Activations(injection, self.name)

        def words(actions: list[str], kind: str) -> str:
            return f"{actions.count(RECOMPUTE)} of {len(actions)} {kind} are computed again in the backward pass"

        def wrap(model: Any) -> None:
            activations.treat_blocks(model, chooser(options, RECOMPUTE), words)

        injection.on_model.append(wrap)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "trainer" and not options.get("blocks"):
            return (
                "TrainingArguments(..., gradient_checkpointing=True, "
                'gradient_checkpointing_kwargs={"use_reentrant": False})'
            )
        containers = [group.container for group in facts.blocks]
        return "\n".join(
            ["from torch.utils.checkpoint import checkpoint", ""]
            + [
                f"for block in {in_code(container)}:  # where the model's forward calls it\n"
                "    x = checkpoint(block, x, use_reentrant=False)"
                for container in containers
            ]
        )


TECHNIQUE = CheckpointBlocks()
