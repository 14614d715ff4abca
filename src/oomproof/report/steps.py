"""``oomproof steps``: the first step against the later ones, and what grows from step to step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from rich.text import Text

from oomproof.measure.profile import CATEGORIES, Growth, Profile, Segments, StepRow
from oomproof.report.blocks import line, words
from oomproof.report.sheet import Body, Sheet
from oomproof.report.source import Source
from oomproof.report.words import NextCommand, plural
from oomproof.units import MIB, format_bytes

MANY = 1000  # steps
FEW = 3  # steps that a trend needs
FRAGMENTS = 0.02  # of reserved: less growth than that is the allocator's choice, too
SEGMENT_BYTES = 20 * MIB  # kLargeBuffer of the caching allocator: what blocks of 1 to 10 MiB are cut from
NOISE = 0.01  # of the peak: a smaller change between steps is the allocator's choice of blocks
SPREAD = 0.02  # of the peak: blocks that are not split hold up to 1 MiB more than was asked for
TRIFLE = 0.001  # of the peak
ROWS = 6
PLACES = 6
STACK_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of code that asked the device for segments after the first steps."""

    module: str | None  # whose backward pass it is, where no line is known
    stack: tuple[str, ...]
    segments: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the steps show."""

    states: tuple[str, ...]  # one or more of "leaks", "fragments", "varies", or one of the others; the worst first
    rows: tuple[StepRow, ...]
    first_to_steady_bytes: int | None  # the last step's peak less the first's; None with a single step
    changes: tuple[tuple[str, int], ...]  # by category, between the first and the last step's peaks
    leaks: tuple[Growth, ...]  # still growing at the last step
    settled: tuple[Growth, ...]  # no longer growing
    leak_bytes_per_step: int
    steps_until_full: int | None  # from the last step on, at this rate; None: no leak, or the memory is not known
    reserved_growth_bytes: int  # over the later steps, beyond what more is allocated
    places: tuple[Place, ...]  # that the growth of reserved comes from, the largest first
    lowest: StepRow | None  # of the later steps, when their peaks differ
    highest: StepRow | None


def high(row: StepRow) -> int:
    """Return a step's highest allocated, in bytes."""
    return sum(row.category_bytes)


def per_step(growth: Growth) -> int:
    """Return the bytes that a place keeps in each step that adds some."""
    return growth.size_bytes // max(1, growth.steps)


def examine(profile: Profile) -> Findings:
    """Return what the steps of a profile show."""
    rows = profile.steps
    last = rows[-1].step if rows else 0
    leaks = tuple(g for g in profile.growth if rows and g.last_step >= last - 1)  # the last one may have been cut short
    settled = tuple(g for g in profile.growth if g not in leaks)
    rate = sum(map(per_step, leaks))
    left = None if profile.limit_bytes is None or not rows else max(0, profile.limit_bytes - rows[-1].reserved_bytes)
    later = rows[1:]
    fragments = _reserved_growth(rows) if not leaks else 0  # a leak alone makes reserved grow
    varies = _spread(later) if not leaks else None
    faults = [name for name, there in (("leaks", leaks), ("fragments", fragments), ("varies", varies)) if there]
    harmless = "no-steps" if not rows else "too-few-steps" if len(rows) < FEW else "steady"
    return Findings(
        states=tuple(faults) or (harmless,),
        rows=rows,
        first_to_steady_bytes=high(rows[-1]) - high(rows[0]) if len(rows) > 1 else None,
        changes=_changes(rows[0], rows[-1]) if len(rows) > 1 else (),
        leaks=leaks,
        settled=settled,
        leak_bytes_per_step=rate,
        steps_until_full=left // rate if rate and left is not None else None,
        reserved_growth_bytes=fragments,
        places=_places(profile.segments, later[0].step) if fragments else (),
        lowest=varies[0] if varies else None,
        highest=varies[1] if varies else None,
    )


def _reserved_growth(rows: Sequence[StepRow]) -> int:
    """Return by how much more reserved grew after the second step than what is allocated; 0 unless again and again."""
    if len(rows) < FEW:
        return 0
    times = sum(after.reserved_bytes > before.reserved_bytes for before, after in pairwise(rows[1:]))
    more_allocated = max(map(high, rows)) - max(map(high, rows[:2]))
    growth = rows[-1].reserved_bytes - rows[1].reserved_bytes - more_allocated
    return growth if times >= 2 and growth >= max(SEGMENT_BYTES, FRAGMENTS * rows[1].reserved_bytes) else 0


def _spread(later: Sequence[StepRow]) -> tuple[StepRow, StepRow] | None:
    if len(later) < 2:
        return None
    lowest, highest = min(later, key=high), max(later, key=high)
    return (lowest, highest) if high(highest) - high(lowest) > SPREAD * high(highest) else None


