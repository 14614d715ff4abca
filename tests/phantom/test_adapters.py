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


@pytest.fixture
def bitsandbytes(peft: None) -> None:
    if not has_module("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed beside the tested torch")


def four_bits(weights: int) -> int:
    """Return the bytes of a layer's weights in NF4: a half each, a byte a block of 64, 4 a block of 256 of those.

    And two tables of 16 and of 256 levels, and an offset. The allocator gives multiples of 512.
    """
    scales = weights // 64
    return sum(-(-size // 512) * 512 for size in (weights // 2, scales, scales // 256 * 4, 16 * 4, 256 * 4, 4))


@pytest.mark.usefixtures("bitsandbytes")
def test_weights_take_half_a_byte_and_their_scales(tmp_path: Path) -> None:
    """Against LoRA, with the same gradients and states, linear weights go from 4 bytes to a half and the scales."""
    program = script(tmp_path, LANGUAGE)
    lora = measured(program, Change("lora", {"rank": 8}), arguments=("2", "512"))
    before, _ = left(program)
    changed = measured(program, Change("qlora", {"rank": 8, "model": "Language"}), arguments=("2", "512"))
    after, _ = left(program)
    weights = 4 * 512 * 512
    assert lora.refused is None
    assert before - after == 8 * (4 * weights - four_bits(weights)) - 256 * 4  # the table that new layers copy
    assert changed.measurement.peak.allocated_bytes < lora.measurement.peak.allocated_bytes
    assert changed.said[0]["what"] == "8 linear layers have 4-bit weights (NF4)"


@pytest.mark.usefixtures("bitsandbytes")
def test_4_bit_weights_are_rounded_once(tmp_path: Path) -> None:
    """On the CPU, where a model is never moved: what three steps leave of the model is what one step leaves."""
    program = script(tmp_path, LANGUAGE)
    change = Change("qlora", {"rank": 4})
    one, _ = trained(program, change, arguments=("1", "64"))
    three, said = trained(program, change, arguments=("3", "64"))
    assert {k: v for k, v in one.items() if "lora_" not in k} == {k: v for k, v in three.items() if "lora_" not in k}
    assert all(one[k] != three[k] for k in one if "lora_" in k)
    assert len(one["blocks.0.up.base_layer.weight"]) == 4 * 64 * 64 // 2
    assert len(said) == 2


@pytest.mark.usefixtures("bitsandbytes")
def test_a_model_made_on_the_gpu_is_told_of(tmp_path: Path) -> None:
    """The full weights were there, so the peak is no less than they are; with the advice to build it elsewhere."""
    text = LANGUAGE.replace("model = Language(hidden)", "with torch.device(device): model = Language(hidden)")
    changed = measured(script(tmp_path, text), Change("qlora"), arguments=("2", "512"))
    assert "8 of them were on the GPU before, where 0.03 GiB had been allocated" in changed.said[0]["what"]
    assert changed.measurement.peak.allocated_bytes > 4 * 8 * 4 * 512 * 512


@pytest.mark.usefixtures("bitsandbytes", "transformers")
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_trainer_trains_adapters_of_gpt2(name: str) -> None:
    """Trainer groups parameters before the adapters are there (lora) or after (qlora): the same are trained."""
    changed = measured(EXAMPLES / "train_gpt2.py", Change(name, {"rank": 8}), arguments=SMALL)
    assert changed.refused is None
    assert changed.measurement.exit_code in (0, None)
    width, rank = 128, 8
    attention = rank * (width + 3 * width) + rank * 2 * width
    assert changed.facts.optimizers[0].parameters == 2 * (attention + 2 * rank * 5 * width)
    assert changed.facts.framework == "trainer"


SMALL = ("--layers", "2", "--hidden", "128", "--heads", "2", "--sequence", "64", "--batch-size", "2", "--steps", "3",
         "--gradient-checkpointing")  # fmt: skip

SAVED = """
import os, tempfile, torch
from peft import PeftModel
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
torch.manual_seed(0)
model = BertForSequenceClassification(config)
start = {k: v.clone() for k, v in model.state_dict().items()}
data = [{"input_ids": torch.arange(8), "labels": i % 2} for i in range(8)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(folder + "/end")
    assert "adapter_model.safetensors" in os.listdir(folder + "/end"), os.listdir(folder + "/end")
    plain = BertForSequenceClassification(config)
    plain.load_state_dict(start)
    again = PeftModel.from_pretrained(plain, folder + "/end").eval()
ids = torch.arange(8)[None]
assert torch.allclose(again(ids).logits, model.eval()(ids).logits, atol=1e-6)
leave(torch.nn.Linear(1, 1))
"""


@pytest.mark.usefixtures("peft", "transformers")
def test_what_trainer_saves_is_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    """With the classifier, which is trained whole: beside the model as it was, it gives the same."""
    _, said = trained(script(tmp_path, SAVED), Change("lora", {"rank": 4}))
    assert "the head classifier whole" in said[0]["what"]


ADVERSARIES = """
import torch
from torch import nn
torch.manual_seed(0)
def net(a, b):
    return nn.Sequential(nn.Linear(a, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, b))
generator, critic = net(4, 8), net(8, 1)
of_generator = torch.optim.Adam(generator.named_parameters(), lr=1e-2)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
for _ in range(3):
    fake = generator(torch.randn(4, 4))
    of_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(4, 8)).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_generator.step()
for model, optimizer in ((generator, of_generator), (critic, of_critic)):
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained
    assert len(trained) == 2 * 2 + 2  # two adapters of two weights, and the last layer's
leave(nn.ModuleList([generator, critic]))
"""


@pytest.mark.usefixtures("peft")
def test_each_of_two_models_has_adapters_in_its_own_optimizer(tmp_path: Path) -> None:
    _, said = trained(script(tmp_path, ADVERSARIES), Change("lora", {"rank": 2}))
    assert len(said) == 2


@pytest.mark.usefixtures("peft")
def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    text = ADVERSARIES.replace("nn.Linear(16, 16)", "nn.Identity()").replace("nn.Linear(a, 16)", "nn.Identity()")
    with pytest.raises(AssertionError, match="cannot apply lora: Sequential has no trainable linear layer besides its"):
        trained(script(tmp_path, text), Change("lora"))
