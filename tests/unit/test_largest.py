"""plan/largest.py: the largest value that was run and fitted, in few runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measurement_samples import fitting

from oomproof import api
from oomproof.errors import UsageError
from oomproof.gpus import get_gpu
from oomproof.measure.measurement import Demand
from oomproof.phantom.launch import Settings
from oomproof.plan import largest
from oomproof.plan.largest import find_largest, value_of, with_value

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
