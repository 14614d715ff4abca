"""``oomproof plan --largest``: the largest value of an option that fits, and what was run to know it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from rich.text import Text

from oomproof.api import Job
from oomproof.plan.largest import Largest, Tried, with_value
from oomproof.report.sheet import Body, Sheet
from oomproof.report.words import NextCommand, plural
from oomproof.units import format_bytes


def body(found: Largest, job: Job) -> Body:
    """Return the lines of the report."""

    def lines(sheet: Sheet) -> Iterator[Text]:
        gpu, answer, above = job.settings.gpu, found.answer, found.above
        if answer is None:
            yield _head(
                "NOTHING FITS", f"{found.option} {min(t.value for t in found.tried)} is too much for {gpu.name}", "red"
            )
        else:
            limit = "" if above is None else f"; {above.value:,} does not fit"
            unsettled = (
                "" if found.settled else f", nothing between was run: {plural(len(found.tried), 'run')} were made"
            )
            detail = f"{found.option} {answer.value:,} is the largest that fits {gpu.name}{limit}{unsettled}"
            yield _head(f"{answer.value:,}", detail, "green" if found.settled else "yellow")
        yield Text()
        yield Text(f"{found.option.lstrip('-'):>20}  {'peak':>11}  to spare", "dim")
        for tried in sorted(found.tried, key=lambda t: t.value):
            spare = gpu.memory_bytes - tried.measurement.demand.device_bytes
            over = f"{format_bytes(-spare)} over" if spare < 0 else format_bytes(spare)
            peak = format_bytes(tried.measurement.demand.device_bytes)
            style = "bold green" if tried is answer else "" if tried.fits else "dim"
            yield Text(f"{tried.value:>20,}  {peak:>11}  {over}", style)

    return lines


def _head(verdict: str, detail: str, colour: str) -> Text:
    return Text.assemble((f" {verdict} ", f"bold reverse {colour}"), " ", (detail, "bold"))


def after(found: Largest, job: Job) -> NextCommand:
    """Return the next command."""
    gpu = f"--gpu {shlex.quote(job.settings.gpu.key)}"
    if found.answer is None:
        return NextCommand(
            reason="see what would make it fit", command=f"oomproof plan {gpu} -- {shlex.join(job.words)}"
        )
    words = with_value(job, found.option, found.answer.value).words
    return NextCommand(
        reason="see what it consists of", command=f"oomproof run {gpu} -o FILE.oomp -- {shlex.join(words)}"
    )


def to_json_text(found: Largest, job: Job) -> str:
    """Return what was found as JSON, schema ``oomproof.largest/1``."""

    def shown(tried: Tried | None) -> dict[str, object] | None:
        if tried is None:
            return None
        demand = tried.measurement.demand
        return {"value": tried.value, "fits": tried.fits, "device_bytes": demand.device_bytes}

    data = {
        "schema": "oomproof.largest/1",
        "command": list(job.words),
        "gpu": {"key": job.settings.gpu.key, "memory_bytes": job.settings.gpu.memory_bytes},
        "option": found.option,
        "answer": shown(found.answer),
        "does_not_fit": shown(found.above),
        "settled": found.settled,
        "tried": [shown(t) for t in found.tried],
    }
    return json.dumps(data, indent=2) + "\n"
