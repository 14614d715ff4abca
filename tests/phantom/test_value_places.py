"""The value mirror wherever a script may run: threads, replicas, transforms, compiled code, graphs, workers, ranks."""

from __future__ import annotations

from typing import Any

import pytest
from child import Child

pytestmark = pytest.mark.phantom


def test_threads_see_the_same_values(lines: Any) -> None:
    """A thread of the script's own, of a pool, and one that starts another read right numbers."""
    assert lines(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        found = {}
        def count(name):
            mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device="cuda")
            x = torch.randn(3, 4, device="cuda")
            found[name] = [mask.sum().item(), mask.sum(-1).max().item(), list(x[mask[0].bool()].shape)]
        class Own(threading.Thread):
            def run(self):
                inner = threading.Thread(target=count, args=("inner",))
                inner.start()
                inner.join()
                count("own class")
        thread = Own()
        thread.start()
        thread.join()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(count, ("pool 1", "pool 2")))
        count("main")
        result = [sorted(found), list({str(v) for v in found.values()}), unknown]
        """
    ) == [["inner", "main", "own class", "pool 1", "pool 2"], ["[3, 2, [2, 4]]"], []]


def test_threads_allocate_what_they_would_without_it(lines: Any) -> None:
    """Forward and backward in several threads take the same memory with the mirror."""
    code = """
        import threading
        # no products: whether a thread finds the cuBLAS handle of the one before it is a matter of time
        model = torch.nn.Sequential(*(torch.nn.LayerNorm(256) for _ in range(4)), torch.nn.GELU()).cuda()
        peaks = []
        def work():
            x = torch.randn(64, 256, device="cuda")
            mask = torch.arange(64, device="cuda") < 40
            model(x * mask[:, None]).sum().backward()
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        result = peaks
        """
    assert lines(code) == lines(code, mirrored=False)


def test_data_parallel_replicas_have_the_mirror(child: Child) -> None:
    """DataParallel's replicas run in threads on two GPUs: lengths and masks are right in each."""

    def body():  # type: ignore[no-untyped-def]
        import torch

        seen = []

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)

            def forward(self, x, lengths):  # type: ignore[no-untyped-def]
                longest = (lengths + 1).max().item()
                mask = torch.arange(x.size(1), device=x.device)[None] < lengths[:, None]
                kept = self.layer(x)[mask]
                seen.append([longest, list(kept.shape)])
                return self.layer(x).sum(1)

        net = torch.nn.DataParallel(Net().cuda(), device_ids=[0, 1])
        lengths = torch.tensor([2, 3, 4, 5])
        net(torch.randn(4, 6, 8).cuda(), lengths.cuda()).sum().backward()
        return sorted(seen)

    assert child(body, gpu_count=2, observe=True, steps=None) == [[4, [5, 8]], [6, [9, 8]]]


def test_python_backward_has_the_mirror(lines: Any) -> None:
    """A torch.autograd.Function's backward reads masks and lengths that are known, however backward is called."""
    assert lines(
        """
        seen = []
        class Keep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, mask):
                ctx.save_for_backward(mask)
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                (mask,) = ctx.saved_tensors
                seen.append([mask.sum().item(), list(grad[mask].shape), mask.nonzero().size(0)])
                return grad * 2, None
        mask = torch.arange(10, device="cuda") < 7
        for backward in (torch.Tensor.backward, torch.autograd.backward):
            x = torch.randn(10, 3, device="cuda", requires_grad=True)
            backward(Keep.apply(x, mask).sum())
        result = [seen, unknown]
        """
    ) == [[[7, [7, 3], 7]] * 2, []]


