"""plan/techniques/micro_batch.py: the same steps on the same batches, with the activations of a piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from child import has_module
from planning import measured, refused, script, trained

from oomproof.plan.technique import Change, techniques

UNIT = 8192 * 512 * 4

#: A language model over sequences of unequal lengths; what a step does is counted in "batches".
TOKENS = """
import sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
order, workers = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
lengths = torch.tensor([12, 3, 7, 9, 2, 11, 5, 12, 1, 8, 10])
samples = []
for length in lengths:
    ids = torch.randint(20, (12,))
    samples.append({"ids": ids, "labels": ids.where(torch.arange(12) < length, -100)})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)
    def forward(self, ids):
        return self.head(self.mix(self.embedding(ids))[0])
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
steps, rates = 0, []
optimizer.register_step_post_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
loader = DataLoader(samples, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
for epoch in range(2):
    for batch in loader:
        if order == "zero first":
            optimizer.zero_grad()
        scores = model(batch["ids"])[:, :-1]
        loss = F.cross_entropy(scores.reshape(-1, 20), batch["labels"][:, 1:].reshape(-1))
        if order == "zero between":
            model.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if order == "zero last":
            optimizer.zero_grad()
model.register_buffer("rates", torch.tensor(rates))
model.register_buffer("rate_after", torch.tensor(schedule.get_last_lr()))
model.register_buffer("scale", torch.tensor(scaler.get_scale()))
leave(model)
"""


@pytest.mark.parametrize(
    ("order", "workers", "parts"), [("zero first", 0, 2), ("zero between", 1, 3), ("zero last", 0, 4)]
)
def test_unequal_token_counts_are_weighed(tmp_path: Path, order: str, workers: int, parts: int) -> None:
    """Parameters, learning rates and the scaler's scale after 6 steps are those of whole batches, the last cut too."""
    program = script(tmp_path, TOKENS)
    arguments = (order, str(workers))
    plain, _ = trained(program, arguments=arguments)
    changed, said = trained(program, Change("micro-batch", {"parts": parts}), arguments=arguments)
    assert len(said) == 1
    assert len(plain["rates"]) == 6
    for name in ("rates", "rate_after", "scale"):
        assert changed[name] == plain[name]
    _assert_close(changed, plain, 1e-6)


def _assert_close(changed: dict[str, list[float]], plain: dict[str, list[float]], tolerance: float) -> None:
    assert changed.keys() == plain.keys()
    for name, values in plain.items():
        assert changed[name] == pytest.approx(values, rel=0, abs=tolerance * max(map(abs, values))), name


#: Mean losses and one-hot targets over rows of one size; the last batch has 6 of 8 rows. 20 layers of two units.
ROWS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
device = "cuda" if torch.cuda.is_available() else "cpu"
rows, width, dtype = (8192, 512, torch.float32) if device == "cuda" else (8, 16, torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(20)])
model.to(device, dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(rows * 11 // 4, width, dtype=dtype))
for epoch in range(1 if device == "cuda" else 2):
    for (x,) in DataLoader(data, batch_size=rows):
        x = x.to(device)
        loss = nn.functional.mse_loss(model(x), x) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if device == "cpu":
    leave(model)
"""


def test_a_piece_of_the_activations_remains(tmp_path: Path) -> None:
    """With 4 pieces a quarter of the 40 units that layers save and of what is beside them; gradients stay whole."""
    program = script(tmp_path, ROWS)
    plain = measured(program)
    options = next(iter(techniques()["micro-batch"].variants(plain.facts)))
    assert options == {"parts": 2, "loaders": [0]}
    changed = measured(program, Change("micro-batch", {**options, "parts": 4}))
    saved = plain.measurement.demand.allocated_bytes - changed.measurement.demand.allocated_bytes
    assert saved / UNIT == pytest.approx(0.75 * 40, abs=3)


@pytest.mark.parametrize("parts", [3, 16])
def test_means_over_samples_are_weighed(tmp_path: Path, parts: int) -> None:
    """8 and 6 rows in 3 pieces, and in pieces of one: in float64 the parameters differ by less than 1e-12."""
    program = script(tmp_path, ROWS)
    plain, _ = trained(program)
    changed, _ = trained(program, Change("micro-batch", {"parts": parts}))
    _assert_close(changed, plain, 1e-12)


REFUSALS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
case = sys.argv[1]
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
if case == "time first":
    loader = DataLoader(TensorDataset(torch.randn(16, 3, 4)), batch_size=4, collate_fn=lambda s: torch.stack(s[0], 1))
for place, (x,) in enumerate(zip(loader, loader) if case == "two loaders" else loader):
    x = x[0] if case == "two loaders" else x
    loss = model(x).square().mean() if case == "own loss" else nn.functional.mse_loss(model(x), x)
    if case == "drops":
        model.weight.grad = None
    loss.backward()
    if case == "turns":
        optimizer.step()
        nn.functional.mse_loss(model(x), x).backward()
    if case != "accumulates" or place % 9 == 8:
        optimizer.step(lambda: None) if case == "closure" else optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("time first", "it is not known along which dimension the samples lie"),
        ("two loaders", "two DataLoaders are read in turn"),
        ("own loss", "the loss is none of torch's means"),
        ("drops", "the script changes or drops gradients by itself"),
        ("turns", "the optimizer steps between two backward passes"),
        ("accumulates", "no optimizer of torch's steps after each batch"),
        ("closure", "the optimizer is given a closure"),
    ],
)
def test_what_pieces_would_not_add_up_to_is_refused(tmp_path: Path, case: str, reason: str) -> None:
    program = script(tmp_path, REFUSALS)
    assert reason in refused(program, Change("micro-batch", {"parts": 2}), arguments=(case,))


FRAMEWORKS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
framework = sys.argv[1]
torch.manual_seed(0)
lengths = torch.tensor([8, 3, 7, 2, 5, 8, 1, 4, 6, 8])
samples = []
for length in lengths:
    ids = torch.randint(20, (8,))
    samples.append({"input_ids": ids, "labels": ids.where(torch.arange(8) < length, -100)})
if framework == "trainer":
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                        attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(output_dir=sys.argv[2], per_device_train_batch_size=4, num_train_epochs=2,
                                  learning_rate=0.5, optim="sgd", use_cpu=True, report_to="none", save_strategy="no",
                                  disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=samples)
    trainer.train()
    steps, rate = trainer.state.global_step, trainer.lr_scheduler.get_last_lr()[0]
else:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mix = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 20)
        def loss(self, batch):
            scores = self.head(self.mix(self.embedding(batch["input_ids"]))[0])
            return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
    model = Model()
    loader = DataLoader(samples, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    def optimizers():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
if framework == "accelerate":
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    optimizer, schedule = optimizers()
    steps = 0
    def count(*_):
        global steps
        steps += 1
    optimizer.register_step_post_hook(count)
    module, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(2):
        for batch in loader:
            loss = model.loss(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    rate = schedule.get_last_lr()[0]
if framework == "lightning":
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
        def training_step(self, batch, index):
            return self.model.loss(batch)
        def configure_optimizers(self):
            optimizer, schedule = optimizers()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                                gradient_clip_val=1.0, enable_progress_bar=False, enable_model_summary=False)
    module = Module()
    trainer.fit(module, loader)
    steps, rate = trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
model.register_buffer("counts", torch.tensor([float(steps), rate]))
leave(model)
"""


@pytest.mark.parametrize(
    ("framework", "library", "parts"),
    [("trainer", "transformers", 2), ("accelerate", "accelerate", 3), ("lightning", "lightning", 3)],
)
def test_frameworks_count_batches(tmp_path: Path, framework: str, library: str, parts: int) -> None:
    """Unequal token counts, and batches of 4, 4 and 2: steps, learning rates and parameters are those of batches."""
    if not has_module(library):
        pytest.skip(f"{library} is not installed beside the tested torch")
    program = script(tmp_path, FRAMEWORKS)
    arguments = (framework, str(tmp_path / "output"))
    plain, _ = trained(program, arguments=arguments)
    changed, said = trained(program, Change("micro-batch", {"parts": parts}), arguments=arguments)
    assert len(said) == 1
    assert changed.pop("counts") == plain.pop("counts")
    _assert_close(changed, plain, 3e-6)