def _changes(first: StepRow, last: StepRow) -> tuple[tuple[str, int], ...]:
    pairs = zip(CATEGORIES, first.category_bytes, last.category_bytes, strict=True)
    found = [(name, after - before) for name, before, after in pairs if after != before]
    return tuple(sorted(found, key=lambda item: -abs(item[1])))


def _places(segments: Sequence[Segments], from_step: int) -> tuple[Place, ...]:
    sums: dict[tuple[str | None, tuple[str, ...]], list[int]] = {}
    for row in segments:
        if row.step is not None and row.step > from_step:
            known = sums.setdefault((None if row.stack else row.module, row.stack), [0, 0])
            known[0] += row.segments
            known[1] += row.size_bytes
    places = [
        Place(module=module, stack=stack, segments=count, size_bytes=size)
        for (module, stack), (count, size) in sums.items()
    ]
    return tuple(sorted(places, key=lambda place: -place.size_bytes))


def verdicts(found: Findings) -> list[tuple[str, str, str]]:
    """Return each finding in capitals, the sentence after it, and its colour; the worst first."""
    return [_verdict(state, found) for state in found.states]


def faults(profile: Profile) -> list[tuple[str, str, str]]:
    """Return the findings that are faults, as ``verdicts`` does; none where all is well or too little is known."""
    found = examine(profile)
    return verdicts(found) if {"leaks", "fragments", "varies"} & set(found.states) else []


def _verdict(state: str, found: Findings) -> tuple[str, str, str]:
    if state == "no-steps":
        return "NO STEPS", "no step is known here, so nothing can be said of growth", "yellow"
    if state == "leaks":
        full = ""
        if found.steps_until_full is not None:
            full = f": at this rate the GPU is full about {plural(found.steps_until_full, 'step')} after the last one"
        return "LEAKS", f"{format_bytes(found.leak_bytes_per_step)} more in each step are never freed{full}", "red"
    if state == "fragments":
        grown = f"reserved grew by {format_bytes(found.reserved_growth_bytes)} over the later steps"
        return "FRAGMENTS", f"{grown}, beyond what more was allocated", "yellow"
    if state == "varies" and found.lowest and found.highest:
        low, top = found.lowest, found.highest
        detail = f"step {low.step} peaks at {format_bytes(high(low))}, step {top.step} at {format_bytes(high(top))}"
        return "VARIES", f"{detail}: a longer run may go higher", "yellow"
    if state == "too-few-steps":
        return "TOO FEW STEPS", f"{plural(len(found.rows), 'step')} cannot show a trend", "yellow"
    return "STEADY", "nothing grows from step to step", "green"


def body(source: Source, found: Findings) -> Body:
    """Return what draws the findings."""

    def lines(sheet: Sheet) -> Iterator[Text]:
        for name, detail, colour in verdicts(found):
            text = Text(name, f"bold reverse {colour}")
            text.append(f"  {detail}", "not reverse bold default")
            yield text
        if not found.rows:
            return
        yield Text()
        yield from _table(found.rows)
        yield from _first(found)
        told = [g for g in found.leaks if per_step(g) >= NOISE * found.leak_bytes_per_step][:PLACES]
        for growth in told:
            yield from _growth(sheet, growth, "kept for good", found.rows[-1].step)
        yield from _more(len(found.leaks) - len(told), "places that leak less")
        for growth in found.settled[:PLACES]:
            yield from _growth(sheet, growth, f"kept, but no more after step {growth.last_step}", growth.last_step)
        yield from _more(len(found.settled) - PLACES, "places that stopped growing")
        for place in found.places[:PLACES]:
            yield Text()
            yield Text(f"{format_bytes(place.size_bytes)} in {plural(place.segments, 'new segment')}, asked for by")
            yield from _stack(sheet, place.stack, place.module)
        yield from _more(len(found.places) - PLACES, "places")

    return lines


def _table(rows: Sequence[StepRow]) -> Iterator[Text]:
    yield Text(f"{'':15}{'allocated':>12}{'reserved':>12}{'left at its end':>17}", "dim", no_wrap=True)
    runs = [list(run) for _, run in groupby(rows, lambda row: (high(row), row.reserved_bytes, row.end_allocated_bytes))]
    top = max(range(len(runs)), key=lambda i: high(runs[i][0]))
    kept = set(range(len(runs))) if len(runs) <= 2 * ROWS else {*range(ROWS), top, *range(len(runs) - ROWS, len(runs))}
    skipped = 0
    for number, run in enumerate(runs):
        if number not in kept:
            skipped += len(run)
            continue
        if skipped:
            yield Text(f"{plural(skipped, 'step')} more", "dim")
            skipped = 0
        first, last = run[0], run[-1]
        name = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
        yield Text(
            f"{name:15}{format_bytes(high(first)):>12}{format_bytes(first.reserved_bytes):>12}"
            f"{format_bytes(first.end_allocated_bytes):>17}",
            no_wrap=True,
        )