def test_function_transforms(lines: Any) -> None:
    """vmap, grad, jacrev, jvp and functional_call run with the mirror, and what they read is right."""
    assert lines(
        """
        from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
        r = result = {}
        mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], device="cuda")
        r["vmap"] = vmap(lambda row: (row * 2).sum())(mask).tolist()
        r["nested"] = vmap(vmap(lambda n: n + 1))(mask).sum().item()
        x = torch.randn(4, 8, device="cuda")
        layer = torch.nn.Linear(8, 8).cuda()
        parameters = dict(layer.named_parameters())
        def loss(p, row):
            return functional_call(layer, p, (row,)).sum()
        r["per sample"] = list(vmap(grad(loss), in_dims=(None, 0))(parameters, x)["weight"].shape)
        r["grad"] = list(grad(lambda a: a[mask[0].bool()].sum())(x).shape)
        r["jacrev"] = list(jacrev(lambda a: a.sum(-1))(x).shape)
        r["jvp"] = list(jvp(torch.sin, (x,), (x,))[1].shape)
        r["vjp"] = list(vjp(torch.sin, x)[1](x)[0].shape)
        r["after"] = mask.sum().item()
        r["unknown"] = unknown
        """
    ) == {
        "vmap": [6, 2], "nested": 12, "per sample": [4, 8, 8], "grad": [4, 8], "jacrev": [4, 4, 8], "jvp": [4, 8],
        "vjp": [4, 8], "after": 4, "unknown": [],
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_and_what_is_around_it(lines: Any, backend: str) -> None:
    """Inside compiled code the mirror is off; before, in a graph break and after it lengths and masks are right."""
    assert lines(
        f"""
        seen = []
        @torch.compiler.disable
        def broken_out(mask):
            seen.append(mask.sum().item())
        @torch.compile(backend={backend!r})
        def f(x, mask):
            y = x.sin()
            broken_out(mask)
            return (y * mask[:, None]).sum()
        mask = torch.arange(10, device="cuda") < 7
        seen.append(mask.sum().item())
        x = torch.randn(10, 3, device="cuda", requires_grad=True)
        for _ in range(3):
            f(x, mask).backward()
        seen.append(mask.nonzero().size(0))
        result = [seen, unknown]
        """
    ) == [[7] * 5, []]


def test_graphs(lines: Any) -> None:
    """Capture runs as without the mirror; what a captured kernel would write is not taken for known."""
    assert lines(
        """
        x = torch.zeros(4, dtype=torch.long, device="cuda")
        y = torch.zeros(64, 64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = y @ y
            x.add_(1)
            w = x * 2
        graph.replay()
        graph.replay()
        reads = [x.sum().item(), w.sum().item()]
        result = [reads, len(unknown), torch.arange(4, device="cuda").sum().item()]
        """
    ) == [[0, 0], 2, 6]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers(child: Child, method: str) -> None:
    """Workers, however they are started, make batches as without the mirror, and the training reads them right."""

    def body(method):  # type: ignore[no-untyped-def]
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.arange(64).view(16, 4), torch.arange(16) % 3)
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=method, pin_memory=True)
        found = []
        for numbers, lengths in loader:
            numbers, lengths = numbers.cuda(non_blocking=True), lengths.cuda(non_blocking=True)
            found.append([numbers.max().item(), lengths.sum().item(), list(numbers[lengths > 0].shape)])
        return found

    expected = [[31, 7, [5, 4]], [63, 8, [5, 4]]]
    assert child(body, method, observe=True, steps=None) == expected


def test_fsdp2_hooks(lines: Any, version: tuple[int, ...]) -> None:
    """Under fully_shard masks and counts are right in forward, and memory is what it is without the mirror."""
    if version < (2, 6):
        pytest.skip("fully_shard is public from torch 2.6 on")
    code = """
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        seen = []
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(256, 256)
            def forward(self, x, mask):
                seen.append([mask.sum().item(), (mask.cumsum(0) - 1).max().item()])
                return x + self.layer(x) * mask[:, None]
        model = torch.nn.Sequential()
        blocks = [Block().cuda() for _ in range(3)]
        for block in blocks:
            fully_shard(block)
        optimizer = torch.optim.AdamW([p for b in blocks for p in b.parameters()])
        mask = torch.arange(64, device="cuda") < 40
        for _ in range(2):
            x = torch.randn(64, 256, device="cuda")
            for block in blocks:
                x = block(x, mask)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        result = [seen, [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]]
        """
    seen, peaks = lines(code)
    assert seen == [[40, 39]] * 6
    assert peaks == lines(code, mirrored=False)[1]
