"""What the steps show: leaks, fragmentation, peaks that vary."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from measurement_samples import step
from profile_samples import bare, from_snapshot, training, written
from rich.console import Console

from oomproof.measure.profile import Growth, Profile
from oomproof.report import steps
from oomproof.report.export.perfetto import to_perfetto
from oomproof.report.page.data import page_data
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load
from oomproof.units import MIB

LEAKING = training(steps=8, leak_bytes=24 * MIB)
FRAGMENTING = training(steps=8, fragment_bytes=60 * MIB)


def shown(path: Path) -> str:
    """Return the findings as text, without colour."""
    console = Console(width=80, record=True, file=io.StringIO(), color_system=None)
    source = load(path)
    found = steps.examine(source.profile)
    print_sheet(steps.body(source, found), steps.after(source, found), console)
    return console.export_text()


@pytest.mark.parametrize(
    ("profile", "state"),
    [
        (training(), "steady"),
        (training(steps=2), "too-few-steps"),
        (training(steps=1), "too-few-steps"),
        (LEAKING, "leaks"),
        (FRAGMENTING, "fragments"),
        (training(steps=6, vary=True), "varies"),
        (from_snapshot(), "no-steps"),
        (bare(), "no-steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state(profile: Profile, state: str) -> None:
    """Each fault is told from the others."""
    assert steps.examine(profile).states == (state,)


def test_leak_names_the_line_and_the_rate(tmp_path: Path) -> None:
    """A leak is told with its bytes per step, its line, and when the GPU would be full."""
    found = steps.examine(LEAKING)
    assert found.leak_bytes_per_step == 24 * MIB
    assert LEAKING.limit_bytes is not None
    assert found.steps_until_full == (LEAKING.limit_bytes - LEAKING.reserved_bytes) // (24 * MIB)
    text = shown(written(tmp_path / "a.oomp", LEAKING))
    assert "LEAKS  24.0 MiB more in each step" in text
    assert "train.py:33 log" in text
    assert f"about {found.steps_until_full} steps" in text


def test_a_cache_that_has_filled_is_no_leak() -> None:
    """What stopped growing before the last steps is told, but not as a leak."""
    filled = Growth(("cache.py:3 get",), None, "unknown", 3, 3 * MIB, 3, 1, 3)
    found = steps.examine(training(steps=8)._replace(growth=(filled,)))
    assert found.states == ("steady",)
    assert found.settled == (filled,)


def test_fragmentation_names_the_lines(tmp_path: Path) -> None:
    """Growing reserved memory is told by the lines that asked for segments after the first steps."""
    found = steps.examine(FRAGMENTING)
    assert found.reserved_growth_bytes == 6 * 60 * MIB
    assert found.places[0].stack[0] == "data.py:7 collate"
    assert found.places[0].size_bytes == 6 * 60 * MIB
    text = shown(written(tmp_path / "a.oomp", FRAGMENTING))
    assert "data.py:7 collate" in text
    assert "expandable_segments:True oomproof run -o FILE.oomp --gpu t4 -- python train.py" in text


def test_the_first_step_is_compared_with_the_last() -> None:
    """Optimizer states appear in the first step's end, so the second peaks higher by them."""
    found = steps.examine(training())
    assert dict(found.changes) == {"optimizer_state": found.first_to_steady_bytes}


def test_json_has_each_step(tmp_path: Path) -> None:
    """JSON has a row for each step, and the leak with its whole stack."""
    source = load(written(tmp_path / "a.oomp", LEAKING))
    data = json.loads(steps.to_json_text(source, steps.examine(source.profile)))
    assert [row["step"] for row in data["steps"]] == list(range(1, 9))
    assert data["leaks"][0]["bytes_per_step"] == 24 * MIB
    assert data["leaks"][0]["stack"][0] == "train.py:33 log"


def test_many_steps_are_folded(tmp_path: Path) -> None:
    """Of many different steps the first, the last and the highest are shown."""
    known = training(steps=3)
    rows = tuple(
        known.steps[1]._replace(
            step=n, end_allocated_bytes=n, category_bytes=(n * MIB if n != 50 else 1000 * MIB,) * 10
        )
        for n in range(1, 101)
    )
    text = shown(written(tmp_path / "a.oomp", known._replace(steps=rows)))
    assert "step 50 " in text
    assert "step 100 " in text
    assert len(text.splitlines()) < 40


def test_lengths_that_vary_fragment() -> None:
    """Where lengths vary, what reserved grows by beyond what more is allocated is fragmentation."""
    known = training(steps=6, vary=True, fragment_bytes=60 * MIB)
    assert steps.examine(known).states == ("fragments", "varies")


def test_more_memory_for_more_is_no_fragmentation() -> None:
    """A step that allocates more than all before it may reserve more."""
    known = training(steps=3)
    rows = tuple(
        known.steps[1]._replace(
            step=n, reserved_bytes=n * 100 * MIB, category_bytes=(n * 100 * MIB, *known.steps[1].category_bytes[1:])
        )
        for n in range(1, 9)
    )
    assert steps.examine(known._replace(steps=rows)).states == ("varies",)


def unfinished() -> Profile:
    """Return a profile of three steps whose events go on after the last optimizer step, as earlier captures have it."""
    known = training(steps=4)
    return known._replace(growth=(Growth(("train.py:33 log",), None, "unknown", 3, 3 * MIB, 3, 2, 4),))


def test_what_comes_after_the_last_step_is_no_step(tmp_path: Path) -> None:
    """No report counts the events after the last optimizer step as a step more."""
    file = written(tmp_path / "a.oomp", unfinished(), steps=3)
    source = load(file)
    found = steps.examine(source.profile)
    assert [row.step for row in found.rows] == [1, 2, 3]
    assert {point.step for point in source.profile.points} == {1, 2, 3, None}
    assert "from step 2 to the end" in shown(file)
    assert "step 4" not in shown(file)
    assert json.loads(steps.to_json_text(source, found))["leaks"][0]["last_step"] == 3
    for data in (page_data(source.profile), to_perfetto(source)):
        assert "step 4" not in json.dumps(data)
    curve = page_data(source.profile)["curve"]
    assert 4 not in curve["step"] + [span[0] for span in curve["spans"]]
    assert max(block.freed_step or 0 for block in source.profile.blocks) <= 3


def test_peaks_agree_with_the_report(tmp_path: Path) -> None:
    """A step's peak is the one that the allocator counted, to the byte, though events miss what blocks round up."""
    known = training(steps=3)
    for more in (5 * MIB, -5 * MIB):
        counted = tuple(step(row.step, steps.high(row) + more) for row in known.steps)
        source = load(written(tmp_path / "a.oomp", known, per_step=counted))
        rows = steps.examine(source.profile).rows
        assert [steps.high(row) for row in rows] == [one.allocated_bytes for one in counted]
        assert min(min(row.category_bytes) for row in rows) >= 0
