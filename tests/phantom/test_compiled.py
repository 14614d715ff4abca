"""Compiled code: torch.compile, CUDA graphs and their pools, Triton, and programs with kernels of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child import PYTHON, Child, has_module

from oomproof.measure.measurement import Measurement

Measure = Callable[..., Measurement]
MIB = 1 << 20


@pytest.fixture
def triton() -> None:
    """Skip where the tested interpreter has no Triton."""
    if not has_module("triton"):
        pytest.skip("Triton is not installed beside the tested torch")


# ---- torch.compile -------------------------------------------------------------------------------------------------


def compiled_steps(mode, budget=1.0, checkpointed=False):
    """Return the peaks of three training steps of a small network compiled in this mode."""
    import torch
    import torch._functorch.config
    import torch._inductor.config
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 128)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)
            )

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = x + (checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x))
            return nn.functional.cross_entropy((x @ self.table.weight.T).flatten(0, 1), ids.flatten())

    torch._inductor.config.compile_threads = 1  # helper processes cost more than they save here
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = budget
    net = Net().cuda()
    step = torch.compile(net, mode=mode)
    optimizer = torch.optim.AdamW(net.parameters())
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step(torch.randint(0, 1000, (8, 128)).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    return peaks


def test_observing_changes_nothing_in_compiled_code(child: Child, triton: None, version: tuple[int, ...]) -> None:
    """The peaks of each step are the same with and without observer, in each mode, and so from run to run."""

    def body(modes):
        return {name: compiled_steps(*how) for name, how in modes.items()}

    modes = {
        "default": (None,), "graphs": ("reduce-overhead",), "budget": (None, 0.2), "checkpoint": (None, 1.0, True),
    }  # fmt: skip

    def peaks(**observed: Any) -> dict[str, list[int]]:
        options: dict[str, Any] = {"uses": [compiled_steps], "gpu": "a100-80gb", "steps": None, **observed}
        # torch 2.4's compiled code holds the parameters, and stacks that are recorded with a block hold the code: there
        # the next model in one process finds those of the last
        processes = [modes] if version >= (2, 5) else [{name: how} for name, how in modes.items()]
        return {name: found for part in processes for name, found in child(body, part, **options).items()}

    if version < (2, 5):
        del modes["budget"]  # what torch 2.4 recomputes to keep to a budget varies from run to run, unobserved too
    bare = peaks(observe=False)
    assert "budget" not in bare or bare["budget"][4] < bare["default"][4], "recomputation keeps less"
    assert bare["graphs"][4] < bare["graphs"][0], "a replayed graph allocates nothing"
    for values in ("mirror", "keep"):
        assert peaks(observe=True, values=values) == bare


def test_a_compiled_model_is_reported(measure: Measure, triton: None) -> None:
    """Steps, phase, module and parts of a compiled model's peak are told; generated code has no path in the report."""

    def body():
        compiled_steps(None)

    found = measure(body, uses=[compiled_steps], gpu="a100-80gb")
    assert (found.verdict, found.steps, found.value_reads) == ("fits", 3, ())
    assert found.peak.phase in ("forward", "backward", "optimizer")
    assert found.breakdown is not None
    assert found.breakdown.total_bytes() == found.peak.allocated_bytes
    assert found.breakdown.activation_bytes > 4 * MIB, "the logits"
    assert found.breakdown.parameter_bytes == 4 * sum((1000 * 128, 2 * (2 * 128 + 128 * 512 * 2 + 512 + 128)))
    assert "oomproof-" not in " ".join(found.peak.stack)
    measured_again = measure(body, uses=[compiled_steps], gpu="a100-80gb")
    assert measured_again.peak == found.peak, "what one run compiled changes nothing for the next"


@pytest.mark.parametrize("observed", [{"observe": False}, {"observe": True, "values": "keep"}, {"observe": True}])
def test_constants_are_folded_as_on_a_gpu(child: Child, triton: None, observed: dict[str, Any]) -> None:
    """Inductor reads a graph's constants back from the GPU; it gets what they are, not zeros or what lay there."""

    def body():
        import torch
        import torch._inductor.config
        from torch._inductor.fx_passes import joint_graph

        torch._inductor.config.compile_threads = 1
        stale = torch.tensor([7.0] * 128).cuda()
        del stale
        folder = joint_graph.UniformValueConstantFolder
        replace, found = folder.add_node_replacement, []

        def note(self, node, tensor):
            replace(self, node, tensor)
            found.append(self.node_replacements[node])

        folder.add_node_replacement = note

        @torch.compile
        def shifted(x):
            shape = (256, 256)
            lifted = x * torch.ones(shape, device="cuda") + torch.full(shape, -3.0, device="cuda").abs()
            return lifted + torch.zeros(shape, device="cuda")

        shifted(torch.zeros(256, 256, device="cuda"))
        return sorted(found)

    assert child(body, steps=None, **observed) == [-3.0, 0.0, 1.0, 3.0]


