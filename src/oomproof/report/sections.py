"""The sections of the terminal report about the peak: how high, of what, where, and how it ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oomproof.measure.measurement import Measurement
from oomproof.report.bars import Glyphs, Part, bar, stacked
from oomproof.report.words import clean, exact, is_untouched, place, plural, share, span
from oomproof.units import format_bytes

Section: TypeAlias = tuple[str, RenderableType]
#: What the steps of a profile show that is wrong: its name in capitals, the sentence after it, the colour of both.
Fault: TypeAlias = tuple[str, str, str]

STACK_LINES = 5
MESSAGE_CHARACTERS = 360  # PyTorch's message up to its advice on allocator settings
ROOM_FOR_ALL = 60  # cells that a table needs before its least column goes
COLOURS = {
    "parameter": "blue",
    "gradient": "magenta",
    "optimizer state": "cyan",
    "activation": "green",
    "unknown": "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown, and the room and characters there are for it."""

    measurement: Measurement
    width: int  # cells beside the section labels
    encoding: str
    glyphs: Glyphs
    faults: tuple[Fault, ...] = ()

    def clean(self, text: str, *, limit: int | None = None) -> str:
        """Return text from a script or a file as the terminal can safely show it."""
        return clean(text, self.encoding, limit=limit)

    def columns(self, wanted: int) -> int:
        """Return how many of a table's columns there is room for; the last ones matter least."""
        return wanted if self.width >= ROOM_FOR_ALL else max(2, wanted - 2)


def columns(*kinds: str) -> Table:
    """Return an empty borderless table with a column for each kind.

    ``name`` stands left and ``right`` right, neither ever broken; ``left`` is text that may be.
    """
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for kind in kinds:
        table.add_column(justify="right" if kind == "right" else "left", no_wrap=kind != "left")
    return table


def peak(view: View) -> list[Section]:
    """Show the peak to the byte, and as a bar against the GPU's memory."""
    m = view.measurement
    low, high = m.device_bounds
    rows = (
        ("allocated", m.peak.allocated_bytes, "max_memory_allocated()"),
        ("reserved", m.peak.reserved_bytes, "max_memory_reserved()"),
        ("device", m.peak.device_bytes, span(low, high) if low < high else "as nvidia-smi has it"),
    )
    table = columns("name", "right", "right", "left")
    for name, size_bytes, meaning in rows:
        cells = name, Text(exact(size_bytes), "bold"), format_bytes(size_bytes), Text(meaning, "dim")
        table.add_row(*cells[: view.columns(4)])
    return [("Peak", Group(table, *_bar(view)))]


def _bar(view: View) -> list[Text]:
    m, glyphs = view.measurement, view.glyphs
    if is_untouched(m):
        return []
    ends = (
        ("allocated", m.peak.allocated_bytes, glyphs.allocated, "blue"),
        ("cached", m.peak.reserved_bytes, glyphs.cached, "cyan"),
        ("outside", m.peak.device_bytes, glyphs.outside, "magenta"),
    )
    parts, legend, below = [], Text(style="dim"), 0
    for name, end, glyph, style in ends:
        if end > below:
            parts.append(Part(size_bytes=end - below, glyph=glyph, style=style))
            legend.append(f"{glyph} {name}  ")
            below = end
    over = below > m.gpu.memory_bytes
    legend.append(f"{glyphs.limit} end of the GPU's memory" if over else f"{glyphs.free} free")
    return [Text(), stacked(parts, m.gpu.memory_bytes, view.width, glyphs), legend]


def breakdown(view: View) -> list[Section]:
    """Show the categories at the allocated peak, biggest first, those of zero bytes left out."""
    m = view.measurement
    if m.breakdown is None:
        return [("Consists of", Text("not known; the notes say why" if m.notes else "not known"))]
    sizes = [
        (f.name.removesuffix("_bytes").replace("_", " "), getattr(m.breakdown, f.name))
        for f in dataclasses.fields(m.breakdown)
    ]
    sizes = sorted((item for item in sizes if item[1]), key=lambda item: -item[1])
    if not sizes:
        return []
    table = columns("name", "right", "right", "left")
    for name, size_bytes in sizes:
        drawn = bar(size_bytes, sizes[0][1], view.width - 36, view.glyphs)
        percent = share(size_bytes, m.breakdown.total_bytes())
        cells = name, format_bytes(size_bytes), percent, Text(drawn, COLOURS.get(name, "white"))
        table.add_row(*cells[: view.columns(4)])
    return [("Consists of", table)]


def outside(view: View) -> list[Section]:
    """Show the device memory at the peak that is no live block."""
    m = view.measurement
    ranges = {item.what: item for item in m.ranges}
    rows = []
    for name, size_bytes, meaning in (
        ("cached", m.outside.cached_bytes, "reserved, not in use"),
        ("context", m.outside.context_bytes, "estimate"),
        ("communication", m.outside.communication_bytes, "estimate"),
        ("other", m.outside.other_bytes, "taken by the program past PyTorch"),
    ):
        known = ranges.get(name)
        if size_bytes or (known and known.high_bytes):
            bounds = f", {span(known.low_bytes, known.high_bytes)}" if known else ""
            rows.append((name, format_bytes(size_bytes), Text(meaning + bounds, "dim")))
    if not rows:
        return []
    table = columns("name", "right", "left")
    for row in rows:
        table.add_row(*row)
    return [("Outside", table)]


def where(view: View) -> list[Section]:
    """Show the step, phase, module and source lines of the allocated peak."""
    found = view.measurement.peak
    lines = [Text(view.clean(place(found.step, found.phase, found.module)), overflow="fold")]
    lines += [Text(view.clean(line), "dim", overflow="fold") for line in found.stack[:STACK_LINES]]
    if len(found.stack) > STACK_LINES:
        lines.append(Text(f"+{len(found.stack) - STACK_LINES} more", "dim"))
    return [("Where", Group(*lines))]


def death(view: View) -> list[Section]:
    """Show where the run on the GPU's own memory meets its out-of-memory error."""
    oom = view.measurement.oom
    if oom is None:
        return []
    asked = "" if oom.requested_bytes is None else f", asking for {format_bytes(oom.requested_bytes)}"
    lines = [Text(view.clean(place(oom.step, oom.phase, oom.module) + asked), "bold", overflow="fold")]
    if oom.caught:
        lines.append(Text("the script caught the error and went on"))
    lines.append(Text(_sentences(view.clean(oom.message)), "dim", overflow="fold"))
    return [("Out of\nmemory", Group(*lines))]


def _sentences(message: str) -> str:
    if len(message) <= MESSAGE_CHARACTERS:
        return message
    kept = message[:MESSAGE_CHARACTERS]
    return kept[: kept.rfind(". ") + 1 or MESSAGE_CHARACTERS] + " ..."


def allocator(view: View) -> list[Section]:
    """Show the allocator's settings and what went wrong in it."""
    m = view.measurement
    config = view.clean(m.allocator.config) or "default settings"
    troubles = f"{plural(m.allocator.retries, 'retry')}, {plural(m.allocator.ooms, 'OOM')}"
    text = Text(f"{config}; {troubles}", overflow="fold")
    if m.verdict == "fits" and m.demand.device_bytes > m.peak.device_bytes:
        text.append(f"; with more memory it would take {format_bytes(m.demand.device_bytes)}")
    return [("Allocator", text)]
