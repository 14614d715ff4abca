"""``oomproof export``: the profile in the formats of other viewers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oomproof.errors import UsageError
from oomproof.report.export import files


def main(
    file: Annotated[Path, typer.Argument(help="A capture written by `oomproof run -o`.")],
    speedscope: Annotated[
        Path | None, typer.Option(help="Write the peak by stack, in bytes, for speedscope.app.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write counters over the steps, for ui.perfetto.dev.")] = None,
    memory_viz: Annotated[
        Path | None, typer.Option(help="Write PyTorch's own snapshot, for memory_viz; needs run --snapshot.")
    ] = None,
) -> None:
    """Write files for speedscope, Perfetto or PyTorch's memory_viz."""
    if speedscope is None and perfetto is None and memory_viz is None:
        raise UsageError("nothing to write; give --speedscope FILE, --perfetto FILE or --memory-viz FILE")
    written = files.export(file, speedscope=speedscope, perfetto=perfetto, memory_viz=memory_viz)
    for path, _ in written:
        print(f"{path} written")
    print("\nNext: open it; these pages read the file on your machine:")
    for path, place in written:
        print(f"  {place}  {path}")
