"""Forks of a warm process measure what fresh processes do, and end as they do."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import child as child_module
import pytest

from oomproof.bench import Bench, Done, Request
from oomproof.gpus import get_gpu
from oomproof.phantom.launch import Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
T4 = get_gpu("t4")
GIB = 2**30

MODEL = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""

#: Scripts by what they try; each is run as ``script.py first second``.
SCRIPTS = {
    "trains": MODEL + "for i in range(5): print(i, step().item())\n",
    "counts": MODEL + "x = torch.randn(4096, device='cuda'); y = x[x > 0].repeat(100); [step() for _ in range(3)]\n",
    "fails": MODEL + "step()\nraise ValueError('no such thing')\n",
    "fails at import": MODEL + "import no_such_module\n",
    "out of memory": MODEL + "step()\nx = [torch.empty(2**30, device='cuda') for _ in range(100)]\n",
    "catches out of memory": MODEL
    + textwrap.dedent("""
        try:
            x = torch.empty(10**12, device="cuda")
        except torch.OutOfMemoryError:
            step(); step()
        """),
    "exit code": MODEL + "step()\nsys.exit(7)\n",
    "exit message": MODEL + "step()\nsys.exit('that is all')\n",
    "os._exit": MODEL + "step()\nimport os; os._exit(5)\n",
    "killed": MODEL + "step()\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "compiles": MODEL
    + textwrap.dedent("""
        model = torch.compile(model)
        for _ in range(3):
            step()
        """),
    "says who it is": textwrap.dedent("""
        import atexit, os, sys, torch
        print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), sys.orig_argv, __spec__, sys.flags)
        print(sorted(vars()), os.environ["OF_THE_RUN"], os.path.isdir(os.environ["OOMPROOF_RUN"]), sorted(os.environ))
        print(os.getpid() == os.getpgrp() == os.getsid(0), sys.stdin.read(), file=sys.stderr)
        import threading, multiprocessing
        print(threading.current_thread() is threading.main_thread(), multiprocessing.current_process())
        atexit.register(print, "at exit")
        torch.zeros(10, device="cuda")
        """),
    "a local module": "import beside, torch\nprint(beside.VALUE); torch.zeros(beside.VALUE, device='cuda')\n",
    "spawns": textwrap.dedent("""
        import torch, torch.multiprocessing as mp
        def work(rank):
            x = torch.zeros(2**20 * (rank + 1), device="cuda")
            print(rank, __name__, flush=True)
        if __name__ == "__main__":
            mp.spawn(work, nprocs=2)
        """),
    "forks": textwrap.dedent("""
        import torch, torch.multiprocessing as mp
        def work(rank):
            x = torch.zeros(2**20 * (rank + 1), device="cuda")
        if __name__ == "__main__":
            p = mp.get_context("fork").Process(target=work, args=(1,)); p.start(); p.join(); print(p.exitcode)
        """),
    "loads data": MODEL
    + textwrap.dedent("""
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                data = TensorDataset(torch.randn(256, 512))
                for (x,) in DataLoader(data, 64, num_workers=2, multiprocessing_context=method):
                    model(x.cuda()).sum().backward()
                    optimizer.step()
        """),
}


def _figures(value: Any) -> Any:
    """What was measured: everything but times, process numbers and the run's own folder."""
    if isinstance(value, dict):
        return {k: _figures(v) for k, v in value.items() if k not in ("pid", "seconds", "snapshot", "profile")}
    if isinstance(value, list | tuple):
        return [_figures(v) for v in value]
    return value


def _measured(done: Done) -> Any:
    assert done.outcome is not None, done.error
    findings = sorted((_figures(f) for f in done.outcome.findings), key=json.dumps)
    return done.outcome.exit_code, findings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 12345\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\nSIZE = 1000\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom package import SIZE\nimport torch\nprint(__name__, __file__, sys.argv, __package__)\n"
        "torch.zeros(SIZE, device='cuda')\n"
    )
    return tmp_path


def fresh_and_warm(
    folder: Path,
    words: list[str],
    *,
    settings: Settings | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[Done, Done]:
    """Return the same run from a fresh process and as the second fork of a warm one."""
    request = Request(settings=settings or Settings(gpu=T4), env=env or {}, timeout_seconds=300)
    with Bench([child_module.PYTHON, *words], cwd=folder, workers=1) as bench:
        fresh, first, second = bench.run([request] * 3)
    assert not fresh.forked
    assert first.forked
    assert second.forked
    assert _measured(first) == _measured(second)
    return fresh, second


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_fork_measures_what_a_fresh_process_does(folder: Path, what: str) -> None:
    """Exit codes and findings of a fork are those of a fresh process, to the byte."""
    (folder / "script.py").write_text(SCRIPTS[what])
    fresh, warm = fresh_and_warm(folder, ["script.py", "first", "second"], env={"OF_THE_RUN": "yes"})
    assert _measured(fresh) == _measured(warm)
    assert fresh.output == warm.output
