"""``oomproof report``: the report of a saved capture, on the terminal, as JSON or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oomproof.capture import read_capture, read_profile
from oomproof.cli.run import larger_gpu
from oomproof.errors import UsageError
from oomproof.report.json_output import to_json_text
from oomproof.report.source import is_snapshot, is_trace, load, of_whole_steps
from oomproof.report.steps import faults
from oomproof.report.terminal import print_report
from oomproof.units import format_bytes


def main(
    capture: Annotated[Path, typer.Argument(help="A capture, saved --json output, or with -o also a memory snapshot.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write one HTML page with charts to this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON.")] = False,
) -> None:
    """Show the report of a saved capture, or write it as a page that works offline; needs no torch."""
    if output is not None:
        if json:
            raise UsageError("--json prints JSON and -o writes a page; give one of them")
        _write(capture, output)
        return
    if is_snapshot(capture) or is_trace(capture):
        raise UsageError(
            f"{capture} is no capture, so it has no verdict; see what is in it with `oomproof tree {capture}`, or as a "
            f"page with `oomproof report {capture} -o report.html`"
        )
    measured = read_capture(capture)
    if json:
        sys.stdout.write(to_json_text(measured))
    else:
        profile = read_profile(capture)
        print_report(
            measured,
            Console(),
            saved=None if profile is None else str(capture),
            larger_gpu=larger_gpu(measured),
            faults=[] if profile is None else faults(of_whole_steps(profile, measured)),
        )


def _write(capture: Path, output: Path) -> None:
    from oomproof.report.page.files import page, write_page

    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: the page is HTML; name a file that ends in .html")
    source = load(capture)
    larger = None if source.measurement is None else larger_gpu(source.measurement)
    text = page(source, larger)
    write_page(output, text)
    print(f"{output}: {format_bytes(output.stat().st_size)}, works offline")
    print(f"\nNext: open it in a browser:\n  {output.resolve().as_uri()}")
