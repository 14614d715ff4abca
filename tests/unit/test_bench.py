"""Benches, warm processes and executors, as far as no process is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from oomproof.bench import Bench, Request
from oomproof.bench.worker import Program, processes_that_fit
from oomproof.errors import OomproofError, UsageError
from oomproof.gpus import get_gpu, with_memory
from oomproof.measure.modules import is_library
from oomproof.phantom.launch import Settings, World, variables
from oomproof.phantom.warm import Key, PythonCommand

T4 = get_gpu("t4")


@pytest.mark.parametrize(
    ("command", "options", "program", "arguments"),
    [
        (["python", "train.py"], (), ("train.py",), ()),
        (["/usr/bin/python3.11", "-u", "train.py", "-m", "x"], ("-u",), ("train.py",), ("-m", "x")),
        (["python", "-W", "ignore", "-X", "dev", "-m", "pkg.train", "--lr", "1"], ("-W", "ignore", "-X", "dev"),
         ("-m", "pkg.train"), ("--lr", "1")),
    ],
)  # fmt: skip
def test_plain_python_programs_are_told_apart(command: list[str], options: Any, program: Any, arguments: Any) -> None:
    """A script or module keeps the interpreter's options before it and its own words after it."""
    parsed = PythonCommand.parse(command)
    assert parsed is not None
    assert (parsed.options, parsed.program, parsed.arguments) == (options, program, arguments)
    assert [parsed.python, *parsed.options, *parsed.program, *parsed.arguments] == command


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["accelerate", "launch", "train.py"],
        ["bash", "train.sh"],
        ["python", "-c", "import torch"],
        ["python", "-I", "train.py"],
        ["python", "-m"],
        ["python"],
        ["python", "-"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["ipython", "train.py"],
    ],
)
def test_other_commands_always_get_a_fresh_process(command: list[str]) -> None:
    """Launchers, shells, code on the command line and interpreters without the environment are never forked."""
    assert PythonCommand.parse(command) is None


def _key(folder: str = "/run", env: dict[str, str] | None = None, **settings: Any) -> Key:
    command = PythonCommand.parse(["python", "train.py", "--lr", "1"])
    assert command is not None
    made = Settings(**{"gpu": T4, **settings})
    return Key.of(command, Path("/work"), variables(made, Path(folder), env or {}), made.to_config())


@pytest.mark.parametrize(
    "settings",
    [
        {"unlimited": True},
        {"steps": 7},
        {"until_stable": True},
        {"snapshot": True},
        {"profile": True},
        {"gpu": with_memory(T4, 8 << 30)},
        {"gpu": get_gpu("a100-40gb")},
        {"folder": "/elsewhere"},
    ],
)
def test_what_nobody_looks_at_during_imports_needs_no_process_of_its_own(settings: dict[str, Any]) -> None:
    """Limits, steps, the run's folder and the kind of GPU may differ between forks of one process."""
    assert _key(**settings) == _key()


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu_count": 2},
        {"values": "keep"},
        {"unknown_counts": "many"},
        {"platform": "wsl"},
        {"observe": False},
        {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        {"env": {"ANY_OTHER": "1"}},
        {"world": World(size=8, rank=0, local_size=8, folder=Path("/messages"))},
    ],
)
def test_what_imports_may_look_at_needs_a_process_of_its_own(settings: dict[str, Any]) -> None:
    """The number of GPUs, the environment and what is installed with torch are the same in all forks of a process."""
    assert _key(**settings) != _key()


def test_ranks_differ_and_their_folders_do_not() -> None:
    """A rank is read during imports; the folder of its messages is not."""

    def world(rank: int, folder: str) -> Key:
        return _key(gpu_count=8, world=World(size=8, rank=rank, local_size=8, folder=Path(folder)))

    assert world(0, "/a") == world(0, "/b")
    assert world(0, "/a") != world(1, "/a")


def test_a_library_is_what_is_installed() -> None:
    """Installed packages and Python's own modules are libraries; a folder with a similar name is not."""
    assert is_library("/venv/lib/python3.11/site-packages/torch/__init__.py")
    assert is_library("/usr/lib/python3/dist-packages/numpy/__init__.py")
    assert is_library(str(Path(sys.modules["json"].__file__ or "")))
    assert not is_library("/home/me/site-packages-of-mine/train.py")
    assert not is_library("built-in")


def test_arguments_are_replaced_in_scripts_only() -> None:
    """Words after a script are known to be its own; those of another program are not."""
    script = Program(command=("python", "-u", "train.py", "--lr", "1"), cwd=Path(), env={})
    assert script.with_arguments(None) == ["python", "-u", "train.py", "--lr", "1"]
    assert script.with_arguments(("--lr", "2")) == ["python", "-u", "train.py", "--lr", "2"]
    with pytest.raises(OomproofError, match="no Python script"):
        Program(command=("bash", "train.sh"), cwd=Path(), env={}).with_arguments(())


def test_the_machine_has_room_for_one_at_least() -> None:
    """However little memory is free, one run at a time is made."""
    assert processes_that_fit() >= 1


@pytest.mark.parametrize(("executor", "module", "extra"), [("ray", "ray", "ray"), ("slurm", "submitit", "slurm")])
def test_a_missing_package_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executor: str, module: str, extra: str
) -> None:
    """Who asks for an executor that is not installed is told what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pip install 'oomproof\[{extra}\]'"):
        Bench([sys.executable, "-m", "this"], cwd=tmp_path, executor=executor)


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    """An unknown executor and a bench of no workers are the user's mistakes."""
    with pytest.raises(UsageError, match="local, ray, slurm"):
        Bench([sys.executable], cwd=tmp_path, executor="kubernetes")
    with pytest.raises(UsageError, match="at least 1"):
        Bench([sys.executable], cwd=tmp_path, workers=0)


def test_a_bench_answers_requests_of_a_command_without_torch(tmp_path: Path) -> None:
    """Any command can be run; each request is answered once, with its exit code."""
    with Bench(["bash", "-c", "exit 3"], cwd=tmp_path, workers=2) as bench:
        done = list(bench.run(Request(settings=Settings(gpu=T4), tag=i) for i in range(3)))
    assert sorted(d.request.tag for d in done) == [0, 1, 2]
    assert all(d.outcome is not None and d.outcome.exit_code == 3 for d in done)
