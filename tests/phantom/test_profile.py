"""The profile of a capture: who holds the peak, by category, module, line and name; and what grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from child import PYTHON, has_module

import oomproof
from oomproof.capture import read_profile
from oomproof.measure.measurement import Measurement
from oomproof.measure.profile import Block, Profile

HAS_TRAINER = has_module("transformers") and has_module("accelerate")

LM = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

class Layer(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))

class LM(nn.Module):
    def __init__(self, recompute=False, count=4, words=4096, width=256):
        super().__init__()
        self.recompute = recompute
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)

def train(model, optimizer=None, count=3):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(count):
        x = torch.randint(0, 4096, (8, 128)).cuda()
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = "train(LM().cuda())\n"
CHECKPOINTED = "train(LM(recompute=True).cuda())\n"
FSDP2 = """
from torch.distributed._composable.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
model = LM(recompute=True).cuda()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
train(model)
"""
COMPILED = "train(torch.compile(LM().cuda()))\n"
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
data = [{"input_ids": torch.randint(0, 512, (64,)), "labels": torch.randint(0, 512, (64,))} for _ in range(16)]
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=512, n_positions=64))
arguments = TrainingArguments("out", max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no")
Trainer(model, arguments, train_dataset=data).train()
"""


def profiled(folder: Path, code: str, **options: Any) -> tuple[Measurement, Profile]:
    """Run a script with a capture; return what both parts of it say."""
    (folder / "train.py").write_text(LM + code)
    options = {"gpu": "a100-40gb", "steps": None, **options}
    found = oomproof.run([PYTHON, str(folder / "train.py")], output=folder / "a.oomp", cwd=folder, **options)
    profile = read_profile(folder / "a.oomp")
    assert profile is not None
    return found, profile


def share(profile: Profile, known: Any) -> float:
    """Return which share of the peak is in blocks of which ``known`` is true."""
    return sum(b.size_bytes for b in profile.blocks if known(b)) / profile.allocated_bytes


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (PLAIN, {}), (CHECKPOINTED, {}), (FSDP2, {"world_size": 8}), (COMPILED, {}),
        pytest.param(TRAINER, {}, marks=pytest.mark.skipif(not HAS_TRAINER, reason="no transformers and accelerate")),
    ],
    ids=["plain", "checkpointed", "FSDP2 rank", "compiled", "HF Trainer"],
)  # fmt: skip
def test_the_peak_has_categories_modules_and_lines(tmp_path: Path, code: str, options: dict[str, Any]) -> None:
    """At least 95 % of the bytes at the peak have a category, 90 % a module, 90 % a line."""
    found, profile = profiled(tmp_path, code, **options)
    assert profile.allocated_bytes == found.peak.allocated_bytes
    assert profile.limit_bytes == found.gpu.memory_bytes
    assert sum(b.size_bytes for b in profile.blocks) + profile.slack_bytes == profile.allocated_bytes
    assert share(profile, lambda b: b.category != "unknown") >= 0.95
    assert share(profile, lambda b: b.module is not None) >= 0.9
    assert share(profile, lambda b: b.stack) >= 0.9


def named(profile: Profile, name: str) -> Block:
    """Return the block of a tensor."""
    return next(b for b in profile.blocks if b.name is not None and b.name.endswith(name))


def test_blocks_are_named_with_shape_module_and_lifetime(tmp_path: Path) -> None:
    """Parameters, states and gradients have their parameter's name; recomputed activations their module."""
    _, profile = profiled(tmp_path, CHECKPOINTED)
    weight = named(profile, "layers.1.up.weight")
    assert (weight.shape, weight.dtype, weight.category) == ((1024, 256), "float32", "parameter")
    assert weight.module == "layers.1.up (Linear)"
    assert (weight.step, weight.phase, weight.freed_step) == (1, "init", 4)  # when the function returns
    state = named(profile, "exp_avg of layers.1.up.weight")
    assert (state.category, state.module, state.phase) == ("optimizer_state", "layers.1.up (Linear)", "optimizer")
    assert [
        b for b in profile.blocks if b.phase == "forward" and b.freed_phase == "backward" and b.step == b.freed_step
    ]
    inside = [b for b in profile.blocks if b.module and b.module.startswith("layers.")]
    assert all(any("train.py" in frame for frame in b.stack) for b in inside)


def test_observing_more_changes_no_figure(tmp_path: Path) -> None:
    """With a profile the peaks are those without one, to the byte."""
    found, _ = profiled(tmp_path, CHECKPOINTED)
    bare = oomproof.run([PYTHON, str(tmp_path / "train.py")], gpu="a100-40gb", steps=None)
    assert (found.peak.allocated_bytes, found.peak.reserved_bytes) == (
        bare.peak.allocated_bytes, bare.peak.reserved_bytes,
    )  # fmt: skip


LEAK = """
model, losses = LM().cuda(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    x = torch.randint(0, 4096, (8, 128)).cuda()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
"""
RETAINED = """
model, kept = LM().cuda(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    logits = model(torch.randint(0, 4096, (8, 128)).cuda())
    logits.logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(logits.detach())
"""
LENGTHS = """
import random
random.seed(0)
model = LM().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    x = torch.randint(0, 4096, (8, random.randrange(64, 1024))).cuda()
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def line_of(folder: Path, text: str) -> str:
    """Return "train.py:31" of the line that begins with ``text``."""
    lines = (folder / "train.py").read_text().splitlines()
    return f"train.py:{next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))} "


def test_a_list_of_losses_with_their_graphs_is_named(tmp_path: Path) -> None:
    """What grows is the graph: every module's activations, as many bytes in each step."""
    _, profile = profiled(tmp_path, LEAK)
    assert {row.steps for row in profile.growth} == {6}
    assert sum(row.size_bytes for row in profile.growth) > 6 * 4 * 8 * 128 * 4096
    places = [row.stack[0] for row in profile.growth]
    assert any(place.startswith(line_of(tmp_path, "loss = ")) for place in places), places
    ends = [row.end_allocated_bytes for row in profile.steps]
    assert ends == sorted(ends)


def test_retained_logits_are_named(tmp_path: Path) -> None:
    """Only the head's output grows, by the logits of a batch in each step."""
    _, profile = profiled(tmp_path, RETAINED)
    largest = profile.growth[0]
    assert largest.size_bytes == 6 * 4 * 8 * 128 * 4096
    assert largest.module == "head (Linear)"
    assert any(frame.startswith(line_of(tmp_path, "return self.head")) for frame in largest.stack)


def test_a_cache_that_grows_with_lengths_is_told(tmp_path: Path) -> None:
    """Nothing leaks, but new segments come in later steps: their lines and modules are named."""
    _, profile = profiled(tmp_path, LENGTHS)
    assert not profile.growth
    late = [row for row in profile.segments if row.step is not None and row.step > 3]
    assert late
    assert all(row.module is not None and row.stack for row in late)
    assert profile.reserved_bytes > 1.2 * profile.allocated_bytes
    assert len(profile.points) <= 8193
    assert max(sum(p.category_bytes) for p in profile.points) + profile.slack_bytes == profile.allocated_bytes
