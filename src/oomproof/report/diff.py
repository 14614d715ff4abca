"""``oomproof diff``: what grew from one measurement to the next, by category, module and line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from oomproof.measure.profile import Block, Profile
from oomproof.report.blocks import by_category, line, module_path, short_line, words
from oomproof.report.sheet import Body, Sheet
from oomproof.report.source import Source
from oomproof.report.steps import signed
from oomproof.report.words import NextCommand
from oomproof.units import format_bytes

ROWS = 8
MIXED = (
    "the two files are of different kinds, {}: their categories and modules are found in different ways, so that only "
    "the totals compare"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LINE = re.compile(r"(.*):(\d+) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One name's bytes at the two peaks."""

    name: str
    before_bytes: int
    after_bytes: int

    @property
    def bytes(self) -> int:
        """Return by how much it grew; below zero when it shrank."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changed between two peaks; each list has the largest changes first and nothing that stayed the same."""

    allocated: Change
    reserved: Change
    categories: tuple[Change, ...]
    modules: tuple[Change, ...]
    lines: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def grew(self, allowed_bytes: int) -> bool:
        """Return whether either peak grew by more than that."""
        return max(self.allocated.bytes, self.reserved.bytes) > allowed_bytes


def compare(before: Profile, after: Profile) -> Difference:
    """Return what changed from one profile's peak to the other's."""
    old, new = by_category(before), by_category(after)
    name_of = _line_names(before, after)
    return Difference(
        allocated=Change(name="allocated", before_bytes=before.allocated_bytes, after_bytes=after.allocated_bytes),
        reserved=Change(name="reserved", before_bytes=before.reserved_bytes, after_bytes=after.reserved_bytes),
        categories=_changes(old, new),
        modules=_changes(_sums(before, _layers), _sums(after, _layers)),
        lines=_changes(_sums(before, name_of), _sums(after, name_of)),
        notes=() if before.source == after.source else (MIXED.format(_kinds(before.source)),),
    )


def _kinds(first: str) -> str:
    kinds = ["a capture", "a recording of PyTorch's own"]
    return ", then ".join(kinds if first == "run" else reversed(kinds))


def _layers(block: Block) -> str:
    """Return the block's module with the numbers of layers left out: all layers of a model grow alike."""
    return _NUMBER.sub("*", module_path(block))


def _line_names(before: Profile, after: Profile) -> Callable[[Block], str]:
    """Return what names a block's line in both files.

    An edit above a line moves it. Where a function has other lines than before, its lines count as one.
    """
    lines: tuple[dict[tuple[str, str], set[str]], ...] = ({}, {})
    for profile, found in zip((before, after), lines, strict=True):
        for frame in {line(block.stack) for block in profile.blocks}:
            match = _LINE.fullmatch(frame)
            if match:
                found.setdefault((match[1], match[3]), set()).add(match[2])

    def name_of(block: Block) -> str:
        frame = line(block.stack)
        match = _LINE.fullmatch(frame)
        if match is None:
            return frame
        place = match[1], match[3]
        old, new = (found.get(place, set()) for found in lines)
        return frame if not old or not new or old == new else f"{place[0]} {place[1]}"

    return name_of


def _sums(profile: Profile, name_of: Callable[[Block], str]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for block in profile.blocks:
        name = name_of(block)
        sums[name] = sums.get(name, 0) + block.size_bytes
    return sums


def _changes(old: dict[str, int], new: dict[str, int]) -> tuple[Change, ...]:
    found = [Change(name=n, before_bytes=old.get(n, 0), after_bytes=new.get(n, 0)) for n in {**old, **new}]
    return tuple(sorted((c for c in found if c.bytes), key=lambda change: (-abs(change.bytes), change.name)))


def body(found: Difference, allowed_bytes: int) -> Body:
    """Return what draws the difference."""

    def lines(sheet: Sheet) -> Iterator[Text]:
        yield _verdict(found, allowed_bytes)
        for note in found.notes:
            yield Text(f"note: {note}", "yellow")
        yield Text()
        yield Text(f"{'':15}{'before':>12}{'after':>12}{'change':>14}", "dim", no_wrap=True)
        for peak in (found.allocated, found.reserved):
            yield _row(peak, f"{peak.name:15}", bold=True)
        for title, changes in (
            ("by category", [dataclasses.replace(c, name=words(c.name)) for c in found.categories]),
            ("by module, * stands for all layers", found.modules),
            ("by line", found.lines),
        ):
            if changes:
                yield Text()
                yield Text(title, "dim")
                yield from _list(sheet, changes)

    return lines


def _verdict(found: Difference, allowed_bytes: int) -> Text:
    change = found.allocated.bytes
    if found.grew(allowed_bytes):
        name, colour = "GREW", "red"
    elif not change and not found.reserved.bytes:
        name, colour = "THE SAME", "green"
    else:
        name, colour = ("GREW WITHIN WHAT IS ALLOWED", "yellow") if found.grew(0) else ("SHRANK", "green")
    text = Text(name, f"bold reverse {colour}")
    detail = f"  allocated {_moved(found.allocated)}, reserved {_moved(found.reserved)}"
    text.append(detail, "not reverse bold default")
    if allowed_bytes:
        text.append(f" ({format_bytes(allowed_bytes)} more allowed)", "not reverse dim default")
    return text


def _moved(change: Change) -> str:
    if not change.bytes:
        return "unchanged"
    percent = f" ({100 * change.bytes / change.before_bytes:+.1f} %)" if change.before_bytes else ""
    return signed(change.bytes) + percent


def _row(change: Change, name: str, *, bold: bool = False) -> Text:
    text = Text(name, "bold" if bold else "", no_wrap=True)
    text.append(f"{format_bytes(change.before_bytes):>12}{format_bytes(change.after_bytes):>12}", "not bold")
    style = "red" if change.bytes > 0 else "green" if change.bytes < 0 else "dim"
    text.append(f"{signed(change.bytes) if change.bytes else '0 B':>14}", style)
    return text


def _list(sheet: Sheet, changes: Sequence[Change]) -> Iterator[Text]:
    for change in changes[:ROWS]:
        text = _row(change, " " * 15)
        room = max(8, sheet.width - text.cell_len - 2)
        text.append("  " + sheet.cut(short_line(change.name, room), room, left=True).rstrip())
        yield text
    rest = changes[ROWS:]
    if rest:
        yield Text(f"{'':15}{'':24}{signed(sum(c.bytes for c in rest)) or '0 B':>14}  in {len(rest):,} more", "dim")


def to_json_text(found: Difference, allowed_bytes: int) -> str:
    """Return the difference as JSON, with every change."""

    def plain(change: Change) -> dict[str, Any]:
        return {
            "before_bytes": change.before_bytes, "after_bytes": change.after_bytes, "change_bytes": change.bytes,
        }  # fmt: skip

    def rows(changes: Sequence[Change]) -> list[dict[str, Any]]:
        return [{"name": change.name, **plain(change)} for change in changes]

    data = {
        "schema": "oomproof.diff/1",
        "grew": found.grew(allowed_bytes),
        "allowed_bytes": allowed_bytes,
        "allocated": plain(found.allocated),
        "reserved": plain(found.reserved),
        "categories": rows(found.categories),
        "modules": rows(found.modules),
        "lines": rows(found.lines),
        "notes": list(found.notes),
    }
    return json.dumps(data, indent=2) + "\n"


def after(second: Source) -> NextCommand:
    """Return what to type after the difference."""
    return NextCommand(reason="see all of the second peak", command=f"oomproof tree {second.quoted}")
