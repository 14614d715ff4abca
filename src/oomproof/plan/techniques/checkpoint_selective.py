"""Selective activation checkpointing: matrix products and attention are kept, the rest is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan.activations import SELECTIVE, Activations, chooser, refuse_compiled, unfit_blocks, unfit_compiled
from oomproof.plan.technique import Options, Technique, in_code

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

_FIRST_TORCH = (2, 5)  # create_selective_checkpoint_contexts


class CheckpointSelective(Technique):
    """Keep what is dear to compute; norms, activation functions and dropouts are cheap to compute again.

    Option ``save``: "matmul" (and convolutions), "attention" or "matmul+attention". Option ``blocks``: the names of
    the blocks, all of them where it is missing.
    """

    name = "checkpoint-selective"
    title = "keep matrix products and attention, compute the rest of each block again"
    fidelity = "exact"
    lowers = ("activation",)
    keeps = (
        "the outputs of matrix products and attention, also those that no backward pass reads; attention with dropout "
        "is computed again all the same, as the random numbers must come out the same"
    )
    rests_on = "torch.utils.checkpoint.create_selective_checkpoint_contexts"
    source = "https://docs.pytorch.org/docs/stable/checkpoint.html"
    accepts = {"save": ("matmul", "attention", "matmul+attention"), "blocks": list}
    excludes = frozenset(("checkpoint-blocks", "offload-activations", "block-actions", "compile-budget"))
    rank = 25

    def unfit(self, facts: Facts) -> str | None:
        if facts.torch and versions.numbers(facts.torch)[:2] < _FIRST_TORCH:
            return "torch has create_selective_checkpoint_contexts from 2.5 on"
        return unfit_blocks(facts) or unfit_compiled(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {"save": "matmul+attention"}
        yield {"save": "attention"}

    def install(self, injection: Injection, options: Options) -> None:
        save = options.get("save", "matmul+attention")
        activations = Activations(injection, self.name, save=save)

        def words(actions: list[str], kind: str) -> str:
            return f"{actions.count(SELECTIVE)} of {len(actions)} {kind} keep {save} alone"

        def wrap(model: Any) -> None:
            refuse_compiled(model)
            activations.treat_blocks(model, chooser(options, SELECTIVE), words)

        injection.on_model.append(wrap)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        operations = _CODE[options.get("save", "matmul+attention")]
        lines = [
            "import functools",
            "import torch",
            "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts",
            "",
            "aten = torch.ops.aten",
            f"save = [{', '.join(operations)}]",
            "contexts = functools.partial(create_selective_checkpoint_contexts, save)",
            "",
        ]
        for group in facts.blocks:
            lines.append(f"for block in {in_code(group.container)}:  # where the model's forward calls it")
            lines.append("    x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)")
        return "\n".join(lines)


_MATMULS = [f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")]
_ATTENTIONS = [
    f"aten._scaled_dot_product_{kind}_attention.default" for kind in ("flash", "efficient", "cudnn")
]  # fmt: skip
_CODE = {"matmul": _MATMULS, "attention": _ATTENTIONS, "matmul+attention": [*_MATMULS, *_ATTENTIONS]}

TECHNIQUE = CheckpointSelective()
