"""oomproof plan and oomproof apply: candidates are run, and what is applied is what was proved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child import PYTHON
from planning import script

import oomproof
from oomproof import api
from oomproof.plan.applying import apply
from oomproof.plan.document import Plan, read_plan, write_plan
from oomproof.plan.planning import plan, rehearse

#: A plain loop: blocks of activations that outweigh the parameters, a DataLoader, AdamW.
PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))
width, samples = (512, 8192) if device == "cuda" else (8, 16)
blocks = nn.Sequential(*[Block(width) for _ in range(6)])
model = nn.Sequential(nn.Linear(32, width), blocks, nn.Linear(width, 5)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4 * samples, 32), torch.randint(5, (4 * samples,)))
for x, y in DataLoader(data, samples):
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if device == "cpu":
    leave(model)
"""
QUICK: dict[str, Any] = {"gpu": "t4", "only": ["checkpoint-blocks", "allocator-settings", "optimizer-implementation"]}


def demand(program: Path) -> int:
    return oomproof.run([PYTHON, str(program)], gpu="t4").demand.device_bytes


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "oomproof", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def memory(program: Path) -> int:
    """The memory of a GPU that is too small."""
    return demand(program) * 7 // 10


@pytest.fixture(scope="module")
def planned(program: Path, memory: int) -> Any:
    return plan([PYTHON, str(program)], memory=memory, **QUICK)


def test_a_plan_is_found_that_fits_and_every_set_in_it_was_run(planned: Any, memory: int) -> None:
    assert planned.plan is not None
    assert planned.plan.device_bytes <= memory
    assert planned.found.winner.fits
    assert "checkpoint-blocks" in [change.name for change in planned.plan.changes]
    assert planned.found.winner.time.expected > 1, "recomputing takes time"
    assert planned.plan.fidelity in ("exact", "equal")


def test_what_is_applied_takes_what_was_proved_to_the_byte(
    planned: Any, program: Path, memory: int, tmp_path: Path
) -> None:
    write_plan(tmp_path / "plan.toml", planned.plan)
    again = read_plan(tmp_path / "plan.toml")
    assert again == planned.plan
    job = api.prepare([PYTHON, str(program)], gpu="t4", memory=memory)
    applied = rehearse(job, again.changes).measurement.peak
    assert (applied.allocated_bytes, applied.reserved_bytes) == (again.allocated_bytes, again.reserved_bytes)


