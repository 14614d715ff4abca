"""Streams, events, pinned memory, graphs and data loaders."""

from __future__ import annotations

import pytest
from child import Child

MIB = 1 << 20


def test_streams_and_events(child: Child) -> None:
    """Streams differ, events are always done, and time between events is above zero."""

    def body():
        import torch

        side, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.cuda.stream(side):
            x = torch.ones(1000, device="cuda")
            current = torch.cuda.current_stream() == side
        side.wait_stream(torch.cuda.current_stream())
        end.record()
        end.synchronize()
        torch.cuda.current_stream().wait_event(end)
        return [side != other, current, end.query(), side.query(), start.elapsed_time(end) > 0, x.numel()]

    assert child(body) == [True, True, True, True, True, 1000]


def test_each_stream_has_its_own_blocks(child: Child) -> None:
    """A block freed on one stream is not given to another, unless record_stream and the events say it is done."""

    def body():
        import torch

        side = torch.cuda.Stream()
        x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        del x
        with torch.cuda.stream(side):
            y = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        apart = torch.cuda.memory_reserved()
        z = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        z.record_stream(side)
        held = torch.cuda.memory_allocated()
        address = z.data_ptr()
        del z
        w = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")  # the event has passed: the block comes back
        return [apart, held, torch.cuda.memory_reserved(), w.data_ptr() == address, y.numel()]

    assert child(body) == [60 * MIB, 60 * MIB, 60 * MIB, True, 30 * MIB]


def test_pinned_memory(child: Child) -> None:
    """Pinned memory is the host's: it takes nothing on the device and copies come back."""

    def body():
        import torch

        pinned = torch.arange(1000).pin_memory()
        plain = torch.arange(1000)
        on_device = torch.cuda.memory_allocated()
        there = pinned.to("cuda", non_blocking=True)
        back = torch.empty(1000, dtype=torch.long, pin_memory=True)
        back.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        return [pinned.is_pinned(), plain.is_pinned(), on_device, torch.equal(back, plain)]

    assert child(body) == [True, False, 0, True]


def test_cuda_graphs(child: Child) -> None:
    """A captured graph has a pool of its own and can be replayed."""

    def body():
        import torch

        x = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        held = torch.cuda.memory_allocated()
        for _ in range(3):
            graph.replay()
        made = torch.cuda.make_graphed_callables(torch.nn.Linear(64, 64).cuda(), (torch.zeros(4, 64, device="cuda"),))
        made(torch.zeros(4, 64, device="cuda")).sum().backward()
        return [held, y.numel()]

    held, elements = child(body)
    assert 8 * MIB <= held <= 8 * MIB + 1024, "both tensors, and the generator's state where a version keeps it there"
    assert elements == 1 << 20


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers(child: Child, start: str) -> None:
    """Workers, forked or spawned, deliver batches that reach the device whole, pinned on the way."""

    def body(start):
        import torch

        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=2, multiprocessing_context=start, pin_memory=True
        )
        torch.zeros(1, device="cuda")  # the parent has a context before workers start
        return [
            sorted(int(v) for batch in loader for v in batch.cuda().tolist()),
            torch.cuda.max_memory_allocated(),
        ]

    numbers, peak = child(body, start, uses=[Squares])
    assert numbers == [i * i for i in range(16)]
    assert peak <= 16 * 512


class Squares:
    """A data set of squares."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        import torch

        return torch.tensor(index * index)
