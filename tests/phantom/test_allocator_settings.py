"""Each setting of PyTorch's allocator does on the phantom what it is documented to do."""

from __future__ import annotations

import pytest
from child import Child

MIB = 1 << 20


def setting(text: str) -> dict[str, str]:
    """Return the environment for an allocator setting; torch reads the old name in every version."""
    return {"PYTORCH_CUDA_ALLOC_CONF": text}


def _fragment():
    """Grow a tensor step by step, as attention over longer and longer sequences does."""
    import torch

    before = torch.cuda.mem_get_info()[0]
    for megabytes in (30, 50, 70, 90):
        x = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
        del x
    found = [torch.cuda.max_memory_reserved(), before - torch.cuda.mem_get_info()[0]]
    torch.cuda.empty_cache()
    return [*found, torch.cuda.memory_reserved(), before - torch.cuda.mem_get_info()[0]]


def test_expandable_segments_grow_in_place(child: Child) -> None:
    """One segment grows to the largest size, where separate segments add up."""
    plain = child(_fragment)
    assert plain == [240 * MIB, 240 * MIB, 0, 0]
    grown = child(_fragment, env=setting("expandable_segments:True"))
    reserved, on_device, after, device_after = grown
    assert 90 * MIB <= reserved <= 100 * MIB
    assert on_device == reserved
    assert after == device_after == 0


def test_expandable_segments_run_out_too(child: Child) -> None:
    """With expandable segments an allocation past the memory is an OutOfMemoryError as well."""

    def body():
        import torch

        torch.ones(10, device="cuda")
        try:
            torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            return [str(error)[:51], x.numel(), torch.cuda.memory_reserved() < 2 << 30]

    assert child(body, env=setting("expandable_segments:True")) == [
        "CUDA out of memory. Tried to allocate 20.00 GiB. GP", 1 << 30, True,
    ]  # fmt: skip


def test_max_split_size(child: Child) -> None:
    """A cached block above the limit is not split for a smaller request."""

    def body():
        import torch

        x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        del x
        y = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        return [y.numel(), torch.cuda.memory_reserved()]

    assert child(body) == [40 * MIB, 100 * MIB]
    assert child(body, env=setting("max_split_size_mb:50")) == [40 * MIB, 140 * MIB]


def test_garbage_collection_threshold(child: Child) -> None:
    """Above the threshold cached segments are freed before a new one is made."""

    def body():
        import torch

        torch.cuda.set_per_process_memory_fraction(0.5)
        limit = int(torch.cuda.get_device_properties(0).total_memory * 0.5)
        x = torch.empty(int(limit * 0.45), dtype=torch.uint8, device="cuda")
        del x
        y = torch.empty(int(limit * 0.5), dtype=torch.uint8, device="cuda")
        del y
        z = torch.empty(int(limit * 0.2), dtype=torch.uint8, device="cuda")
        w = torch.empty(int(limit * 0.4), dtype=torch.uint8, device="cuda")
        return [
            torch.cuda.memory_reserved() / limit,
            torch.cuda.memory_stats()["num_alloc_retries"],
            w.numel() + z.numel() > 0,
        ]

    plain = child(body)
    collected = child(body, env=setting("garbage_collection_threshold:0.4"))
    assert collected[0] <= plain[0]
    assert collected[1] <= plain[1]
    assert collected[2]


def test_roundup_power2_divisions(child: Child) -> None:
    """Sizes are rounded up to the next of the power of two's divisions."""

    def body():
        import torch

        x = torch.empty(1200 << 10, dtype=torch.uint8, device="cuda")
        return [x.numel(), torch.cuda.memory_allocated()]

    assert child(body) == [1200 << 10, 1200 << 10]
    assert child(body, env=setting("roundup_power2_divisions:4")) == [1200 << 10, 1280 << 10]


def test_cuda_malloc_async(child: Child) -> None:
    """The driver's pool counts what is used, runs out, and gives memory back."""

    def body():
        import torch

        backend = torch.cuda.get_allocator_backend()
        x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        held = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
        try:
            torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
            ran_out = False
        except torch.OutOfMemoryError:
            ran_out = True
        net = torch.nn.Linear(512, 512).cuda()
        net(torch.zeros(4, 512, device="cuda")).sum().backward()
        del x, net
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return [
            backend,
            held,
            ran_out,
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_allocated() > 100 << 20,
        ]

    backend, held, ran_out, after, peak = child(body, env=setting("backend:cudaMallocAsync"))
    assert backend == "cudaMallocAsync"
    assert held[0] == 100 * MIB <= held[1]
    assert ran_out
    assert after < 100 * MIB
    assert peak


def test_caching_can_be_switched_off(child: Child) -> None:
    """PYTORCH_NO_CUDA_MEMORY_CACHING sends each request to the driver."""

    def body():
        import torch

        before = torch.cuda.mem_get_info()[0]
        x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        held = before - torch.cuda.mem_get_info()[0]
        del x
        return [held, before - torch.cuda.mem_get_info()[0]]

    assert child(body, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}) == [100 * MIB, 0]


@pytest.mark.parametrize("text", ["max_split_size_mb:not-a-number", "no_such_setting:1"])
def test_a_wrong_setting_is_pytorchs_own_error(child: Child, text: str) -> None:
    """PyTorch itself refuses a setting that it does not know."""

    def body():
        import torch

        torch.empty(1, device="cuda")

    ended = child.run(body, env=setting(text))
    assert ended.code == 1
    assert "torch._C._cuda_init()" in ended.stderr or text.split(":")[0] in ended.stderr
