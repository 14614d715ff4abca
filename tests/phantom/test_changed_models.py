"""plan/techniques/share_blocks.py, int8_frozen.py, prune_channels.py: another model, smaller by what theory says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from child import has_module
from planning import measured, script, trained

from oomproof.plan.technique import Change

BLOCKS = """
import json, sys, torch
from torch import nn
steps, width = int(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear, self.norm = nn.Linear(n, n), nn.BatchNorm1d(n)
    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))
model = nn.Sequential(nn.Linear(8, width), nn.Sequential(*[Block(width) for _ in range(8)]), nn.Linear(width, 4))
model.to(device)
optimizer = torch.optim.Adam([{"params": model.parameters()}], lr=1e-2, foreach=False)
for _ in range(steps):
    x, y = torch.randn(32, 8).to(device), torch.randint(4, (32,)).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert device == "cuda" or loss.isfinite()
if device == "cpu":
    leave(model)
else:
    del x, y, loss
    given = sum(len(g["params"]) for g in optimizer.param_groups)
    print(json.dumps([torch.cuda.memory_allocated(), given]), file=open(__file__ + ".left", "w"))
"""

#: A frozen part between trained ones: gradients flow through it. And a part that no gradient reaches.
FROZEN = """
import json, sys, torch
from torch import nn
steps, width = int(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
def body(n):
    return nn.Sequential(*[nn.Linear(n, n) for _ in range(4)]).requires_grad_(False)
teacher = body(width)
model = nn.Sequential(nn.Linear(8, width), body(width), nn.Linear(width, 4))
teacher.to(device)
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    x = torch.randn(16, 8).to(device)
    hidden = model[0](x)
    loss = (model[1](hidden) - teacher(hidden.detach())).square().mean() + model[2](hidden).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert device == "cuda" or loss.isfinite()
if device == "cpu":
    leave(nn.ModuleList([model, teacher]))
else:
    resting = torch.cuda.memory_allocated()
    hidden = model[1](model[0](x))
    held = torch.cuda.memory_allocated() - resting
    del hidden, loss, x
    print(json.dumps([torch.cuda.memory_allocated(), held]), file=open(__file__ + ".left", "w"))
"""


def left(program: Path) -> list[int]:
    """Return what a script on the phantom leaves: the bytes allocated after the last step, and another figure."""
    figures = json.loads(Path(f"{program}.left").read_text())
    assert all(isinstance(figure, int) for figure in figures)
    return [int(figure) for figure in figures]


def block(width: int) -> int:
    """Return the parameters of a block of BLOCKS."""
    return width * width + 3 * width


def test_sharing_leaves_one_set_of_weights_gradients_and_states(tmp_path: Path) -> None:
    """Eight blocks in two groups keep a quarter of their weights, gradients and Adam's states: 16 bytes each."""
    program = script(tmp_path, BLOCKS)
    plain = measured(program, arguments=("2", "512"))
    before, _ = left(program)
    changed = measured(program, Change("share-blocks", {"groups": 2}), arguments=("2", "512"))
    after, given = left(program)
    assert plain.refused is None
    assert changed.refused is None
    assert before - after == 16 * 6 * block(512)
    assert given == 2 + 2 * 4 + 2
    assert [entry["what"] for entry in changed.said] == ["8 Block have 2 sets of parameters"]


def test_shared_blocks_train_together_and_keep_their_own_statistics(tmp_path: Path) -> None:
    program = script(tmp_path, BLOCKS)
    start, _ = trained(program, arguments=("0", "16"))
    changed, said = trained(program, Change("share-blocks"), arguments=("3", "16"))
    assert said
    for name in ("linear.weight", "linear.bias", "norm.weight", "norm.bias"):
        sets = [changed[f"1.{place}.{name}"] for place in range(8)]
        assert sets == [sets[0]] * 8
        assert sets[0] != start[f"1.0.{name}"]
    statistics = [changed[f"1.{place}.norm.running_mean"] for place in range(8)]
    assert all(one != other for one, other in itertools.pairwise(statistics))


SAVED = """
import tempfile, torch, transformers
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32)
torch.manual_seed(0)
model = BertForMaskedLM(config)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True,
                                  save_strategy="steps", save_steps=3)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(folder + "/end")
    again = BertForMaskedLM.from_pretrained(folder + "/end")
    same = all(torch.equal(p, q) for p, q in zip(again.state_dict().values(), model.state_dict().values()))
    assert same
    leave(again)
"""


@pytest.mark.usefixtures("transformers")
def test_trainer_saves_shared_blocks_for_the_plain_class(tmp_path: Path) -> None:
    """transformers refuses tied weights that it does not know of; what is written here loads without any change."""
    if not has_module("accelerate"):
        pytest.skip("accelerate, which Trainer needs, is not installed beside the tested torch")
    program = script(tmp_path, SAVED)
    changed, said = trained(program, Change("share-blocks"))
    assert said
    name = "bert.encoder.layer.{}.output.dense.weight"
    assert changed[name.format(0)] == changed[name.format(3)]


@pytest.fixture
def torchao() -> None:
    if not has_module("torchao"):
        pytest.skip("torchao is not installed beside the tested torch")


@pytest.mark.usefixtures("torchao")
def test_frozen_weights_take_a_quarter_and_their_scales(tmp_path: Path) -> None:
    """3 of 4 bytes go, one scale of 4 bytes and one zero point of a byte a row come; no copies stay for backward."""
    program = script(tmp_path, FROZEN)
    plain = measured(program, arguments=("2", "1024"))
    before, held_before = left(program)
    changed = measured(program, Change("int8-frozen"), arguments=("2", "1024"))
    after, held_after = left(program)
    assert changed.refused is None
    assert plain.facts.frozen_linear_bytes == 8 * 4 * 1024 * 1024
    scales = 8 * (4 * 1024 + 1024)
    assert before - after == 8 * 3 * 1024 * 1024 - scales
    assert held_after == held_before
    assert changed.said[0]["what"] == "4 frozen linear layers have 8-bit weights: 16,777,216 bytes before"


@pytest.mark.usefixtures("torchao")
def test_what_is_trained_moves_and_frozen_weights_are_rounded_once(tmp_path: Path) -> None:
    """Frozen weights come out within half a step of 8 bits, and stay so; gradients pass through them."""
    program = script(tmp_path, FROZEN)
    start, _ = trained(program, arguments=("0", "16"))
    fresh, _ = trained(program, Change("int8-frozen"), arguments=("0", "16"))
    changed, _ = trained(program, Change("int8-frozen"), arguments=("3", "16"))
    plain, _ = trained(program, arguments=("3", "16"))
    frozen = [name for name in start if name.startswith(("0.1.", "1."))]
    assert len(frozen) == 16
    for name in frozen:
        assert changed[name] == fresh[name]
        step = max(map(abs, start[name])) / 127
        assert max(abs(a - b) for a, b in zip(start[name], changed[name], strict=True)) <= 0.51 * step
    for name in ("0.0.weight", "0.2.weight"):
        moved = max(abs(a - b) for a, b in zip(plain[name], start[name], strict=True))
        assert moved > 0
        assert max(abs(a - b) for a, b in zip(plain[name], changed[name], strict=True)) < 0.1 * moved


CONVOLUTIONS = """
import json, sys, torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if MODEL == "resnet50":
    import torchvision
    model = torchvision.models.resnet50()
else:
    class Residual(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.a, self.b = nn.Conv2d(n, 2 * n, 3, padding=1), nn.Conv2d(2 * n, n, 3, padding=1)
            self.norm = nn.BatchNorm2d(2 * n)
        def forward(self, x):
            return x + self.b(torch.relu(self.norm(self.a(x))))
    model = nn.Sequential(nn.Conv2d(3, 10, 3), Residual(10), Residual(10), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(10, 1000))
model.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
everything = list(model.parameters())
for _ in range(2):
    x, y = torch.randn(2, 3, 64, 64).to(device), torch.randint(1000, (2,)).to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(everything, 1.0)
    optimizer.step()
    assert device == "cuda" or loss.isfinite()
count = sum(p.numel() for p in model.parameters())
assert all(p.grad.shape == optimizer.state[p]["momentum_buffer"].shape == p.shape for p in everything)
if device == "cpu":
    leave(model)
else:
    del x, y, loss
    held = torch.cuda.memory_stats()["requested_bytes.all.current"]  # a reused block of over 1 MiB may be larger
    print(json.dumps([held, count]), file=open(__file__ + ".left", "w"))
"""


@pytest.fixture
def torch_pruning() -> None:
    if not has_module("torch_pruning"):
        pytest.skip("torch-pruning is not installed beside the tested torch")


@pytest.mark.usefixtures("torch_pruning")
def test_phantom_and_real_run_take_out_as_many_channels(tmp_path: Path) -> None:
    """Half of 10 and of 20 channels: what each convolution, norm and the head lose, counted by hand."""
    program = script(tmp_path, CONVOLUTIONS.replace("MODEL", "'small'"))
    changed = measured(program, Change("prune-channels", {"ratio": 0.5}))
    assert changed.refused is None
    _, count = left(program)
    state, said = trained(program, Change("prune-channels", {"ratio": 0.5}))

    def residual(n: int) -> int:
        return (9 * n * 2 * n + 2 * n) + 2 * 2 * n + (9 * 2 * n * n + n)

    assert count == (27 * 5 + 5) + 2 * residual(5) + 5 * 1000 + 1000
    learned = [k for k in state if "running" not in k and "batches" not in k]
    assert sum(len(state[k]) for k in learned) == count
    assert said[0]["what"] == changed.said[0]["what"]
    assert state["1.norm.num_batches_tracked"] == [2.0]


@pytest.mark.usefixtures("torch_pruning")
def test_resnet_50_loses_what_is_published(tmp_path: Path) -> None:
    """36 to 44 % of the parameters at ratios of 0.20 to 0.25; weights, gradients and momentum with them."""
    if not has_module("torchvision"):
        pytest.skip("torchvision is not installed beside the tested torch")
    program = script(tmp_path, CONVOLUTIONS.replace("MODEL", "'resnet50'"))
    before, whole = (measured(program), left(program))[1]
    after, count = (measured(program, Change("prune-channels", {"ratio": 0.2})), left(program))[1]
    assert 0.34 < 1 - count / whole < 0.38
    assert abs((before - after) / (12 * (whole - count)) - 1) < 0.01


@pytest.mark.usefixtures("torch_pruning")
def test_a_compiled_model_is_pruned_once(tmp_path: Path) -> None:
    """Its optimizer sees the module, its first call what torch.compile put around that."""
    compiled = "model = torch.compile(model, backend='eager')\neverything ="
    text = CONVOLUTIONS.replace("MODEL", "'small'").replace("everything =", compiled)
    state, said = trained(script(tmp_path, text), Change("prune-channels", {"ratio": 0.5}))
    assert len(said) == 1
    assert len(state["_orig_mod.0.bias"]) == 5


@pytest.mark.usefixtures("torch_pruning")
def test_a_model_whose_code_fixes_its_channels_is_refused(tmp_path: Path) -> None:
    text = CONVOLUTIONS.replace("MODEL", "'small'").replace(
        "return x + self", "return x[:, :10].view(-1, 10, 62, 62) + self"
    )
    program = script(tmp_path, text)
    with pytest.raises(AssertionError, match=r"cannot apply prune-channels: .*could not be traced in Sequential"):
        trained(program, Change("prune-channels", {"ratio": 0.5}))
