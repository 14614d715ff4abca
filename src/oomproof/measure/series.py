"""How memory moved over a run: points for a chart, the steps, the segments, and what grows.

Fed with pieces of the allocator's trace after the ledger has followed their blocks. No torch, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from oomproof.measure.ledger import CATEGORIES, Block, Mark, module_at
from oomproof.measure.profile import Growth, Point, Segments, Stack, StepRow

#: Twice as many points are kept before neighbours are merged into the higher of the two.
MOST_POINTS = 4096
#: Places in the code whose segments are told one by one.
MOST_SEGMENT_ROWS = 2000
#: A place that adds blocks for good in this many steps leaks.
LEAKING_STEPS = 3

_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Series:
    """Follows one device's totals by category through successive pieces of its trace."""

    def __init__(self) -> None:
        self.events = 0
        self.reserved = 0
        self.most_reserved = 0
        self._stride = 1
        self._points: list[Point] = []
        self._bucket = -1
        self._high = -1  # total of the last point
        self._steps: list[StepRow] = []
        self._step: StepRow | None = None
        self._step_high = -1
        self._segments: dict[tuple[Any, ...], list[Any]] = {}  # by step, module and frames: [frames, count, bytes]

    def feed(
        self, events: Iterable[dict[str, Any]], blocks: list[Any], places: list[Mark], before: list[Block]
    ) -> None:
        """Take the next piece: ``blocks`` and ``places`` belong to its allocations and frees, in order.

        A block is None where its birth was not seen. ``before`` are the blocks that lived when the piece began.
        """
        categories: dict[int, int] = {}
        totals = [0] * len(CATEGORIES)
        for block in before:
            totals[_category(block, categories)] += block.size
        total = sum(totals)
        index = 0
        place: Mark | None = None
        for event in events:
            action = event["action"]
            sign = _RESERVES.get(action)
            if sign is not None:
                self.reserved += sign * event["size"]
                self.most_reserved = max(self.most_reserved, self.reserved)
                if sign > 0:
                    self._add_segment(event, place or (places[index] if index < len(places) else None))
                continue
            if action not in ("alloc", "free_requested"):
                continue
            block, place = blocks[index], places[index]
            index += 1
            self.events += 1
            if block is None:
                continue
            change = block.size if action == "alloc" else -block.size
            totals[_category(block, categories)] += change
            total += change
            self._add(event, place, totals, total)

    def _add(self, event: dict[str, Any], place: Mark, totals: list[int], total: int) -> None:
        if self._step is None or self._step.step != place.step:
            if self._step is not None:
                self._steps.append(self._step)
            self._step, self._step_high = StepRow(place.step, 0, 0, 0, ()), -1
        row = self._step._replace(
            reserved_bytes=max(self._step.reserved_bytes, self.reserved),
            end_allocated_bytes=total,
            end_reserved_bytes=self.reserved,
        )
        if total > self._step_high:
            self._step_high = total
            row = row._replace(category_bytes=tuple(totals))
        self._step = row
        bucket = self.events // self._stride
        if bucket != self._bucket or total > self._high:
            point = Point(self.events, event["time_us"], place.step, place.phase, self.reserved, tuple(totals))
            if bucket == self._bucket:
                self._points[-1] = point
            else:
                self._points.append(point)
            self._bucket, self._high = bucket, total
            if len(self._points) > 2 * MOST_POINTS:
                self._merge()

    def _merge(self) -> None:
        self._stride *= 2
        pairs = [self._points[i : i + 2] for i in range(0, len(self._points), 2)]
        self._points = [max(pair, key=lambda p: sum(p.category_bytes)) for pair in pairs]
        self._bucket = self.events // self._stride
        self._high = sum(self._points[-1].category_bytes)

    def _add_segment(self, event: dict[str, Any], place: Mark | None) -> None:
        frames = event.get("frames", [])
        step, module = (place.step, module_at(place)) if place else (0, None)
        key: tuple[Any, ...] = step, module, hash(tuple((f["filename"], f["line"]) for f in frames))
        if key not in self._segments and len(self._segments) >= MOST_SEGMENT_ROWS:
            key, frames = (step, None, 0), []
        row = self._segments.setdefault(key, [frames, 0, 0])
        row[1] += 1
        row[2] += event["size"]

    def points(self) -> tuple[Point, ...]:
        """Return the points, none of the highest left out."""
        return tuple(self._points)

    def steps(self) -> tuple[StepRow, ...]:
        """Return a row for each step."""
        return tuple(self._steps if self._step is None else [*self._steps, self._step])

    def segments(self, stack_of: Callable[[list[dict[str, Any]], str | None], Stack]) -> tuple[Segments, ...]:
        """Return the segments by step and place, the largest first; ``stack_of`` makes a module's frames a Stack."""
        places: dict[tuple[Any, ...], list[int]] = {}
        for (step, module, _), (frames, count, size) in self._segments.items():
            row = places.setdefault((step, module, stack_of(frames, module)), [0, 0])
            row[:] = [row[0] + count, row[1] + size]
        rows = [Segments(step, module, stack, n, size) for (step, module, stack), (n, size) in places.items()]
        return tuple(sorted(rows, key=lambda row: -row.size_bytes))


def growth(live: Iterable[Block], stack_of: Callable[[Block], Stack]) -> tuple[Growth, ...]:
    """Return what is still there at the end though each of several steps made some of it, the largest first.

    ``stack_of`` makes a Stack of a block.
    """
    groups: dict[tuple[Stack, str | None, str], list[Block]] = {}
    for block in live:
        groups.setdefault((stack_of(block), block.module(), block.category()), []).append(block)
    rows = []
    for (stack, module, category), blocks in groups.items():
        steps = {block.born.step for block in blocks}
        if len(steps) >= LEAKING_STEPS:
            size = sum(block.size for block in blocks)
            rows.append(Growth(stack, module, category, len(blocks), size, len(steps), min(steps), max(steps)))
    return tuple(sorted(rows, key=lambda row: -row.size_bytes))


def _category(block: Block, known: dict[int, int]) -> int:
    number = known.get(id(block))
    if number is None:
        number = known[id(block)] = _NUMBER[block.category()]
    return number
