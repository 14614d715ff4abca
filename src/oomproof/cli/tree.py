"""``oomproof tree``: what the peak consists of, as a tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oomproof.errors import UsageError
from oomproof.report import tree
from oomproof.report.blocks import has_modules
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load


def main(
    file: Annotated[
        Path, typer.Argument(help="A capture written by `oomproof run -o`, or a memory snapshot of PyTorch's.")
    ],
    by: Annotated[
        str | None, typer.Option(help="module, stack or category; default: module, or stack where none is known.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels to show.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole tree as JSON.")] = False,
) -> None:
    """Show what the peak consists of, by module, by stack or by category."""
    if by is not None and by not in tree.WAYS:
        raise UsageError(f"--by is {by!r}; give one of {', '.join(tree.WAYS)}")
    source = load(file)
    way = by or ("module" if has_modules(source.profile) else "stack")
    if json:
        sys.stdout.write(tree.to_json_text(source, way, depth))
    else:
        print_sheet(tree.body(source, way, depth), tree.after(source, way))
