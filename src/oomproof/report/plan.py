"""``oomproof plan``: the cheapest changes that make it fit, what was tried besides, and what to write instead."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from oomproof.plan.candidate import AS_FAST, WORTH, Trial, to_json
from oomproof.plan.planning import Planned
from oomproof.report.plan_code import code
from oomproof.report.plan_table import FIDELITY, rows, table, time
from oomproof.report.sheet import Body, Sheet
from oomproof.report.verdict import reservation
from oomproof.report.words import plural
from oomproof.units import format_bytes


def body(planned: Planned, emit: str | None = None) -> Body:
    """Return the lines of the report; ``emit`` is the framework whose code is shown for the winner."""

    def lines(sheet: Sheet) -> Iterator[Text]:
        yield headline(planned)
        found = planned.found
        if found.trials:
            yield Text()
            yield from table(sheet, planned)
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
            yield from map(sheet.verbatim, code(planned, emit).splitlines())

    return lines


def headline(planned: Planned) -> Text:
    """Return the answer in one line, with the reservations that ``oomproof run`` has about the same measurement."""
    found, gpu = planned.found, planned.gpu
    winner = found.baseline if planned.fits_as_it_is else found.winner
    if winner is None:
        closest = found.closest
        missing = (closest.peak_bytes or 0) - gpu.memory_bytes
        stopped = " within the budget" if found.out_of_budget else ""
        detail = f"the closest, {closest.candidate.label}, takes {_of(closest, planned)}: "
        if missing > 0:
            detail += f"{format_bytes(missing)} are missing"
        else:
            detail += "only you can make this change" if closest.fits else "there was no room along the way"
        return _head(f"NOTHING FITS{stopped.upper()}", detail, "red")
    how, why = ("", "") if winner.measurement is None else reservation(winner.measurement)
    if planned.fits_as_it_is:
        verdict, detail = "FITS AS IT IS", f"{_of(winner, planned)}; nothing has to change"
    else:
        verdict = f"FITS WITH {plural(len(winner.candidate.changes), 'change').upper()}"
        takes = "an unknown time" if winner.time is None else time(winner)
        detail = f"{_of(winner, planned)} ({format_bytes(_left(winner, planned))} to spare), a step takes {takes}, "
        detail += FIDELITY[winner.candidate.fidelity]
    if not how:
        return _head(verdict, detail, "green")
    return _head(f"{verdict}, {how}", f"{detail}: {why}", "yellow")


def _head(verdict: str, detail: str, colour: str) -> Text:
    return Text.assemble((f" {verdict} ", f"bold reverse {colour}"), " ", (detail, "bold"))


def _of(trial: Trial, planned: Planned) -> str:
    gpu = planned.gpu
    return f"{format_bytes(gpu.memory_bytes - _left(trial, planned))} of {format_bytes(gpu.memory_bytes)} on {gpu.name}"


def _left(trial: Trial, planned: Planned) -> int:
    """Return what is left of the memory: where it fits, of the run on that memory, which may have given back cache."""
    measured = trial.measurement
    peak = trial.peak_bytes or 0
    if trial.fits and measured is not None:
        peak = measured.peak.device_bytes
    return planned.gpu.memory_bytes - peak


def _section(sheet: Sheet, label: str, lines: Sequence[str]) -> Iterator[Text]:
    if not lines:
        return
    yield Text()
    for place, line in enumerate(lines):
        for part, piece in enumerate(
            textwrap.wrap(sheet.clean(line), sheet.width - 14, break_on_hyphens=False) or [""]
        ):
            head = label.ljust(12) if place == 0 and part == 0 else " " * (14 if part else 12)
            yield Text.assemble((head, "bold"), piece)


def by_hand(planned: Planned) -> list[str]:
    """Return what changes that only the person can make would save."""
    found, lines = planned.found, []
    for number, trial in enumerate(rows(planned), 1):
        if not trial.candidate.by_hand or trial.peak_bytes is None or found.baseline.peak_bytes is None:
            continue
        change = trial.candidate.changes[0]
        saved = found.baseline.peak_bytes - trial.peak_bytes
        if saved > 0:
            fits = ", and it fits" if trial.fits else ""
            lines.append(f"#{number} {change.label}: {change.technique.title}: {format_bytes(saved)} less{fits}")
    return lines


def not_tried(planned: Planned) -> list[str]:
    """Return the techniques that were not tried, with their reasons."""
    names: dict[str, list[str]] = {}
    for name, reason in planned.found.unfit:
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(those)}: {reason}" for reason, those in names.items()]


def reasons(planned: Planned) -> list[str]:
    """Return why the winner won and others did not; numbers are those of the table."""
    found, winner = planned.found, planned.found.winner
    if winner is None or winner is found.baseline:
        return []
    fitting = [t for t in found.trials if t.fits]
    ran = f"{plural(len(found.trials), 'set')} of changes ran, {len(fitting)} fit; of these #1 "
    if winner.time is None:
        lines = [f"{ran}is the most faithful, then the simplest, then the one that changes least: times are unknown"]
    else:
        lines = [
            f"{ran}is the fastest, where less than the same maths counts as {WORTH:g} times as long; of equally fast "
            "ones it is the most faithful, then the simplest"
        ]
    lines += [f"{change.label}: {change.technique.title}" for change in winner.candidate.changes]
    for number, trial in list(enumerate(rows(planned), 1))[2:6]:
        lines.append(f"not #{number} {trial.candidate.label}: {_lost(trial, winner, planned)}")
    return lines


def _lost(trial: Trial, winner: Trial, planned: Planned) -> str:
    if trial.peak_bytes is None:
        return trial.reason
    if not trial.fits:
        return f"it lacks {format_bytes(trial.peak_bytes - planned.gpu.memory_bytes)}"
    if trial.candidate.by_hand:
        return "it fits, but only you can make this change"
    if trial.candidate.level > winner.candidate.level:
        why = "; ".join(why for _, why in less_faithful(trial, planned))
        return f"it fits, but is {FIDELITY[trial.candidate.fidelity]}" + (f": {why}" if why else "")
    if trial.time is None:
        return "it fits, but the time of a step is unknown"
    if trial.expected_time > winner.expected_time * AS_FAST:
        return f"it fits, but a step takes {time(trial)}"
    if trial.candidate.fidelity != winner.candidate.fidelity:
        return f"it fits and is as fast, but is only {FIDELITY[trial.candidate.fidelity]}"
    if len(trial.candidate.changes) > len(winner.candidate.changes):
        return f"it fits and is as fast, but takes {len(trial.candidate.changes)} changes"
    return f"it fits, but a step takes {time(trial)}, nearly the same"


def less_faithful(trial: Trial, planned: Planned) -> list[tuple[str, str]]:
    """Return the changes that are less faithful here than they mostly are, and why."""
    found = [(c.name, c.technique.less_faithful(planned.facts, c.options)) for c in trial.candidate.changes]
    return [(name, why) for name, why in found if why is not None]


def mind(planned: Planned) -> list[str]:
    """Return what a person must know before applying the plan, and why times are unknown."""
    winner, baseline = planned.found.winner, planned.found.baseline
    found = []
    if winner is not None and winner.measurement is not None:
        how, why = reservation(winner.measurement)
        if how:
            found.append(f"it fits, {how.lower()}: {why}; plan with a smaller --memory to leave room")
    for change in winner.candidate.changes if winner is not None else ():
        why_less = change.technique.less_faithful(planned.facts, change.options)
        if why_less:
            found.append(f"{change.name} is {FIDELITY[change.technique.fidelity_of(change.options)]}: {why_less}")
        caution = change.technique.caution(planned.facts, change.options)
        if caution:
            found.append(f"{change.name}: {caution}")
    if winner is not None and baseline.time is not None:
        found += [f"time, of the script as it is too: {what}" for what in baseline.time.unknown]
    if winner is not None and winner is not baseline and winner.time is not None:
        found += [f"time: {what}" for what in winner.time.unknown]
    return found + unknown_times(planned)


def unknown_times(planned: Planned) -> list[str]:
    """Return why times of steps are unknown: each reason once, with the numbers of the rows that it is true of."""
    baseline = planned.found.baseline
    numbers: dict[str, list[str]] = {}
    for number, trial in enumerate(rows(planned), 1):
        if trial.peak_bytes is not None and trial.time is None and trial.verdict in ("fits", "does-not-fit"):
            of_script = f"of the script as it is nothing was counted: {baseline.time_reason}"
            reason = trial.time_reason or (of_script if baseline.time_reason else "nothing was counted")
            numbers.setdefault(reason, []).append(f"#{number}")
    return [f"time of {', '.join(those)} is unknown: {reason}" for reason, those in numbers.items()]


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


def to_json_text(planned: Planned) -> str:
    """Return the plan as JSON, schema ``oomproof.planned/1``."""
    found = planned.found
    numbers = {id(trial): number for number, trial in enumerate(rows(planned), 1)}
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
        "candidates": [{**to_json(t), "number": numbers[id(t)]} for t in found.trials],
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
