"""The stand-ins: compiled once, by whatever compiler is there, rebuilt when broken, safe when many start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from child import PYTHON, Child, has_module

import oomproof

SOURCE = Path(oomproof.__file__).parents[1]


def torch_folder() -> Path:
    """Return the tested torch's folder."""
    code = "import importlib.util as u; print(list(u.find_spec('torch').submodule_search_locations)[0])"
    return Path(subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def build(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the builder as the bootstrap does."""
    command = [sys.executable, "-m", "oomproof.phantom.build", str(torch_folder()), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def exported(path: Path) -> set[str]:
    """Return the functions that a library exports."""
    from oomproof.phantom.build import exported_functions

    return set(exported_functions(path))


def test_sources_compile_without_a_warning(tmp_path: Path) -> None:
    """Every C file is clean under -Wall -Wextra -Werror with the installed headers."""
    from oomproof.phantom import build as builder
    from oomproof.phantom.standins import DRIVER

    torch = torch_folder()
    includes = builder.include_folders(torch)
    macros = [f"-D{name}=1" for name in builder.VERSION_MACROS]
    for source in sorted(DRIVER.glob("*.c")):
        command = [
            *builder.find_compiler(), *builder.FLAGS, "-Werror", *macros, f"-I{DRIVER}", *(f"-I{i}" for i in includes),
            "-c", str(source), "-o", str(tmp_path / "out.o"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{source.name}\n{done.stderr}"


def test_several_processes_build_one_set(tmp_path: Path) -> None:
    """Of builders that start together one compiles, the others wait and take its result; nothing else remains."""
    folder = tmp_path / "standins" / "set"
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda _: build(folder), range(3)))
    assert [done.returncode for done in ended] == [0, 0, 0], ended[0].stderr
    assert sorted(path.name for path in folder.parent.iterdir()) == ["set", "set.lock"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert all((folder / name).exists() for name in manifest["files"])

    # every function that the installed real libraries export is there
    from oomproof.phantom.standins import library_folders

    for name in manifest["load"]:
        real = next((f / name for f in library_folders(torch_folder()) if (f / name).exists()), None)
        if real is not None:
            names = exported(real)
            if name.startswith("libcusparseLt"):  # old versions export the CUDA runtime that is linked into them
                names = {function for function in names if function.startswith("cusparseLt")}
            assert names <= exported(folder / name), name


def test_a_broken_cache_is_rebuilt(child: Child, tmp_path: Path) -> None:
    """A library cut short, or a manifest that is no JSON, is noticed at the next start and built again."""

    def body():
        import torch

        return torch.ones(3, device="cuda").numel()

    env = {"OOMPROOF_CACHE": str(tmp_path / "cache")}
    assert child(body, env=env) == 3
    (folder,) = (p for p in (tmp_path / "cache" / "standins").iterdir() if p.is_dir())
    library = next(folder.glob("libcudart*"))
    size = library.stat().st_size
    library.write_bytes(library.read_bytes()[:1000])
    assert child(body, env=env) == 3
    assert library.stat().st_size == size
    (folder / "manifest.json").write_text("{")
    assert child(body, env=env) == 3
    assert json.loads((folder / "manifest.json").read_text())["load"]


def test_ziglang_compiles_too(child: Child, tmp_path: Path) -> None:
    """With no compiler on PATH the ziglang package is taken."""
    if not has_module("ziglang") and subprocess.run([sys.executable, "-c", "import ziglang"]).returncode:
        pytest.skip("ziglang is not installed")
    empty = tmp_path / "bin"
    empty.mkdir()
    folder = tmp_path / "standins" / "set"
    done = build(folder, PATH=str(empty), CC="", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (folder / "manifest.json").exists()


def test_trace_names_each_call(child: Child) -> None:
    """OOMPROOF_TRACE=1 writes every call to the stand-ins to standard error."""

    def body():
        import torch

        torch.ones(3, device="cuda")

    said = child.run(body, env={"OOMPROOF_TRACE": "1"}).stderr
    assert "cudaMalloc" in said
    assert "[oomproof " in said


def test_idle_functions_are_listed() -> None:
    """doctor --symbols names the functions that only answer "success", with their library."""
    command = [sys.executable, "-m", "oomproof", "doctor", "--symbols"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) > 1000
    assert all(len(line.split()) == 2 for line in listed)
    assert not any(line.endswith(" cudaMalloc") for line in listed)
