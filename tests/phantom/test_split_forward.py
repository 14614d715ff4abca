"""plan/techniques/split_forward.py: the loss sees the batch, a slice's activations exist at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import measured, refused, script, trained

from oomproof.plan.technique import Change

UNIT = 8192 * 512 * 4

#: Contrastive: each sample is told from the others of its batch, so only the model may be cut. 20 layers of two units.
CONTRASTIVE = """
import torch
from torch import nn
from torch.nn import functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
rows, width = (8192, 512) if device == "cuda" else (10, 16)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(20)], nn.Linear(width, 4))
model.to(device) if device == "cuda" else model.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(rows, width).to(model[20].weight)
    out = F.normalize(model(x))
    loss = (out.T @ out).square().sum() / rows
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if device == "cpu":
    leave(model)
"""


def test_a_slice_of_the_activations_remains(tmp_path: Path) -> None:
    """Of 40 units that layers save, 10 are left with 4 slices; the input and the layer at work stay."""
    program = script(tmp_path, CONTRASTIVE)
    plain, changed = measured(program), measured(program, Change("split-forward", {"parts": 4}))
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved / UNIT == pytest.approx(30, abs=1.5)
    assert changed.said[0]["what"] == "a batch runs through it in 4 slices"


@pytest.mark.parametrize("parts", [2, 3])
def test_a_loss_over_the_batch_stays_as_it_is(tmp_path: Path, parts: int) -> None:
    """Only rounding differs: in float64, by less than 1e-12."""
    program = script(tmp_path, CONTRASTIVE)
    plain, _ = trained(program)
    changed, said = trained(program, Change("split-forward", {"parts": parts}))
    assert said
    for name, values in plain.items():
        assert changed[name] == pytest.approx(values, rel=0, abs=1e-12 * max(map(abs, values))), name


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("return self.layer(x).mean()", "the model returns a number"),
        ("return self.layer(x).T", "first dimension 8 for 5 samples"),
        ("return self.layer(x).tolist()", "returns a float that depends on the batch"),
    ],
)
def test_what_is_not_cut_along_the_batch_is_refused(tmp_path: Path, forward: str, reason: str) -> None:
    program = script(
        tmp_path,
        f"""
        import torch
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)
            def forward(self, x):
                {forward}
        model = Model()
        torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(80.0).view(10, 8))
        """,
    )
    assert reason in refused(program, Change("split-forward", {"parts": 2}))
