"""What a call of the driver takes, from the times of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from oomproof.snapshot.model import NO_TIME, Action, Events

_FEWEST = 10
_LEAST_US = 30  # no real driver is faster; on the phantom a call takes less

# Medians in published snapshots: cudaMalloc 0.13 ms (782 on an H100), 0.19 ms (195) to 0.46 ms (64 on WSL2); cudaFree
# 0.10 ms (429 on the H100). Without the wait for running kernels that a cudaFree may add.
ASSUMED_ALLOCATION_US = 200.0
ASSUMED_FREE_US = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """Microseconds a call of the driver, and whether they are this trace's own."""

    allocation_us: float
    free_us: float
    allocation_recorded: bool
    free_recorded: bool

    def seconds(self, allocations: int, frees: int) -> float:
        """Return how long so many calls take."""
        return (allocations * self.allocation_us + frees * self.free_us) / 1e6


def call_times(events: Events) -> CallTimes:
    """Return medians of a trace's own calls where it has ten or more, else what is assumed.

    A call is given the time since the event before it, so it took that long at most.
    """
    allocation = _median(_gaps(events, Action.SEGMENT_ALLOC, None))
    free = _median(_gaps(events, Action.SEGMENT_FREE, Action.SEGMENT_FREE))
    return CallTimes(
        allocation_us=allocation or ASSUMED_ALLOCATION_US,
        free_us=free or ASSUMED_FREE_US,
        allocation_recorded=allocation is not None,
        free_recorded=free is not None,
    )


def _median(gaps: list[int]) -> float | None:
    found = median(gaps) if len(gaps) >= _FEWEST else 0
    return found if found >= _LEAST_US else None


def _gaps(events: Events, kind: Action, before: Action | None) -> list[int]:
    action, time = events.action, events.time_us
    return [
        time[index] - time[index - 1]
        for index in range(1, len(events))
        if action[index] == kind
        and (before is None or action[index - 1] == before)
        and time[index - 1] != NO_TIME
        and time[index] >= time[index - 1]
    ]
