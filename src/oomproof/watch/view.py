"""A sample as a person reads it, at any width from 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oomproof.report.bars import bar, glyphs_for
from oomproof.units import format_bytes
from oomproof.watch.sample import DeviceSample, ProcessUse, Sample
from oomproof.watch.watcher import Standing

BAR_CELLS = 20


def shown(sample: Sample, alarms: Sequence[Standing], encoding: str = "utf-8") -> RenderableType:
    """Return devices with their processes under them, then the alarms."""
    parts: list[RenderableType] = []
    for device in sample.devices:
        parts += [
            Text(f"{device.index}  {device.name or 'unnamed'}  {device.uuid or ''}", "bold"),
            _figures(device, encoding),
        ]
        if device.processes:
            parts.append(_processes(device.processes))
    if not sample.devices:
        parts.append(Text("the driver shows no GPU"))
    for standing in alarms:
        parts.append(Text(f"! GPU {standing.device}, process {standing.pid}: {standing.alarm.text}", "bold red"))
    return Group(*parts)


def _figures(device: DeviceSample, encoding: str) -> Text:
    if device.problem is not None:
        return Text(f"   {device.problem}", "red")
    if device.used_bytes is None or not device.total_bytes:
        memory = f"memory: {device.missing.get('memory', 'no figure')}"
    else:
        filled = bar(device.used_bytes, device.total_bytes, BAR_CELLS, glyphs_for(encoding)).ljust(BAR_CELLS)
        memory = f"{filled} {format_bytes(device.used_bytes)} of {format_bytes(device.total_bytes)}"
    others = [
        _unit(device.utilisation_percent, "%"),
        _unit(device.temperature_celsius, "°C" if encoding.lower().startswith("utf") else "C"),
        _unit(device.power_watts, "W"),
    ]
    return Text("   " + "  ".join([memory, *filter(None, others)]))


def _unit(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.0f} {unit}"


def _processes(processes: Sequence[ProcessUse]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1), header_style="dim")
    for heading in ("   process", "on device", "allocated", "peak", "reserved", "pinned", "retries", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for process in processes:
        used = "no figure" if process.used_bytes is None else format_bytes(process.used_bytes)
        row = [str(process.pid), used]
        if (own := process.allocator) is not None:
            row += map(format_bytes, (own.allocated_bytes, own.allocated_peak_bytes, own.reserved_bytes))
            row += ["" if own.pinned_bytes is None else format_bytes(own.pinned_bytes), str(own.retries), str(own.step)]
        table.add_row(*row)
    return table
