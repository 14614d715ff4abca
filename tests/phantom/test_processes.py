"""Scripts that train elsewhere than in their main thread: a child, a thread, several processes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from child import PYTHON, has_module

import oomproof
from oomproof.measure.measurement import Measurement

GIB = 1 << 30
TRAIN = """
import multiprocessing, os, sys, threading
import torch

def take(gib):
    block = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
    return block
"""


def measured(folder: Path, code: str, arguments: Sequence[str] = ()) -> Measurement:
    """Run a script on a phantom T4 and return what it showed."""
    script = folder / "script.py"
    script.write_text(TRAIN + code)
    return oomproof.run([PYTHON, str(script), *arguments], gpu="t4")


@pytest.mark.parametrize(
    "code",
    [
        'if __name__ == "__main__":\n'
        '    child = multiprocessing.get_context("spawn").Process(target=take, args=(40,))\n'
        "    child.start()\n    child.join()\n",
        "thread = threading.Thread(target=take, args=(40,))\nthread.start()\nthread.join()\n",
        "try:\n    take(40)\nexcept Exception:\n    sys.exit(1)\n",
        "try:\n    take(40)\nexcept Exception:\n    os._exit(1)\n",
    ],
    ids=["spawned child", "thread", "caught, then exit", "caught, then gone"],
)
def test_an_oom_that_nothing_follows_does_not_fit(tmp_path: Path, code: str) -> None:
    """Whoever caught it: a run whose last act on the GPU failed for want of memory did not fit."""
    found = measured(tmp_path, code)
    assert found.verdict == "does-not-fit"
    assert found.demand.allocated_bytes == 40 * GIB


def test_a_forked_child_may_use_cuda(tmp_path: Path) -> None:
    """Importing torch leaves forked children their CUDA, and what they take is measured."""
    code = 'child = multiprocessing.get_context("fork").Process(target=take, args=(3,))\nchild.start()\nchild.join()\n'
    found = measured(tmp_path, code + "sys.exit(child.exitcode)\n")
    assert found.verdict == "fits"
    assert found.peak.allocated_bytes == 3 * GIB


def test_processes_on_one_gpu_are_counted_together(tmp_path: Path) -> None:
    """What must fit is the sum of what all processes of the run hold at once."""
    code = (
        'if __name__ == "__main__":\n'
        "    held = take(4)\n"
        '    child = multiprocessing.get_context("spawn").Process(target=take, args=(6,))\n'
        "    child.start()\n    child.join()\n"
    )
    found = measured(tmp_path, code)
    assert found.peak.allocated_bytes == 6 * GIB
    assert 10 * GIB < found.peak.device_bytes < 10.5 * GIB


RANKS = """
import socket, sys, time
import torch, torch.distributed as dist

def work(rank, port):
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    layer = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(5):
        layer(torch.zeros(1, 8, device="cuda")).sum().backward()
        BEFORE_STEP
        optimizer.step()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(port,), nprocs=2)
"""


def ranks(folder: Path, before_step: str) -> Measurement:
    """Run two ranks, of which the first serves the store, with a line before each optimizer step."""
    script = folder / "script.py"
    script.write_text(RANKS.replace("BEFORE_STEP", before_step))
    return oomproof.run([PYTHON, str(script)], gpu="t4", gpus=2)


def test_a_stopped_rank_stays_until_the_others_are_done(tmp_path: Path) -> None:
    """Rank 0 has made its steps first; rank 1 still needs the store that it serves."""
    found = ranks(tmp_path, "time.sleep(rank); store.set(f'{rank} {step}', 'done')")
    assert (found.ended, found.verdict, found.steps) == ("steps-reached", "fits", 3)
    assert [rank.verdict for rank in found.ranks] == ["fits", "fits"]


def test_ranks_exchange_empty_tensors(tmp_path: Path) -> None:
    """A collective of no elements, which DeepSpeed's ZeRO-3 makes, is over at once on every rank."""
    found = ranks(
        tmp_path,
        "empty = torch.empty(0, device='cuda'); dist.broadcast(empty, 0); dist.all_reduce(empty); "
        "number = torch.full((1,), rank + 5, device='cuda'); dist.broadcast(number, 0); assert number.item() == 5",
    )
    assert (found.ended, found.verdict, found.notes) == ("steps-reached", "fits", ())
    assert (found.world.size, [rank.device for rank in found.ranks]) == (2, [0, 1])


SPAWNED = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    net = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(work, args=(3,), nprocs=3)
"""
LIGHTNING = """
import torch
from lightning.pytorch import Trainer
Trainer(devices=8, accelerator="gpu", logger=False, enable_checkpointing=False)
"""
ONE_OF_SEVERAL = "import torch\ntorch.zeros(1, device='cuda:3')"
REPLICAS = "import torch\ntorch.nn.DataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0, 1])"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        pytest.param(SPAWNED, "3", id="mp.spawn"),
        pytest.param(
            LIGHTNING,
            "8",
            id="Lightning",
            marks=pytest.mark.skipif(not has_module("lightning"), reason="lightning is not installed"),
        ),
        pytest.param(ONE_OF_SEVERAL, "N", id="cuda:3"),
        pytest.param(REPLICAS, "N", id="DataParallel"),
    ],
)
def test_a_script_that_asks_for_more_gpus_than_there_are(tmp_path: Path, code: str, count: str) -> None:
    """The report says so, and which option gives the machine more, with the number where it is known."""
    (tmp_path / "train.py").write_text(code)
    found = oomproof.run([PYTHON, str(tmp_path / "train.py")], gpu="t4")
    assert found.verdict == "unknown"
    assert found.remedy is not None, found.notes
    assert found.remedy.options == ("--gpus", count)


def test_the_gpus_that_were_missing_help(tmp_path: Path) -> None:
    """With the number that the report gives, the script runs."""
    (tmp_path / "train.py").write_text(SPAWNED)
    found = oomproof.run([PYTHON, str(tmp_path / "train.py")], gpu="t4", gpus=3)
    assert found.verdict == "fits", found.notes
    assert sorted(row.rank for row in found.ranks) == [0, 1, 2]
