"""Finding a model's repeated blocks. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from oomproof.plan.wrapping import own_kind


class Blocks(NamedTuple):
    """Modules of one class in one ``ModuleList``, ``Sequential`` or ``ModuleDict``."""

    container: str
    kind: str
    names: tuple[str, ...]
    modules: tuple[Any, ...]

    def parameter_bytes(self) -> int:
        """Return the bytes of their parameters, each counted once."""
        unique = {id(p): p for module in self.modules for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in unique.values())


def find_blocks(model: Any) -> list[Blocks]:
    """Return a model's repeated blocks: the outermost lists with at least two children of one class.

    Children that are lists themselves, such as the stages of a Swin transformer, are looked into. A list of layers
    without children of their own, such as VGG's convolutions, is none: there is nothing within to let go of. The
    same module listed twice (shared layers) counts once.
    """
    found: list[Blocks] = []
    seen: set[int] = set()

    def walk(module: Any, name: str) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if _is_list(child) and _take(child, full):
                continue
            walk(child, full)

    def _take(container: Any, name: str) -> bool:
        children = [(key, child) for key, child in container.named_children() if not _is_list(child)]
        counts = Counter(own_kind(child) for _, child in children if _is_block(child))
        if not counts:
            return False
        kind, count = counts.most_common(1)[0]
        chosen = [
            (f"{name}.{key}", child) for key, child in children if own_kind(child) is kind and id(child) not in seen
        ]
        if count < 2 or len(chosen) < 2:
            return False
        seen.update(id(child) for _, child in chosen)
        names, modules = zip(*chosen)
        found.append(Blocks(name, kind.__name__, names, modules))
        for key, child in children:
            if own_kind(child) is not kind:
                walk(child, f"{name}.{key}")
        return True

    if _is_list(model) and _take(model, ""):
        return found
    walk(model, "")
    return found


def _is_list(module: Any) -> bool:
    return own_kind(module).__name__ in ("ModuleList", "Sequential", "ModuleDict")


def _is_block(module: Any) -> bool:
    """Return whether a module has modules and parameters of its own."""
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None
