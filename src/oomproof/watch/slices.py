"""The MIG slices of a card, and which of them a measurement fits."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from oomproof.capture import read_capture
from oomproof.errors import UsageError
from oomproof.gpus import GPUSpec, all_gpus, get_gpu
from oomproof.measure.measurement import Measurement
from oomproof.units import format_bytes

_MARK = "-mig-"  # between a board's key and a slice's profile in the catalogue


def slices_of(board: GPUSpec) -> list[GPUSpec]:
    """Return a card's slices in the catalogue, smallest first; those of a slice's own card when given a slice."""
    start = board.key.partition(_MARK)[0] + _MARK
    return sorted((gpu for gpu in all_gpus() if gpu.key.startswith(start)), key=lambda gpu: gpu.memory_bytes)


def verdict(measurement: Measurement, memory_bytes: int) -> str:
    """Return "fits", "perhaps" (within the ranges) or "does not fit" by what the run would take on that memory.

    The peaks were measured on the measurement's own GPU; a slice's fewer SMs can change libraries' workspaces.
    """
    low, high = measurement.device_bounds
    more = measurement.demand.device_bytes - measurement.peak.device_bytes
    if measurement.demand_if_many is not None:
        high += max(0, measurement.demand_if_many.device_bytes - measurement.demand.device_bytes)
    if high + max(0, more) <= memory_bytes:
        return "fits"
    return "does not fit" if low + more > memory_bytes else "perhaps"


def print_slices(what: str) -> None:
    """Print the slices of the card that ``what`` names, or of the one that a capture was measured for.

    Raises UsageError when the catalogue has no slices of it.
    """
    measurement = read_capture(what) if Path(what).is_file() else None
    board = get_gpu(what if measurement is None else measurement.gpu.name)
    found = slices_of(board)
    if not found:
        with_slices = sorted({gpu.key.partition(_MARK)[0] for gpu in all_gpus() if _MARK in gpu.key})
        raise UsageError(f"no MIG slices of {board.name} are known; cards that have them: {', '.join(with_slices)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("--gpu", "memory", "SMs"):
        table.add_column(heading, no_wrap=True)
    if measurement is not None:
        table.add_column("the capture", no_wrap=True)
    for gpu in found:
        row = [gpu.key, format_bytes(gpu.memory_bytes), str(gpu.sm_count)]
        table.add_row(*row, *([] if measurement is None else [verdict(measurement, gpu.memory_bytes)]))
    console = Console()
    console.print(table)
    if measurement is not None:
        low, high = measurement.device_bounds
        console.print(
            f"\nIt took {format_bytes(low)} to {format_bytes(high)} on {measurement.gpu.name}. A slice has fewer SMs, "
            "which can change libraries' workspaces; to be sure: oomproof run --gpu SLICE -- command"
        )
