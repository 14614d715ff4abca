"""plan/techniques/micro_batch.py: the same steps on the same batches, with the activations of a piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import script, trained

from oomproof.plan.technique import Change

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
    _assert_close(changed, plain)


def _assert_close(changed: dict[str, list[float]], plain: dict[str, list[float]]) -> None:
    for name, values in plain.items():
        largest = max(map(abs, values))
        assert changed[name] == pytest.approx(values, rel=0, abs=1e-6 * largest), name
