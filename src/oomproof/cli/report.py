"""``oomproof report``: the report of a saved capture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oomproof.capture import read_capture
from oomproof.cli.run import larger_gpu
from oomproof.report.json_output import to_json_text
from oomproof.report.terminal import print_report


def main(
    capture: Annotated[Path, typer.Argument(help="A capture written by `oomproof run -o`, or saved --json output.")],
    json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON.")] = False,
) -> None:
    """Show the report of a saved capture; needs no torch."""
    measured = read_capture(capture)
    if json:
        sys.stdout.write(to_json_text(measured))
    else:
        print_report(measured, Console(), saved=True, larger_gpu=larger_gpu(measured))
