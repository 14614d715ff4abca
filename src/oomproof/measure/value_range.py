"""How the peak depends on counts that nobody knows: what a run with the smallest and one with the largest show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oomproof.measure.measurement import Demand, Range
from oomproof.units import format_bytes

#: Lines of the script that a reason or a note names.
PLACES = 3

#: How a count was answered, the option for the other way and what that takes.
OTHER_WAY = {"least": ("many", "most"), "most": ("few", "least")}

#: In the names of operators that count what a mask keeps.
MASKS = ("nonzero", "argwhere", "index", "masked", "where")
EACH_FOR_ITSELF = "each mask is counted for itself: where several share out elements, such as tokens among experts, "

Reads = Sequence[Mapping[str, Any]]


def got_as_far(finding: Mapping[str, Any]) -> bool:
    """Return whether a process ended as one does whose figures count."""
    return finding["ended"] in ("steps-reached", "stable", "finished")


def ranges(reads: Reads, few: Demand, many: Demand | None) -> tuple[Range, ...]:
    """Return the range between the peaks with the smallest and with the largest counts, if they differ."""
    if many is None or few == many:
        return ()
    low, high = sorted((few.device_bytes, many.device_bytes))
    bounded = _bounded(reads)
    places = _places(bounded)
    reason = (
        "how many elements are kept, or where tokens go, is not known; measured with the smallest and the largest "
        f"counts, allocated {format_bytes(few.allocated_bytes)} and {format_bytes(many.allocated_bytes)}"
    )
    if any(_shares(r) for r in bounded):
        reason += f"; {EACH_FOR_ITSELF}one may be counted at none of them in the former and at several in the latter"
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


def counted(reads: Reads, few: Demand, many: Demand | None, ended: str) -> list[str]:
    """Return which way the figures count what nobody knows, and the option for the other way."""
    told = [r for r in _bounded(reads) if r["taken"] in OTHER_WAY]
    if not told or many == few or ended == "raised":  # then it makes no difference, or ``hint`` tells
        return []
    way, other = told[0]["taken"], OTHER_WAY[told[0]["taken"]]
    text = (
        "what only a kernel can count, such as the boxes that a detector keeps or the tokens for an expert, is taken "
        f"as the {way} it can be; --unknown-counts {other[0]} takes the {other[1]}"
    )
    if many is None and any(_shares(r) for r in told):  # else the range's reason says it
        where = "several" if way == "most" else "none"
        text += f". {EACH_FOR_ITSELF.capitalize()}one may be counted at {where} of them"
    return [text if many is not None else f"{text}: {_places(told)}"]


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


def _shares(read: Mapping[str, Any]) -> bool:
    """Return whether a count is of what a mask keeps, of which several may share out the same elements."""
    return read["taken"] in OTHER_WAY and any(name in read["operation"] for name in MASKS)


def _bounded(reads: Reads) -> list[Mapping[str, Any]]:
    return [r for r in reads if r["affects_memory"] and r["most"] is not None and r["most"] > r["least"]]


def _places(reads: Iterable[Mapping[str, Any]]) -> str:
    """Return where counts were read: ``train.py:12 (aten::nonzero (bool), 0 to 4,096)``, the widest first."""
    ordered = sorted(reads, key=lambda r: int(r["least"] - r["most"]))
    told = [f"{r['location']} ({r['operation']}, {r['least']:,} to {r['most']:,})" for r in ordered[:PLACES]]
    return ", ".join(told) + (f" and {len(ordered) - PLACES} more" if len(ordered) > PLACES else "")
