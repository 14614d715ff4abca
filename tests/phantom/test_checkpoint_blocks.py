"""plan/techniques/checkpoint_blocks.py: less memory, the same bits."""

from __future__ import annotations

from pathlib import Path

from planning import measured, script, trained

from oomproof.plan.technique import Change

#: Blocks with dropout and batch norm: random numbers and running statistics must come out the same.
CONVOLUTIONS = """
import sys, torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(n, n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU(), nn.Dropout(0.2))
    def forward(self, x):
        return x + self.body(x)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*[Block(8) for _ in range(6)]), nn.Flatten(), nn.LazyLinear(5))
model(torch.randn(1, 3, 34, 34))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    x, y = torch.randn(16, 3, 34, 34).to(device), torch.randint(5, (16,)).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if device == "cpu":
    leave(model)
"""


def test_it_needs_less_memory_and_says_where(tmp_path: Path) -> None:
    program = script(tmp_path, CONVOLUTIONS)
    plain, changed = measured(program), measured(program, Change("checkpoint-blocks"))
    assert changed.measurement.fits
    assert changed.measurement.demand.allocated_bytes < 0.7 * plain.measurement.demand.allocated_bytes
    assert changed.said == [
        {
            "technique": "checkpoint-blocks",
            "what": "6 of 6 Block are computed again in the backward pass",
            "where": "1",
        }
    ]


def test_parameters_and_running_statistics_are_the_same_bits(tmp_path: Path) -> None:
    program = script(tmp_path, CONVOLUTIONS)
    plain, nothing = trained(program)
    changed, said = trained(program, Change("checkpoint-blocks"))
    assert not nothing
    assert said
    assert changed == plain
