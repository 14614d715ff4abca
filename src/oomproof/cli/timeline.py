"""``oomproof timeline``: memory over the steps, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oomproof.errors import UsageError
from oomproof.report import timeline
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load


def main(
    file: Annotated[
        Path, typer.Argument(help="A capture written by `oomproof run -o`, or a memory snapshot of PyTorch's.")
    ],
    step: Annotated[int | None, typer.Option(min=1, help="Only this step; 1 is the first.")] = None,
) -> None:
    """Draw what was allocated over the steps, stacked by category."""
    source = load(file)
    known = {point.step for point in source.profile.points}
    if step is not None and step not in known:
        numbers = sorted(number for number in known if number is not None)
        there = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise UsageError(f"--step is {step}, and the steps in {file} are {there}; give one of them")
    print_sheet(timeline.body(source, step), timeline.after(source, step))
