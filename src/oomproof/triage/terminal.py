"""A triage as a person reads it: the kind first, then why, the lines it rests on, and what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from oomproof.report.words import clean
from oomproof.triage.result import Triage
from oomproof.units import format_bytes

LABEL_WIDTH = 10
MAX_WIDTH = 110

_FIGURES = (
    ("requested_bytes", "asked for"),
    ("free_bytes", "free"),
    ("missing_bytes", "missing"),
    ("total_bytes", "the GPU's"),
    ("allocated_bytes", "allocated by PyTorch"),
    ("unallocated_bytes", "cached and unused"),
    ("private_pools_bytes", "in private pools"),
    ("allowed_bytes", "allowed to this process"),
    ("own_bytes", "this process in all"),
    ("others_bytes", "other processes listed"),
    ("outside_bytes", "outside PyTorch"),
)


def print_triage(result: Triage, console: Console | None = None) -> None:
    """Print ``result`` on ``console``, or on standard output."""
    console = console or Console()
    width = max(30, min(console.width, MAX_WIDTH) - LABEL_WIDTH)
    head = Text(result.kind.upper(), f"bold reverse {'red' if result.is_oom else 'green'}")
    head.append(f"  {result.meaning}", "bold not reverse default")
    head.append(f" ({result.confidence} confidence)", "not bold not reverse default")
    console.print(head, soft_wrap=True)
    for label, lines in _sections(result, console.encoding, width):
        console.print()
        for number, line in enumerate(lines):
            shown = Text(f"{label if number == 0 else '':<{LABEL_WIDTH}}", "bold")
            console.print(shown.append(line, "not bold"), soft_wrap=True)


def _sections(result: Triage, encoding: str, width: int) -> Iterator[tuple[str, list[str]]]:
    def wrapped(text: str, indent: str = "", limit: int | None = None) -> list[str]:
        shown = clean(text, encoding, limit=limit)
        return textwrap.wrap(shown, width, subsequent_indent=indent, break_on_hyphens=False) or [""]

    yield "Why", wrapped(result.why[:1].upper() + result.why[1:])
    known = [(name, getattr(result.figures, field)) for field, name in _FIGURES]
    known = [(name, size) for name, size in known if size is not None]
    if known:
        wide = max(len(name) for name, _ in known)
        yield "Figures", [f"{name:<{wide}}  {format_bytes(size):>10}" for name, size in known]
    if result.evidence:
        lines = []
        for item in result.evidence:
            where = f"line {item.line}: " if item.line is not None else ""
            lines += wrapped(where + item.text, "  ", limit=420)
        yield "Evidence", lines
    if result.rank is not None:
        yield "Rank", [str(result.rank)]
    if result.ooms > 1 or result.survived:
        count = f"{result.ooms:,} out-of-memory messages in all" if result.ooms > 1 else "1 out-of-memory message"
        yield "Count", wrapped(count + (f", {result.survived:,} of them survived" if result.survived else ""))
    if result.advice:
        yield "Advice", [line for item in result.advice for line in wrapped(f"- {item}", "  ")]
