"""oomproof watch beside a training process on the phantom."""

from __future__ import annotations

import pytest
from child import Child, has_module

from oomproof.gpus import get_gpu


def test_watch_sees_the_process_and_what_it_publishes(child: Child) -> None:
    """NVML's and the allocator's figures of a process arrive, by its UUID, as the process has them; to the byte."""
    if not has_module("pynvml") or not has_module("typer"):
        pytest.skip("nvidia-ml-py or typer is not installed beside the tested torch")

    def body():
        import json
        import os
        import subprocess
        import sys

        import torch

        from oomproof.watch import publish

        layer = torch.nn.Linear(1024, 1024).cuda()
        layer(torch.randn(64, 1024, device="cuda")).sum().backward()
        before = torch.cuda.memory_stats()
        wrote = [publish(), publish()]
        after = torch.cuda.memory_stats()
        command = [sys.executable, "-m", "oomproof", "watch", "--once", "--json"]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {
            "wrote": wrote,
            "untouched": before == after,
            "pid": os.getpid(),
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "seen": json.loads(seen),
        }

    found = child(body, env={"XDG_RUNTIME_DIR": str(child.folder)})
    assert found["wrote"] == [True, False]  # the second call comes within a quarter of a second
    assert found["untouched"]
    (device,) = found["seen"]["devices"]
    assert device["name"] == get_gpu("t4").name
    (process,) = device["processes"]
    assert process["pid"] == found["pid"]
    published = process["allocator"]
    assert published["allocated_bytes"] == found["allocated"]
    assert published["allocated_peak_bytes"] == found["peak"]
    assert published["reserved_bytes"] == found["reserved"]
    assert process["used_bytes"] == found["reserved"] + get_gpu("t4").context_bytes[1]
