"""The sections of the terminal report that list things: steps, calls, ranks, what is not known, notes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from oomproof.measure.measurement import Rank, Step, ValueRead
from oomproof.report.sections import Fault, Section, View, columns
from oomproof.report.words import plural, span
from oomproof.units import format_bytes

CALLS = 5
RANKS = 8
STEP_ROWS = 4
VALUE_READS = 4
NOTES = 8
RISING = 0.01  # a smaller change between steps is the allocator's choice of blocks
LOCATION = 36  # characters that are never folded


def more(hidden: int, what: str) -> list[Text]:
    """Return the line that says how much was folded away, if anything was."""
    return [Text(f"+{hidden} more {what}", "dim")] if hidden > 0 else []


def steps(view: View) -> list[Section]:
    """Show the peaks of each step, equal neighbours as one row, and how the first differs from the last."""
    per_step = view.measurement.per_step
    if not per_step:
        return []
    runs = [tuple(run) for _, run in groupby(per_step, lambda s: (s.allocated_bytes, s.reserved_bytes))]
    kept = _folded(runs)
    table = columns("name", "right", "right")
    table.add_row("", Text("allocated", "dim"), Text("reserved", "dim"))
    for run in kept:
        first, last = run[0], run[-1]
        name = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
        table.add_row(name, format_bytes(first.allocated_bytes), format_bytes(first.reserved_bytes))
    hidden = sum(len(run) for run in runs) - sum(len(run) for run in kept)
    body: list[RenderableType] = [table, *more(hidden, "steps, none of them higher"), *_trend(per_step, view.faults)]
    if view.measurement.ended in ("steps-reached", "stable"):
        body.append(Text("stopped there: evaluation and saving, if any, were not run", "dim"))
    return [("Steps", Group(*body))]


def _folded(runs: Sequence[tuple[Step, ...]]) -> list[tuple[Step, ...]]:
    if len(runs) <= STEP_ROWS:
        return list(runs)
    highest = max(range(len(runs)), key=lambda i: runs[i][0].allocated_bytes)
    return [runs[i] for i in sorted({0, 1, highest, len(runs) - 1})]


def _trend(per_step: Sequence[Step], faults: Sequence[Fault]) -> list[Text]:
    """Return how the first step differs from the last, and what a profile shows of all, else whether they rise."""
    if len(per_step) < 2:
        return []
    first, before, last = per_step[0], per_step[-2], per_step[-1]
    lines = []
    change = last.allocated_bytes - first.allocated_bytes
    if change:
        side = "below" if change > 0 else "above"
        lines.append(Text(f"the first step peaks {format_bytes(abs(change))} {side} the last"))
    lines += [Text(f"{name}: {detail}", colour) for name, detail, colour in faults]
    highest = last.allocated_bytes >= max(step.allocated_bytes for step in per_step)
    rising = highest and last.allocated_bytes - before.allocated_bytes > RISING * before.allocated_bytes
    if len(per_step) > 2 and rising and not faults:
        lines.append(Text("still rising at the last step: measure more steps", "yellow"))
    return lines


def calls(view: View) -> list[Section]:
    """Show the outermost module calls, highest first, of a script that made no optimizer step."""
    m = view.measurement
    if m.per_step or not m.calls:
        return []
    table = columns("left", "right", "right", "right")
    table.add_row("", Text("calls", "dim"), Text("allocated", "dim"), Text("reserved", "dim"))
    ordered = sorted(m.calls, key=lambda c: -c.allocated_bytes)
    for call in ordered[:CALLS]:
        table.add_row(
            Text(view.clean(call.module), overflow="fold"),
            f"{call.count:,}",
            format_bytes(call.allocated_bytes),
            format_bytes(call.reserved_bytes),
        )
    return [("Calls", Group(Text("no optimizer step was made"), table, *more(len(ordered) - CALLS, "modules")))]


def ranks(view: View) -> list[Section]:
    """Show each rank of a run with several processes, the worst first."""
    m = view.measurement
    if len(m.ranks) < 2:
        return []
    table = columns("name", "name", "right", "right", "right", "left")
    table.add_row(*(Text(t, "dim") for t in ("rank", "device", "allocated", "reserved", "in all", "")))
    ordered = sorted(m.ranks, key=_badness)
    for rank in ordered[:RANKS]:
        table.add_row(
            f"{rank.rank}",
            f"cuda:{rank.device}",
            format_bytes(rank.peak.allocated_bytes),
            format_bytes(rank.peak.reserved_bytes),
            format_bytes(rank.peak.device_bytes),
            Text(*_rank_verdict(rank)),
        )
    return [("Ranks", Group(table, *more(len(ordered) - RANKS, "ranks, none of them worse")))]


def _badness(rank: Rank) -> tuple[int, int, int]:
    return ("does-not-fit", "unknown", "fits").index(rank.verdict), -rank.peak.device_bytes, rank.rank


def _rank_verdict(rank: Rank) -> tuple[str, str]:
    return {"fits": ("fits", "green"), "does-not-fit": ("does not fit", "red")}.get(rank.verdict, ("unknown", "yellow"))


def unknowns(view: View) -> list[Section]:
    """Show each range with its reason, and the values that were read back though no kernel computed them."""
    m = view.measurement
    body: list[RenderableType] = []
    for item in m.ranges:
        text = Text(view.clean(f"{item.what}, {span(item.low_bytes, item.high_bytes)}"), overflow="fold")
        text.append(view.clean(f": {item.reason}"), "dim")
        body.append(text)
    if m.value_reads:
        body += _value_reads(view)
    return [("Not known", Group(*body))] if body else []


def _value_reads(view: View) -> list[RenderableType]:
    reads = sorted(view.measurement.value_reads, key=lambda r: (r.affects_memory is False, -r.count))
    total = sum(read.count for read in reads)
    heading = f"{plural(total, 'value read')}, of numbers that only a real kernel computes:"
    table = columns("left", "left", "right", "left")
    for read in reads[:VALUE_READS]:
        table.add_row(
            Text(view.clean(read.location), overflow="fold", no_wrap=len(read.location) <= LOCATION),
            Text(view.clean(read.operation), "dim", overflow="fold"),
            f"{read.count:,} x",
            Text(*_effect(read), overflow="fold"),
        )
    return [Text(heading), table, *more(len(reads) - VALUE_READS, "places")]


def _effect(read: ValueRead) -> tuple[str, str]:
    if read.affects_memory is False:
        return "harmless", "dim"
    return ("changes memory" if read.affects_memory else "may change memory"), "yellow"


def notes(view: View) -> list[Section]:
    """Show the measurement's notes, one a line."""
    found = view.measurement.notes
    if not found:
        return []
    lines = [Text(view.clean(note), overflow="fold") for note in found[:NOTES]]
    return [("Notes", Group(*lines, *more(len(found) - NOTES, "notes, in the JSON")))]
