"""plan/techniques/lora.py and qlora.py: adapters are trained, nothing else moves, memory falls by what theory says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from child import has_module
from planning import measured, script, trained

from oomproof.plan.technique import Change

EXAMPLES = Path(__file__).parents[2] / "examples"

#: A language model with a head tied to its embedding, and an optimizer with and without weight decay.
LANGUAGE = """
import json, sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
steps, hidden, reentrant = int(sys.argv[1]), int(sys.argv[2]), "reentrant" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
class Language(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.embedding = nn.Embedding(100, n)
        self.blocks = nn.ModuleList([Block(n) for _ in range(4)])
        self.head = nn.Linear(n, 100, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if reentrant else block(x)
        return self.head(x)
model = Language(hidden)
if "compiled" in sys.argv:
    model = torch.compile(model, backend="eager")
if "on-gpu" in sys.argv or device == "cuda":
    model.to(device)
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim == 1]
everything = list(model.parameters())
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
for _ in range(steps):
    ids = torch.randint(100, (2, 16)).to(device)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(everything, 1.0)
    optimizer.step()
    assert device == "cuda" or (loss.isfinite() and norm > 0)
if device == "cpu":
    leave(getattr(model, "_orig_mod", model))
else:
    del ids, loss, norm
    groups = [[len(g["params"]), g["weight_decay"]] for g in optimizer.param_groups]
    resident = torch.cuda.memory_allocated()
    print(json.dumps([resident, groups]), file=open(__file__ + ".left", "w"))
"""


@pytest.fixture
def peft() -> None:
    if not has_module("peft"):
        pytest.skip("peft is not installed beside the tested torch")


def left(program: Path) -> tuple[int, list[list[float]]]:
    """Return the bytes that are allocated after the last step, and each group's parameters and weight decay."""
    resident, groups = json.loads(Path(f"{program}.left").read_text())
    return resident, groups


def parts(hidden: int, rank: int) -> int:
    """Return the elements of the adapters of LANGUAGE: r * (in + out) for each of its linear layers."""
    return 4 * 2 * rank * (hidden + 4 * hidden)


@pytest.mark.usefixtures("peft")
def test_gradients_and_states_are_those_of_the_adapters(tmp_path: Path) -> None:
    """Four bytes of gradient and eight of states for each of r * (in + out) elements; the weights stay."""
    program = script(tmp_path, LANGUAGE)
    plain = measured(program, arguments=("2", "512"))
    before, _ = left(program)
    changed = measured(program, Change("lora", {"rank": 8}), arguments=("2", "512"))
    after, groups = left(program)
    whole, adapters = plain.facts.models[0].parameters, parts(512, 8)
    assert before - after == 12 * whole - (4 + 12) * adapters
    assert changed.measurement.peak.allocated_bytes < plain.measurement.peak.allocated_bytes
    assert groups == [[16, 0.1], [0, 0.0]]


@pytest.mark.usefixtures("peft")
@pytest.mark.parametrize("variation", ["", "reentrant", "compiled"])
def test_only_adapters_move(tmp_path: Path, variation: str) -> None:
    """What the model had is the same bits after three steps; every adapter has moved from where it started."""
    program = script(tmp_path, LANGUAGE)
    start, _ = trained(program, arguments=("0", "32"))
    change = Change("lora", {"rank": 4})
    fresh, _ = trained(program, change, arguments=("0", "32", variation))
    changed, said = trained(program, change, arguments=("3", "32", variation))
    base = {k.replace("base_layer.", ""): v for k, v in changed.items() if "lora_" not in k}
    assert base == start
    adapters = [k for k in changed if "lora_" in k]
    assert len(adapters) == 16
    assert all(changed[k] != fresh[k] for k in adapters)
    assert said[0]["where"] == "Language"


#: The same linear layers, on their way to the GPU in one move: the peak of the move is the model's.
@pytest.fixture
def bitsandbytes(peft: None) -> None:
    if not has_module("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed beside the tested torch")


def four_bits(weights: int, layers: int) -> int:
    """Return the bytes of weights in NF4 with quantized scales, blocks of 64 and of 256, as QLoRA's paper has them."""
    scales = weights // 64
    return weights // 2 + scales + layers * 0 + scales // 256 * 4


@pytest.mark.usefixtures("bitsandbytes")
def test_weights_take_half_a_byte_and_their_scales(tmp_path: Path) -> None:
    """Against LoRA, with the same gradients and states, linear weights go from 4 bytes to a half and the scales."""
    program = script(tmp_path, LANGUAGE)
    lora = measured(program, Change("lora", {"rank": 8}), arguments=("2", "512"))
    before, _ = left(program)
    changed = measured(program, Change("qlora", {"rank": 8, "model": "Language"}), arguments=("2", "512"))
    after, _ = left(program)
    print(before, after, before - after, changed.said, changed.refused)
    weights = 4 * 2 * 4 * 512 * 512
    assert lora.refused is None
    assert before - after == 4 * weights - four_bits(weights, 8)
