"""torch.cuda's own view of the phantom's memory."""

from __future__ import annotations

from child import Child

from oomproof.gpus import get_gpu

MIB = 1 << 20


def test_properties_are_the_gpu_specs(child: Child) -> None:
    """What torch.cuda says of the device is what the catalogue says."""

    def body():
        import torch

        p = torch.cuda.get_device_properties(0)
        return {
            "available": torch.cuda.is_available(),
            "count": torch.cuda.device_count(),
            "name": torch.cuda.get_device_name(),
            "memory": p.total_memory,
            "capability": list(torch.cuda.get_device_capability()),
            "sm": p.multi_processor_count,
            "threads": p.max_threads_per_multi_processor,
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "cudnn": torch.backends.cudnn.is_available(),
            "synchronized": torch.cuda.synchronize() is None,
        }

    for name in ("t4", "a100-40gb", "rtx-4090", "h100-sxm"):
        gpu = get_gpu(name)
        assert child(body, gpu=name) == {
            "available": True,
            "count": 1,
            "name": gpu.name,
            "memory": gpu.memory_bytes,
            "capability": list(gpu.compute_capability),
            "sm": gpu.sm_count,
            "threads": gpu.max_threads_per_sm,
            "bf16": gpu.compute_capability >= (8, 0),
            "cudnn": True,
            "synchronized": True,
        }


def test_context_comes_off_first(child: Child) -> None:
    """Before the first tensor the device has lost the context's memory, then each segment's."""

    def body():
        import torch

        infos = [list(torch.cuda.mem_get_info())]
        x = torch.zeros(100, device="cuda")
        infos.append(list(torch.cuda.mem_get_info()))
        y = torch.zeros(40 << 20, dtype=torch.uint8, device="cuda")
        infos.append(list(torch.cuda.mem_get_info()))
        del x, y
        infos.append(list(torch.cuda.mem_get_info()))
        torch.cuda.empty_cache()
        infos.append(list(torch.cuda.mem_get_info()))
        return infos

    gpu = get_gpu("t4")
    free = [info[0] for info in child(body)]
    assert free[0] == gpu.memory_bytes - gpu.context_bytes[1]
    assert free[0] - free[1] == 2 * MIB
    assert free[1] - free[2] == 40 * MIB
    assert free[3] == free[2], "freed blocks stay in the cache"
    assert free[4] == free[0], "empty_cache gives everything back"


