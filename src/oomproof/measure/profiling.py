"""Making the profile of a process from its ledger; runs there. Python 3.9."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from oomproof.measure import ledger as ledger_module
from oomproof.measure.ledger import Ledger
from oomproof.measure.profile import Block, Profile, Stack
from oomproof.measure.reads import stack_lines
from oomproof.measure.series import growth

STACK_LINES = 32


def profile(torch: ModuleType, ledger: Ledger, device: int, allocated: int, reserved: int, steps: int) -> Profile:
    """Return what a device's ledger knows.

    ``allocated`` and ``reserved`` are the counters' peaks, in bytes; ``steps`` is how many steps have ended.
    """
    assert ledger.peak is not None
    assert ledger.series is not None
    series = ledger.series
    stacks = _Stacks(torch, ledger.forward_stacks)
    at_peak = sorted(ledger.peak.blocks, key=lambda block: -block.size)
    return Profile(
        source="run",
        device=device,
        events=series.events,
        peak_event=ledger.peak.event,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        limit_bytes=None,
        blocks=tuple(_row(block, stacks) for block in at_peak),
        slack_bytes=allocated - sum(block.size for block in at_peak),
        points=series.points(),
        steps=tuple(row for row in series.steps() if row.step <= steps),
        growth=growth(ledger.live(), lambda block: stacks.for_module(block.stack, block.module())),
        segments=series.segments(stacks.for_module),
        notes=(),
    )


class _Stacks:
    """Recorded frames as lines for people, each stack made once."""

    def __init__(self, torch: ModuleType, forward: dict[str, list[dict[str, Any]]]) -> None:
        self._torch = torch
        self._forward = forward
        self._made: dict[Any, Stack] = {}

    def of(self, frames: list[dict[str, Any]]) -> Stack:
        """Return the user's and libraries' lines, innermost first."""
        key = tuple((f["filename"], f["line"]) for f in frames)
        if key not in self._made:
            self._made[key] = tuple(stack_lines(self._torch, frames)[:STACK_LINES])
        return self._made[key]

    def for_module(self, frames: list[dict[str, Any]], module: str | None) -> Stack:
        """Return the lines; where there are none, on autograd's thread, those of the module's forward pass."""
        return self.of(frames) or self.of(self._forward.get(module or "", []))


def _row(block: ledger_module.Block, stacks: _Stacks) -> Block:
    stack = stacks.for_module(block.stack, block.module())
    tag = block.tag
    return Block(
        address=block.address,
        size_bytes=block.size,
        category=block.category(),
        step=block.born.step,
        phase=block.born.phase,
        module=block.module(),
        stack=stack,
        forward_stack=bool(stack) and not stacks.of(block.stack),
        name=tag.name if tag else None,
        shape=tag.shape if tag else None,
        dtype=tag.dtype if tag else None,
        born=block.born_event,
        freed=block.died_event,
        freed_step=block.died.step if block.died else None,
        freed_phase=block.died.phase if block.died else None,
    )
