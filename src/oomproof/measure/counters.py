"""PyTorch's own memory counters, read in windows without the script noticing.

The peak counters can only be reset, so a window's peak needs a reset at its start. The script must not see those
resets: what it reads is the highest since *its* last reset.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

POOLS = ("all", "small_pool", "large_pool")


class Counters:
    """Peaks of allocated and reserved memory, by window and in all, for every device the process used."""

    def __init__(self, torch: ModuleType) -> None:
        self._c: Any = torch._C
        self._torch: Any = torch
        self.ready = False  # CUDA is initialised
        self._seen_by_script: dict[int, dict[str, dict[str, int]]] = {}  # peaks hidden by our resets
        self._peak: dict[int, list[int]] = {}
        self._window: dict[int, list[int]] = {}
        self._events_read = 0

    def install(self) -> None:
        """Put the script's own readings and resets through this object."""
        self._read = self._c._cuda_memoryStats
        self._reset = self._c._cuda_resetPeakMemoryStats
        self._c._cuda_memoryStats = self._stats_for_script
        self._c._cuda_resetPeakMemoryStats = self._reset_by_script

    def _devices(self) -> range:
        return range(self._c._cuda_getDeviceCount())

    def _stats_for_script(self, device: int) -> dict[str, Any]:
        return self._with_hidden_peaks(device, self._read(device))

    def _with_hidden_peaks(self, device: int, stats: dict[str, Any]) -> dict[str, Any]:
        for name, pools in self._seen_by_script.get(device, {}).items():
            for pool, peak in pools.items():
                stats[name][pool]["peak"] = max(stats[name][pool]["peak"], peak)
        return stats

    def _reset_by_script(self, device: int) -> None:
        self.fold()
        self._seen_by_script.pop(device, None)
        self._reset(device)

    def fold(self) -> tuple[int, int]:
        """Note the peaks since the last reading and start anew; return (allocated, reserved) of the worst device."""
        worst = (0, 0)
        for device in self._devices():
            stats = self._read(device)
            found = (
                stats["allocated_bytes"]["all"]["peak"],
                stats["reserved_bytes"]["all"]["peak"],
            )
            self._with_hidden_peaks(device, stats)
            for record in (self._peak, self._window):
                kept = record.setdefault(device, [0, 0])
                kept[:] = [max(kept[0], found[0]), max(kept[1], found[1])]
            self._seen_by_script[device] = {
                name: {pool: figures[pool]["peak"] for pool in POOLS}
                for name, figures in stats.items()
                if isinstance(figures, dict) and POOLS[0] in figures and "peak" in figures[POOLS[0]]
            }
            self._reset(device)
            worst = max(worst, found)
        return worst

    def end_window(self) -> tuple[int, int]:
        """Return (allocated, reserved) peaks of the worst device since the last call."""
        self.fold()
        peaks = [tuple(kept) for kept in self._window.values()]
        self._window = {}
        allocated, reserved = max(peaks, default=(0, 0))
        return allocated, reserved

    def window_peak(self) -> int:
        """Return the allocated peak of the worst device since ``end_window``, as far as it was folded."""
        return max((kept[0] for kept in self._window.values()), default=0)

    def worst_device(self) -> int:
        """Return the device with the highest allocated peak."""
        return max(self._peak, key=lambda device: self._peak[device], default=0)

    def peaks(self, device: int) -> tuple[int, int]:
        """Return (allocated, reserved): max_memory_allocated() and max_memory_reserved() had the script never reset."""
        allocated, reserved = self._peak.get(device, [0, 0])
        return allocated, reserved

    def troubles(self, device: int) -> tuple[int, int]:
        """Return (out-of-memory errors, allocation retries)."""
        if not self.ready:
            return 0, 0
        stats = self._read(device)
        return stats.get("num_ooms", 0), stats.get("num_alloc_retries", 0)

    def _event_count(self) -> int:
        counts = (self._read(device)["allocation"]["all"] for device in self._devices())
        return sum(count["allocated"] + 2 * count["freed"] for count in counts)

    def events_since_read(self) -> int:
        """Return about how many trace entries there are since ``trace_was_read``."""
        return self._event_count() - self._events_read

    def trace_was_read(self) -> None:
        """Start counting trace entries anew."""
        self._events_read = self._event_count()
