"""The curve for https://ui.perfetto.dev, as trace events: counters by category, slices for steps and phases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from oomproof.measure.profile import CATEGORIES, Point
from oomproof.report.blocks import words
from oomproof.report.curve import allocated
from oomproof.report.source import Source

PROCESS = 1
STEPS, PHASES = 1, 2


def to_perfetto(source: Source) -> dict[str, Any]:
    """Return the file's content. Time is that of the host, or the number of the event where it is not known."""
    profile = source.profile
    timed = [point.time_us for point in profile.points if point.time_us is not None]
    known = len(timed) == len(profile.points)
    times = timed if known else [point.event for point in profile.points]
    start = times[0] if times else 0
    times = [time - start for time in times]
    drawn = [i for i in range(len(CATEGORIES)) if any(point.category_bytes[i] for point in profile.points)]
    events = [
        _meta("process_name", 0, f"oomproof, GPU {profile.device}"),
        _meta("thread_name", STEPS, "steps"),
        _meta("thread_name", PHASES, "phases"),
    ]
    for time, point in zip(times, profile.points, strict=True):
        sizes = {words(CATEGORIES[i]): point.category_bytes[i] for i in drawn}
        events.append(_counter(time, "allocated", {"bytes": allocated(point)}))
        events.append(_counter(time, "reserved", {"bytes": point.reserved_bytes}))
        events.append(_counter(time, "category", sizes))
    events += _slices(times, profile.points)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "file": source.path,
            "time": "microseconds of the host, which say nothing of a GPU's speed" if known else "numbers of events",
            "limit_bytes": profile.limit_bytes,
        },
        "traceEvents": events,
    }


def _meta(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": name, "args": {"name": value}}


def _counter(time: int, name: str, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": PROCESS, "tid": 0, "ts": time, "name": name, "args": values}


def _slices(times: Sequence[int], points: Sequence[Point]) -> list[dict[str, Any]]:
    tracks: tuple[tuple[int, list[str | None]], ...] = (
        (STEPS, [None if point.step is None else f"step {point.step}" for point in points]),
        (PHASES, [point.phase for point in points]),
    )
    found = []
    for thread, names in tracks:
        # a phase that goes on into the next step is two slices
        for (name, _), members in groupby(range(len(points)), key=lambda i: (names[i], points[i].step)):
            numbers = list(members)
            if name is not None:
                begin, end = times[numbers[0]], times[min(numbers[-1] + 1, len(times) - 1)]
                found.append({"ph": "X", "pid": PROCESS, "tid": thread, "ts": begin, "dur": end - begin, "name": name})
    return found