def test_choices_by_time_are_told(measure: Measure, triton: None) -> None:
    """Where Inductor timed products with and without padding the report says that a GPU may choose otherwise."""

    def body():
        import torch
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1
        net = torch.nn.Linear(768, 5001, bias=False, device="cuda", dtype=torch.bfloat16)
        compiled = torch.compile(net)
        x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()

    found = measure(body, gpu="a100-80gb")
    assert any("padding" in note for note in found.notes)


TUNED = """
import json, torch, triton, triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (512, 128, 1024) for warps in (4, 2)]

@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)

x = torch.ones(1 << 20, device="cuda")
out = torch.empty_like(x)
add[lambda meta: (triton.cdiv(1 << 20, meta["BLOCK"]),)](x, x, out, 1 << 20)
best = add.best_config
print("result: " + json.dumps([best.kwargs["BLOCK"], best.num_warps, torch.cuda.max_memory_allocated()]))
"""


def test_autotuning_takes_the_first_of_equals(child: Child, triton: None) -> None:
    """All kernels take the same time, so the choice is no matter of noise; the timing's own buffer is counted."""
    script = child.folder / "tuned.py"
    script.write_text(TUNED)
    ended = child.run_script(script)
    block, warps, peak = ended.result
    assert (block, warps) == (512, 4), ended.stderr
    assert peak - 8 * MIB in (256 * MIB, 256_000_000), "the second with Triton 3.0"


# ---- CUDA graphs ---------------------------------------------------------------------------------------------------


def test_a_stream_joins_a_capture(child: Child) -> None:
    """A stream that waits for a captured one is captured too, and what it allocates is the graph's."""

    def body():
        import torch

        side = torch.cuda.Stream()
        x = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            before = torch.cuda.memory_allocated()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                inside = torch.cuda.is_current_stream_capturing()
                z = torch.empty(8 << 20, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.stream(side):
            after = torch.cuda.is_current_stream_capturing()
        where = [s["segment_pool_id"] for s in torch.cuda.memory_snapshot() if s["address"] == z.data_ptr()]
        return [inside, after, where == [graph.pool()], torch.cuda.memory_allocated() - before, y.numel()]

    assert child(body) == [True, False, True, 32 * MIB, 1 << 20]


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_pools_are_counted_and_given_back(child: Child, settings: str) -> None:
    """The pools of a graph and of the script's own keep their memory until they go; two graphs can share one."""

    def body():
        import torch

        def held():
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free]

        x = torch.zeros(10 << 20, dtype=torch.uint8, device="cuda")
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            x + 1
        first.reset()  # up to torch 2.11 the first capture leaves the generator's state on the device
        states = [held()]
        with torch.cuda.graph(first):
            y = x + 1
            z = y * 2
        del y
        with torch.cuda.graph(second, pool=first.pool()):
            w = x * 3
        states.append(held())
        for _ in range(3):
            first.replay()
            second.replay()
        states.append(held())
        del z, w
        first.reset()
        second.reset()
        states.append(held())
        if hasattr(torch.cuda, "MemPool"):  # from torch 2.5 on
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                kept = torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
            del kept
            states.append(held()[:1])
            del pool
            states.append(held())
        return states

    env = {"PYTORCH_CUDA_ALLOC_CONF": settings}
    start, captured, replayed, gone, *own_pool = child(body, env=env)
    assert captured == replayed
    assert 20 * MIB <= captured[0] - start[0] <= 30 * MIB
    assert captured[2] - start[2] == captured[1] - start[1] >= captured[0] - start[0]
    assert gone == start
    assert own_pool in ([], [start[:1], start])


def test_what_the_driver_keeps_for_a_graph_is_told(measure: Measure) -> None:
    """The driver's own memory for a graph is not public, and the report says so."""

    def body():
        import torch

        x = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        graph.replay()

    assert any("instantiated graphs" in note for note in measure(body).notes)


