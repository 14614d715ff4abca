"""The difference of two measurements, and its exit code in CI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from profile_samples import every, training, written

from oomproof import cli
from oomproof.measure.profile import Profile
from oomproof.report.diff import compare
from oomproof.units import MIB

SAMPLES = dict(every())


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["oomproof", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("allow", "code"), [("0", 2), ("100MiB", 2), ("179MiB", 2), ("180MiB", 0), ("1GiB", 0)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allow: str, code: int) -> None:
    """Exit code 2 as soon as allocated or reserved grew by more than is allowed: here 168 and 180 MiB."""
    before = written(tmp_path / "a.oomp", training(steps=8))
    after = written(tmp_path / "b.oomp", training(steps=8, leak_bytes=24 * MIB))
    assert call(monkeypatch, "diff", before, after, "--allow", allow) == code
    assert call(monkeypatch, "diff", after, before) == 0
    assert call(monkeypatch, "diff", after, after) == 0


@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_nothing_changed(profile: Profile) -> None:
    """A measurement beside itself shows no change."""
    found = compare(profile, profile)
    assert not found.grew(0)
    assert found.categories == found.modules == found.lines == ()


@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_changes_add_up(profile: Profile) -> None:
    """The changes by category add up to that of the peak; by module and line to that of the blocks."""
    found = compare(training(), profile)
    assert sum(change.bytes for change in found.categories) == found.allocated.bytes
    blocks = sum(b.size_bytes for b in profile.blocks) - sum(b.size_bytes for b in training().blocks)
    assert sum(change.bytes for change in found.modules) == blocks
    assert sum(change.bytes for change in found.lines) == blocks


def test_files_of_different_kinds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A capture beside a memory snapshot is compared with a note, two of a kind without one."""
    run, other = written(tmp_path / "a.oomp", training()), written(tmp_path / "b.oomp", SAMPLES["snapshot"])
    for files, said in (
        ((run, other), "a capture, then a recording"),
        ((other, run), "own, then a capture"),
        ((run, run), ""),
        ((other, other), ""),
    ):
        call(monkeypatch, "diff", *files)
        text = " ".join(capsys.readouterr().out.split())
        assert ("of different kinds" in text) is bool(said)
        assert said in text
        call(monkeypatch, "diff", *files, "--json")
        assert bool(json.loads(capsys.readouterr().out)["notes"]) is bool(said)


def test_layers_are_told_together() -> None:
    """More layers are one change, not one for each."""
    names = [change.name for change in compare(training(layers=4), training(layers=12)).modules]
    assert names[:2] == ["transformer.h.*.mlp", "transformer.h.*.attn"]
    assert len(names) == 2


def test_moved_lines_are_no_change() -> None:
    """Lines that an edit above them moved are the same lines."""
    before = training()

    def moved(frame: str) -> str:
        file, _, rest = frame.partition(":")
        number, _, function = rest.partition(" ")
        return f"{file}:{int(number) + 7} {function}"

    after = before._replace(
        blocks=tuple(block._replace(stack=tuple(map(moved, block.stack))) for block in before.blocks)
    )
    assert compare(before, after).lines == ()


def test_a_new_line_changes_its_function() -> None:
    """Where a function has other lines than before, the function is what grew."""
    before = training()
    new = before.blocks[0]._replace(stack=("model.py:99 loss",), size_bytes=MIB)
    (change,) = compare(before, before._replace(blocks=(*before.blocks, new))).lines
    assert (change.name, change.bytes) == ("model.py loss", MIB)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """JSON says whether it grew, and names the line that did."""
    before = written(tmp_path / "a.oomp", training(steps=8))
    after = written(tmp_path / "b.oomp", training(steps=8, leak_bytes=24 * MIB))
    assert call(monkeypatch, "diff", before, after, "--json") == 2
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "oomproof.diff/1"
    assert data["grew"] is True
    assert data["allocated"]["change_bytes"] == 7 * 24 * MIB
    assert data["lines"][0]["name"] == "train.py:33 log"
