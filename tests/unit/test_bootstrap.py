"""What runs first in the user's process: it puts the phantom in, and otherwise leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oomproof
from oomproof.inject.bootstrap import has_kernels, is_compile_worker, newest_architecture
from oomproof.phantom.launch import SITE, environment

FLAGS = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(75, 75), (80, 80), (86, 86), (89, 86), (87, 86), (90, 90), (120, 120), (121, 120), (70, 70)],
)
def test_newest_architecture_that_runs(capability: int, expected: int) -> None:
    """A binary runs on its own major version from its minor version on; with none the kernels come from PTX."""
    assert newest_architecture(FLAGS, capability) == expected


@pytest.mark.parametrize(
    ("capability", "runs"), [(60, False), (70, False), (75, True), (89, True), (110, False), (120, True), (130, True)]
)
def test_a_gpu_without_kernels_is_known(capability: int, runs: bool) -> None:
    """torch runs on a GPU when it has a binary of its major version, or PTX that is not newer."""
    assert has_kernels(FLAGS, capability) is runs


def python(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of a run whose folder is ``folder``."""
    (folder / "config.json").write_text(json.dumps({"phantom": True, "gpus": [], "observe": False}))
    environ = environment(folder, {**os.environ, **env})
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, capture_output=True, text=True, cwd=folder)


def fake_torch(folder: Path, *, cuda: bool) -> str:
    """Make a package called torch and return the folder to put on PYTHONPATH."""
    package = folder / "site" / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("print('torch ran')")
    if cuda:
        (package / "lib" / "libtorch_cuda.so").write_text("")
    return str(package.parent)


def test_a_process_without_torch_goes_on_as_it_is(tmp_path: Path) -> None:
    """Tools that the command starts, and never import torch, do not notice anything."""
    done = python("print('hello')", tmp_path, PYTHONPATH=fake_torch(tmp_path, cuda=False))
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    assert not list(tmp_path.glob("error-*"))


def test_cpu_only_torch_stops_with_a_message(tmp_path: Path) -> None:
    """A process that imports a CPU-only torch ends before torch's code runs, and leaves the message for the tool."""
    done = python("import torch", tmp_path, PYTHONPATH=fake_torch(tmp_path, cuda=False))
    assert done.returncode == 1
    assert "CPU-only build" in done.stderr
    assert "pip install" in done.stderr
    assert "torch ran" not in done.stdout
    (left,) = tmp_path.glob("error-*.txt")
    assert "CPU-only build" in left.read_text()


def test_looking_torch_up_is_not_importing_it(tmp_path: Path) -> None:
    """Libraries that only ask whether torch is there do not end the process."""
    code = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    done = python(code, tmp_path, PYTHONPATH=fake_torch(tmp_path, cuda=False))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_environments_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    """Ours comes first and then runs the one that the environment has."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own ran')")
    done = python("print('script')", tmp_path, PYTHONPATH=f"{own}:{fake_torch(tmp_path, cuda=False)}")
    assert done.stdout == "own ran\nscript\n", done.stderr


def test_environment_of_a_run(tmp_path: Path) -> None:
    """Our folder comes first on PYTHONPATH; the machine's CUDA_VISIBLE_DEVICES does not count."""
    env = environment(tmp_path, {"PYTHONPATH": "/theirs", "CUDA_VISIBLE_DEVICES": "3", "OTHER": "kept"})
    assert env["PYTHONPATH"] == os.pathsep.join([str(SITE), "/theirs"])
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["OTHER"] == "kept"
    assert env["OOMPROOF_RUN"] == str(tmp_path)


def test_compiled_code_has_caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor keeps lasts for one run and never reaches the user's cache; Triton's kernels are kept with ours."""
    monkeypatch.setenv("OOMPROOF_CACHE", str(tmp_path / "cache"))
    theirs = {"TORCHINDUCTOR_CACHE_DIR": "/theirs", "TRITON_CACHE_DIR": "/theirs"}
    env = environment(tmp_path / "run", theirs)
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "run" / "inductor")
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    monkeypatch.setenv("OOMPROOF_CACHE", "/dev/null/cache")
    assert environment(tmp_path / "run", theirs)["TRITON_CACHE_DIR"] == str(tmp_path / "run" / "triton")


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        (["python", "/venv/torch/_inductor/compile_worker/__main__.py", "--kind=fork"], True),
        (["python", "train.py"], False),
    ],
)
def test_inductors_helpers_are_known(monkeypatch: pytest.MonkeyPatch, words: list[str], is_one: bool) -> None:
    """The processes in which Inductor compiles kernels are told from those that may use the GPU."""
    monkeypatch.setattr(sys, "orig_argv", words)
    assert is_compile_worker() is is_one


def test_importing_oomproof_imports_no_torch() -> None:
    """``import oomproof``, reading captures and the catalogue need no torch and no command line library."""
    code = (
        "import sys, oomproof; first = set(sys.modules); oomproof.read_capture; oomproof.get_gpu('t4'); "
        "oomproof.Measurement; oomproof.run; oomproof.fits; "
        "print(sorted(m for m in ('torch', 'numpy', 'typer', 'rich') if m in first), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


def test_all_names_are_there() -> None:
    """Every public name resolves, and the list is sorted."""
    assert list(oomproof.__all__) == sorted(oomproof.__all__)
    for name in oomproof.__all__:
        assert getattr(oomproof, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        oomproof.nothing  # noqa: B018