def test_memory_functions(child: Child) -> None:
    """stats, summary, snapshot, history and the resets work and agree with each other."""

    def body():
        import pickle
        import tempfile
        from pathlib import Path

        import torch

        m = torch.cuda.memory
        m._record_memory_history(max_entries=1000)
        a = torch.zeros(3 * 256, device="cuda")
        b = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
        del b
        stats = torch.cuda.memory_stats()
        snapshot = m._snapshot()
        events = [(e["action"], e["size"]) for e in snapshot["device_traces"][0]]
        with tempfile.TemporaryDirectory() as folder:
            m._dump_snapshot(f"{folder}/s.pickle")
            dumped = pickle.loads(Path(f"{folder}/s.pickle").read_bytes())
        found = {
            "allocated": [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()],
            "reserved": [torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()],
            "stats": [
                stats["allocated_bytes.all.current"],
                stats["reserved_bytes.all.peak"],
                stats["num_ooms"],
            ],
            "segments": sum(s["total_size"] for s in torch.cuda.memory_snapshot()),
            "summary": "PyTorch CUDA memory summary" in torch.cuda.memory_summary(),
            "events": events,
            "dumped": len(dumped["segments"]),
            "frames": bool(snapshot["device_traces"][0][0]["frames"]),
            "address": snapshot["device_traces"][0][1]["addr"] == a.data_ptr(),
        }
        m._record_memory_history(enabled=None)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        found["after reset"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        found["after empty_cache"] = torch.cuda.memory_reserved()
        return found

    found = child(body)
    small, large = 3 * 256 * 4, 5 * MIB
    assert found["allocated"] == [small, small + large]
    assert found["reserved"] == [22 * MIB, 22 * MIB]
    assert found["stats"] == [small, 22 * MIB, 0]
    assert found["segments"] == 22 * MIB
    assert found["summary"]
    assert found["events"] == [
        ["segment_alloc", 2 * MIB],
        ["alloc", small],
        ["segment_alloc", 20 * MIB],
        ["alloc", large],
        ["free_requested", large],
        ["free_completed", large],
    ]
    assert found["dumped"] == 2
    assert found["frames"]
    assert found["address"]
    assert found["after reset"] == small
    assert found["after empty_cache"] == 2 * MIB


def test_out_of_memory_is_pytorchs_own(child: Child) -> None:
    """A request past the memory raises torch.OutOfMemoryError with the usual message, and the process goes on."""

    def body():
        import torch

        kept = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        try:
            torch.zeros(20 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            message = str(error)
        after = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        stats = torch.cuda.memory_stats()
        legacy = torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
        return [message, kept.numel() + after.numel(), stats["num_ooms"], stats["num_alloc_retries"], legacy]

    gpu = get_gpu("t4")
    message, went_on, ooms, retries, legacy = child(body)
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 14.56 GiB"
    )
    assert f"of which {(gpu.memory_bytes - gpu.context_bytes[1] - (1 << 30)) / (1 << 30):.2f} GiB is free" in message
    assert "1024.00 MiB is allocated by PyTorch" in message or "1.00 GiB is allocated by PyTorch" in message
    assert went_on == 2 << 30
    assert (ooms, retries, legacy) == (1, 1, True)


def test_out_of_memory_at_the_exact_byte(child: Child) -> None:
    """The last 2 MiB page that fits beside the context is given, the next one is refused."""

    def body():
        import torch

        free = torch.cuda.mem_get_info()[0] // (2 << 20) * (2 << 20)
        x = torch.empty(free, dtype=torch.uint8, device="cuda")
        left = torch.cuda.mem_get_info()[0]
        del x
        torch.cuda.empty_cache()
        try:
            torch.empty(free + 1, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return [free, left, True]
        return [free, left, False]

    gpu = get_gpu("t4")
    free, left, refused = child(body)
    assert 0 <= gpu.memory_bytes - gpu.context_bytes[1] - free < 2 * MIB
    assert 0 <= left < 2 * MIB
    assert refused


def test_cache_is_given_back_before_an_error(child: Child) -> None:
    """When the device is full PyTorch frees its cached segments and tries again."""

    def body():
        import torch

        chunk = torch.cuda.mem_get_info()[0] // 3
        a = torch.empty(chunk, dtype=torch.uint8, device="cuda")
        b = torch.empty(chunk, dtype=torch.uint8, device="cuda")
        del a, b
        c = torch.empty(2 * chunk, dtype=torch.uint8, device="cuda")
        stats = torch.cuda.memory_stats()
        return [stats["num_alloc_retries"], stats["num_ooms"], c.numel() == 2 * chunk]

    assert child(body) == [1, 0, True]


def test_per_process_memory_fraction(child: Child) -> None:
    """A fraction below one refuses what the device could still hold."""

    def body():
        import torch

        torch.cuda.set_per_process_memory_fraction(0.25)
        limit = int(torch.cuda.get_device_properties(0).total_memory * 0.25)
        fits = torch.empty(limit - (64 << 20), dtype=torch.uint8, device="cuda")
        try:
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            return [fits.numel() > 0, torch.cuda.mem_get_info()[0] > 1 << 30, str(error)[:18]]

    assert child(body) == [True, True, "CUDA out of memory"]


def test_unlimited_memory_never_runs_out(child: Child) -> None:
    """With the limit off a run shows its demand; the device still says how much it has."""

    def body():
        import torch

        x = torch.empty(40 << 30, dtype=torch.uint8, device="cuda")
        return [
            x.numel(),
            torch.cuda.max_memory_allocated(),
            torch.cuda.get_device_properties(0).total_memory,
        ]

    assert child(body, unlimited=True) == [40 << 30, 40 << 30, get_gpu("t4").memory_bytes]
