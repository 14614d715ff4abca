"""``oomproof watch``: the machine's GPUs and the training processes on them."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from oomproof.errors import UsageError


def main(
    device: Annotated[str | None, typer.Option(help="Only these: NVML indices or UUIDs, with commas.")] = None,
    every: Annotated[float, typer.Option(help="Seconds between samples.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one sample a line.")] = False,
    mig: Annotated[
        str | None,
        typer.Option(metavar="CAPTURE|GPU", help="A card's MIG slices, and which a capture fits."),
    ] = None,
) -> None:
    """Show the GPUs' memory, their processes, the allocator figures that these publish, and alarms."""
    if mig is not None:
        if device is not None or once or json:
            raise UsageError("--mig looks at no GPU of this machine; leave --device, --once and --json out")
        from oomproof.watch.slices import print_slices

        print_slices(mig)
        return None
    from oomproof.watch.published import remove_ended
    from oomproof.watch.sample import Sample, Sampler, chosen
    from oomproof.watch.view import shown
    from oomproof.watch.watcher import Standing, Watcher

    sampler, watcher, console = Sampler(), Watcher(), Console()
    remove_ended()

    def look() -> tuple[Sample, list[Standing]]:
        sample = sampler.sample()
        if device is not None:
            sample = chosen(sample, device)
        return sample, watcher.observe(sample)

    if json:
        while True:
            sample, alarms = look()
            line = {**dataclasses.asdict(sample), "alarms": [dataclasses.asdict(alarm) for alarm in alarms]}
            sys.stdout.write(json_module.dumps(line) + "\n")
            sys.stdout.flush()
            if once:
                return None
            time.sleep(every)
    if once or not console.is_terminal:  # nobody looks at a screen that is a file
        console.print(shown(*look(), console.encoding))
        return None
    from rich.live import Live

    with Live(
        shown(*look(), console.encoding), console=console, screen=console.is_terminal, auto_refresh=False
    ) as live:
        while True:
            time.sleep(every)
            live.update(shown(*look(), console.encoding), refresh=True)
