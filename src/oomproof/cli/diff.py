"""``oomproof diff``: what grew between two captures; a check for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oomproof.errors import EXIT_DOES_NOT_FIT, UsageError
from oomproof.report import diff
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load
from oomproof.units import parse_size


def main(
    before: Annotated[Path, typer.Argument(help="The capture to compare with.")],
    after: Annotated[Path, typer.Argument(help="The capture that may have grown.")],
    allow: Annotated[str, typer.Option(help="By how much the peak may grow, such as 64MiB.")] = "0",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what grew from one capture to the next; exit code 2 if the peak grew by more than --allow."""
    allowed_bytes = _allowed(allow)
    first, second = load(before), load(after)
    found = diff.compare(first.profile, second.profile)
    if json:
        sys.stdout.write(diff.to_json_text(found, allowed_bytes))
    else:
        print_sheet(diff.body(found, allowed_bytes), diff.after(second))
    if found.grew(allowed_bytes):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _allowed(text: str) -> int:
    if text.strip() == "0":
        return 0
    if text.strip().isdecimal():
        raise UsageError(f"--allow is {text!r}; write it with its unit, such as {text.strip()}MiB")
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--allow: {error}") from None
