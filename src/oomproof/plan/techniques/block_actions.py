"""A choice for each repeated block: keep, recompute, save some, offload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan.activations import (
    ACTIONS,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    SELECTIVE,
    SMALLEST,
    Activations,
    refuse_compiled,
    unfit_blocks,
    unfit_compiled,
)
from oomproof.plan.technique import CannotApply, Options, Technique, in_code

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class BlockActions(Technique):
    """Treat each block in the way that was chosen for it.

    Option ``actions``: names of blocks and what is done with them, "keep" where a block is missing; ``save`` and
    ``smallest`` as checkpoint-selective and offload-activations have them.
    """

    name = "block-actions"
    title = "keep, recompute or offload each block's activations, as chosen for it"
    fidelity = "exact"
    lowers = ("activation",)
    keeps = "parameters, gradients and optimizer states; and the activations of the blocks that keep them"
    rests_on = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), torch.autograd.graph.saved_tensors_hooks"
    source = "https://docs.pytorch.org/docs/stable/checkpoint.html"
    accepts = {"actions": dict, "save": ("matmul", "attention", "matmul+attention"), "smallest": int}
    excludes = frozenset(("checkpoint-blocks", "checkpoint-selective", "offload-activations", "compile-budget"))
    rank = 45

    def shown(self, options: Options) -> str:
        return ", ".join(f"{count} {action}" for action, count in Counter(options["actions"].values()).items())

    def unfit(self, facts: Facts) -> str | None:
        return unfit_blocks(facts) or unfit_compiled(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        """The block programme finds them: there are too many to try."""
        return iter(())

    def caution(self, facts: Facts, options: Options) -> str | None:
        unknown = sorted(set(options["actions"]) - {name for group in facts.blocks for name in group.names})
        return f"the script's model has no block {', '.join(unknown)}" if unknown else None

    def install(self, injection: Injection, options: Options) -> None:
        actions: Mapping[str, str] = options["actions"]
        unknown = sorted(set(actions.values()) - set(ACTIONS))
        if unknown:
            raise CannotApply(f"no such action: {', '.join(unknown)}; there are {', '.join(ACTIONS)}")
        torch: Any = injection.torch
        if SELECTIVE in actions.values() and versions.numbers(torch.__version__)[:2] < (2, 5):
            raise CannotApply("torch has create_selective_checkpoint_contexts from 2.5 on")
        save, smallest = options.get("save", "matmul+attention"), int(options.get("smallest", SMALLEST))
        activations = Activations(injection, self.name, save=save, smallest=smallest)

        def words(chosen: list[str], kind: str) -> str:
            counts = ", ".join(f"{count} {action}" for action, count in Counter(chosen).items())
            return f"{len(chosen)} {kind}: {counts}"

        def wrap(model: Any) -> None:
            refuse_compiled(model)
            activations.treat_blocks(model, lambda name: actions.get(name, KEEP), words)

        injection.on_model.append(wrap)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        actions: Mapping[str, str] = options["actions"]
        used = [action for action in ACTIONS if action in set(actions.values())]
        lines = ["import functools", "", "import torch", "from torch.autograd.graph import save_on_cpu"]
        lines += ["from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts", ""]
        if SELECTIVE in used:
            lines += ["aten = torch.ops.aten", "save = [aten.mm.default, aten.addmm.default, aten.bmm.default,"]
            lines += ["        aten._scaled_dot_product_flash_attention.default,"]
            lines += ["        aten._scaled_dot_product_efficient_attention.default]", ""]
        for group in facts.blocks:
            chosen = [actions.get(name, KEEP) for name in group.names]
            lines += [f"actions = {chosen!r}", f"for block, action in zip({in_code(group.container)}, actions):"]
            for place, action in enumerate(dict.fromkeys(chosen)):
                lines += [f'    {"elif" if place else "if"} action == "{action}":', *_CALLS[action]]
        return "\n".join(lines)


_CALLS = {
    KEEP: ["        x = block(x)"],
    RECOMPUTE: ["        x = checkpoint(block, x, use_reentrant=False)"],
    SELECTIVE: [
        "        contexts = functools.partial(create_selective_checkpoint_contexts, save)",
        "        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)",
    ],
    OFFLOAD: ["        with save_on_cpu(pin_memory=True):", "            x = block(x)"],
    RECOMPUTE_OFFLOAD: [
        "        with save_on_cpu(pin_memory=True):",
        "            x = checkpoint(block, x, use_reentrant=False)",
    ],
}

TECHNIQUE = BlockActions()
