"""One look at the machine's GPUs through nvidia-ml-py, which oomproof depends on already.

What NVML does not tell is None, with the reason in ``missing``; a GPU that cannot be asked at all has a ``problem``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oomproof.errors import EnvironmentMissingError, UsageError
from oomproof.watch.published import Published, read_published

# NVML's return values (nvml.h)
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 3, 4, 9, 12
NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, ARGUMENT_VERSION = 6, 13, 15, 16, 18, 25

_NO_NVML = {
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; load it with `modprobe nvidia`",
    LIBRARY_NOT_FOUND: "there is no NVIDIA driver here (no libnvidia-ml.so.1); install it, or start the container with "
    "GPUs (--gpus all)",
    VERSION_MISMATCH: "the NVIDIA driver was updated while loaded (version mismatch); restart the machine",
    NO_PERMISSION: "this user may not use the NVIDIA driver; ask for access to /dev/nvidia*",
}
_REASONS = {
    NOT_SUPPORTED: "not supported by this GPU",
    NO_PERMISSION: "no permission",
    GPU_IS_LOST: "GPU is lost: it has fallen off the bus; restart the machine",
    RESET_REQUIRED: "GPU needs a reset",
}
_WHOLE_GPU = (GPU_IS_LOST, RESET_REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """One process on one device."""

    pid: int
    used_bytes: int | None
    allocator: Published | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One GPU or MIG slice, at one moment."""

    index: str
    """NVML's index; ``0:1`` is slice 1 of GPU 0."""
    uuid: str | None = None
    name: str | None = None
    problem: str | None = None
    """Why nothing can be asked of it."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    """What the driver and the firmware keep."""
    utilisation_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    processes: tuple[ProcessUse, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a figure is None, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All devices at one moment."""

    time: float
    devices: tuple[DeviceSample, ...]


class Sampler:
    """Asks NVML (pynvml, or what stands for it in a test). Raises EnvironmentMissingError without a driver."""

    def __init__(self, nvml: Any = None) -> None:
        if nvml is None:
            import pynvml

            nvml = pynvml
        self.nvml = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            reason = _NO_NVML.get(error.value, f"NVML does not start: {error}; see what nvidia-smi says")
            raise EnvironmentMissingError(reason) from None

    def sample(self) -> Sample:
        """Return what can be known now."""
        devices: list[DeviceSample] = []
        for index in range(self.nvml.nvmlDeviceGetCount()):
            try:
                handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
            except self.nvml.NVMLError as error:
                devices.append(DeviceSample(index=str(index), problem=_reason(error)))
                continue
            devices.append(self._device(str(index), handle))
            devices += self._slices(index, handle)
        return Sample(time=time.time(), devices=tuple(devices))

    def _slices(self, index: int, handle: Any) -> list[DeviceSample]:
        nvml = self.nvml
        try:
            if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                return []
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:  # no MIG on this card, or it is lost, which its own row says
            return []
        found = []
        for number in range(count):
            try:
                slice_handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError as error:
                if error.value != NOT_FOUND:  # NOT_FOUND: no slice of that number was made
                    found.append(DeviceSample(index=f"{index}:{number}", problem=_reason(error)))
                continue
            found.append(self._device(f"{index}:{number}", slice_handle))
        return found

    def _device(self, index: str, handle: Any) -> DeviceSample:
        nvml = self.nvml
        missing: dict[str, str] = {}
        lost: list[str] = []

        def ask(name: str, question: Callable[[], Any]) -> Any:
            try:
                return question()
            except nvml.NVMLError as error:
                missing[name] = _reason(error)
                if error.value in _WHOLE_GPU:
                    lost.append(missing[name])
                return None

        uuid = ask("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
        name = ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
        memory = ask("memory", lambda: self._memory(handle))
        utilisation = ask("utilisation_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        celsius = ask("temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, 0))
        milliwatts = ask("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        running = ask("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if lost:
            return DeviceSample(index=index, uuid=uuid, name=name, problem=lost[0])
        if memory is None and missing["memory"] == _REASONS[NOT_SUPPORTED]:
            missing["memory"] = "no figure: this GPU shares the host's memory, or NVML does not count it"
        return DeviceSample(
            index=index,
            uuid=uuid,
            name=name,
            total_bytes=memory and memory.total,
            used_bytes=None if memory is None else memory.used,
            reserved_bytes=getattr(memory, "reserved", None),
            utilisation_percent=utilisation,
            temperature_celsius=celsius,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            processes=None if running is None else tuple(_process(process, uuid) for process in running),
            missing=missing,
        )

    def _memory(self, handle: Any) -> Any:
        nvml = self.nvml
        try:  # the second version keeps what is reserved apart from what is used
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            if error.value not in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION):  # drivers before 510
                raise
            return nvml.nvmlDeviceGetMemoryInfo(handle)


def chosen(sample: Sample, wanted: str) -> Sample:
    """Return the devices named in ``wanted``: NVML indices, UUIDs or unique beginnings of UUIDs, with commas.

    Raises UsageError naming each one that no device or several match.
    """
    found: list[DeviceSample] = []
    wrong: list[str] = []
    for word in (word.strip() for word in wanted.split(",")):
        fits = [d for d in sample.devices if d.index == word or (word[:4] in ("GPU-", "MIG-") and _begins(d, word))]
        if len(fits) == 1:
            found += [device for device in fits if device not in found]
        else:
            wrong.append(f"{word!r} is {'no device' if not fits else 'the beginning of several UUIDs'}")
    if wrong:
        known = ", ".join(f"{device.index} ({device.uuid})" for device in sample.devices)
        raise UsageError(f"{'; '.join(wrong)}; there are {known or 'none'}")
    return Sample(time=sample.time, devices=tuple(found))


def _begins(device: DeviceSample, word: str) -> bool:
    return device.uuid is not None and device.uuid.lower().startswith(word.lower())


def _process(process: Any, uuid: str | None) -> ProcessUse:
    bare = _bare(uuid)
    fits = [p for p in read_published(process.pid) if p.uuid is not None and _bare(p.uuid) == bare]
    return ProcessUse(pid=process.pid, used_bytes=process.usedGpuMemory, allocator=fits[0] if fits else None)


def _bare(uuid: str | None) -> str | None:
    """Return a UUID as PyTorch shows it, without NVML's prefix."""
    return uuid and uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes in nvidia-ml-py before 11.515


def _reason(error: Any) -> str:
    return _REASONS.get(error.value, str(error))
