"""plan/techniques/compile_budget.py and drop_outputs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import measured, script

from oomproof.plan.technique import CannotApply, Change, techniques

#: Products, and between them what costs a compiler nothing to compute again.
PRODUCTS = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8192, 512).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OUTPUT = 8192 * 512 * 4


def test_compiled_it_keeps_no_output_of_gelu(tmp_path: Path) -> None:
    """Uncompiled, each of the 12 layers keeps its product and GELU's output; compiled with a budget, no output.

    Half of that is seen at the peak: what is computed again may be so at the start of the backward pass.
    """
    program = script(tmp_path, PRODUCTS)
    plain, changed = measured(program), measured(program, Change("compile-budget", {"budget": 0.5}))
    before, after = (t.measurement.demand.allocated_bytes for t in (plain, changed))
    assert changed.measurement.fits
    assert before - after > 6 * OUTPUT
    assert [entry["what"] for entry in changed.said] == ["compiled with an activation memory budget of 0.5"]


#: The peak is in the forward pass, where the last step's outputs are still held.
HELD = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held = None
for _ in range(4):
    outputs = model(torch.randn(4096, 64).cuda())
    outputs.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""


@pytest.mark.parametrize(("after", "held"), [("held = outputs", 1), ("del outputs", 0)], ids=["held", "let go"])
def test_outputs_that_are_held_are_found_and_no_others(tmp_path: Path, after: str, held: int) -> None:
    """What is saved on the phantom is what is held at the peak: the last step's outputs, 4096 x 1024 floats."""
    program = script(tmp_path, HELD.format(after=after))
    plain, changed = measured(program), measured(program, Change("drop-outputs"))
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved == held * 4096 * 1024 * 4
    assert len(changed.said) == held


def test_it_is_only_proposed() -> None:
    class Real:
        rehearsal = False

    technique = techniques()["drop-outputs"]
    assert technique.proposal_only
    with pytest.raises(CannotApply, match="del outputs"):
        technique.install(Real(), {})  # type: ignore[arg-type]
