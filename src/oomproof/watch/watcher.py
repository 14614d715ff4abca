"""Samples and the alarms that come from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oomproof.watch.alarm import Alarm, Alarms, Figures
from oomproof.watch.published import Published
from oomproof.watch.sample import DeviceSample, ProcessUse, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An alarm of one process on one device."""

    device: str
    pid: int
    alarm: Alarm


class Watcher:
    """Keeps an alarm engine for each process on each device that publishes its figures."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, int], Alarms] = {}
        self._seen: dict[tuple[str, int], float] = {}
        self._alarms: dict[tuple[str, int], list[Alarm]] = {}

    def observe(self, sample: Sample) -> list[Standing]:
        """Return the alarms that stand after ``sample``; those of processes that have ended are gone."""
        present = {}
        for device, process, figures in _judged(sample):
            key = (device.uuid or device.index, process.pid)
            present[key] = device.index
            published = process.allocator
            assert published is not None
            if self._seen.get(key) != published.time:  # the same figures again say nothing of growth
                self._seen[key] = published.time
                self._alarms[key] = self._engines.setdefault(key, Alarms()).observe(figures)
        for key in [key for key in self._alarms if key not in present]:
            del self._engines[key], self._seen[key], self._alarms[key]
        return [
            Standing(device=present[key], pid=key[1], alarm=alarm)
            for key, alarms in self._alarms.items()
            for alarm in alarms
        ]


def _judged(sample: Sample) -> Iterator[tuple[DeviceSample, ProcessUse, Figures]]:
    for device in sample.devices:
        for process in device.processes or ():
            if device.total_bytes and device.used_bytes is not None and process.allocator is not None:
                yield device, process, figures_of(process.allocator, process.used_bytes, device)


def figures_of(published: Published, used_bytes: int | None, device: DeviceSample) -> Figures:
    """Return the figures that alarms are judged by. The device must have total and used memory.

    Without the process's own memory from NVML, all that is not in its cache counts as others', its context too.
    """
    assert device.total_bytes is not None
    assert device.used_bytes is not None
    own = published.reserved_bytes if used_bytes is None else used_bytes
    return Figures(
        step=published.step,
        limit_bytes=device.total_bytes - (device.reserved_bytes or 0),
        allocated_peak_bytes=published.allocated_peak_bytes,
        not_reusable_bytes=max(0, own - published.reserved_bytes) + published.not_reusable_bytes,
        others_bytes=max(0, device.used_bytes - own),
        retries=published.retries,
    )
