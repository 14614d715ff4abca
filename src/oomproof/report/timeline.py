"""``oomproof timeline``: what was allocated over the events of a run, stacked by category, in characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from oomproof.measure.profile import CATEGORIES, Point, Profile
from oomproof.report.blocks import LETTERS, colour, words
from oomproof.report.curve import allocated, buckets, spans
from oomproof.report.sheet import Body, Sheet
from oomproof.report.source import Source
from oomproof.report.tree import headline
from oomproof.report.words import NextCommand
from oomproof.units import format_bytes

HEIGHT = 18
AXIS = 12  # cells for the scale
LIMIT_IN_VIEW = 1.6  # times the highest point: a GPU that is larger lies above the chart
#: Phases narrower than this many cells are not written.
NARROW = 3
LABELS = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "init": "init", "other": ""}


def body(source: Source, step: int | None = None) -> Body:
    """Return what draws the curve, of one step if given."""
    profile = source.profile
    points = [point for point in profile.points if step is None or point.step == step]

    def lines(sheet: Sheet) -> Iterator[Text]:
        yield headline(source, "over the events" if step is None else f"in step {step}")
        if not points:
            yield Text("no event was recorded" if step is None else f"step {step} has no events")
            return
        yield Text()
        yield from _chart(sheet, profile, points)

    return lines


def _chart(sheet: Sheet, profile: Profile, points: Sequence[Point]) -> Iterator[Text]:
    columns = _filled(buckets(points, sheet.width - AXIS))
    high = max(max(allocated(point), point.reserved_bytes) for point in points) or 1
    limit = profile.limit_bytes
    within = limit is not None and limit <= LIMIT_IN_VIEW * high
    scale = max(high, limit if within and limit is not None else 0)
    row_bytes = scale / HEIGHT
    stacks = [_cells(point, row_bytes) for point in columns]
    reserved_at = [_row(point.reserved_bytes, row_bytes) for point in columns]
    limit_at = _row(limit, row_bytes) if within and limit is not None else -1
    dash, double = ("-", "=") if sheet.dots == "..." else ("─", "═")
    for level in range(HEIGHT - 1, -1, -1):
        shown = level % 3 == 2
        text = Text(f"{format_bytes(round((level + 1) * row_bytes)):>{AXIS - 2}}" if shown else " " * (AXIS - 2), "dim")
        text.append("+ " if shown else "| ", "dim")
        text.no_wrap = True
        for column, stack in enumerate(stacks):
            if level < len(stack):
                category = stack[level]
                text.append(LETTERS[category], colour(category))
            elif level == reserved_at[column]:
                text.append(dash, "bold")
            elif level == limit_at:
                text.append(double, "red")
            else:
                text.append(" ")
        text.rstrip()
        yield text
    yield from _feet(columns)
    yield Text()
    yield from _legend(sheet, points, profile, within, dash, double)


def _filled(found: Sequence[Point | None]) -> list[Point]:
    """Return a point for each column; where nothing happened, that of the column before goes on."""
    last = next(point for point in found if point is not None)
    filled = []
    for point in found:
        last = point or last
        filled.append(last)
    return filled


def _row(size_bytes: int, row_bytes: float) -> int:
    return max(0, min(HEIGHT - 1, -int(-size_bytes // row_bytes) - 1))


def _cells(point: Point, row_bytes: float) -> list[str]:
    """Return the category of each cell of a column, the bottom first."""
    cells: list[str] = []
    end = 0
    for category, size in zip(CATEGORIES, point.category_bytes, strict=True):
        end += max(0, size)
        cells += [category] * (round(end / row_bytes) - len(cells))
    if not cells and end:
        cells.append(max(zip(point.category_bytes, CATEGORIES, strict=True))[1])
    return cells


def _feet(columns: Sequence[Point]) -> Iterator[Text]:
    """Yield where steps begin, and the phases that are wide enough."""
    marks = _Line(len(columns))
    phases = _Line(len(columns))
    before: int | None = None
    runs = []
    for span in spans([point._replace(event=i) for i, point in enumerate(columns)]):
        runs.append((span.step, span.phase, span.first_event, span.last_event + 1 - span.first_event))
    for step, _, at, _ in runs:
        if step is not None and step != before:
            marks.put(at, f"{'|' if at else ''}step {step}", f"|{step}", "|")
        elif step is None and before is not None:
            marks.put(at, "|after the steps", "|after", "|")
        before = step
    for _, phase, at, width in runs:
        label = LABELS.get(phase or "", phase or "")
        if label and width >= NARROW:
            phases.put(at, label[:width] if width <= len(label) else f"{label}{'.' * (width - len(label) - 1)}")
    for line in (marks, phases):
        if line.text.strip():
            yield Text(" " * AXIS + line.text.rstrip(), "dim", no_wrap=True)


class _Line:
    """A line of characters where words are put, none over another."""

    def __init__(self, width: int) -> None:
        self.text = " " * width
        self._free = 0

    def put(self, at: int, *choices: str) -> None:
        """Write the first of the choices that has room at ``at``, with a blank before it; else nothing."""
        for word in choices:
            if at >= self._free and at + len(word) <= len(self.text):
                self.text = self.text[:at] + word + self.text[at + len(word) :]
                self._free = at + len(word) + (1 if len(word) > 1 else 0)
                return


def _legend(
    sheet: Sheet, points: Sequence[Point], profile: Profile, within: bool, dash: str, double: str
) -> Iterator[Text]:
    top = max(points, key=allocated)
    yield Text("at the highest point", "dim")
    line = Text()
    for number, category in enumerate(CATEGORIES):
        if not any(point.category_bytes[number] for point in points):
            continue
        entry = Text(LETTERS[category], f"bold {colour(category)}")
        entry.append(f" {words(category)} {format_bytes(top.category_bytes[number])}", "not bold default")
        if line and line.cell_len + 3 + entry.cell_len > sheet.width:
            yield line
            line = Text()
        line.append("   " if line else "").append_text(entry)
    yield line
    ends = Text(f"{dash} reserved {format_bytes(max(point.reserved_bytes for point in points))} at most")
    if profile.limit_bytes is not None:
        gpu = format_bytes(profile.limit_bytes)
        ends.append(f"   {double} the GPU's memory {gpu}" if within else f"   the GPU's memory, {gpu}, lies above")
    yield ends
    yield Text("from left to right: allocations and frees in their order, not time", "dim")


def after(source: Source, step: int | None) -> NextCommand:
    """Return what to type after the curve."""
    steps = source.profile.steps
    if step is None and len(steps) > 1:
        top = max(steps, key=lambda row: sum(row.category_bytes)).step
        return NextCommand(
            reason="see the highest step alone", command=f"oomproof timeline {source.quoted} --step {top}"
        )
    if len(steps) > 1:
        return NextCommand(reason="see whether steps grow or differ", command=f"oomproof steps {source.quoted}")
    return NextCommand(reason="see what the peak consists of", command=f"oomproof tree {source.quoted}")
