"""A triage as a person reads it: the kind first, then why, the lines it rests on, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oomproof.report.words import clean, exact
from oomproof.triage.result import Triage
from oomproof.units import format_bytes

LABEL_WIDTH = 11
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
    ("others_bytes", "other processes"),
    ("outside_bytes", "outside PyTorch"),
)


def print_triage(result: Triage, console: Console | None = None) -> None:
    """Print ``result`` on ``console``, or on standard output."""
    console = console or Console()
    width = min(console.width, MAX_WIDTH)
    colour = "red" if result.is_oom else "green"
    head = Text(result.kind.upper(), f"bold reverse {colour}")
    head.append(f"  {result.meaning}", "bold not reverse default")
    head.append(f" ({result.confidence} confidence)", "not bold not reverse default")
    console.print(head, width=width, highlight=False)
    for label, body in _sections(result, console.encoding):
        console.print()
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, width=LABEL_WIDTH)
        table.add_column(overflow="fold")
        table.add_row(Text(label, "bold"), Text(body))
        console.print(table, width=width, highlight=False)


def _sections(result: Triage, encoding: str) -> Iterator[tuple[str, str]]:
    yield "Why", clean(_sentence(result.why), encoding)
    known = [(name, getattr(result.figures, field)) for field, name in _FIGURES]
    known = [(name, size) for name, size in known if size is not None]
    if known:
        wide = max(len(name) for name, _ in known)
        yield (
            "Figures",
            "\n".join(f"{name:<{wide}}  {format_bytes(size):>10}  {exact(size):>23}" for name, size in known),
        )
    if result.evidence:
        lines = []
        for item in result.evidence:
            where = f"line {item.line}: " if item.line is not None else ""
            lines.append(clean(where + item.text, encoding, limit=420))
        yield "Evidence", "\n".join(lines)
    if result.rank is not None:
        yield "Rank", str(result.rank)
    if result.ooms > 1 or result.survived:
        count = f"{result.ooms:,} out-of-memory messages in all" if result.ooms > 1 else "1 out-of-memory message"
        yield "Count", count + (f", {result.survived:,} of them survived" if result.survived else "")
    if result.advice:
        yield "Advice", "\n".join(f"- {clean(item, encoding)}" for item in result.advice)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
