"""A model's linear layers, its head and its wrappers, told apart. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from oomproof.plan.facts import Model

_WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod", "DataParallel": "module"}


class Head(NamedTuple):
    """The layer that a model ends with. That of a vocabulary is tied to an embedding or much wider than its input."""

    name: str
    module: Any
    vocabulary: bool


def unwrap(model: Any) -> Any:
    """Return the module that torch.compile and DistributedDataParallel were put around."""
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


def is_sharded(model: Any) -> bool:
    """Return whether FSDP or tensor parallelism has split the parameters already."""
    return any(type(p).__name__ in ("DTensor", "FlatParameter") for p in model.parameters())


def linear_layers(torch: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers that are called, with their names; transformers' Conv1D is one too.

    ``nn.MultiheadAttention`` reads the weight of its ``out_proj`` and never calls it: what is put there has no effect.
    """
    beside = {
        id(child)
        for module in model.modules()
        if isinstance(module, torch.nn.MultiheadAttention)
        for child in module.modules()
    }
    for name, module in model.named_modules():
        if id(module) not in beside and (isinstance(module, torch.nn.Linear) or is_conv1d(module)):
            yield name, module


def is_conv1d(module: Any) -> bool:
    """Return whether it is transformers' linear layer with a transposed weight (GPT-2)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def find_head(torch: Any, model: Any) -> Head | None:
    """Return the layer that a model ends with, None where it does not end with a linear one."""
    named = getattr(model, "get_output_embeddings", None)
    head = named() if named is not None else None
    if head is not None:
        return next((Head(n, m, True) for n, m in model.named_modules() if m is head), None)
    leaves = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    if not leaves or not isinstance(leaves[-1][1], torch.nn.Linear):
        return None
    name, head = leaves[-1]
    tied = any(p is head.weight for n, m in leaves[:-1] for p in m.parameters(recurse=False))
    return Head(name, head, tied or head.out_features >= max(4096, 4 * head.in_features))


def option_of(model: Model) -> dict[str, str]:
    """Return the option that names a trained model, so that no other module which is moved is taken for it."""
    return {} if model.kind in _WRAPPERS else {"model": model.kind}


def named_kind(model: Any, kind: str | None) -> Any:
    """Return the outermost module of a class in a model: the model itself where no class is asked for, else None."""
    if kind is None:
        return model
    return next((module for module in model.modules() if type(module).__name__ == kind), None)
