"""Requests go past one machine: through Ray, with a local cluster, and submitit, with its local executor."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import child as child_module
import pytest

from oomproof.bench import Bench, Request
from oomproof.bench.slurm import Slurm
from oomproof.gpus import get_gpu
from oomproof.phantom.launch import Settings

EXECUTORS = {"local": "local", "ray": "ray", "submitit": functools.partial(Slurm, cluster="local")}
SCRIPT = """
import sys, time, torch
from torch import nn
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(int(sys.argv[1]), 1024, device="cuda")).sum().backward()
    optimizer.step()
    time.sleep(float(sys.argv[2]))
sys.exit(4)
"""


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Any:
    """Each executor whose package is installed."""
    if request.param != "local" and importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return EXECUTORS[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def _request(rows: int, sleep: float = 0.0, **settings: Any) -> Request:
    return Request(settings=Settings(gpu=get_gpu("t4"), **settings), arguments=(str(rows), str(sleep)), tag=rows)


def test_every_executor_answers_each_request_once_with_its_own_figures(executor: Any, folder: Path) -> None:
    """Answers carry the tag of their request and what that run measured, the same wherever it ran."""
    rows = (64, 128, 256, 512)
    found = {}
    for name in ("local", executor):
        with Bench([child_module.PYTHON, "script.py"], cwd=folder, executor=name, workers=2) as bench:
            done = list(bench.run([_request(n, steps=None) for n in rows]))
        assert [d.error for d in done] == [None] * len(rows)
        assert sorted(d.request.tag for d in done) == list(rows)
        peaks = {d.request.tag: d.outcome.findings[0]["allocated_bytes"] for d in done if d.outcome is not None}
        assert {d.outcome.exit_code for d in done if d.outcome is not None} == {4}
        found[str(name)] = [peaks[n] for n in rows]
    assert found["local"] == found[str(executor)]
    assert len(set(found["local"])) == len(rows)


def test_every_executor_stops_in_the_middle(executor: Any, folder: Path) -> None:
    """After its seconds a bench answers what has not ended with "stopped", and leaves no file beside the script."""
    with Bench([child_module.PYTHON, "script.py"], cwd=folder, executor=executor, workers=2) as bench:
        done = list(bench.run([_request(n, 1000.0) for n in range(1, 5)], seconds=15.0))
    assert sorted(d.request.tag for d in done) == [1, 2, 3, 4]
    assert {d.error for d in done} == {"stopped"}
    assert [path.name for path in folder.iterdir()] == ["script.py"]
