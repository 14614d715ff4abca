"""plan/activations.py and its techniques: the bytes that theory says, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from child import torch_version
from planning import Trial, measured, script, trained

from oomproof.plan.technique import Change

UNIT = 8192 * 512 * 4  # bytes of what lies between two blocks
BLOCKS = 8
MIB = 2**20

#: A block saves its input, the norm's output, and two of four units each: 10 units, of which 9 are its own.
FEED_FORWARD = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 512)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.mean()
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8192, 8, device="cuda")).backward()
    optimizer.step()
"""


def _all(action: str) -> dict[str, str]:
    return {f"blocks.{place}": action for place in range(BLOCKS)}


@pytest.fixture(scope="module")
def feed_forward(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial]:
    program = script(tmp_path_factory.mktemp("feed-forward"), FEED_FORWARD)
    return program, measured(program)


@pytest.mark.parametrize(
    ("change", "units", "host"),
    [
        # what the 7 blocks keep less while the last is computed again
        (Change("checkpoint-blocks"), 9 * (BLOCKS - 1), 0),
        # kept: the input, the wide product, and the narrow one that no backward pass reads
        (Change("checkpoint-selective", {"save": "matmul"}), 4 * (BLOCKS - 1), 0),
        (Change("offload-activations", {"of": "blocks"}), 10 * (BLOCKS - 1), 10 * BLOCKS),
        (Change("offload-activations", {"of": "model"}), 10 * (BLOCKS - 1), 10 * BLOCKS),
        (Change("block-actions", {"actions": _all("recompute-offload")}), 10 * (BLOCKS - 1) - 3, BLOCKS),
    ],
    ids=lambda value: value.name if isinstance(value, Change) else None,
)
def test_peaks_fall_by_what_blocks_no_longer_keep(
    feed_forward: tuple[Path, Trial], change: Change, units: int, host: int
) -> None:
    """Within two units: the peak may move to another operation of a block. The host holds what left the GPU."""
    if "selective" in change.name and torch_version() < (2, 5):
        pytest.skip("torch has create_selective_checkpoint_contexts from 2.5 on")
    program, plain = feed_forward
    changed = measured(program, change)
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved / UNIT == pytest.approx(units, abs=2.1)
    notes = [note for note in changed.measurement.notes if note.startswith("pinned host memory")]
    assert notes == ([f"pinned host memory: {host * UNIT / 2**30:.2f} GiB at its peak, not on the GPU"] if host else [])


#: Everything that saving, recomputing and offloading could get wrong: random numbers, running statistics, in-place
#: operations, views of one storage, a transposed input, a cast weight, tensors saved twice; and what scripts do beside.
HARD = """
import copy, io, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(n), nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.conv, self.statistics = nn.Conv1d(n, n, 3, padding=1), nn.BatchNorm1d(n)
        self.dropout = nn.Dropout(0.3)
    def forward(self, x, scale=None):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        y = self.statistics(self.conv(x.transpose(1, 2))).relu_().transpose(1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            z = F.linear(x, self.out.weight)
        return x * scale + self.dropout(y) * y + z.float()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(5))
    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=torch.tensor(0.5))
        return x
model = Model()
names = list(model.state_dict())
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 6, 16)).square().mean().backward(retain_graph=step == 1)
    optimizer.step()
    with torch.no_grad():
        model.eval()
        model(torch.randn(4, 6, 16))
        model.train()
    for old, new in zip(average.parameters(), model.parameters()):
        old.data.lerp_(new.data, 0.1)
assert list(model.state_dict()) == names
copy.deepcopy(model)(torch.randn(4, 6, 16)).sum().backward()
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
restored = torch.load(file, weights_only=False)
assert type(restored.blocks[0]) is Block
restored(torch.randn(4, 6, 16)).sum().backward()
leave(model)
"""

MIXED = {"blocks.0": "recompute", "blocks.1": "offload", "blocks.2": "selective", "blocks.4": "recompute-offload"}


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    program = script(tmp_path_factory.mktemp("hard"), HARD)
    return program, trained(program)[0]


@pytest.mark.parametrize(
    "change",
    [
        Change("checkpoint-blocks", {"blocks": ["blocks.0", "blocks.3"]}),
        Change("checkpoint-selective", {"save": "matmul+attention"}),
        Change("offload-activations", {"of": "blocks", "smallest": 1}),
        Change("offload-activations", {"of": "model", "smallest": 1}),
        Change("block-actions", {"actions": MIXED, "smallest": 1}),
    ],
    ids=lambda change: change.label,
)
def test_parameters_and_running_statistics_are_the_same_bits(
    hard: tuple[Path, dict[str, list[float]]], change: Change
) -> None:
    if (change.name == "checkpoint-selective" or change.options.get("actions")) and torch_version() < (2, 5):
        pytest.skip("torch has create_selective_checkpoint_contexts from 2.5 on")
    program, plain = hard
    changed, said = trained(program, change)
    assert said
    assert changed == plain
