"""``oomproof table``: the blocks of the peak one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oomproof.errors import UsageError
from oomproof.report import table
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load


def main(
    file: Annotated[
        Path, typer.Argument(help="A capture written by `oomproof run -o`, or a memory snapshot of PyTorch's.")
    ],
    sort: Annotated[str, typer.Option(help=f"{', '.join(table.ORDERS)}.")] = "size",
    limit: Annotated[
        int | None, typer.Option(min=0, help="Blocks to show, 0 for all; default: 25, and all with --json or --csv.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Show the blocks of the peak: what each is, when it was made and freed, and by which line."""
    if sort not in table.ORDERS:
        raise UsageError(f"--sort is {sort!r}; give one of {', '.join(table.ORDERS)}")
    if json and csv:
        raise UsageError("--json and --csv are two forms; give one of them")
    source = load(file)
    if limit is None:
        limit = 0 if json or csv else table.LIMIT
    blocks = table.ordered(source.profile.blocks, sort)[: limit or None]
    if json:
        sys.stdout.write(table.to_json_text(source, blocks))
    elif csv:
        sys.stdout.write(table.to_csv_text(blocks))
    else:
        print_sheet(table.body(source, blocks, sort), table.after(source))
