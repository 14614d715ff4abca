"""Points of the memory's curve, thinned out without losing a peak. Used by the timeline, the page and the exports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from oomproof.measure.profile import Point


class Span(NamedTuple):
    """Neighbouring points of one step and phase."""

    step: int | None
    phase: str | None
    first_event: int
    last_event: int


def allocated(point: Point) -> int:
    """Return what is allocated at a point, in bytes."""
    return sum(point.category_bytes)


def buckets(points: Sequence[Point], count: int) -> list[Point | None]:
    """Return the highest point of each of ``count`` equal parts of the events; None for a part that has none.

    Of what is reserved a part has the highest, too.
    """
    found: list[Point | None] = [None] * count
    if not points:
        return found
    first = points[0].event
    length = max(1, points[-1].event - first + 1)
    for point in points:
        at = min(count - 1, (point.event - first) * count // length)
        known = found[at]
        if known is None:
            found[at] = point
        else:
            best = point if allocated(point) > allocated(known) else known
            found[at] = best._replace(reserved_bytes=max(point.reserved_bytes, known.reserved_bytes))
    return found


def thinned(points: Sequence[Point], count: int) -> list[Point]:
    """Return at most ``count`` of the points, with the highest and the lowest of each part, in order."""
    if len(points) <= count:
        return list(points)
    parts = max(1, count // 3)  # each gives its highest and lowest allocated, and its highest reserved
    kept: set[int] = {0, len(points) - 1} if count > 3 * parts + 1 else set()
    sizes = [allocated(point) for point in points]
    for part in range(parts):
        inside = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        kept.add(max(inside, key=sizes.__getitem__))
        kept.add(min(inside, key=sizes.__getitem__))
        kept.add(max(inside, key=lambda i: points[i].reserved_bytes))
    return [points[i] for i in sorted(kept)]


def spans(points: Sequence[Point]) -> list[Span]:
    """Return the runs of neighbours with the same step and phase."""
    runs = groupby(points, key=lambda point: (point.step, point.phase))
    return [
        Span(step, phase, run[0].event, run[-1].event)
        for (step, phase), run in ((key, list(members)) for key, members in runs)
    ]
