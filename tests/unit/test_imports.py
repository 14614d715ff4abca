"""inject/imports.py: being told of an import, by everyone who asked."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from oomproof.inject.imports import before_import, when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "waited_for", raising=False)
    return "waited_for"


def test_everyone_who_waits_for_a_module_is_told_once(module: str) -> None:
    told: list[str] = []
    before_import(module, lambda _: told.append("before"))
    for name in ("first", "second", "third"):
        when_imported(module, lambda m, name=name: told.append(f"{name} {m.value}"))
    assert importlib.util.find_spec(module) is not None  # libraries look for a module without importing it
    assert not told
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert sorted(told) == ["before", "first 1", "second 1", "third 1"]
    assert told[0] == "before"


def test_a_module_that_is_there_is_told_of_at_once(module: str) -> None:
    importlib.import_module(module)
    told: list[int] = []
    when_imported(module, lambda m: told.append(m.value))
    assert told == [1]


def test_a_module_that_is_not_there_is_not_found(module: str) -> None:
    for _ in range(2):
        when_imported(f"{module}_not", lambda _: pytest.fail("there is none"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}_not")
