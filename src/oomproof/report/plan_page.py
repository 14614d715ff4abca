"""The plan as one HTML page that works offline: memory against time, every set that ran, the reasons, the code."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template
from typing import Any

import oomproof
from oomproof.plan.candidate import Trial
from oomproof.plan.planning import Planned
from oomproof.report import plan as report
from oomproof.report.page import files
from oomproof.report.page.parts import text
from oomproof.report.plan_code import code
from oomproof.report.plan_next import Options, after
from oomproof.report.plan_table import FIDELITY, rows, spare, time
from oomproof.report.words import clean
from oomproof.units import format_bytes

TONES = {"fits": "good", "does-not-fit": "bad", "cannot-apply": "care", "failed": "care"}


def page(planned: Planned, framework: str, saved: str | None, options: Options | None = None) -> str:
    """Return the page; ``framework`` is whose code is shown, ``options`` are those that were typed.

    Raises EnvironmentMissingError without plotly.
    """
    plotly, script = files.plotly(), files.file("plan.js")
    found = planned.found
    following = after(planned, saved, options)
    command = text(" ".join(planned.command))
    reasons = (report.reasons, report.mind, report.by_hand, report.not_tried, report.other_gpus)
    head = report.headline(planned)
    tone = "good" if found.winner is not None else "bad"
    return Template(files.file("plan.html")).substitute(
        policy=escape(files.policy(plotly, script)),
        title=escape(clean(" ".join(planned.command), limit=80)),
        css=files.file("page.css"),
        verdict=f'<div class="verdict {tone}"><h1>{text(head.plain)}</h1><p><code>{command}</code></p></div>',
        sets=_sets(planned),
        why=_list([line for part in reasons for line in part(planned)]),
        code=f"<pre><code>{escape(code(planned, framework))}</code></pre>" if planned.plan else "<p>Nothing.</p>",
        next=f"<p>{text(following.reason)}:</p><pre><code>{text(following.command)}</code></pre>",
        data=files.json_for_html(_data(planned)),
        plotly=plotly,
        script=script,
        made_by=escape(f"oomproof {oomproof.__version__}"),
    )


def _data(planned: Planned) -> dict[str, Any]:
    found = planned.found
    frontier = {t.candidate.key for t in found.frontier()}
    return {
        "memory": planned.gpu.memory_bytes,
        "gpu": f"{planned.gpu.name}, {format_bytes(planned.gpu.memory_bytes)}",
        "points": [
            {
                "label": t.candidate.label,
                "peak": t.peak_bytes,
                "time": t.time.expected,
                "low": t.time.low,
                "high": t.time.high,
                "fits": t.fits,
                "winner": t is found.winner,
                "frontier": t.candidate.key in frontier,
            }
            for t in (found.baseline, *found.trials)
            if t.peak_bytes is not None and t.time is not None
        ],
    }


def _sets(planned: Planned) -> str:
    lines = [_row(number, trial, planned) for number, trial in enumerate(rows(planned), 1)]
    names = ("#", "changes", "verdict", "peak", "to spare", "time of a step", "fidelity")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>"
    return f"{table}{''.join(lines)}</tbody></table>"


def _row(number: int, trial: Trial, planned: Planned) -> str:
    verdict = f'<span class="{TONES[trial.verdict]}">{trial.verdict.replace("-", " ")}</span>'
    label = text(trial.candidate.label)
    if trial is planned.found.winner:
        label = f"<b>{label}</b>"
    if trial.peak_bytes is None:
        return f'<tr><td>{number}</td><td>{label}</td><td>{verdict}</td><td colspan="4">{text(trial.reason)}</td></tr>'
    cells = (
        str(number),
        label,
        verdict,
        format_bytes(trial.peak_bytes),
        spare(trial, planned),
        time(trial),
        FIDELITY[trial.candidate.fidelity],
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>" if lines else "<p>Nothing was tried.</p>"
