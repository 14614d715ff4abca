"""``oomproof plan``: the cheapest changes that make it fit, what was tried besides, and what to write instead."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from oomproof.plan.candidate import Trial, to_json
from oomproof.plan.planning import Planned
from oomproof.report.sheet import Body, Sheet
from oomproof.report.verdict import device_bounds
from oomproof.report.words import NextCommand, plural
from oomproof.units import format_bytes

ROWS = 12
FIDELITY = {
    "exact": "same bits",
    "equal": "same maths",
    "approximate": "approximate",
    "changes-model": "other model",
}
_COLOURS = {"fits": "green", "does-not-fit": "red", "cannot-apply": "yellow", "failed": "yellow"}


def body(planned: Planned, emit: str | None = None) -> Body:
    """Return the lines of the report; ``emit`` is the framework whose code is shown for the winner."""

    def lines(sheet: Sheet) -> Iterator[Text]:
        yield headline(planned)
        found = planned.found
        if found.trials:
            yield Text()
            yield from _table(sheet, planned)
        if planned.plan is not None and found.winner is not None:
            yield from _section(sheet, "Why", reasons(planned))
            yield from _section(
                sheet, "Changed", [f"{e['technique']}: {e['what']} ({e['where']})" for e in found.winner.said]
            )
            yield from _section(sheet, "Mind", mind(planned))
        yield from _section(sheet, "By hand", by_hand(planned))
        yield from _section(sheet, "Not tried", not_tried(planned))
        yield from _section(sheet, "Other GPUs", other_gpus(planned))
        if emit is not None and planned.plan is not None:
            yield Text()
            yield Text(f"Code ({emit})", "bold")
            for line in code(planned, emit).splitlines():
                yield Text("  " + sheet.clean(line) if line.strip() else "")

    return lines


def headline(planned: Planned) -> Text:
    """Return the answer in one line."""
    found, gpu = planned.found, planned.gpu
    if planned.fits_as_it_is:
        return _head("FITS AS IT IS", f"{_of(found.baseline, planned)}; nothing has to change", "green")
    winner = found.winner
    if winner is None:
        closest = found.closest
        over = (closest.peak_bytes or 0) - gpu.memory_bytes
        stopped = " within the budget" if found.out_of_budget else ""
        detail = (
            f"the closest, {closest.candidate.label}, takes {_of(closest, planned)}: {format_bytes(over)} are missing"
        )
        return _head(f"NOTHING FITS{stopped.upper()}", detail, "red")
    count = plural(len(winner.candidate.changes), "change").upper()
    spare = format_bytes(
        gpu.memory_bytes - (winner.measurement.peak.device_bytes if winner.measurement is not None else 0)
    )
    detail = (
        f"{_of(winner, planned)} ({spare} to spare), a step takes {time(winner)}, {FIDELITY[winner.candidate.fidelity]}"
    )
    return _head(f"FITS WITH {count}", detail, "green")


def _head(verdict: str, detail: str, colour: str) -> Text:
    return Text.assemble((f" {verdict} ", f"bold reverse {colour}"), " ", (detail, "bold"))


def _of(trial: Trial, planned: Planned) -> str:
    peak = (
        trial.measurement.peak.device_bytes if trial.fits and trial.measurement is not None else trial.peak_bytes or 0
    )
    return f"{format_bytes(peak)} of {format_bytes(planned.gpu.memory_bytes)} on {planned.gpu.name}"


def time(trial: Trial) -> str:
    """Return the relative time of a step with its range: "1.24 x (1.18 to 1.31)"."""
    if trial.time is None:
        return "an unknown time"
    low, high = f"{trial.time.low:.2f}", f"{trial.time.high:.2f}"
    return f"{trial.time.expected:.2f} x" + (f" ({low} to {high})" if low != high else "")


def _table(sheet: Sheet, planned: Planned) -> Iterator[Text]:
    found = planned.found
    widths = (11, 13, 22, 12)
    room = max(20, sheet.width - sum(widths) - 2 * len(widths))
    head = (
        "changes".ljust(room),
        "peak".rjust(11),
        "to spare".rjust(13),
        "time of a step".ljust(22),
        "fidelity".ljust(12),
    )
    yield Text("  ".join(head).rstrip(), "dim")
    rows = ordered(found.baseline, found.trials, found.winner)
    for trial in rows[:ROWS]:
        style = "bold green" if trial is found.winner else ""
        label = sheet.cut(trial.candidate.label, room)
        if trial.peak_bytes is None:
            yield Text(f"{label}  {sheet.clean(trial.reason)[: sheet.width - room - 2]}", "yellow")
            continue
        spare = planned.gpu.memory_bytes - trial.peak_bytes
        over = format_bytes(-spare) + " over" if spare < 0 else format_bytes(spare)
        if trial.fits and spare < 0:
            over = "by retries"
        cells = (
            label,
            format_bytes(trial.peak_bytes).rjust(11),
            over.rjust(13),
            time(trial).ljust(22),
            FIDELITY[trial.candidate.fidelity].ljust(12),
        )
        yield Text("  ".join(cells).rstrip(), style or ("" if trial.fits else "dim"))
    if len(rows) > ROWS:
        yield Text(f"{sheet.dots} {plural(len(rows) - ROWS, 'more set')}; all of them are in --json and --html", "dim")


def ordered(baseline: Trial, trials: Sequence[Trial], winner: Trial | None) -> list[Trial]:
    """Return the winner, the script as it is, what else fits by its time, what does not by its peak, and the rest."""
    ran = [t for t in trials if t is not winner and t.peak_bytes is not None]
    fitting = sorted((t for t in ran if t.fits), key=Trial.order)
    others = sorted((t for t in ran if not t.fits), key=lambda t: t.peak_bytes or 0)
    first = [winner] if winner is not None and winner is not baseline else []
    return [*first, baseline, *fitting, *others, *(t for t in trials if t.peak_bytes is None)]


def _section(sheet: Sheet, label: str, lines: Sequence[str]) -> Iterator[Text]:
    if not lines:
        return
    yield Text()
    for place, line in enumerate(lines):
        for part, piece in enumerate(textwrap.wrap(sheet.clean(line), sheet.width - 14) or [""]):
            head = label.ljust(12) if place == 0 and part == 0 else " " * (14 if part else 12)
            yield Text.assemble((head, "bold"), piece)


def by_hand(planned: Planned) -> list[str]:
    """Return what changes that only the person can make would save."""
    found, lines = planned.found, []
    for trial in found.trials:
        if not trial.candidate.by_hand or trial.peak_bytes is None or found.baseline.peak_bytes is None:
            continue
        change = trial.candidate.changes[0]
        saved = found.baseline.peak_bytes - trial.peak_bytes
        if saved > 0:
            fits = ", and it fits" if trial.fits else ""
            lines.append(f"{change.label}: {change.technique.title}: {format_bytes(saved)} less{fits}")
    return lines


def not_tried(planned: Planned) -> list[str]:
    """Return the techniques that were not tried, with their reasons."""
    names: dict[str, list[str]] = {}
    for name, reason in planned.found.unfit:
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(those)}: {reason}" for reason, those in names.items()]


def reasons(planned: Planned) -> list[str]:
    """Return why the winner won and others did not."""
    found, winner = planned.found, planned.found.winner
    if winner is None or winner is found.baseline:
        return []
    fitting = [t for t in found.trials if t.fits]
    lines = [
        f"{plural(len(found.trials), 'set')} of changes ran, {len(fitting)} fit; of the most faithful of these it is "
        "the fastest, of equally fast ones the simplest"
    ]
    lines += [f"{change.label}: {change.technique.title}" for change in winner.candidate.changes]
    for trial in ordered(found.baseline, found.trials, winner)[2:6]:
        lines.append(f"not {trial.candidate.label}: {_lost(trial, winner, planned)}")
    return lines


def _lost(trial: Trial, winner: Trial, planned: Planned) -> str:
    if trial.fits and trial.candidate.level > winner.candidate.level:
        return f"it fits, but is {FIDELITY[trial.candidate.fidelity]}"
    if trial.fits and trial.expected_time > winner.expected_time:
        return f"it fits, but a step takes {time(trial)}"
    if trial.fits:
        return "it fits and is as fast, but is less simple or less faithful"
    if trial.peak_bytes is None:
        return trial.reason
    return f"it lacks {format_bytes(trial.peak_bytes - planned.gpu.memory_bytes)}"


def mind(planned: Planned) -> list[str]:
    """Return what a person must know before applying the plan."""
    winner = planned.found.winner
    if winner is None:
        return []
    found = []
    if winner.measurement is not None:
        _, high = device_bounds(winner.measurement)
        if high > planned.gpu.memory_bytes:
            found.append(
                "it fits, but only just: the range of what cannot be known reaches past the GPU, to "
                f"{format_bytes(high)}; plan with a smaller --memory to leave room"
            )
    for change in winner.candidate.changes:
        caution = change.technique.caution(planned.facts, change.options)
        if caution:
            found.append(f"{change.name}: {caution}")
    if planned.found.baseline.time is not None:
        found += [f"time, of the script as it is too: {what}" for what in planned.found.baseline.time.unknown]
    if winner.time is not None:
        found += [f"time: {what}" for what in winner.time.unknown]
    return found


def other_gpus(planned: Planned) -> list[str]:
    """Return the smallest GPUs that the script fits, as it is and with the plan."""
    lines = []
    if not planned.fits_as_it_is and planned.smallest is not None:
        lines.append(f"as it is the script fits {planned.smallest.key} ({format_bytes(planned.smallest.memory_bytes)})")
    least = planned.smallest_with_plan
    if least is not None and least.memory_bytes < planned.gpu.memory_bytes:
        lines.append(f"with the plan it fits {least.key} ({format_bytes(least.memory_bytes)}) too")
    if (
        planned.fits_as_it_is
        and planned.smallest is not None
        and planned.smallest.memory_bytes < planned.gpu.memory_bytes
    ):
        least = planned.smallest
        lines.append(f"it fits {least.key} ({format_bytes(least.memory_bytes)}) too, the smallest of the catalogue")
    return lines


def code(planned: Planned, framework: str) -> str:
    """Return what a person would write instead of applying the plan, for a framework."""
    parts = []
    assert planned.plan is not None
    for change in planned.plan.changes:
        technique = change.technique
        text = technique.code(change.options, framework, planned.facts)
        if text is None and framework != "code":
            text = technique.code(change.options, "code", planned.facts)
        parts.append(
            f"# {change.label}: {technique.title}\n# {technique.source}\n" + (text or "# nothing to write by hand")
        )
    return "\n\n".join(parts)


def after(planned: Planned, saved: str | None) -> NextCommand:
    """Return the next command."""
    command = shlex.join(planned.command)
    gpu = f"--gpu {shlex.quote(planned.gpu.key)}"
    if planned.fits_as_it_is:
        return NextCommand(
            reason="see what the peak consists of", command=f"oomproof run {gpu} -o FILE.oomp -- {command}"
        )
    if planned.plan is None:
        return NextCommand(
            reason="see whether another model would fit",
            command=f"oomproof plan {gpu} --allow changes-model -- {command}",
        )
    if saved is None:
        return NextCommand(reason="keep the plan in a file", command=f"oomproof plan {gpu} -o plan.toml -- {command}")
    return NextCommand(reason="train with it", command=f"oomproof apply {shlex.quote(saved)} -- {command}")


def to_json_text(planned: Planned) -> str:
    """Return the plan as JSON, schema ``oomproof.planned/1``."""
    found = planned.found
    data: dict[str, Any] = {
        "schema": "oomproof.planned/1",
        "command": list(planned.command),
        "gpu": {
            "key": planned.gpu.key,
            "name": planned.gpu.name,
            "memory_bytes": planned.gpu.memory_bytes,
        },
        "gpus": planned.gpus,
        "baseline": to_json(found.baseline),
        "candidates": [to_json(t) for t in found.trials],
        "frontier": [t.candidate.key for t in found.frontier()],
        "winner": to_json(found.winner) if found.winner is not None else None,
        "closest": to_json(found.closest),
        "out_of_budget": found.out_of_budget,
        "not_tried": [{"technique": name, "reason": reason} for name, reason in found.unfit],
        "smallest_gpu": planned.smallest.key if planned.smallest else None,
        "smallest_gpu_with_plan": planned.smallest_with_plan.key if planned.smallest_with_plan else None,
        "cautions": mind(planned),
    }
    return json.dumps(data, indent=2) + "\n"
