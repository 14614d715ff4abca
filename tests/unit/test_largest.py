"""plan/largest.py: the largest value that was run and fitted, in few runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measurement_samples import fitting
from rich.console import Console

from oomproof import api
from oomproof.errors import UsageError
from oomproof.gpus import get_gpu
from oomproof.measure.measurement import Allocator, Demand
from oomproof.phantom.launch import Settings
from oomproof.plan import largest
from oomproof.plan.largest import find_largest, value_of, with_value
from oomproof.report import largest as report
from oomproof.report.sheet import print_sheet

MEMORY = 15 * 2**30


def job(*words: str) -> api.Job:
    return api.Job(
        words=words,
        program=("/usr/bin/python3", *words),
        folder=Path("/"),
        env=None,
        settings=Settings(gpu=replace(get_gpu("t4"), memory_bytes=MEMORY)),
        world_size=None,
        ranks=None,
        unknown_counts="range",
    )


def made_up(monkeypatch: pytest.MonkeyPatch, peak: Any) -> list[int]:
    """Have runs take ``peak(value)`` bytes; return the values that are run, as they are."""
    ran: list[int] = []

    def rehearse(changed: api.Job, changes: object) -> Any:
        value = value_of(changed.words, "--batch")
        ran.append(value)
        size = int(peak(value))
        demand = Demand(allocated_bytes=size, reserved_bytes=size, device_bytes=size)
        measured = replace(fitting(), verdict="fits" if size <= MEMORY else "does-not-fit", demand=demand)
        return api.Result(measurement=measured, limited=None, unlimited=None, interrupted=False)  # type: ignore[arg-type]

    monkeypatch.setattr(largest, "rehearse", rehearse)
    return ran


SHAPES = {
    "straight": lambda v: 2**30 + v * 150 * 2**20,
    "square": lambda v: 2**30 + v * v * 2**20,
    "in steps of 20 MiB": lambda v: 2**30 + (v * 33 * 2**20) // (20 * 2**20) * 20 * 2**20,
    "flat, then steep": lambda v: 2**30 + max(0, v - 40) * 2**30,
    "steep, then flat": lambda v: min(2**30 * v, 14 * 2**30 + v * 2**20),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [1, 7, 64, 1000])
@pytest.mark.parametrize("multiple", [1, 8])
def test_it_finds_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch, shape: str, start: int, multiple: int) -> None:
    peak = SHAPES[shape]
    ran = made_up(monkeypatch, peak)
    found = find_largest(job("train.py", "--batch", str(start)), "--batch", multiple=multiple)
    fitting_values = [v for v in range(multiple, 5000, multiple) if peak(v) <= MEMORY]
    if not fitting_values:
        assert found.answer is None
        return
    assert found.answer is not None
    assert found.answer.value in ran, "a size was returned that was not tried"
    assert found.answer.value == max(fitting_values)
    assert found.settled
    assert len(ran) <= largest.ROUNDS


def test_a_straight_line_takes_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = made_up(monkeypatch, SHAPES["straight"])
    find_largest(job("train.py", "--batch", "4"), "--batch")
    assert len(ran) <= 6


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = made_up(monkeypatch, lambda v: MEMORY + v)
    found = find_largest(job("train.py", "--batch=16"), "--batch")
    assert found.answer is None
    assert min(ran) == 1


def by_retries(monkeypatch: pytest.MonkeyPatch, easy: int, hard: int) -> list[int]:
    """Have values up to ``easy`` fit, and those up to ``hard`` by giving back what is cached."""
    ran: list[int] = []

    def rehearse(changed: api.Job, changes: object) -> Any:
        value = value_of(changed.words, "--batch")
        ran.append(value)
        size = MEMORY * value // easy
        demand = Demand(allocated_bytes=size, reserved_bytes=size, device_bytes=size)
        measured = replace(
            fitting(),
            verdict="fits" if value <= hard else "does-not-fit",
            demand=demand,
            allocator=Allocator(retries=2 if value > easy else 0),
        )
        return api.Result(measurement=measured, limited=None, unlimited=None, interrupted=False)  # type: ignore[arg-type]

    monkeypatch.setattr(largest, "rehearse", rehearse)
    return ran


def shown(found: largest.Largest, job: api.Job) -> str:
    console = Console(width=200, file=io.StringIO(), color_system=None)
    print_sheet(report.body(found, job), report.after(found, job), console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("easy", "hard"), [(155, 172), (155, 180), (1000, 1200), (8, 9), (40, 41)])
def test_what_fits_by_retries_is_not_gone_through_one_by_one(
    monkeypatch: pytest.MonkeyPatch, easy: int, hard: int
) -> None:
    """A ResNet-50 fits a T4 by retries far beyond the batch whose demand is the memory."""
    ran = by_retries(monkeypatch, easy, hard)
    found = find_largest(job("train.py", "--batch", "32"), "--batch")
    assert (found.answer.value, found.easy.value) == (hard, easy)  # type: ignore[union-attr]
    assert found.settled
    assert found.easy_settled
    assert len(ran) <= largest.ROUNDS + largest.MORE_ROUNDS


@pytest.mark.parametrize("start", [1, 40, 157, 500])
def test_what_fits_by_retries_only_is_told_from_what_fits(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """The largest of both is found, each by runs, and no row that fits says "over"."""
    ran = by_retries(monkeypatch, 150, 157)
    asked = job("train.py", "--batch", str(start))
    found = find_largest(asked, "--batch")
    assert found.answer is not None
    assert found.easy is not None
    assert (found.answer.value, found.easy.value) == (157, 150)
    assert found.settled
    assert found.easy_settled
    assert {150, 151, 157, 158} <= set(ran)
    assert len(ran) == len(set(ran)) <= largest.ROUNDS + largest.MORE_ROUNDS
    head, _, table = shown(found, asked).partition("\n\n")
    said = " ".join(head.split())
    assert "157 is the largest that fits Tesla T4, but only by giving back cached memory (2 retries in 3 steps)" in said
    assert "150 is the largest that fits without it; 158 does not fit" in said
    rows = {line.split()[0]: line for line in table.splitlines() if line[:20].strip().isdigit()}
    assert "fits by giving back cached memory, 2 retries in 3 steps" in rows["157"]
    assert "over" not in rows["157"]
    assert "over" in rows["158"]
    assert "giving back" not in rows["150"]
    data = json.loads(report.to_json_text(found, asked))
    assert data["answer"]["retries"] == 2
    assert data["largest_without_retries"]["value"] == 150


def test_where_nothing_is_given_back_nothing_more_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, SHAPES["straight"])
    found = find_largest(job("train.py", "--batch", "8"), "--batch")
    assert found.easy is found.answer
    assert "giving back" not in shown(found, job("train.py", "--batch", "8"))


def test_the_next_command_after_the_largest_keeps_options_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, SHAPES["straight"])
    asked = job("train.py", "--batch", "8")
    found = find_largest(asked, "--batch")
    options: dict[str, str | None] = {"--gpu": "t4", "--memory": "15GiB", "--only": "x", "--steps": "5"}
    given = "--memory 15GiB --steps 5"
    assert report.after(found, asked, options).command == (
        f"oomproof run --gpu t4 {given} -o FILE.oomp -- train.py --batch {found.answer.value}"  # type: ignore[union-attr]
    )
    with_plan = report.after(found, asked, options, Path("my plan.toml")).command
    assert with_plan.startswith(f"oomproof apply --phantom t4 {given} 'my plan.toml' -- train.py --batch")
    by_file = report.after(found, asked, {"--gpu-file": "g.toml"}, Path("p.toml")).command
    assert by_file.startswith("oomproof apply --gpu-file g.toml p.toml -- ")


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("train.py", "--batch", "8", "x"), ("train.py", "--batch", "32", "x")),
        (("train.py", "--batch=8"), ("train.py", "--batch=32")),
        (("-m", "train", "--batch", "8"), ("-m", "train", "--batch", "32")),
    ],
)
def test_the_option_is_changed_in_what_people_wrote_and_in_what_is_started(
    words: tuple[str, ...], changed: tuple[str, ...]
) -> None:
    new = with_value(job(*words), "--batch", 32)
    assert new.words == changed
    assert new.program[1:] == changed


@pytest.mark.parametrize("words", [("train.py",), ("train.py", "--batch"), ("train.py", "--batch", "auto")])
def test_an_option_without_a_number_is_refused_with_the_cure(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="8"):
        value_of(words, "--batch")
