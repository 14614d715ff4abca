"""NVML, several GPUs and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest
from child import Child, has_module

from oomproof.gpus import get_gpu

MIB = 1 << 20


def test_nvml_sees_the_gpu_and_this_process(child: Child) -> None:
    """nvidia-ml-py tells the name, the memory and what each process of the run uses, also from another process."""
    if not has_module("pynvml"):
        pytest.skip("nvidia-ml-py is not installed beside the tested torch")

    def body():
        import json
        import os
        import subprocess
        import sys

        import pynvml
        import torch

        x = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        other = (
            "import json, pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0); "
            "print(json.dumps([[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]))"
        )
        seen = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
        return {
            "name": pynvml.nvmlDeviceGetName(handle),
            "count": pynvml.nvmlDeviceGetCount(),
            "total": memory.total,
            "sum": memory.used + memory.free,
            "used": memory.used,
            "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            "processes": [[p.pid, p.usedGpuMemory] for p in processes],
            "seen from outside": json.loads(seen),
            "pid": os.getpid(),
            "on device": torch.cuda.device_memory_used() if hasattr(torch.cuda, "device_memory_used") else None,
            "held": x.numel(),
        }

    gpu = get_gpu("t4")
    found = child(body)
    mine = 300 * MIB + gpu.context_bytes[1]
    assert found["name"] == gpu.name
    assert found["count"] == 1
    assert found["total"] == found["sum"] >= gpu.memory_bytes
    assert found["used"] >= mine
    assert found["capability"] == [7, 5]
    assert found["processes"] == found["seen from outside"] == [[found["pid"], mine]]


def test_nvitop(child: Child) -> None:
    """nvitop lists the device and the process."""
    if not has_module("nvitop"):
        pytest.skip("nvitop is not installed beside the tested torch")

    def body():
        import os

        import nvitop
        import torch

        x = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        devices = nvitop.Device.all()
        processes = devices[0].processes()
        return [
            [device.name() for device in devices],
            devices[0].memory_total(),
            processes[os.getpid()].gpu_memory(),
            x.numel(),
        ]

    names, total, used, _ = child(body)
    assert names == ["Tesla T4"]
    assert total >= get_gpu("t4").memory_bytes
    assert used == 300 * MIB + get_gpu("t4").context_bytes[1]


def test_two_gpus(child: Child) -> None:
    """Each GPU has its own memory; copies between them arrive; a module can be split over both."""

    def body():
        import torch

        a = torch.arange(1000, device="cuda:0")
        b = a.to("cuda:1")
        on_second = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:1")
        first, second = torch.nn.Linear(64, 64).to("cuda:0"), torch.nn.Linear(64, 64).to("cuda:1")
        second(first(torch.zeros(4, 64, device="cuda:0")).to("cuda:1")).sum().backward()
        with torch.cuda.device(1):
            here = torch.cuda.current_device()
        return {
            "count": torch.cuda.device_count(),
            "copied": torch.equal(b.cpu(), a.cpu()),
            "devices": [str(t.device) for t in (a, b, first.weight.grad, second.weight.grad)],
            "apart": [
                torch.cuda.memory_allocated(0) < 20 << 20,
                torch.cuda.memory_allocated(1) >= on_second.numel(),
            ],
            "peer": torch.cuda.can_device_access_peer(0, 1),
            "here": here,
            # torch 2.4 has no uuid
            "uuids": len({str(getattr(torch.cuda.get_device_properties(i), "uuid", i)) for i in range(2)}),
        }

    assert child(body, gpu_count=2) == {
        "count": 2,
        "copied": True,
        "devices": ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
        "apart": [True, True],
        "peer": True,
        "here": 1,
        "uuids": 2,
    }


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("1,7,0", 1), ("2", 0)])
def test_visible_devices_set_by_the_script(child: Child, visible: str, count: int) -> None:
    """CUDA_VISIBLE_DEVICES, set before the first CUDA call, hides devices; the first unknown one ends the list."""

    def body(visible):
        import os

        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        import torch

        return [torch.cuda.device_count(), torch.cuda.is_available()]

    assert child(body, visible, gpu_count=2) == [count, count > 0]


def test_visible_devices_of_the_machine_do_not_count(child: Child) -> None:
    """The caller's CUDA_VISIBLE_DEVICES is about its own GPUs: the phantom ignores it."""

    def body():
        import torch

        return torch.cuda.device_count()

    assert child(body, env={"CUDA_VISIBLE_DEVICES": ""}) == 1


def test_processes_of_a_run_share_the_device(child: Child) -> None:
    """What one process holds another cannot have; when it ends its memory comes back."""

    def body():
        import subprocess
        import sys

        import torch

        x = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        code = (
            "import torch\n"
            "free = torch.cuda.mem_get_info()[0]\n"
            "try:\n"
            "    torch.empty(8 << 30, dtype=torch.uint8, device='cuda')\n"
            "except torch.OutOfMemoryError:\n"
            "    print('full', free)\n"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        return [said[0], int(said[1]), torch.cuda.mem_get_info()[0], x.numel()]

    gpu = get_gpu("t4")
    context = gpu.context_bytes[1]
    said, free_there, free_here, _ = child(body)
    assert said == "full"
    assert free_there == gpu.memory_bytes - (8 << 30) - 2 * context
    assert free_here == gpu.memory_bytes - (8 << 30) - context


def _expandable_on_two_devices() -> list[int]:
    import ctypes

    import torch

    found = []
    for index in range(2):
        block = torch.empty(1 << 20, device=f"cuda:{index}")
        attributes = (ctypes.c_int * 64)()  # cudaPointerAttributes begins with type and device
        assert ctypes.CDLL(None).cudaPointerGetAttributes(attributes, ctypes.c_void_p(block.data_ptr())) == 0
        found.append(attributes[1])
    return found


def test_expandable_segments_know_their_device(child: Child) -> None:
    """A pointer into memory that was mapped on the second device belongs to it, also for those who ask the driver."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert child(_expandable_on_two_devices, gpu_count=2, env=settings) == [0, 1]
