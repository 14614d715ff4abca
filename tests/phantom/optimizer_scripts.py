"""Scripts that train a small model with an optimizer, for the tests of the optimizer techniques."""

from __future__ import annotations

import json
from typing import Any

#: Eight layers of 1 MiB elements each in float32; biases, so that there are small tensors too.
MODEL = """
import sys, torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
N, LAYERS, BATCH = (1024, 8, 8) if device == "cuda" else (64, 3, 4)  # 4,096 weights: the least for 8 bits
model = nn.Sequential(*[nn.Sequential(nn.Linear(N, N), nn.Tanh()) for _ in range(LAYERS)]).to(device)
"""

LOOP = """
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
for step in range(STEPS):
    x = torch.randn(BATCH, N).to(device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
if device == "cpu":
    leave(model)
"""

WEIGHTS = 8 * 1024 * 1024
BIASES = 8 * 1024


def training(
    optimizer: str = "torch.optim.AdamW(model.parameters(), lr=1e-2)", steps: int = 3, loop: str = LOOP
) -> str:
    """Return a script that trains with this optimizer."""
    return f"{MODEL}\nSTEPS = {steps}\noptimizer = {optimizer}\n{loop}"


def states(trial: Any) -> int:
    """Return the bytes of optimizer states that a run had at its peak."""
    return trial.measurement.breakdown.optimizer_state_bytes


def farthest(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Return the largest difference between two trained models' parameters."""
    assert one.keys() == other.keys(), json.dumps([list(one), list(other)])
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))


def resumed(optimizer: str = "torch.optim.AdamW(model.parameters(), lr=1e-2)") -> str:
    """Return a script that saves and loads its optimizer after two steps, and sets rates as numbers."""
    return f"""{MODEL}
import io
def steps(optimizer):
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.zero_grad()
        model(torch.randn(BATCH, N).to(device)).square().mean().backward()
        optimizer.step()
def build():
    return {optimizer}
optimizer = build()
steps(optimizer)
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
saved = torch.load(file, weights_only=False)
optimizer.zero_grad()
optimizer.load_state_dict(saved)
steps(optimizer)
leave(model)
"""
