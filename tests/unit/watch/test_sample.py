from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from oomproof.errors import EnvironmentMissingError, UsageError
from oomproof.watch.published import read_published, remove_ended
from oomproof.watch.sample import Sample, Sampler, chosen
from oomproof.watch.view import shown
from oomproof.watch.watcher import Watcher

GIB = 1 << 30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML says {value}")
        self.value = value


class FakeNVML:
    """NVML with two GPUs; ``faults`` is (function, handle) -> return value, handle None for any."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2

    def __init__(self, faults: dict[tuple[str, str | None], int] | None = None, slices: int = 0) -> None:
        self.faults, self.slices, self.used = faults or {}, slices, 30 * GIB

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            handle = str(arguments[0]) if arguments else None
            for key in ((name, handle), (name, None), ("*", handle)):
                if key in self.faults and not (name == "nvmlDeviceGetHandleByIndex" and key[0] == "*"):
                    raise NVMLError(self.faults[key])
            return getattr(self, f"_{name}")(*arguments, **options)

        return call

    def _nvmlInit(self) -> None: ...
    def _nvmlDeviceGetCount(self) -> int:
        return 2

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(index)

    def _nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(self.slices > 0 and handle == "0")] * 2

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, number: int) -> str:
        if number >= self.slices:
            raise NVMLError(6)
        return f"{handle}:{number}"

    def _nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"{'MIG' if ':' in handle else 'GPU'}-aaaa{handle}"

    def _nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA A100"

    def _nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        memory = SimpleNamespace(total=40 * GIB, used=self.used, free=40 * GIB - self.used)
        if version is not None:
            memory.reserved = 0
        return memory

    def _nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97)

    def _nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def _nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 250_000

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.used)] if handle == "0" else []


def text(sample: Sample, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(shown(sample, Watcher().observe(sample)))
    return console.export_text()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        pytest.param(12, "no NVIDIA driver", id="wookayin/gpustat#90: library not found"),
        pytest.param(18, "version mismatch", id="Syllo/nvtop#95: driver/library version mismatch"),
        pytest.param(9, "not loaded", id="driver not loaded"),
        pytest.param(999, "nvidia-smi", id="anything else"),
    ],
)
def test_without_a_driver_one_message_says_what_to_do(value: int, told: str) -> None:
    """NVML that does not start is one error of the tool, with the cure."""
    with pytest.raises(EnvironmentMissingError, match=told):
        Sampler(FakeNVML({("nvmlInit", None): value}))


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        pytest.param({("nvmlDeviceGetHandleByIndex", "1"): 15}, "GPU is lost", id="rossumai/nvgpu#6: lost, no handle"),
        pytest.param({("*", "1"): 15}, "GPU is lost", id="XuehaiPan/nvitop#139: lost while watched"),
        pytest.param(
            {("nvmlDeviceGetMemoryInfo", "1"): 3}, "shares the host's memory", id="wookayin/gpustat#179: unified memory"
        ),
        pytest.param(
            {("nvmlDeviceGetMemoryInfo", "1"): 4}, "no permission", id="NVIDIA/nvidia-container-toolkit#842: MIG's card"
        ),
    ],
)
def test_a_fault_of_one_gpu_is_told_beside_the_other(faults: dict[tuple[str, str | None], int], told: str) -> None:
    """A fault of GPU 1 is one clear state of it, with no figure made up; GPU 0 keeps its figures."""
    sample = Sampler(FakeNVML(faults)).sample()
    assert sample.devices[0].used_bytes == 30 * GIB
    assert sample.devices[1].used_bytes is None
    assert told in text(sample)


@pytest.mark.parametrize("sensor", ["PowerUsage", "Temperature", "UtilizationRates"])
def test_a_sensor_that_is_not_supported_is_left_out(sensor: str) -> None:
    """wookayin/gpustat#144: one unsupported figure is None with its reason, and the rest stays."""
    device = Sampler(FakeNVML({(f"nvmlDeviceGet{sensor}", None): 3})).sample().devices[0]
    assert len(device.missing) == 1
    assert set(device.missing.values()) == {"not supported by this GPU"}
    assert device.used_bytes == 30 * GIB


