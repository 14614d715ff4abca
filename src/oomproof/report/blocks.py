"""How blocks are spoken of: the module and the line they belong to, the colour and letter of their category."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from oomproof.measure.profile import CATEGORIES, Block, Profile, Stack
from oomproof.report.sections import COLOURS
from oomproof.report.words import share

NO_MODULE = "(outside modules)"  # as the observer calls it, too
NO_STACK = "(no stack recorded)"
ROUNDING = "(rounding)"  # blocks are larger than what was asked for

LETTERS = dict(zip(CATEGORIES, "PGOAIBWTCU", strict=True))
_OWNED = ("parameter", "gradient", "optimizer_state", "buffer")


class ModuleName(NamedTuple):
    """A module's qualified name, "h.0.attn" or "" for a root, and its class, "" when that is not known."""

    path: str
    kind: str


def words(category: str) -> str:
    """Return a category as people write it: "optimizer state"."""
    return category.replace("_", " ")


def colour(category: str) -> str:
    """Return the terminal's colour for a category."""
    return COLOURS.get(words(category), "white")


def split_module(module: str) -> ModuleName:
    """Return the parts of "h.0.attn (GPT2Attention)" or of a root's "GPT2LMHeadModel"."""
    path, bracket, kind = module.partition(" (")
    return ModuleName(path, kind.removesuffix(")")) if bracket else ModuleName("", module)


def owner(block: Block) -> str | None:
    """Return the block's module; of a parameter and what belongs to one, the name tells when nothing else does."""
    if block.module is not None:
        return block.module
    if block.name is None or block.category not in _OWNED:
        return None
    module, dot, _ = block.name.rpartition(" of ")[2].removesuffix(".grad").rpartition(".")
    return f"{module} ()" if dot else None


def module_path(block: Block) -> str:
    """Return the qualified name of the block's module, a root's class, or ``NO_MODULE``."""
    module = owner(block)
    if module is None:
        return NO_MODULE
    name = split_module(module)
    return name.path or name.kind


def line(stack: Stack) -> str:
    """Return the innermost line of a stack that is outside PyTorch."""
    return stack[0] if stack else NO_STACK


def short_line(frame: str, cells: int) -> str:
    """Return a line as fully as fits: "a/b.py:12 step", else "b.py:12 step", else "b.py:12"."""
    if len(frame) <= cells:
        return frame
    frame = base_name(frame)
    place, _, _ = frame.partition(" ")
    return frame if len(frame) <= cells or ":" not in place else place


def base_name(frame: str) -> str:
    """Return "b.py:12 step" of "a/b.py:12 step"."""
    place, blank, function = frame.partition(" ")
    return place.rpartition("/")[2] + blank + function


def has_modules(profile: Profile) -> bool:
    """Return whether any block's module is known; of a snapshot none is."""
    return any(owner(block) is not None for block in profile.blocks)


def by_category(profile: Profile) -> dict[str, int]:
    """Return the bytes of each category at the peak, in the order of CATEGORIES; they add up to what is allocated."""
    totals = dict.fromkeys(CATEGORIES, 0)
    for block in profile.blocks:
        totals[block.category] += block.size_bytes
    totals["unknown"] += profile.slack_bytes
    if totals["unknown"] < 0:  # true sizes of a later moment: take it from the largest, as the Measurement does
        largest = max(totals, key=lambda name: totals[name])
        totals[largest] += totals["unknown"]
        totals["unknown"] = 0
    return totals


def shares(sizes: Mapping[str, int], room: int, dots: str) -> str:
    """Return "activation 62 %, gradient 20 %", the largest first, as many as there is room for."""
    total = sum(sizes.values())
    found = sorted(((size, name) for name, size in sizes.items() if size > 0), key=lambda item: -item[0])
    if len(found) == 1 or (found and share(found[0][0], total) == "100 %"):
        return words(found[0][1])
    text = ""
    for number, (size, name) in enumerate(found):
        more = f"{', ' if text else ''}{words(name).removesuffix(' state')} {share(size, total)}"
        rest = len(dots) + 2 if number < len(found) - 1 else 0
        if len(text) + len(more) + rest > room:
            return f"{text}, {dots}" if text else ""
        text += more
    return text
