"""What is said of a torch that was never tested; the only place that names versions needs no torch for that."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from oomproof.measure import versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", [*versions.TESTED, "2.14.1+cu130", "2.4.0", "2.4.1+cu121", "2.9.1", "2.14.0"])
def test_tested_versions_and_those_between_go_without_saying(version: str) -> None:
    """No note from the oldest tested version to the newest, whatever the build."""
    assert versions.note(version) is None


@pytest.mark.parametrize(
    ("version", "age"),
    [("2.15.0", "newer"), ("2.14.2", "newer"), ("3.0", "newer"), ("2.15.0a0+git1234", "newer"),
     ("2.3.1+cu118", "older"), ("1.13.1", "older")],
)  # fmt: skip
def test_others_are_told_in_one_line(version: str, age: str) -> None:
    """The note names the version, whether it is older or newer, and the tested range."""
    note = versions.note(version)
    assert note == f"torch {version} is {age} than those that oomproof is tested with, 2.4.1 to {versions.TESTED[-1]}"


def test_no_torch_is_needed() -> None:
    """Importing the module imports no torch, so that the doctor and the report can ask it."""
    assert "torch" not in sys.modules


def test_the_same_versions_everywhere() -> None:
    """The Makefile makes environments for the tested versions, and docs/versions.md has a row for each."""
    makefile = (ROOT / "Makefile").read_text()
    made = re.search(r"^VERSIONS \?= (.*)$", makefile, re.MULTILINE)
    newest = re.search(r"torch==(\S+)", makefile)
    assert made is not None
    assert newest is not None
    assert {*made[1].split(), newest[1]} == set(versions.TESTED)
    page = (ROOT / "docs" / "versions.md").read_text()
    assert re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE) == list(versions.TESTED)
