"""``oomproof triage``: which kind of out-of-memory a log tells of, and the cure."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer
from rich.console import Console

from oomproof.errors import EXIT_NOT_OOM
from oomproof.triage.source import triage
from oomproof.triage.terminal import print_triage

EPILOG = "Exit code: 0 an out-of-memory ended it, 4 none did, 1 it could not be read, 64 wrong usage."


def main(
    source: Annotated[str, typer.Argument(help="A log, a capture (`oomproof run -o`), or - for standard input.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kind of out-of-memory ended a run, why, and what to do; needs no torch."""
    result = triage(source)
    if json:
        sys.stdout.write(json_module.dumps(result.to_json(), indent=2) + "\n")
    else:
        print_triage(result, Console())
    if not result.is_oom:
        raise typer.Exit(EXIT_NOT_OOM)
