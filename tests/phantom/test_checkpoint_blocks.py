"""plan/techniques/checkpoint_blocks.py: less memory, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import measured, script, trained

from oomproof.plan.technique import Change

UNIT = 256 * 64 * 32 * 32 * 4  # bytes of what lies between two blocks on the GPU

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
channels, images = (64, 256) if device == "cuda" else (8, 16)  # on the GPU activations are to outweigh workspaces
blocks = nn.Sequential(*[Block(channels) for _ in range(6)])
model = nn.Sequential(nn.Conv2d(3, channels, 3), blocks, nn.Flatten(), nn.LazyLinear(5))
with torch.no_grad():
    model(torch.randn(1, 3, 34, 34))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    x, y = torch.randn(images, 3, 34, 34).to(device), torch.randint(5, (images,)).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if device == "cpu":
    leave(model)
"""


def test_the_peak_falls_by_what_blocks_no_longer_keep(tmp_path: Path) -> None:
    """Besides its input a block keeps the convolution's output, ReLU's and a mask of bytes: all but one let go."""
    program = script(tmp_path, CONVOLUTIONS)
    plain, changed = measured(program), measured(program, Change("checkpoint-blocks"))
    assert changed.measurement.fits
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved == pytest.approx(5 * 2.25 * UNIT, rel=0.01)
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