def test_an_old_driver_without_reserved_memory() -> None:
    """Drivers before 510 know only the first version of the memory call: reserved is None, used is there."""

    class Old(FakeNVML):
        def _nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
            if version is not None:
                raise NVMLError(13)
            return super()._nvmlDeviceGetMemoryInfo(handle)

    device = Sampler(Old()).sample().devices[0]
    assert (device.used_bytes, device.reserved_bytes) == (30 * GIB, None)


def test_mig_slices_are_devices_and_found_by_uuid() -> None:
    """Slices that exist follow their card; indices, whole UUIDs and unique beginnings name devices, others do not."""
    sample = Sampler(FakeNVML(slices=2)).sample()
    assert [device.index for device in sample.devices] == ["0", "0:0", "0:1", "1"]
    assert [device.index for device in chosen(sample, "MIG-aaaa0:1, gpu-aaaa1, 0".replace("gpu", "GPU")).devices] == [
        "0:1", "1", "0",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="'9' is no device; 'MIG-' is the beginning of several"):
        chosen(sample, "9,MIG-")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "oomproof"
    folder.mkdir(mode=0o700)
    return folder


def publish(folder: Path, step: int, peak: int, pid: int | None = None) -> None:
    device = {
        "index": 0, "uuid": "aaaa0", "allocated_bytes": 1, "allocated_peak_bytes": peak, "reserved_bytes": 28 * GIB,
        "not_reusable_bytes": 0, "retries": 0, "ooms": 0, "pinned_bytes": None,
    }  # fmt: skip
    file = folder / f"{pid or os.getpid()}.json"
    file.write_text(json.dumps({"pid": pid, "time": float(step), "step": step, "devices": [device]}))


def test_the_level_is_of_what_is_needed_not_of_what_nvml_calls_used(runtime: Path) -> None:
    """A cache that fills the card alarms nobody; an allocated peak plus the context at 85 % does."""
    nvml = FakeNVML()
    nvml.used = 39 * GIB
    watcher, sampler = Watcher(), Sampler(nvml)
    publish(runtime, 1, peak=10 * GIB)
    assert not watcher.observe(sampler.sample())
    publish(runtime, 2, peak=24 * GIB)
    assert [standing.alarm.kind for standing in watcher.observe(sampler.sample())] == ["level"]


def test_what_cannot_be_read_is_nothing(runtime: Path) -> None:
    """A torn file, another version's, or a folder that others can write to, gives no figures and no error."""
    publish(runtime, 1, peak=1)
    assert len(read_published(os.getpid())) == 1
    runtime.chmod(0o777)
    assert not read_published(os.getpid())
    runtime.chmod(0o700)
    for wrong in ("{", "[]", '{"devices": [{}]}'):
        (runtime / f"{os.getpid()}.json").write_text(wrong)
        assert not read_published(os.getpid())


def test_files_of_ended_processes_are_removed(runtime: Path) -> None:
    """Only files of processes that run stay."""
    publish(runtime, 1, peak=1)
    publish(runtime, 1, peak=1, pid=2**22 + 1)  # above the largest pid of Linux
    remove_ended()
    assert [file.stem for file in runtime.iterdir()] == [str(os.getpid())]


@pytest.mark.parametrize("width", [80, 160])
def test_nothing_is_wider_than_the_terminal(runtime: Path, width: int) -> None:
    """Every line fits 80 and 160 columns, and all figures of a process are in it."""
    publish(runtime, 7, peak=24 * GIB)
    lines = text(Sampler(FakeNVML(slices=1)).sample(), width).splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if str(os.getpid()) in line)
    assert "24.00 GiB" in row
    assert row.split()[-1] == "7"