# ---- programs with CUDA code of their own ---------------------------------------------------------------------------


def managed(size):
    """Take ``size`` bytes of managed memory beside PyTorch, and say what CUDA says of it."""
    import ctypes

    import torch

    torch.zeros(1, device="cuda")
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    runtime = ctypes.CDLL(name)
    before = torch.cuda.mem_get_info()[0]
    pointer = ctypes.c_void_p()
    made = runtime.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1)
    attributes = (ctypes.c_int32 * 64)()
    asked = runtime.cudaPointerGetAttributes(attributes, pointer)
    taken = before - torch.cuda.mem_get_info()[0]
    ctypes.memset(pointer, 5, 4096)
    return [made, asked, attributes[0], taken, runtime.cudaFree(pointer)]


def test_managed_memory_is_not_the_devices(child: Child, measure: Measure) -> None:
    """Managed memory is managed to CUDA, takes nothing of the GPU's memory, can be freed, and is told in a note."""
    memory_type_managed = 3
    assert child(managed, 64 * MIB) == [0, 0, memory_type_managed, 0, 0]

    def body():
        managed(3 << 30)

    found = measure(body, uses=[managed])
    assert any(note.startswith("managed memory: 3.00 GiB") for note in found.notes)
    assert found.peak.device_bytes == found.peak.reserved_bytes + found.outside.context_bytes
    assert not any("pinned" in note for note in found.notes)


def test_code_for_a_default_stream_per_thread(child: Child) -> None:
    """Functions compiled for one default stream a thread, and copies to device variables, do what they say."""

    def body():
        import ctypes

        import torch

        x = torch.zeros(4, dtype=torch.int64, device="cuda")
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        size = ctypes.c_size_t(32)
        sent, back = (ctypes.c_int64 * 4)(1, 2, 3, 4), (ctypes.c_int64 * 4)()
        there = ctypes.c_void_p(x.data_ptr())
        runtime.cudaMemcpyAsync_ptsz(there, sent, size, 1, None)
        runtime.cudaMemcpy_ptds(back, there, size, 2)
        variable = ctypes.create_string_buffer(8)  # what nvcc makes of a __device__ variable is a symbol like this
        runtime.__getattr__("__cudaRegisterVar")(None, variable, variable, b"v", 0, ctypes.c_size_t(64), 0, 0)
        again, whole = (ctypes.c_int64 * 4)(), ctypes.c_size_t()
        runtime.cudaMemcpyToSymbol(variable, sent, size, ctypes.c_size_t(8), 1)
        runtime.cudaMemcpyFromSymbol(again, variable, size, ctypes.c_size_t(8), 2)
        runtime.cudaGetSymbolSize(ctypes.byref(whole), variable)
        past = runtime.cudaMemcpyToSymbol(variable, sent, size, ctypes.c_size_t(40), 1)
        return [list(back), list(again), whole.value, past]

    invalid_value = 1
    assert child(body) == [[1, 2, 3, 4], [1, 2, 3, 4], 64, invalid_value]


def test_a_programs_own_memory_pool(child: Child) -> None:
    """A pool that a program makes itself is counted on the device and runs out."""

    def body():
        import ctypes

        import torch

        torch.zeros(1, device="cuda")
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        properties = (ctypes.c_int32 * 64)(1, 0, 1, 0)  # pinned, no handle to share, on device 0
        pool, pointer = ctypes.c_void_p(), ctypes.c_void_p()
        before = torch.cuda.mem_get_info()[0]
        made = runtime.cudaMemPoolCreate(ctypes.byref(pool), properties)
        take = runtime.cudaMallocFromPoolAsync
        taken = take(ctypes.byref(pointer), ctypes.c_size_t(64 << 20), pool, None)
        held = before - torch.cuda.mem_get_info()[0]
        much = take(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 40), pool, None)
        return [made, taken, held, much, runtime.cudaFreeAsync(pointer, None), before - torch.cuda.mem_get_info()[0]]

    out_of_memory = 2
    assert child(body) == [0, 0, 64 * MIB, out_of_memory, 0, 0]


