"""``oomproof steps``: what differs between steps, and what grows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oomproof.report import steps
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load


def main(
    file: Annotated[
        Path, typer.Argument(help="A capture written by `oomproof run -o`, or a memory snapshot of PyTorch's.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the steps: leaks, growing reserved memory, peaks that vary."""
    source = load(file)
    found = steps.examine(source.profile)
    if json:
        sys.stdout.write(steps.to_json_text(source, found))
    else:
        print_sheet(steps.body(source, found), steps.after(source, found))
