"""The first line of a report: whether it fits, and by how much."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from oomproof.measure.measurement import Measurement
from oomproof.report.words import depends, is_untouched, plural
from oomproof.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The verdict in capitals, the sentence after it, and the colour of both."""

    verdict: str
    detail: str
    colour: str


def headline(measurement: Measurement) -> Headline:
    """Return the verdict as a person should read it."""
    if is_untouched(measurement):
        verdict = {"fits": "FITS", "does-not-fit": "DOES NOT FIT"}.get(measurement.verdict, "UNKNOWN")
        return Headline(verdict=verdict, detail="the script never used the GPU" + _ended(measurement), colour="yellow")
    if measurement.verdict == "fits":
        return _fits(measurement)
    if measurement.verdict == "does-not-fit":
        return _does_not_fit(measurement)
    return Headline(
        verdict="UNKNOWN",
        detail=f"{_figures(measurement, 'peak so far')}{_ended(measurement)}",
        colour="yellow",
    )


def _fits(measurement: Measurement) -> Headline:
    spare = measurement.gpu.memory_bytes - measurement.peak.device_bytes
    figures = f"{_figures(measurement)} ({format_bytes(spare)} to spare)"
    figures += _sized(measurement)
    how, why = reservation(measurement)
    if not how:
        return Headline(verdict="FITS", detail=figures, colour="green")
    return Headline(verdict=f"FITS, {how}", detail=f"{figures}: {why}", colour="yellow")


def reservation(measurement: Measurement) -> tuple[str, str]:
    """Return with what reservation a measurement that fits does so, in capitals, and why; "" twice without one."""
    _, high = measurement.device_bounds
    if depends(measurement):
        why = f"with the largest of the counts that nobody knows it would take {format_bytes(high)}"
        return "DEPENDING ON VALUES", why
    if high > measurement.gpu.memory_bytes:
        return "BUT ONLY JUST", f"the range reaches past the GPU, to {format_bytes(high)}"
    if measurement.allocator.retries:
        retries = plural(measurement.allocator.retries, "time")
        return "BUT ONLY JUST", f"the allocator had to give back its cache {retries} to go on, which costs speed"
    return "", ""


#: How sizes were come by that only a kernel computes, by how the counts were answered.
_TAKEN = {
    "least": "taken as the least they can be",
    "most": "taken as the most they can be",
    "assumed": "assumed",
    None: "not known",
}


def _sized(measurement: Measurement) -> str:
    """Return what the figures rest on where sizes are unknown: how far they reach up, or how they were counted."""
    many = measurement.demand_if_many
    if many is not None and not depends(measurement) and many.device_bytes > measurement.peak.device_bytes:
        reach = f", up to {format_bytes(many.device_bytes)} by counts that nobody knows"
    else:
        reach = ""
    sizes: Counter[str | None] = Counter()
    for read in measurement.value_reads:
        told = many is not None and (read.most is not None or read.taken == "assumed")  # the further run has both ends
        if read.affects_memory and not told:
            sizes[read.taken] += read.count
    if not sizes:
        return reach
    ways = [f"{count:,} {_TAKEN[how]}" for how, count in sizes.most_common()]
    mixed = f": {', '.join(ways)}" if len(ways) > 1 else f" {_TAKEN[next(iter(sizes))]}"
    return f"{reach}, with {plural(sizes.total(), 'size')} that only a kernel computes{mixed}"


def _does_not_fit(measurement: Measurement) -> Headline:
    over = measurement.peak.device_bytes - measurement.gpu.memory_bytes
    if over <= 0:
        requested = measurement.oom.requested_bytes if measurement.oom else None
        what = "an allocation" if requested is None else f"an allocation of {format_bytes(requested)}"
        return Headline(
            verdict="DOES NOT FIT",
            detail=f"{_figures(measurement)}: no room for {what} along the way",
            colour="red",
        )
    low, _ = measurement.device_bounds
    maybe = f": the low end of the range, {format_bytes(low)}, would fit" if low <= measurement.gpu.memory_bytes else ""
    return Headline(
        verdict="DOES NOT FIT",
        detail=f"{_figures(measurement)} ({format_bytes(over)} over){maybe}",
        colour="red",
    )


def _figures(measurement: Measurement, what: str = "peak") -> str:
    peak, gpu, world = measurement.peak, measurement.gpu, measurement.world
    rank = f", rank {world.rank} of {world.size}" if world.size > 1 else ""
    return f"{what} {format_bytes(peak.device_bytes)} of {format_bytes(gpu.memory_bytes)} on {gpu.name}{rank}"


def _ended(measurement: Measurement) -> str:
    code = "" if measurement.exit_code is None else f" (exit code {measurement.exit_code})"
    return {
        "raised": f"; the script raised an error{code}",
        "exited": f"; the script exited early{code}",
        "interrupted": "; it was interrupted",
        "no-kernels": "; this torch has no kernels for it, see Notes",
        "oom": "; it ran out of memory",
    }.get(measurement.ended, "")