OWN_CODE = r"""
#include <cuda_runtime.h>
__constant__ float scale;
__global__ void twice(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x] * scale; }
extern "C" int run(long bytes, float *back) {
    void *taken = nullptr;
    float value = 3.5f;
    cudaError_t error = cudaMalloc(&taken, bytes);
    if (error) return error;
    cudaMemcpyToSymbol(scale, &value, sizeof value);
    cudaMemcpyFromSymbol(back, scale, sizeof value);
    twice<<<1, 32>>>((float *)taken, (float *)taken);
    if ((error = cudaGetLastError())) return error;
    return cudaDeviceSynchronize();
}
"""


@pytest.mark.parametrize("stream", ["legacy", "per-thread"])
def test_code_that_nvcc_compiled(child: Child, stream: str) -> None:
    """A library of nvcc's takes memory, launches kernels and keeps its variables, beside PyTorch."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on PATH")
    ours = re.search(r"release (\d+)", subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)
    code = "import torch; print(torch.version.cuda.split('.')[0])"
    torchs = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True).stdout.strip()
    if ours is None or ours[1] != torchs:
        pytest.skip(f"nvcc is not of CUDA {torchs}")
    source, library = child.folder / "own.cu", child.folder / "own.so"
    source.write_text(OWN_CODE)
    options = ["-cudart", "shared", "-shared", "-Xcompiler", "-fPIC", "-default-stream", stream]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)

    def body(library):
        import ctypes

        import torch

        torch.zeros(1, device="cuda")
        own = ctypes.CDLL(library)
        free, back = torch.cuda.mem_get_info()[0], ctypes.c_float()
        ended = own.run(ctypes.c_long(100 << 20), ctypes.byref(back))
        much = own.run(ctypes.c_long(1 << 40), ctypes.byref(back))
        return [ended, free - torch.cuda.mem_get_info()[0], back.value, much]

    out_of_memory = 2
    assert child(body, str(library)) == [0, 100 * MIB, 3.5, out_of_memory]


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    [("AdamW8bit", 2 + 2 * 4 / 256), ("AdamW32bit", 8.0), ("PagedAdamW8bit", 2 * 4 / 256), ("PagedAdamW32bit", 0.0)],
)
def test_bitsandbytes_state(child: Child, name: str, state_bytes: float) -> None:
    """Its 8-bit state takes a byte a moment and a float for each 256; paged state is not on the device."""
    if not has_module("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed beside the tested torch")

    def body(name):
        import bitsandbytes
        import torch

        weight = torch.nn.Parameter(torch.zeros(4096, 4096, device="cuda"))
        optimizer = getattr(bitsandbytes.optim, name)([weight])
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        before = torch.cuda.memory_allocated() - 2 * weight.nbytes
        return before / weight.numel()

    assert child(body, name, gpu="a100-80gb") == pytest.approx(state_bytes, abs=1e-3)


def test_a_wheels_compiled_operators(child: Child) -> None:
    """xformers' own attention kernels run and allocate what their shapes say."""
    if not has_module("xformers"):
        pytest.skip("xformers is not installed beside the tested torch")

    def body():
        import torch
        from xformers import ops

        q = torch.zeros(4, 2048, 16, 64, device="cuda", dtype=torch.bfloat16)
        before = torch.cuda.memory_allocated()
        out = ops.memory_efficient_attention(q, q, q, op=ops.fmha.MemoryEfficientAttentionCutlassOp)
        return [torch.cuda.memory_allocated() - before, out.nbytes]

    taken, expected = child(body, gpu="a100-80gb")
    assert taken == expected


def test_jiterated_and_scripted_code(child: Child, tmp_path: Path) -> None:
    """Kernels that PyTorch compiles with NVRTC while it runs allocate their results, and the fuser fuses."""

    def body():
        import warnings

        import torch

        warnings.simplefilter("ignore")
        x = torch.ones(1 << 20, device="cuda")
        start = torch.cuda.memory_allocated()
        made = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T a, T b) { return a * b; }")(x, x)
        also = torch.special.i1e(x)
        jiterated = torch.cuda.memory_allocated() - start

        @torch.jit.script
        def f(a, b):
            c = a * b + a
            return torch.tanh((torch.relu(c) - b) * c)

        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            scripted = f(x, made)
        fused = torch.cuda.max_memory_allocated() - before
        return [jiterated, fused, scripted.numel(), also.numel(), "TensorExpr" in str(f.graph_for(x, made))]

    # the last result lives until the next is there; a, b and c of a fused function need nothing
    assert child(body) == [8 * MIB, 4 * MIB, 1 << 20, 1 << 20, True]