def test_the_command_line_plans_applies_and_says_that_it_is_the_same(
    program: Path, memory: int, tmp_path: Path
) -> None:
    file, page = tmp_path / "plan.toml", tmp_path / "plan.html"
    size = f"{memory}"
    only = "checkpoint-blocks,allocator-settings"
    made = command(
        "plan", "--gpu", "t4", "--memory", size, "--only", only, "-o", file, "--html", page, "--emit", "code", "--",
        PYTHON, program,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "FITS WITH" in made.stdout
    assert "oomproof apply" in made.stdout
    assert "from torch.utils.checkpoint import checkpoint" in made.stdout
    assert "Plotly.newPlot" in page.read_text()
    rehearsed = command("apply", "--phantom", "t4", "--memory", size, "-q", file, "--", PYTHON, program)
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert "the peak is the plan's, to the byte" in rehearsed.stderr
    assert "6 of 6 Block" in rehearsed.stderr


def test_applied_for_real_it_trains_to_the_same_bits(planned: Any, program: Path, tmp_path: Path, capfd: Any) -> None:
    """On the CPU, since the tests have no GPU: the changes are the same, and exact ones change no bit."""
    left = []
    exact = [c for c in planned.plan.changes if c.technique.fidelity_of(c.options) == "exact"]
    assert exact
    for changes in ([], exact):
        made = Plan(**{**{f: getattr(planned.plan, f) for f in Plan.__dataclass_fields__}, "changes": tuple(changes)})
        environment = {**__import__("os").environ, "LEFT": str(tmp_path / f"left-{len(left)}.json")}
        assert apply(made, [PYTHON, str(program)], env=environment) == 0
        left.append(json.loads((tmp_path / f"left-{len(left)}.json").read_text()))
    assert left[0] == left[1]
    assert "6 of 6 Block are computed again" in capfd.readouterr().err


def test_json_names_every_candidate_and_the_winner(program: Path, memory: int) -> None:
    made = command(
        "plan", "-q", "--json", "--gpu", "t4", "--memory", memory, "--only", "checkpoint-blocks", "--", PYTHON, program
    )
    data = json.loads(made.stdout)
    assert data["winner"]["techniques"] == [{"technique": "checkpoint-blocks"}]
    assert data["winner"]["verdict"] == "fits"
    assert data["baseline"]["verdict"] == "does-not-fit"
    assert data["winner"]["relative_time"]["low"] <= data["winner"]["relative_time"]["expected"]
    assert {"peak", "headroom_bytes", "fidelity", "changed"} <= set(data["candidates"][0])


def test_nothing_fits_is_an_answer_with_the_closest_and_what_is_missing(program: Path) -> None:
    made = command(
        "plan", "-q", "--gpu", "t4", "--memory", "200MiB", "--only", "checkpoint-blocks", "--", PYTHON, program
    )
    assert made.returncode == 2, made.stderr
    assert "NOTHING FITS" in made.stdout
    assert "checkpoint-blocks" in made.stdout
    assert "are missing" in made.stdout


def test_what_fits_as_it_is_needs_no_plan(program: Path, tmp_path: Path) -> None:
    made = command("plan", "-q", "--gpu", "t4", "-o", tmp_path / "plan.toml", "--", PYTHON, program)
    assert made.returncode == 0, made.stderr
    assert "FITS AS IT IS" in made.stdout
    assert not (tmp_path / "plan.toml").exists()


def test_a_search_that_was_stopped_goes_on_without_running_anything_twice(
    program: Path, memory: int, tmp_path: Path
) -> None:
    state = tmp_path / "trials.jsonl"
    first = plan([PYTHON, str(program)], memory=memory, resume=state, candidates=1, **QUICK)
    known = state.read_text().splitlines()
    assert len(known) == 2  # what it is of, and one trial
    with state.open("a") as file:
        file.write('{"key": "half a li')  # killed while it wrote
    second = plan([PYTHON, str(program)], memory=memory, resume=state, **QUICK)
    assert state.read_text().splitlines()[:2] == known
    assert second.found.trials[0].candidate == first.found.trials[0].candidate
    lines = len(state.read_text().splitlines())
    third = plan([PYTHON, str(program)], memory=memory, resume=state, **QUICK)
    assert len(state.read_text().splitlines()) == lines
    assert third.plan is not None
    assert second.plan is not None
    assert third.plan.changes == second.plan.changes


def test_a_script_that_fails_has_no_plan(tmp_path: Path) -> None:
    broken = script(tmp_path, 'import torch\nraise ValueError("no data")\n')
    made = command("plan", "-q", "--gpu", "t4", "--", PYTHON, broken)
    assert made.returncode == 1
    assert "does not run as it is" in made.stderr
    assert "no data" in made.stderr
    assert "Traceback" not in made.stderr.replace("Traceback (most recent call last):\n  File", "")


#: Scripts in which techniques have little to hold on to; whatever the answer, there is one, and no traceback.
ODD = {
    "custom optimizer, no blocks, frozen and shared parameters": """
        import torch
        from torch import nn
        class Mine(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {})
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.add_(p.grad, alpha=-0.1)
        layers = nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8)
        model = nn.Sequential(*layers).cuda()
        model[2].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        optimizer = Mine(p for p in model.parameters() if p.requires_grad)
        for _ in range(3):
            model(torch.randn(4096, 2048).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "two models, a dataset smaller than the batch": """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        one, other = nn.Linear(4096, 4096).cuda(), nn.Linear(4096, 4096).cuda()
        first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(other.parameters())
        for _ in range(3):
            for (x,) in DataLoader(TensorDataset(torch.randn(100, 4096)), 512):
                first.zero_grad(); one(x.cuda()).mean().backward(); first.step()
                second.zero_grad(); other(one(x.cuda()).detach()).mean().backward(); second.step()
        """,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_scripts_get_an_answer(name: str, tmp_path: Path) -> None:
    program = script(tmp_path, ODD[name])
    size = int(demand(program) / 1.1)
    made = command(
        "plan",
        "-q",
        "--gpu",
        "t4",
        "--memory",
        size,
        "--candidates",
        "6",
        "-o",
        tmp_path / "plan.toml",
        "--",
        PYTHON,
        program,
    )
    assert made.returncode in (0, 2), made.stderr
    assert "Traceback" not in made.stderr
    if made.returncode == 0:
        applied = command(
            "apply", "--phantom", "t4", "--memory", size, "-q", tmp_path / "plan.toml", "--", PYTHON, program
        )
        assert "to the byte" in applied.stderr, applied.stderr


def build() -> Any:
    import torch
    from torch import nn

    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 512), nn.ModuleList(), *blocks).cuda()
    del model[1]
    batch = torch.randn(8192, 32), torch.randint(512, (8192,))

    def loss(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return model, batch, loss, torch.optim.AdamW(model.parameters())


def test_a_function_is_planned_for_like_a_script(version: tuple[int, ...]) -> None:
    if sys.executable != PYTHON:
        pytest.skip("a function is run by the interpreter that calls oomproof.plan")
    whole = oomproof.plan(build, gpu="t4").found.baseline.peak_bytes
    found = oomproof.plan(build, gpu="t4", memory=whole * 3 // 4, only=["micro-batch"])
    assert found.plan is not None
    assert [change.name for change in found.plan.changes] == ["micro-batch"]


def test_a_script_that_ends_with_the_measured_steps_has_times_too(tmp_path: Path) -> None:
    """Work is counted in a further run, whose last step is that of the script; with one step there is none for it."""
    # four batches: as many as steps are measured
    program = script(tmp_path, PLAIN)
    size = demand(program) * 7 // 10
    options: dict[str, Any] = {"gpu": "t4", "memory": size, "only": ["checkpoint-blocks", "micro-batch"]}
    found = plan([PYTHON, str(program)], steps=4, **options).found
    assert found.winner is not None
    assert all(t.time is not None for t in found.trials if t.peak_bytes is not None)
    longer = plan([PYTHON, str(program)], steps=3, **options).found
    assert longer.winner is not None
    assert found.winner.candidate == longer.winner.candidate
    assert found.winner.time == longer.winner.time
    once = script(tmp_path, PLAIN.replace("torch.randn(4 * samples", "torch.randn(samples").replace(
        "(4 * samples,)", "(samples,)"), "once.py")  # fmt: skip
    unknown = plan([PYTHON, str(once)], **options).found
    assert unknown.winner is not None
    assert unknown.winner.time is None
    assert "more steps" in unknown.winner.time_reason
    fitting = [t for t in unknown.trials if t.fits and t.candidate.fidelity == unknown.winner.candidate.fidelity]
    assert unknown.winner.peak_bytes == max(t.peak_bytes or 0 for t in fitting)


def test_a_choice_for_each_block_wins_where_recomputing_all_is_more_than_is_needed(program: Path, memory: int) -> None:
    """A third of the activations has to go: recomputing some blocks costs less than all, and applies to the byte."""
    asked = ["checkpoint-blocks", "block-actions"]
    planned = plan([PYTHON, str(program)], gpu="t4", memory=memory, only=asked)
    winner = planned.found.winner
    assert winner is not None
    assert planned.plan is not None
    (change,) = winner.candidate.changes
    assert change.name == "block-actions"
    assert 0 < len(change.options["actions"]) < 6
    everything = next(t for t in planned.found.trials if t.candidate.changes[0].name == "checkpoint-blocks")
    assert everything.fits
    assert winner.expected_time < everything.expected_time
    job = api.prepare([PYTHON, str(program)], gpu="t4", memory=memory)
    applied = rehearse(job, planned.plan.changes).measurement
    assert applied.fits
    assert applied.peak.allocated_bytes == planned.plan.allocated_bytes
