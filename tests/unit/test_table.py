"""The table of blocks: order, limit, and forms that other programs read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from profile_samples import every, from_snapshot, hostile, training, written
from rich.console import Console

from oomproof.report import table
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load


def shown(path: Path, limit: int = 25, width: int = 80) -> str:
    """Return the table as text, without colour."""
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    source = load(path)
    blocks = table.ordered(source.profile.blocks, "size")[:limit]
    print_sheet(table.body(source, blocks, "size"), table.after(source), console)
    return console.export_text()


@pytest.mark.parametrize("sort", table.ORDERS)
def test_order(sort: str) -> None:
    """Each order is that of its key, and of equal blocks the largest stands first."""
    for _, profile in every():
        keys = [(table.ORDERS[sort](block), -block.size_bytes) for block in table.ordered(profile.blocks, sort)]
        assert keys == sorted(keys)


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and what the blocks are fit 80 columns; what is left out is counted."""
    monkeypatch.chdir(tmp_path)
    assert shown(written(Path("a.oomp"), training()), 3) == PICTURE


def test_wide_terminals_have_all_columns(tmp_path: Path) -> None:
    """With room for them shape, dtype and share are shown too."""
    text = shown(written(tmp_path / "a.oomp"), width=140)
    assert "8x512x8192" in text
    assert "bfloat16" in text
    assert "21 %" in text


def test_columns_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    """Of a snapshot only size and line are known."""
    text = shown(written(tmp_path / "a.oomp", from_snapshot()), width=140)
    assert text.splitlines()[2].split() == ["size", "line"]


def test_blocks_from_before_the_recording(tmp_path: Path) -> None:
    """Where the rows shown are older than a snapshot's recording, category and line stand there all the same."""
    known = from_snapshot()
    old = known.blocks[0]._replace(born=0, stack=(), size_bytes=2**40)
    text = shown(written(tmp_path / "a.oomp", known._replace(blocks=(old, old, *known.blocks))), 2, 100)
    assert text.splitlines()[2].split() == ["size", "category", "line"]
    assert text.count("unknown   (before the recording)") == 2


def test_of_equal_blocks_the_known_stand_first() -> None:
    """Blocks of which nothing is known do not push equal ones off the table, nor off the page."""
    first, *_ = training().blocks
    unknown = first._replace(category="unknown", stack=(), born=0)
    assert table.ordered([unknown, first], "size") == [first, unknown]


def test_csv_round_trip() -> None:
    """CSV has a row for each block, with every digit, and empty cells for what is not known."""
    for _, profile in every():
        rows = list(csv.DictReader(io.StringIO(table.to_csv_text(profile.blocks))))
        assert [int(row["size_bytes"]) for row in rows] == [block.size_bytes for block in profile.blocks]
        assert all(row["module"] or block.module is None for row, block in zip(rows, profile.blocks, strict=True))


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_csv_holds_no_formula(name: str) -> None:
    """A name that a spreadsheet would compute is text there."""
    (block, *_) = training().blocks
    (row,) = csv.DictReader(io.StringIO(table.to_csv_text([block._replace(name=name)])))
    assert row["name"] == f"'{name}"


def test_csv_lines_hold_no_control_codes() -> None:
    """A file's names cannot act on the terminal that the CSV is printed on."""
    assert "\x1b" not in table.to_csv_text(hostile().blocks)


def test_json_tells_all_of_a_block(tmp_path: Path) -> None:
    """JSON has the whole stack, and the sizes add up to what is allocated."""
    source = load(written(tmp_path / "a.oomp"))
    data = json.loads(table.to_json_text(source, source.profile.blocks))
    assert sum(row["size_bytes"] for row in data["blocks"]) + data["rounding_bytes"] == data["allocated_bytes"]
    assert data["blocks"][0]["stack"] == ["model.py:95 loss", "train.py:9 main", "train.py:40 <module>"]
    assert data["blocks"][0]["freed_phase"] == "backward"


PICTURE = """\
Peak 1.21 GiB allocated in 48 blocks; step 2, backward; 3 shown, largest first

     size  category    what                born - freed   line
256.0 MiB  activation  output of lm_head   2 fwd - 2 bwd  model.py:95 loss
256.0 MiB  temporary   in GPT              2 bwd - 2 bwd  (no stack recorded)
 32.0 MiB  activation  in transformer.wte  2 fwd - 2 bwd  model.py:39 forward
 694.5 MiB  in 45 more; --limit 0 shows all
   1.5 MiB  rounding: blocks are larger than asked for

Next: see how memory moves over the steps:
  oomproof timeline a.oomp
"""
