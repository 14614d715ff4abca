"""What ``oomproof replay`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oomproof.snapshot.replay import Baseline, Outcome, Replay
from oomproof.units import format_bytes, format_seconds

DEFAULTS = "PyTorch's defaults"
AS_RECORDED = "as recorded"
_WIDE = 112  # columns for the whole table


def print_replay(replay: Replay, console: Console) -> None:
    """Print whether the record could be reproduced, a row for each setting, and the best as a line to paste."""
    for line in _baseline(replay):
        console.print(line)
    console.print()
    console.print(_table(replay, console.width))
    console.print(Text(_assumption(replay), "dim"))
    console.print()
    for line in _verdict(replay):
        console.print(line, soft_wrap=True)
    for note in replay.notes:
        console.print(Text(f"Note: {note}", "dim"))


def _baseline(replay: Replay) -> Iterator[Text]:
    baseline = replay.baseline
    peaks = (
        f"{replay.events:,} events of device {replay.device}: peak allocated "
        f"{format_bytes(baseline.peak_allocated_bytes)}, reserved {format_bytes(baseline.peak_reserved_bytes)}"
    )
    if baseline.exact:
        yield Text.assemble(("EXACT", "bold reverse green"), "  ", (peaks, "bold"))
        yield Text(
            f"Replayed with its own settings through the allocator of torch {replay.torch}, each address, each segment "
            "and both peaks are those of the record."
        )
        return
    yield Text.assemble(("NOT EXACT", "bold reverse yellow"), "  ", (peaks, "bold"))
    difference = baseline.first_difference
    assert difference is not None
    where = "at its start" if difference.event < 0 else f"at event {difference.event:,}"
    yield Text(
        f"The replay parts from the record {where}: recorded {difference.recorded}; replayed, {difference.replayed}."
    )
    yield Text(f"Why: {difference.why}.")


def _table(replay: Replay, width: int) -> Table:
    narrow = width < _WIDE
    names = ["reserved", "saved", "cached", "mallocs", "frees", "in them", "retries", ""]
    left_out = {"cached", "in them", "retries"} if narrow else set()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    for name in names:
        if name not in left_out:
            table.add_column(name, justify="right" if name else "left", no_wrap=bool(name), overflow="fold")
    usual = replay.outcomes[0]
    best = replay.best()
    recorded = replay.baseline
    cells = [
        format_bytes(recorded.peak_reserved_bytes),
        "",
        format_bytes(recorded.peak_reserved_bytes - recorded.peak_allocated_bytes),
        *(["", "", ""] if recorded.device_allocations is None else _calls(replay, recorded)),
        "",
        "",
    ]
    table.add_row(AS_RECORDED, *(cell for name, cell in zip(names, cells, strict=True) if name not in left_out))
    for outcome in replay.outcomes:
        saved = usual.peak_reserved_bytes - outcome.peak_reserved_bytes
        comparable = outcome is not usual and usual.survives and outcome.survives
        cells = [
            format_bytes(outcome.peak_reserved_bytes),
            format_bytes(saved) if comparable else "",
            format_bytes(outcome.cached_bytes),
            *_calls(replay, outcome),
            f"{outcome.retries:,}",
            _fate(outcome, replay),
        ]
        kept = [cell for name, cell in zip(names, cells, strict=True) if name not in left_out]
        config = outcome.config.replace(",", ",\n") or DEFAULTS
        table.add_row(config, *kept, style="bold" if outcome is best else "")
    return table


def _calls(replay: Replay, counted: Baseline | Outcome) -> list[str]:
    allocations, frees = counted.device_allocations or 0, counted.device_frees or 0
    return [f"{allocations:,}", f"{frees:,}", format_seconds(replay.calls.seconds(allocations, frees))]


def _fate(outcome: Outcome, replay: Replay) -> str:
    if outcome.survives:
        return "" if replay.memory_bytes is None else "survives"
    if outcome.failed_bytes:
        return f"OOM at {outcome.failed_at_event:,}"
    return "OOM at start"


def _assumption(replay: Replay) -> str:
    calls = replay.calls

    def told(microseconds: float, recorded: bool) -> str:
        return f"{microseconds / 1000:.2f} ms ({'median of this trace' if recorded else 'assumed'})"

    return (
        "mallocs and frees: calls of the driver during the trace, which take "
        f"{told(calls.allocation_us, calls.allocation_recorded)} and {told(calls.free_us, calls.free_recorded)} each."
    )


def _too_little(replay: Replay) -> str:
    needed, available = replay.baseline.peak_allocated_bytes, replay.available_bytes or 0
    room = f"{format_bytes(available)} are left beside the CUDA context"
    if needed > available:
        return f"its blocks alone take {format_bytes(needed)}, and {room}"
    return f"its blocks take {format_bytes(needed)} and {room}, but they leave holes under each setting"


def _verdict(replay: Replay) -> Iterator[Text]:
    limit = "" if replay.memory_bytes is None else f" on {format_bytes(replay.memory_bytes)}"
    best = replay.best()
    if best is None:
        yield Text(f"No setting survives{limit}: {_too_little(replay)}.", "bold")
        return
    usual = replay.outcomes[0]
    saved = usual.peak_reserved_bytes - best.peak_reserved_bytes
    if not best.config or (usual.survives and saved <= 0):
        yield Text(f"No setting reserves less than PyTorch's defaults{limit}.", "bold")
        return
    gain = f"{format_bytes(saved)} less reserved" if usual.survives else "it survives, and the defaults do not"
    yield Text(f"Best{limit}: {gain}:", "bold")
    yield Text(f"  export {replay.variable}={best.config}", "bold")
