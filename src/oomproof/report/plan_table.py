"""The table of a plan: what ran, numbered, so that text can refer to it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from oomproof.plan.candidate import Trial
from oomproof.plan.planning import Planned
from oomproof.report.sheet import Sheet
from oomproof.report.words import plural
from oomproof.units import format_bytes

ROWS = 12
FIDELITY = {
    "exact": "same bits",
    "equal": "same maths",
    "approximate": "approximate",
    "changes-model": "other model",
}
#: Where there is no room for more.
SHORT = {"exact": "bits", "equal": "maths", "approximate": "approx.", "changes-model": "other"}
BY_RETRIES = "by retries"
GAP = 2
LEAST_ROOM = 12  # of a label, before it goes on in the next line


def rows(planned: Planned) -> list[Trial]:
    """Return all trials in the order of the table: the place of each, from 1, is its number.

    First the winner, then the script as it is, what else fits by its price, what does not by its peak, and the rest.
    """
    found = planned.found
    baseline, winner = found.baseline, found.winner
    ran = [t for t in found.trials if t is not winner and t.peak_bytes is not None]
    fitting = sorted((t for t in ran if t.fits), key=Trial.order)
    others = sorted((t for t in ran if not t.fits), key=lambda t: t.peak_bytes or 0)
    first = [winner] if winner is not None and winner is not baseline else []
    rest = [t for t in found.trials if t is not winner and t.peak_bytes is None]
    return [*first, baseline, *fitting, *others, *rest]


def time(trial: Trial) -> str:
    """Return the relative time of a step with its range: "1.24 x (1.18 to 1.31)"."""
    if trial.time is None:
        return "unknown"
    low, high = f"{trial.time.low:.2f}", f"{trial.time.high:.2f}"
    return short_time(trial) + (f" ({low} to {high})" if low != high else "")


def short_time(trial: Trial) -> str:
    """Return the relative time of a step without its range."""
    return "unknown" if trial.time is None else f"{trial.time.expected:.2f} x"


def spare(trial: Trial, planned: Planned) -> str:
    """Return what is left of the GPU's memory: below zero what is missing, and "by retries" where it fits even so."""
    left = planned.gpu.memory_bytes - (trial.peak_bytes or 0)
    return BY_RETRIES if trial.fits and left < 0 else format_bytes(left)


def table(sheet: Sheet, planned: Planned) -> Iterator[Text]:
    """Yield the table's lines: in one line each where there is room, else with labels on several."""
    everything = rows(planned)
    shown = everything[:ROWS]
    wide = _figures(shown, planned, wide=True)
    labels = [sheet.clean(trial.candidate.label) for trial in shown]
    numbers = len(str(len(shown))) + GAP
    longest = max(len(label) for label in labels)
    figures = wide if _room(sheet, numbers, wide) >= longest else _figures(shown, planned, wide=False)
    room = max(LEAST_ROOM, _room(sheet, numbers, figures))
    room = min(room, max(longest, len("changes")))
    widths = [max(map(len, column)) for column in zip(*figures, strict=True)]

    def laid_out(number: str, label: str, cells: Sequence[str]) -> str:
        left = (2, 3) if figures is wide else (3,)  # ranges in brackets: the times stand under each other
        right = [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return (" " * GAP).join([number.rjust(numbers - GAP), label.ljust(room), *right]).rstrip()

    yield Text(laid_out("", "changes", figures[0]), "dim")
    for number, (trial, label, cells) in enumerate(zip(shown, labels, figures[1:], strict=True), 1):
        first, *more = broken(label, room)
        style = "bold green" if trial is planned.found.winner else "" if trial.fits else "dim"
        indent = " " * numbers
        if trial.peak_bytes is None:
            yield Text(f"{str(number).rjust(numbers - GAP)}{' ' * GAP}{label}", "yellow", overflow="fold")
            for piece in textwrap.wrap(sheet.clean(trial.reason), sheet.width - numbers - GAP):
                yield Text(f"{indent}{' ' * GAP}{piece}", "yellow")
            continue
        yield Text(laid_out(str(number), first, cells), style)
        for piece in more:
            yield Text(f"{indent}{' ' * GAP}{piece}", style)
    if any(BY_RETRIES in cells for cells in figures):
        yield Text(
            f"{BY_RETRIES}: only because the allocator gives back its cache where memory runs out, which costs speed",
            "dim",
        )
    if len(everything) > ROWS:
        more_sets = plural(len(everything) - ROWS, "more set")
        yield Text(f"{sheet.dots} {more_sets}; all of them are in --json and --html", "dim")


def _figures(shown: Sequence[Trial], planned: Planned, *, wide: bool) -> list[tuple[str, str, str, str]]:
    """Return the cells beside the labels, their heads first."""
    return [
        ("peak", "to spare", "time of a step" if wide else "time", "fidelity"),
        *(
            (
                format_bytes(trial.peak_bytes),
                spare(trial, planned),
                time(trial) if wide else short_time(trial),
                (FIDELITY if wide else SHORT)[trial.candidate.fidelity],
            )
            if trial.peak_bytes is not None
            else ("", "", "", "")
            for trial in shown
        ),
    ]


def _room(sheet: Sheet, numbers: int, figures: Sequence[Sequence[str]]) -> int:
    return sheet.width - numbers - sum(max(map(len, column)) + GAP for column in zip(*figures, strict=True))


def broken(label: str, room: int) -> list[str]:
    """Return a label in pieces of at most ``room`` characters, the later ones two less: they stand further right.

    It is broken before a "+", before the options of a technique or between them, and only else within a word.
    """
    pieces = [""]
    for part in re.split(r" (?=\+ )", label):
        for start, piece in enumerate(re.split(r"(?=\()|(?<=, )", part)):
            rest = piece
            blank = " " if pieces[-1] and not start else ""
            while rest:
                free = room - (GAP if len(pieces) > 1 else 0) - len(pieces[-1]) - len(blank)
                whole = len(rest.rstrip()) <= free
                # a part begins a line where it is not whole on this one
                if whole and (start or len(part) <= free or not pieces[-1]):
                    pieces[-1] += blank + rest
                    break
                if pieces[-1]:
                    pieces.append("")
                else:
                    pieces[-1], rest = rest[:free], rest[free:]
                blank = ""
    return [piece.rstrip() for piece in pieces]
