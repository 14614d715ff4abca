"""Scripts that train elsewhere than in their main thread: a child, a thread, several processes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from child import PYTHON

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
