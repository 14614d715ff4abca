"""DeepSpeed's ZeRO stages 1, 2 and 3 on one model, as rank 0 of 64, beside the closed formulas of the ZeRO paper.

    python benchmarks/zero.py          (needs deepspeed beside the CUDA build of torch; no GPU)

With P parameters in bfloat16 and AdamW over N ranks, a rank holds 2 P bytes of parameters, 2 P of gradients and 12 P of
optimizer state (a float32 copy and two moments). Stage 1 shards the state, stage 2 the gradients too, stage 3 all
(Rajbhandari et al., ZeRO, 2020, figure 1).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import oomproof

RANKS = 64
WIDTH, LAYERS, BUCKET = 4096, 24, 16_777_216
WORKSPACES = 2 * 33_554_432  # cuBLAS on Hopper: one for the forward thread, one for autograd's

SCRIPT = f"""
import sys
import deepspeed
import torch
from torch import nn

stage = int(sys.argv[1])
deepspeed.init_distributed()
settings = {{
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {{"enabled": True}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4, "torch_adam": True}}}},
    "zero_optimization": {{"stage": stage, "contiguous_gradients": True, "reduce_bucket_size": {BUCKET},
                          "stage3_prefetch_bucket_size": {BUCKET}, "stage3_param_persistence_threshold": 0}},
}}
with deepspeed.zero.Init(enabled=stage == 3, config_dict_or_path=settings):
    model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for _ in range(3):
    loss = engine(torch.randn(1, {WIDTH}, device="cuda", dtype=torch.bfloat16)).sum()
    engine.backward(loss)
    engine.step()
    print("between steps:", torch.cuda.memory_allocated(), flush=True)
"""


def main() -> None:
    """Measure each stage and print it beside its formula."""
    parameters = LAYERS * WIDTH * WIDTH
    print(f"{parameters:,} parameters, {RANKS} ranks; bytes that rank 0 holds between steps")
    for stage in (1, 2, 3):
        # stage 3 keeps its shards of the gradients, and the bucket through which it reduces them
        formula = 12 * parameters // RANKS + (2 * parameters if stage < 3 else 4 * parameters // RANKS)
        buffers = WORKSPACES + (2 * BUCKET if stage == 3 else 0)
        held, peak = measure(stage)
        states = held - buffers
        print(
            f"stage {stage}: {states:>13,} states  {formula:>13,} by formula  {states / formula - 1:+.4%}"
            f"   (+ {buffers:,} cuBLAS workspaces and bucket; peak {peak:,})"
        )


def measure(stage: int) -> tuple[int, int]:
    """Return the bytes held after the last step and at the peak."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "out.txt", "w+") as output:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        found = oomproof.run(
            ["python", str(script), str(stage)],
            gpu="h100-80gb",
            world_size=RANKS,
            steps=None,
            quiet=False,
            stdout=output,
        )
        output.seek(0)
        held = re.findall(r"between steps: (\d+)", output.read())
    return int(held[-1]), found.peak.allocated_bytes


if __name__ == "__main__":
    main()