def _first(found: Findings) -> Iterator[Text]:
    change = found.first_to_steady_bytes
    if not change:
        return
    yield Text()
    side = "below" if change > 0 else "above"
    text = Text(f"the first step peaks {format_bytes(abs(change))} {side} the last: ")
    text.append(", ".join(f"{words(name)} {signed(size)}" for name, size in told_changes(found)))
    yield text


def told_changes(found: Findings) -> list[tuple[str, int]]:
    """Return the categories that differ between the first and the last step by more than rounding does."""
    return [item for item in found.changes if abs(item[1]) >= TRIFLE * high(found.rows[-1])] or list(found.changes[:1])


def signed(size_bytes: int) -> str:
    """Return a change with its sign: ``+1.00 GiB``."""
    return f"+{format_bytes(size_bytes)}" if size_bytes > 0 else format_bytes(size_bytes)


def _growth(sheet: Sheet, growth: Growth, what: str, last: int) -> Iterator[Text]:
    yield Text()
    until = f"to {growth.last_step}" if growth.last_step <= last else "to the end"
    text = Text(f"{format_bytes(per_step(growth))} a step", "bold")
    text.append(
        f", {format_bytes(growth.size_bytes)} in {plural(growth.blocks, 'block')} "
        f"from step {growth.first_step} {until}, {what}; {words(growth.category)}, made by",
        "not bold",
    )
    yield text
    yield from _stack(sheet, growth.stack, growth.module)


def _stack(sheet: Sheet, stack: Sequence[str], module: str | None) -> Iterator[Text]:
    if module:
        yield Text(f"  in {sheet.clean(module)}", "dim" if stack else "bold", overflow="fold")
    elif not stack:
        yield Text(f"  {line(())}", "dim")
    for number, frame in enumerate(stack[:STACK_LINES]):
        yield Text(f"  {'from ' if number else ''}{sheet.clean(frame)}", "dim" if number else "bold", overflow="fold")
    yield from _more(len(stack) - STACK_LINES, "callers")


def _more(count: int, what: str) -> Iterator[Text]:
    if count > 0:
        yield Text(f"  +{count} more {what}", "dim")


def to_json_text(source: Source, found: Findings) -> str:
    """Return the findings as JSON."""
    data: dict[str, Any] = {
        "schema": "oomproof.steps/1",
        "states": list(found.states),
        "steps": [
            {
                "step": row.step,
                "allocated_bytes": high(row),
                "reserved_bytes": row.reserved_bytes,
                "end_allocated_bytes": row.end_allocated_bytes,
                "end_reserved_bytes": row.end_reserved_bytes,
            }
            for row in found.rows
        ],
        "first_to_steady_bytes": found.first_to_steady_bytes,
        "first_to_steady": {f"{name}_bytes": size for name, size in found.changes},
        "leak_bytes_per_step": found.leak_bytes_per_step,
        "steps_until_full": found.steps_until_full,
        "leaks": [_plain(growth, found) for growth in found.leaks],
        "settled": [_plain(growth, found) for growth in found.settled],
        "reserved_growth_bytes": found.reserved_growth_bytes,
        "reserved_growth": [
            {"module": p.module, "stack": list(p.stack), "segments": p.segments, "size_bytes": p.size_bytes}
            for p in found.places
        ],
        "lowest_step": found.lowest.step if found.lowest else None,
        "highest_step": found.highest.step if found.highest else None,
    }
    return json.dumps(data, indent=2) + "\n"


def _plain(growth: Growth, found: Findings) -> dict[str, Any]:
    steps = {"last_step": min(growth.last_step, found.rows[-1].step if found.rows else growth.last_step)}
    return growth._asdict() | steps | {"bytes_per_step": per_step(growth), "stack": list(growth.stack)}


def after(source: Source, found: Findings) -> NextCommand:
    """Return what to type next."""
    state = found.states[0]
    if state == "leaks":
        return NextCommand(
            reason="mend the line, measure again, and see the difference",
            command=f"oomproof diff {source.quoted} MENDED.oomp",
        )
    if state == "fragments":
        return NextCommand(
            reason="see whether segments that can grow cure it",
            command=f"PYTORCH_ALLOC_CONF=expandable_segments:True {source.run_again()}",
        )
    if state in ("varies", "too-few-steps"):
        count = 10 if state == "too-few-steps" else 10 * len(found.rows)
        wanted = str(count) if count <= MANY else "all"
        return NextCommand(reason="measure more steps", command=source.run_again("--steps", wanted))
    return NextCommand(reason="see what the peak consists of", command=f"oomproof tree {source.quoted}")
