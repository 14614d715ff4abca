"""Activations on the host between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.activations import (
    OFFLOAD,
    SMALLEST,
    Activations,
    chooser,
    refuse_compiled,
    unfit_activations,
    unfit_compiled,
)
from oomproof.plan.technique import Options, Technique, in_code

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class OffloadActivations(Technique):
    """What autograd saves goes to pinned host memory and comes back when the backward pass asks for it.

    Option ``of``: "blocks" or "model". Option ``blocks``: the names of the blocks, all of them where it is missing.
    Option ``smallest``: bytes from which on a tensor is moved, 1 MiB where it is missing.
    """

    name = "offload-activations"
    title = "keep saved activations in host memory until the backward pass"
    fidelity = "exact"
    lowers = ("activation",)
    keeps = (
        "parameters, gradients and optimizer states; activations under 1 MiB, those of the loss, and on the GPU those "
        "of the operation that is running. The host needs pinned memory for them, each rounded up to a power of two"
    )
    rests_on = "torch.autograd.graph.saved_tensors_hooks"
    source = "https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html"
    accepts = {"of": ("blocks", "model"), "blocks": list, "smallest": int}
    excludes = frozenset(("checkpoint-blocks", "checkpoint-selective", "block-actions", "compile-budget"))
    rank = 40

    def unfit(self, facts: Facts) -> str | None:
        if not facts.models:
            return "no module is trained"
        return unfit_activations(facts) or unfit_compiled(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if facts.blocks:
            yield {"of": "blocks"}
        yield {"of": "model"}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "every offloaded byte crosses the bus to the host twice a step: where that takes longer than computing, "
            "checkpointing is faster; the host needs pinned memory for them, for each GPU: `oomproof apply --phantom` "
            "says how much under Notes"
        )

    def install(self, injection: Injection, options: Options) -> None:
        smallest = int(options.get("smallest", SMALLEST))
        activations = Activations(injection, self.name, smallest=smallest)

        def words(actions: list[str], kind: str) -> str:
            return f"what {actions.count(OFFLOAD)} of {len(actions)} {kind} save goes to the host"

        def wrap(model: Any) -> None:
            refuse_compiled(model)
            if options.get("of", "blocks") == "model":
                activations.treat(model, OFFLOAD)
                injection.say(self.name, "what its forward saves goes to the host", type(model).__name__)
            else:
                activations.treat_blocks(model, chooser(options, OFFLOAD), words)

        injection.on_model.append(wrap)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        start = "from torch.autograd.graph import save_on_cpu\n\n"
        if options.get("of") == "model":
            return (
                start + "with save_on_cpu(pin_memory=True):  # moves weights and small tensors too\n"
                "    outputs = model(inputs)"
            )
        return start + "\n".join(
            f"for block in {in_code(group.container)}:  # where the model's forward calls it\n"
            "    with save_on_cpu(pin_memory=True):  # moves weights and small tensors too\n"
            "        x = block(x)"
            for group in facts.blocks
        )


TECHNIQUE = OffloadActivations()
