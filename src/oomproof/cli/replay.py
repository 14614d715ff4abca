"""``oomproof replay``: a recorded run under other settings of PyTorch's allocator."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from oomproof import api, snapshot
from oomproof.cli.run import chosen_gpu
from oomproof.errors import EXIT_DOES_NOT_FIT, EXIT_FITS
from oomproof.report.replay import print_replay
from oomproof.snapshot.replay import replay


def main(
    file: Annotated[
        Path, typer.Argument(help="A pickle of torch.cuda.memory._dump_snapshot, or a capture with a snapshot.")
    ],
    memory: Annotated[str | None, typer.Option(help="Memory of the GPU to replay on, such as 24GiB.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU from the catalogue to replay on; default: no limit.")] = None,
    gpu_file: Annotated[Path | None, typer.Option(help="TOML file that describes a GPU of your own.")] = None,
    device: Annotated[int | None, typer.Option(help="Which device's trace; default: the longest.")] = None,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter whose torch is used; default: this one's, else the first on PATH.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the replay as JSON.")] = False,
) -> None:
    """Replay a memory snapshot through PyTorch's allocator: what would other settings have reserved?"""
    chosen = chosen_gpu(gpu, gpu_file)
    spec = None if chosen is None and memory is None else api.resolve_gpu(chosen, memory)
    with _progress() as progress:
        reading = progress.add_task("reading", total=None)
        recorded = snapshot.load(file, progress=lambda done, size: progress.update(reading, completed=done, total=size))
        progress.remove_task(reading)
        replaying = progress.add_task("replaying", total=None)
        result = replay(
            recorded,
            device=device,
            gpu=spec,
            python=str(python) if python else None,
            on_setting=lambda done, total: progress.update(replaying, completed=done, total=total),
        )
    if json:
        sys.stdout.write(json_module.dumps(result.to_json(), indent=2) + "\n")
    else:
        print_replay(result, Console())
    raise typer.Exit(EXIT_FITS if result.best() is not None else EXIT_DOES_NOT_FIT)


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (TextColumn("oomproof: {task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
