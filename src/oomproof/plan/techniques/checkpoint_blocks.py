"""Activation checkpointing of a model's repeated blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.repeated import find_blocks
from oomproof.plan.technique import Options, Technique
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class KeepStatistics:
    """While inside, batch norms normalise as ever and leave their running statistics alone.

    A recomputed forward pass is no new batch; with plain checkpointing each batch counts twice.
    """

    def __init__(self, norms: list[Any]) -> None:
        self._norms = norms
        self._before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        for norm in self._norms:
            self._before.append((norm.momentum, norm.num_batches_tracked))
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, count) in zip(self._norms, self._before):
            norm.momentum, norm.num_batches_tracked = momentum, count
        self._before = []


def _contexts(norms: list[Any]) -> tuple[Any, Any]:
    return contextlib.nullcontext(), KeepStatistics(norms)


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
    excludes = frozenset(("checkpoint-selective", "offload-activations", "compile-budget"))
    rank = 20

    def unfit(self, facts: Facts) -> str | None:
        if not facts.blocks:
            return "the model has no repeated blocks (two or more modules of one class in a ModuleList or Sequential)"
        if "checkpoint" in facts.uses:
            return "the script checkpoints by itself"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {}

    def install(self, injection: Injection, options: Options) -> None:
        from torch.utils.checkpoint import checkpoint, noop_context_fn

        batch_norm = injection.torch.nn.modules.batchnorm._BatchNorm

        def around(module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
            if not injection.torch.is_grad_enabled():
                return forward(*args, **kwargs)
            norms = [m for m in module.modules() if isinstance(m, batch_norm)]
            contexts = functools.partial(_contexts, norms) if norms else noop_context_fn
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        wanted = options.get("blocks")

        def wrap(model: Any) -> None:
            for group in find_blocks(model):
                chosen = [(n, m) for n, m in zip(group.names, group.modules) if wanted is None or n in wanted]
                for _, module in chosen:
                    wrap_forward(module, functools.partial(around, module))
                if chosen:
                    what = f"{len(chosen)} of {len(group.names)} {group.kind} are computed again in the backward pass"
                    injection.say(self.name, what, group.container or type(model).__name__)

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
                f"for block in model.{container}:  # where the model's forward calls it\n"
                "    x = checkpoint(block, x, use_reentrant=False)"
                for container in containers
            ]
        )


TECHNIQUE = CheckpointBlocks()
