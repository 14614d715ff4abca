"""Finding a compiler, and writing the functions that do nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from oomproof.errors import EnvironmentMissingError
from oomproof.phantom import build, standins


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any compiler; returns the only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return folder


def program(folder: Path, name: str) -> None:
    """Put an executable there."""
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_without_a_compiler_both_cures_are_named(bare: Path) -> None:
    """One message: install a compiler, or without any rights the ziglang package."""
    with pytest.raises(EnvironmentMissingError, match=r"gcc.*pip install ziglang"):
        build.find_compiler()


@pytest.mark.parametrize("name", ["cc", "gcc", "clang"])
def test_any_c_compiler_on_path_will_do(bare: Path, name: str) -> None:
    """cc, gcc and clang are taken from PATH, $CC before them."""
    program(bare, name)
    assert build.find_compiler() == [name]


def test_cc_from_the_environment_comes_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CC is what the person wants."""
    program(bare, "gcc")
    program(bare, "my-cc")
    monkeypatch.setenv("CC", "my-cc")
    assert build.find_compiler() == ["my-cc"]


def test_ziglang_comes_last(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ziglang package's compiler is taken when PATH has none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ziglang" or None)
    assert build.find_compiler()[1:] == ["-m", "ziglang", "cc"]
    program(bare, "gcc")
    assert build.find_compiler() == ["gcc"]


def test_the_builder_prints_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run as a program it ends with an exit code and one message, without a traceback."""
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(sys, "argv", ["build", str(tmp_path), str(tmp_path / "cache" / "set")])
    assert build.main() == 1
    assert "OOMPROOF_CACHE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text('{"files": 3}'),
        lambda folder: (folder / "libx.so").unlink(),
        lambda folder: (folder / "libx.so").write_bytes(b"12"),
    ],
    ids=["no manifest", "cut short", "a list", "no files", "library gone", "library cut short"],
)
def test_a_damaged_set_counts_as_none(tmp_path: Path, damage: object) -> None:
    """A manifest is believed only when it reads and each library has the size it says."""
    (tmp_path / "libx.so").write_bytes(b"123")
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {"libx.so": 3}}))
    assert standins.read_manifest(tmp_path) is not None
    damage(tmp_path)  # type: ignore[operator]
    assert standins.read_manifest(tmp_path) is None


def test_cpu_only_torch_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without CUDA, and no torch at all, each name what to install."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(standins.NoCUDATorch, match=r"CPU-only build.*pip install"):
        standins.find_torch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(standins.NoCUDATorch, match=r"no torch in .*pip install torch"):
        standins.find_torch()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """OOMPROOF_CACHE comes first, then XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("OOMPROOF_CACHE", raising=False)
    assert standins.cache_root() == Path("/home/x/.cache/oomproof")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert standins.cache_root() == Path("/xdg/oomproof")
    monkeypatch.setenv("OOMPROOF_CACHE", "/own")
    assert standins.cache_root() == Path("/own")


def test_functions_for_a_default_stream_per_thread_are_ours() -> None:
    """What code compiled for one default stream a thread calls is the plain function, where that does something."""
    exported = ["cudaMemcpy", "cudaMemcpy_ptds", "cudaMemcpyAsync_ptsz", "cudaStreamAttachMemAsync_ptsz"]
    own = {"cudaMemcpy", "cudaMemcpyAsync"}
    expected = {"cudaMemcpy_ptds": "cudaMemcpy", "cudaMemcpyAsync_ptsz": "cudaMemcpyAsync"}
    assert build.per_thread_aliases(exported, own) == expected
