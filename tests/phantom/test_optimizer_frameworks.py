"""Optimizer techniques in scripts of HF's Trainer, accelerate and Lightning, which wrap and schedule steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from child import has_module
from planning import measured, script, trained

from oomproof.plan.technique import Change

OFFLOAD = Change("offload-optimizer", {"gradients": False})
BITSANDBYTES = Change("optimizer-8bit", {"library": "bitsandbytes", "bits": 8})
BF16 = Change("optimizer-bf16-states")

TRAINER = """
import tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
cuda = torch.cuda.is_available()
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=4096, n_positions=64, n_embd=256 if cuda else 64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
))
tokens = torch.randint(4096, (12, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": t, "labels": t} for t in tokens]
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=model,
        args=TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=3, learning_rate=1e-3, use_cpu=not cuda, report_to="none",
            save_strategy="steps", save_steps=2,
        ),
        train_dataset=data,
    ).train()
if not cuda:
    leave(model)
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
torch.manual_seed(0)
cuda = torch.cuda.is_available()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
loader = torch.utils.data.DataLoader(torch.randn(12, 64), batch_size=4)
accelerator = Accelerator(cpu=not cuda)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x in loader:
    optimizer.zero_grad()
    accelerator.backward(model(x).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
if not cuda:
    leave(model)
"""

LIGHTNING = """
import torch, lightning
torch.manual_seed(0)
cuda = torch.cuda.is_available()
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    def training_step(self, batch, index):
        return self.body(batch).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]
model = Model()
lightning.Trainer(
    max_steps=3, accelerator="cuda" if cuda else "cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=CLIP,
).fit(model, torch.utils.data.DataLoader(torch.randn(12, 64), batch_size=4))
if not cuda:
    leave(model)
"""


def lightning(clip: float | None = None) -> str:
    return LIGHTNING.replace("CLIP", repr(clip))


@pytest.fixture(autouse=True)
def _frameworks(request: pytest.FixtureRequest) -> None:
    for name in ("transformers", "accelerate", "lightning", "bitsandbytes"):
        if name in request.node.name and not has_module(name):
            pytest.skip(f"{name} is not installed beside the tested torch")


def test_transformers_trainer_offloads(tmp_path: Path) -> None:
    """It clips, schedules and saves checkpoints; the parameters are those that it trains without the technique."""
    program = script(tmp_path, TRAINER)
    after, said = trained(program, OFFLOAD)
    assert said
    assert after == trained(program)[0]
    changed = measured(program, OFFLOAD).measurement
    assert changed.breakdown is not None
    assert changed.breakdown.optimizer_state_bytes == 0


def test_transformers_trainer_with_bitsandbytes(tmp_path: Path) -> None:
    """Embeddings keep 8 bytes a parameter, as in the Trainer's own adamw_bnb_8bit; the peak is the same bytes."""
    program = script(tmp_path, TRAINER)
    own = measured(script(tmp_path, TRAINER.replace("folder, per", 'folder, optim="adamw_bnb_8bit", per'), "own.py"))
    changed = measured(program, BITSANDBYTES)
    assert {entry["what"] for entry in changed.said} == {
        "bitsandbytes's AdamW8bit in place of AdamW",
        "2 embeddings keep states of 32 bits",
    }
    assert changed.measurement.breakdown is not None
    assert changed.measurement.breakdown == own.measurement.breakdown
    assert changed.measurement.demand.reserved_bytes == own.measurement.demand.reserved_bytes


@pytest.mark.parametrize("change", [OFFLOAD, BF16], ids=lambda change: change.name)
def test_accelerate(tmp_path: Path, change: Change) -> None:
    """AcceleratedOptimizer wraps what was built; clipped gradients are what the step sees."""
    program = script(tmp_path, ACCELERATE)
    after, said = trained(program, change)
    before, _ = trained(program)
    assert len(said) == 1
    assert (after == before) == (change == OFFLOAD)


@pytest.mark.parametrize(
    "change",
    [OFFLOAD, Change("step-in-backward"), Change("clear-gradients", {"when": "after-step"})],
    ids=lambda change: change.name,
)
def test_lightning_closes_over_the_backward_pass(tmp_path: Path, change: Change) -> None:
    """Lightning computes gradients in the closure that it gives to step()."""
    program = script(tmp_path, lightning())
    after, said = trained(program, change)
    assert said
    assert after == trained(program)[0]


def test_lightning_clears_gradients_late_and_clips(tmp_path: Path) -> None:
    """The survey sees both, and stepping in backward is refused when it clips."""
    facts = measured(script(tmp_path, lightning())).facts
    assert "late-zero-grad" in facts.uses
    with pytest.raises(AssertionError, match="the script calls clip_grad_norm_"):
        trained(script(tmp_path, lightning(0.5)), Change("step-in-backward"))
