"""A GPT of 1,009 billion parameters under FSDP2, one rank of 1,024: how long two steps take, how much of that is ours.

    python benchmarks/trillion.py            (two to three minutes; needs the CUDA build of torch, no GPU)
    oomproof run --world-size 1024 --gpu h200-141gb --steps 2 -- benchmarks/trillion.py --train

The model is made on the meta device, so that nothing but the shards ever has memory. CPU time is compared, of runs made
one after another: with observation, and without it. Where `perf` is installed, the share of the stand-in libraries is
sampled too.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oomproof.gpus import get_gpu
from oomproof.phantom import launch

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 25_600, 128, 200, 51_200, 2_048


def train(steps: int) -> None:
    """Train two steps, as a script of a user's would."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            parts = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    with torch.device("meta"):
        model = GPT()
    if torch.distributed.get_rank() == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        started = time.perf_counter()
        ids = torch.randint(0, VOCABULARY, (1, LENGTH), device="cuda")
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: {time.perf_counter() - started:.1f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"host memory of the process: {peak / 2**30:.2f} GiB", flush=True)


def measure(observe: bool, prefix: tuple[str, ...] = ()) -> tuple[float, float, int]:
    """Return wall and CPU seconds and the most host memory, in bytes, of two steps in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_folder, tempfile.TemporaryDirectory() as messages:
        place = launch.World(size=1024, rank=0, local_size=8, folder=Path(messages))
        settings = launch.Settings(gpu=get_gpu("h200-141gb"), gpu_count=8, observe=observe, steps=2, world=place)
        process = launch.start([*prefix, sys.executable, __file__, "--train"], settings, Path(run_folder))
        if process.wait():
            sys.exit("the training failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, seconds, after.ru_maxrss * 1024


def main() -> None:
    """Print times, host memory and our share."""
    bare = measure(observe=False)
    observed = measure(observe=True)
    print(f"two steps, whole process: {observed[0]:.0f} s, {observed[2] / 2**30:.2f} GiB of host memory")
    print(f"observation: {observed[1] / bare[1] - 1:+.1%} CPU time ({observed[1]:.1f} s against {bare[1]:.1f} s)")
    if shutil.which("perf") is None:
        print("stand-ins: not sampled, perf is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        measure(True, ("perf", "record", "-q", "-e", "cpu-clock", "-F", "199", "-o", data))
        command = ["perf", "report", "-i", data, "--sort", "dso", "-t", ";", "--stdio"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = ("liboomproof", "libcuda", "libcudart", "libcublas", "libcudnn", "libnccl", "libnvidia-ml")
    rows = [line.split(";") for line in report.splitlines() if ";" in line]
    share = sum(float(row[0].strip(" %")) for row in rows if row[1].strip().startswith(ours))
    print(f"stand-ins: {share:.2f} % of the samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    if options.train:
        train(options.steps)
    else:
        main()
