"""Gradients that are freed early: clear-gradients, and what step-in-backward must refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from optimizer_scripts import BIASES, WEIGHTS, farthest, training
from planning import measured, script, trained

from oomproof.plan.technique import Change

LATE = """
for step in range(STEPS):
    loss = model(torch.randn(BATCH, N).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if device == "cpu":
    leave(model)
"""

#: The second half of the layers has no gradients in the second step: zeros still decay weights, None does not.
ZEROS = """
for step in range(STEPS):
    used = model if step != 1 else model[: LAYERS // 2]
    optimizer.zero_grad(set_to_none=False)
    used(torch.randn(BATCH, N).to(device)).square().mean().backward()
    optimizer.step()
if device == "cpu":
    leave(model)
"""

#: Activations of 16 layers of tanh and Linear, as large as all gradients: the peak is at the end of the forward pass.
LARGE_BATCH = "BATCH = 1024 if device == 'cuda' else 4\n"

FOR_LOOP = Change("optimizer-implementation", {"use": "for-loop"})  # no temporaries that hide the peak


@pytest.mark.parametrize(
    ("loop", "when", "fact"), [(LATE, "after-step", "late-zero-grad"), (ZEROS, "zero-grad", "keeps-gradients")]
)
def test_gradients_do_not_live_through_the_forward_pass(tmp_path: Path, loop: str, when: str, fact: str) -> None:
    """The peak falls by the gradients, and the survey saw why; parameters are the same bits."""
    program = script(tmp_path, training(steps=4, loop=LARGE_BATCH + loop))
    plain = measured(program, FOR_LOOP)
    assert fact in plain.facts.uses
    change = Change("clear-gradients", {"when": when})
    assert change.technique.unfit(plain.facts) is None
    assert change.options in list(change.technique.variants(plain.facts))
    changed = measured(program, FOR_LOOP, change)
    assert changed.measurement.fits
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    gradients = 4 * (WEIGHTS + BIASES)
    # the highest point is then in the backward pass, which frees a layer's activations (4 MiB), makes its gradients
    # (4 MiB) and has up to three more of that size at work
    assert gradients - 3.1 * 4 * 2**20 <= saved <= 1.01 * gradients
    assert fact not in changed.facts.uses or when == "zero-grad"
    assert trained(program, change)[0] == trained(program)[0]


def test_early_zero_grad_is_left_alone(tmp_path: Path) -> None:
    """A script that frees its gradients before the forward pass gains nothing, and is told so."""
    facts = measured(script(tmp_path, training())).facts
    assert Change("clear-gradients").technique.unfit(facts) == "the script frees its gradients before the forward pass"


CLIPS = """
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(BATCH, N).to(device)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

ACCUMULATES = """
for step in range(2 * STEPS):
    model(torch.randn(BATCH, N).to(device)).square().mean().backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
"""

SCALES = """
scaler = torch.amp.GradScaler(device)
for step in range(STEPS):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(BATCH, N).to(device)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""

TWO = """
other = torch.optim.SGD(nn.Linear(2, 2).to(device).parameters(), lr=0.1)
"""

READS = """
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(BATCH, N).to(device)).square().mean().backward()
    total = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    optimizer.step()
"""

SETS_RATES = """
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(BATCH, N).to(device)).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (CLIPS, "the script calls clip_grad_norm_"),
        (ACCUMULATES, "a parameter got gradients twice in one step"),
        (SCALES, "the script calls GradScaler.scale"),
        (TWO, "the script has several optimizers"),
        (READS, "train.py:LINE reads gradients, which are gone when backward() returns"),
        (SETS_RATES, "the script sets the learning rate between backward() and step()"),
    ],
    ids=["clips", "accumulates", "scales", "two", "reads", "rates"],
)
def test_stepping_in_backward_is_refused_where_gradients_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, reason: str
) -> None:
    """Nothing is trained wrongly: the run ends with the reason."""
    monkeypatch.chdir(tmp_path)
    program = script(tmp_path, training(loop=loop))
    line = next((n for n, text in enumerate(program.read_text().splitlines(), 1) if "p.grad" in text), 0)
    reason = reason.replace("LINE", str(line))
    with pytest.raises(AssertionError, match=re.escape(f"cannot apply step-in-backward: {reason}")):
        trained(program, Change("step-in-backward"))


def test_offloading_steps_with_clipped_and_scaled_gradients(tmp_path: Path) -> None:
    """What the script does to gradients before the step counts: the step's copies are made after it."""
    for loop in (CLIPS, SCALES):
        program = script(tmp_path, training(loop=loop + 'if device == "cpu":\n    leave(model)\n'))
        change = Change("offload-optimizer", {"gradients": False})
        assert trained(program, change)[0] == trained(program)[0]
        assert measured(program, change).measurement.breakdown.optimizer_state_bytes == 0


def test_fused_steps_with_a_gradient_scaler(tmp_path: Path) -> None:
    """GradScaler hands its scale to a fused step; the outcome is that of the loop but for rounding."""
    program = script(tmp_path, training(loop=SCALES + 'if device == "cpu":\n    leave(model)\n'))
    change = Change("optimizer-implementation", {"use": "fused"})
    assert measured(program, change).measurement.fits
    assert farthest(trained(program, change)[0], trained(program)[0]) < 1e-6
