"""plan/techniques/chunked_cross_entropy.py: the logits vanish, the gradients stay."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from child import PYTHON
from planning import measured, script, trained

from oomproof.plan.technique import Change

TOKENS, FEATURES, CLASSES = 2048, 64, 8192
LOGITS = TOKENS * CLASSES * 4  # bytes in float32

#: Trains a model for each loss in LOSSES; its head's weight is the embedding's, or has a bias.
LANGUAGE_MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
class Model(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.embedding = nn.Embedding({classes}, {features})
        self.body = nn.Sequential(nn.Linear({features}, {features}), nn.GELU(), nn.LayerNorm({features}))
        self.head = nn.Linear({features}, {classes}, bias=not tie)
        if tie:
            self.head.weight = self.embedding.weight
    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))
def train(loss_of, tie):
    torch.manual_seed(0)
    model = Model(tie).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        tokens = torch.randint({classes}, (8, {tokens} // 8 + 1)).to(device)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        with torch.autocast(device, torch.bfloat16, enabled={autocast}):
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model
models = [train(loss_of, tie) for loss_of in [{losses}] for tie in {ties}]
if device == "cpu":
    leave(nn.ModuleList(models))
"""

PLAIN = "F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())"
CHANGE = Change("chunked-cross-entropy")


def model(folder: Path, *losses: str, tokens: int = TOKENS, autocast: bool = False, ties: str = "[True]") -> Path:
    functions = ", ".join(f"lambda logits, y: {loss}" for loss in losses or (PLAIN,))
    text = LANGUAGE_MODEL.format(
        tokens=tokens, features=FEATURES, classes=CLASSES, losses=functions, autocast=autocast, ties=ties
    )
    return script(folder, text)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_the_logits_and_their_gradients_vanish(tmp_path: Path, autocast: bool) -> None:
    """Plain: three times the logits in float32 (their log-softmax, its gradient, theirs) and, under autocast, those in
    bfloat16. In 16 blocks: at most five times a block, in the place of all of it."""
    program = model(tmp_path, autocast=autocast)
    plain, changed = measured(program), measured(program, CHANGE)
    before, after = (t.measurement.demand.allocated_bytes for t in (plain, changed))
    assert before > 2 * LOGITS
    assert after < before - 2 * LOGITS + 5 * LOGITS // 16
    assert changed.said == [
        {
            "technique": "chunked-cross-entropy",
            "what": "a cross entropy is computed without the logits of head",
            "where": changed.said[0]["where"],
        }
    ]


LIBRARIES = {"torch": "torch.nn.functional.linear_cross_entropy", "liger": "liger_kernel"}


@pytest.mark.parametrize("use", LIBRARIES)
def test_libraries_need_no_logits_either(tmp_path: Path, use: str) -> None:
    """Two of the three times the logits go, whichever library computes the loss."""
    look = "import torch.nn.functional, importlib.util as u, sys; n = sys.argv[1]; sys.exit(0 if "
    look += "(hasattr(torch.nn.functional, n.split('.')[-1]) if '.' in n else u.find_spec(n)) else 1)"
    if subprocess.run([PYTHON, "-c", look, LIBRARIES[use]], check=False).returncode:
        pytest.skip(f"{LIBRARIES[use]} is not beside this torch")
    program = model(tmp_path, autocast=True)
    plain, changed = measured(program), measured(program, Change("chunked-cross-entropy", {"use": use}))
    assert changed.measurement.fits
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved > 2 * LOGITS - LOGITS // 4


LOSSES = {
    "flattened": PLAIN,
    "classes second": "nn.CrossEntropyLoss()(logits.transpose(1, 2), y)",
    "shifted": "F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), y[:, 1:].reshape(-1))",
    "ignored": "F.cross_entropy(logits.view(-1, logits.shape[-1]), y.masked_fill(y % 3 == 0, -1).view(-1),"
    " ignore_index=-1)",
    "smoothed": "nn.CrossEntropyLoss(label_smoothing=0.1, reduction='sum')(logits.view(-1, 8192), y.view(-1)) / 1e3",
    "weighted": "F.cross_entropy(logits.view(-1, 8192), y.view(-1), weight=torch.arange(8192.0, device=device) / 4096,"
    " label_smoothing=0.2)",
    "masked": "F.cross_entropy(logits[y > 99], y[y > 99], reduction='none').mean()",
}


def test_parameters_are_equal_within_rounding(tmp_path: Path) -> None:
    """After three steps in float32 parameters differ by less than 1e-5 of their norm, whatever the loss's arguments."""
    program = model(tmp_path, *LOSSES.values(), tokens=256, ties="[True, False]")
    plain, _ = trained(program)
    changed, said = trained(program, CHANGE)
    assert {entry["what"] for entry in said} == {"a cross entropy is computed without the logits of head"}
    assert _furthest(changed, plain) < 1e-5


def test_what_else_reads_the_logits_gets_them_and_it_is_said(tmp_path: Path) -> None:
    readers = {
        "pow": PLAIN + " + logits.pow(2).mean()",
        "log_softmax": "F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), y.flatten())",
        "div": "F.cross_entropy((torch.tanh(logits / 30) * 30).flatten(0, 1), y.flatten())",
        "mul_": "F.cross_entropy((logits.mul_(2), logits)[1].flatten(0, 1), y.flatten())",
    }
    program = model(tmp_path, *readers.values(), tokens=256)
    plain, _ = trained(program)
    changed, said = trained(program, CHANGE)
    what = [entry["what"] for entry in said]
    assert [f"not saved here: {reader} reads the logits" for reader in readers] == [w for w in what if w[0] == "n"]
    assert _furthest(changed, plain) < 1e-5


def _furthest(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """Return the largest distance between two parameters in terms of the second's norm."""
    assert ours.keys() == theirs.keys()
    return max(_distance(ours[name], values) for name, values in theirs.items())


def _distance(values: list[float], others: list[float]) -> float:
    difference = sum((a - b) ** 2 for a, b in zip(values, others, strict=True)) ** 0.5
    return difference / (sum(b * b for b in others) ** 0.5 or 1)
