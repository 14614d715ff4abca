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
N, LAYERS, BATCH = (1024, 8, 8) if device == "cuda" else (32, 3, 4)
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
