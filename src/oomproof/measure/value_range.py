"""How the peak depends on counts that nobody knows: what a run with the smallest and one with the largest show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oomproof.measure.measurement import Demand, Range
from oomproof.units import format_bytes

#: Lines of the script that a reason or a note names.
PLACES = 3

Reads = Sequence[Mapping[str, Any]]


def got_as_far(finding: Mapping[str, Any]) -> bool:
    """Return whether a process ended as one does whose figures count."""
    return finding["ended"] in ("steps-reached", "stable", "finished")


def ranges(reads: Reads, few: Demand, many: Demand | None) -> tuple[Range, ...]:
    """Return the range between the peaks with the smallest and with the largest counts, if they differ."""
    if many is None or few == many:
        return ()
    low, high = sorted((few.device_bytes, many.device_bytes))
    places = _places(_bounded(reads))
    reason = (
        "how many elements are kept, or where tokens go, is not known; measured with the smallest and the largest "
        f"counts, allocated {format_bytes(few.allocated_bytes)} and {format_bytes(many.allocated_bytes)}"
    )
    return (Range(what="values", low_bytes=low, high_bytes=high, reason=f"{reason}: {places}" if places else reason),)


def notes(reads: Reads, few: Demand, many: Demand | None) -> list[str]:
    """Return what else is known of unknown counts: that they change nothing, and which have no largest."""
    found = []
    if many == few:
        found.append("unknown counts do not change the peak: it is the same with the smallest and the largest of them")
    unbounded = [r for r in reads if r["affects_memory"] and r["least"] is not None and r["most"] is None]
    if unbounded:
        where = ", ".join(f"{r['location']} ({r['operation']})" for r in unbounded[:PLACES])
        found.append(f"sized by unknown values, without a largest size that shapes tell; counted as the least: {where}")
    return found


def hint(reads: Reads, ended: str) -> list[str]:
    """Return what to try when a script raised an error that empty results may be the cause of."""
    if ended != "raised" or not _bounded(reads):
        return []
    return [
        "counts of unknown values were answered with the least; if the error comes from an empty tensor, try "
        f"--unknown-counts many: {_places(_bounded(reads))}"
    ]


def failure(reads: Reads, most: Mapping[str, Any] | None, interrupted: bool) -> list[str]:
    """Return the note that the run with the largest counts gave no figures, and why."""
    if interrupted:
        return ["the run with the largest counts was interrupted, so how far the peak reaches up is not known"]
    error = most["error"].partition("\n")[0][:200] if most is not None and most["error"] else "no error of Python's"
    return [
        f"with the largest counts of unknown values the script failed ({error}), so how far the peak reaches up is not "
        f"known: {_places(_bounded(reads))}"
    ]


def _bounded(reads: Reads) -> list[Mapping[str, Any]]:
    return [r for r in reads if r["affects_memory"] and r["most"] is not None and r["most"] > r["least"]]


def _places(reads: Iterable[Mapping[str, Any]]) -> str:
    """Return where counts were read: ``train.py:12 (aten::nonzero (bool), 0 to 4,096)``, the widest first."""
    ordered = sorted(reads, key=lambda r: int(r["least"] - r["most"]))
    told = [f"{r['location']} ({r['operation']}, {r['least']:,} to {r['most']:,})" for r in ordered[:PLACES]]
    return ", ".join(told) + (f" and {len(ordered) - PLACES} more" if len(ordered) > PLACES else "")
