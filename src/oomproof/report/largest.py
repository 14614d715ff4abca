"""``oomproof plan --largest``: the largest value of an option that fits, and what was run to know it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from oomproof.api import Job
from oomproof.plan.largest import Largest, Tried, with_value
from oomproof.report.plan_next import OF_RUNS, Options, line, words
from oomproof.report.sheet import Body, Sheet
from oomproof.report.verdict import reservation
from oomproof.report.words import NextCommand, plural
from oomproof.units import format_bytes


def body(found: Largest, job: Job) -> Body:
    """Return the lines of the report."""

    def lines(sheet: Sheet) -> Iterator[Text]:
        gpu, answer = job.settings.gpu, found.answer
        if answer is None:
            yield _head(
                "NOTHING FITS", f"{found.option} {min(t.value for t in found.tried)} is too much for {gpu.name}", "red"
            )
        else:
            certain = found.settled and not reservation(answer.measurement)[0]
            yield _head(f"{answer.value:,}", _detail(found, answer, gpu.name), "green" if certain else "yellow")
        yield Text()
        yield Text(f"{found.option.lstrip('-'):>20}  {'peak':>11}  to spare", "dim")
        for tried in sorted(found.tried, key=lambda t: t.value):
            peak = format_bytes(tried.measurement.demand.device_bytes)
            style = "bold green" if tried is answer else "" if tried.fits else "dim"
            yield Text(f"{tried.value:>20,}  {peak:>11}  {_spare(tried, gpu.memory_bytes)}", style)

    return lines


def _detail(found: Largest, answer: Tried, gpu: str) -> str:
    """Return the answer in words: how it fits, what fits without reservation, what does not fit."""
    parts = [f"{found.option} {answer.value:,} is the largest that fits {gpu}"]
    how, why = reservation(answer.measurement)
    if answer.retries:
        parts[0] += f", but only by giving back cached memory ({_retries(answer)}), which costs speed"
        easy, last = found.easy, "the largest" if found.easy_settled else "the largest that was run"
        parts.append(
            "none that was run fits without it" if easy is None else f"{easy.value:,} is {last} that fits without it"
        )
    elif how:
        parts[0] += f", {how.lower()}: {why}"
    if found.above is not None:
        parts.append(f"{found.above.value:,} does not fit")
    if not found.settled:
        parts.append(f"nothing between was run in {plural(len(found.tried), 'run')}")
    return "; ".join(parts)


def _retries(tried: Tried) -> str:
    return f"{plural(tried.retries, 'retry')} in {plural(tried.measurement.steps, 'step')}"


def _spare(tried: Tried, memory_bytes: int) -> str:
    spare = memory_bytes - tried.measurement.demand.device_bytes
    if tried.retries:
        return f"none: fits by giving back cached memory, {_retries(tried)}"
    if tried.fits:
        how, _ = reservation(tried.measurement)
        return format_bytes(max(0, spare)) + (f", {how.lower()}" if how else "")
    return f"{format_bytes(-spare)} over" if spare < 0 else "no room along the way"


def _head(verdict: str, detail: str, colour: str) -> Text:
    return Text.assemble((f" {verdict} ", f"bold reverse {colour}"), " ", (detail, "bold"))


def after(found: Largest, job: Job, options: Options | None = None, with_plan: Path | None = None) -> NextCommand:
    """Return the next command; ``options`` are those that were typed, ``with_plan`` is the plan that was applied."""
    given: dict[str, str | None] = {"--gpu": job.settings.gpu.key}
    if options is not None:
        given = {**({} if "--gpu-file" in options else given), **options}
    if found.answer is None:
        return NextCommand(reason="see what would make it fit", command=line("plan", words(given), job.words))
    command = with_value(job, found.option, found.answer.value).words
    if with_plan is None:
        return NextCommand(
            reason="see what it consists of",
            command=line("run", [*words(given, *OF_RUNS), "-o", "FILE.oomp"], command),
        )
    # a run knows no plan: the rehearsal of it does
    gpu = given.pop("--gpu", None)
    rehearsal = [*(("--phantom", gpu) if gpu is not None else ()), *words(given, *OF_RUNS)]
    return NextCommand(reason="see what it consists of", command=line("apply", [*rehearsal, str(with_plan)], command))


def to_json_text(found: Largest, job: Job) -> str:
    """Return what was found as JSON, schema ``oomproof.largest/1``."""

    def shown(tried: Tried | None) -> dict[str, object] | None:
        if tried is None:
            return None
        demand = tried.measurement.demand
        return {
            "value": tried.value,
            "fits": tried.fits,
            "device_bytes": demand.device_bytes,
            "retries": tried.measurement.allocator.retries,
        }

    data = {
        "schema": "oomproof.largest/1",
        "command": list(job.words),
        "gpu": {"key": job.settings.gpu.key, "memory_bytes": job.settings.gpu.memory_bytes},
        "option": found.option,
        "answer": shown(found.answer),
        "largest_without_retries": shown(found.easy),
        "does_not_fit": shown(found.above),
        "settled": found.settled,
        "tried": [shown(t) for t in found.tried],
    }
    return json.dumps(data, indent=2) + "\n"
