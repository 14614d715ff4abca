"""``oomproof gpus``: the catalogue."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from oomproof.gpus import GPUSpec, all_gpus, get_gpu
from oomproof.units import GIB, format_bytes


def main(
    name: Annotated[str | None, typer.Argument(help="Show one GPU with the source of each figure.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the GPUs that --gpu knows, or show one with the source of every figure."""
    chosen = [get_gpu(name)] if name else list(all_gpus())
    if json:
        print(json_module.dumps([_plain(gpu) for gpu in chosen], indent=2))
    elif name:
        _show(chosen[0])
    else:
        _list(chosen)


def _plain(gpu: GPUSpec) -> dict[str, Any]:
    return {
        field.name: dict(value) if hasattr(value := getattr(gpu, field.name), "items") else value
        for field in dataclasses.fields(gpu)
    }


def _list(gpus: list[GPUSpec]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("--gpu", no_wrap=True)
    table.add_column("name", overflow="fold")
    for heading in ("memory", "capability", "SMs", "context"):
        table.add_column(heading, justify="right", no_wrap=True)
    for gpu in gpus:
        table.add_row(
            gpu.key,
            gpu.name,
            f"{gpu.memory_bytes / GIB:.2f} GiB",
            ".".join(map(str, gpu.compute_capability)),
            str(gpu.sm_count),
            format_bytes(gpu.context_bytes[1]),
        )
    console = Console()
    console.print(table)
    console.print("\nMemory is what PyTorch reports as total. Next: oomproof run --gpu NAME -- python train.py")


def _show(gpu: GPUSpec) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("source", overflow="fold", style="dim")
    for field in dataclasses.fields(gpu):
        if field.name == "sources":
            continue
        value = getattr(gpu, field.name)
        shown = ", ".join(f"{k} {v:.4g}" for k, v in value.items()) if hasattr(value, "items") else str(value)
        if field.name.endswith("_bytes") and isinstance(value, int):
            shown = f"{value:,} ({format_bytes(value)})"
        table.add_row(field.name, shown, gpu.sources.get(field.name, ""))
    Console().print(table)
