"""plan/techniques/autocast.py and pure_bf16.py: 16 bits in a script that knows nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from child import PYTHON
from planning import measured, script, trained

from oomproof.errors import UsageError
from oomproof.plan.technique import Change

WIDTH, ROWS, LAYERS = 256, 8192, 8

LOOP = f"""
import torch
from torch import nn
from torch.nn import functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
rows = {ROWS} if device == "cuda" else 32
layers = [layer for _ in range({LAYERS}) for layer in (nn.Linear({WIDTH}, {WIDTH}), nn.ReLU())]
model = nn.Sequential(*layers, nn.BatchNorm1d({WIDTH}), nn.Linear({WIDTH}, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
for _ in range(4):
    x, y = torch.randn(rows, {WIDTH}).to(device), torch.randint(10, (rows,)).to(device)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    assert loss.dtype == torch.float32
if device == "cpu":
    leave(model)
"""

#: What is kept of a layer: the input of its product and ReLU's output are one tensor.
KEPT = ROWS * WIDTH * LAYERS
WEIGHTS = WIDTH * WIDTH * LAYERS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_halves_what_is_kept_and_copies_the_weights(tmp_path: Path, dtype: str) -> None:
    """2 of 4 bytes of the layers' outputs go, 2 bytes a weight come: to 2 % of the activations."""
    program = script(tmp_path, LOOP)
    plain, changed = measured(program), measured(program, Change("autocast", {"dtype": dtype}))
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert abs(saved - (2 * KEPT - 2 * WEIGHTS)) < 0.02 * 4 * KEPT + 2 * ROWS * WIDTH * 4
    what = [entry["what"] for entry in changed.said]
    assert what[0] == f"its forward runs under autocast in torch.{dtype}; its outputs are float32"
    assert ("a GradScaler scales the loss and steps the optimizer" in what) == (dtype == "float16")


def test_bfloat16_weights_halve_all_but_the_batch_norm(tmp_path: Path) -> None:
    """2 bytes go of each of the layers' outputs, of their weights and of the weights' gradients; to 10 %."""
    program = script(tmp_path, LOOP)
    plain, changed = measured(program), measured(program, Change("pure-bf16"))
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert abs(saved - (2 * KEPT + 4 * WEIGHTS)) < 0.1 * 2 * KEPT
    assert [entry["what"] for entry in changed.said] == [
        "parameters and floating inputs are bfloat16, outputs float32; 1 batch norms keep float32"
    ]


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        (Change("autocast", {"dtype": "bfloat16"}), 0.02),
        (Change("autocast", {"dtype": "float16"}), 0.003),
        (Change("pure-bf16"), 0.02),
    ],
    ids=["autocast-bf16", "autocast-fp16", "pure-bf16"],
)
def test_it_trains_to_about_the_same_parameters(tmp_path: Path, change: Change, tolerance: float) -> None:
    """After four clipped steps all parameters together are off by a rounding of 8 (bfloat16) or 11 bits, not more.

    A gradient that was clipped before the scaler's scale was taken out of it would be far off.
    """
    program = script(tmp_path, LOOP)
    plain, _ = trained(program)
    changed, said = trained(program, change)
    assert said
    learned = [name for name in plain if "running" not in name and "num_batches" not in name]
    pairs = [pair for name in learned for pair in zip(changed[name], plain[name], strict=True)]
    distance = (sum((a - b) ** 2 for a, b in pairs) / sum(b * b for _, b in pairs)) ** 0.5
    assert 0 < distance <= tolerance


def test_a_scaler_is_not_put_where_gradients_are_taken_otherwise(tmp_path: Path) -> None:
    program = script(tmp_path, LOOP.replace("loss.backward()", "torch.autograd.grad(loss, list(model.parameters()))"))
    with pytest.raises(UsageError, match="takes gradients with torch"):
        measured(program, Change("autocast", {"dtype": "float16"}))


def test_a_model_that_is_called_in_parts_is_refused(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        LOOP.replace("model(x)", "functools.reduce(lambda x, layer: layer(x), model, x)").replace(
            "import torch", "import functools, torch", 1
        ),
    )
    with pytest.raises(UsageError, match="without calling it as a whole"):
        measured(program, Change("autocast", {"dtype": "bfloat16"}))


LIBRARIES = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
backward = accelerator.backward
""",
    "lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, index):
        return self.model(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4 * 8192, 256))
trainer = lightning.Trainer(max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=8192))
""",
}


@pytest.mark.parametrize(
    ("library", "dtype", "said"),
    [
        ("accelerate", "bfloat16", 'Accelerator(mixed_precision="bf16")'),
        ("lightning", "float16", 'Trainer(precision="16-mixed")'),
    ],
)
def test_a_library_is_told_in_its_own_words(tmp_path: Path, library: str, dtype: str, said: str) -> None:
    import subprocess

    if subprocess.run([PYTHON, "-c", f"import {library}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{library} is not beside this torch")
    start = LOOP[: LOOP.index("optimizer =")]
    program = script(tmp_path, start + LIBRARIES[library] + (LOOP_OF_ACCELERATE if library == "accelerate" else ""))
    plain, changed = measured(program), measured(program, Change("autocast", {"dtype": dtype}))
    assert [entry["what"] for entry in changed.said] == [said]
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved > 1.5 * KEPT


LOOP_OF_ACCELERATE = """
for _ in range(3):
    loss = model(torch.randn(rows, 256).to(device)).square().mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
"""
