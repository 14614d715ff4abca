"""Errors of how a script was run: the note says what is missing, the remedy is the option that helps."""

from __future__ import annotations

from typing import Any

import pytest
from test_assemble import finding, measured

#: As torch 2.6 to 2.14, Lightning 2.6 and mp.spawn put it.
ERRORS = (
    "MisconfigurationException: You requested gpu: [0, 1, 2, 3, 4, 5, 6, 7]\n But your machine only has: [0]",
    "AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?",
    "AssertionError: Invalid device id",
    "ProcessRaisedException: \n\n-- Process 3 terminated\nTraceback\nRuntimeError: CUDA error: invalid device ordinal",
)


def raised(error: str, **changes: Any) -> dict[str, Any]:
    return finding(ended="raised", error=error, **changes)


@pytest.mark.parametrize(("error", "count"), list(zip(ERRORS, ("8", "N", "N", "N"), strict=True)))
def test_a_gpu_that_is_not_there(error: str, count: str) -> None:
    """The cure is --gpus, with the number where the message has one."""
    found = measured(raised(error), code=1)
    assert found.remedy.options == ("--gpus", count)
    assert any(f"the machine has 1; --gpus {count}" in note for note in found.notes)


def test_the_ranks_that_were_started_say_how_many_gpus() -> None:
    """A script that starts its ranks itself needs one GPU for each; where these are there, the number is not known."""
    parent = raised(ERRORS[3], used_gpu=False, process_peak_bytes=0)
    ranks = [raised("SystemExit: 1", rank=r, world_size=4) for r in range(4)]
    assert measured(parent, *ranks, code=1).remedy.options == ("--gpus", "4")
    there = [raised(ERRORS[1], rank=r, world_size=4, gpus=4) for r in range(4)]
    assert measured(*there, code=1).remedy.options == ("--gpus", "N")
    alone = raised(ERRORS[1], world_size=8, alone=True)
    assert measured(alone, code=1).remedy.options == ("--gpus", "N")


def test_other_errors_have_no_remedy() -> None:
    """Not the script's own errors, nor a run that went well, nor one that did not fit."""
    assert measured(raised("ValueError: bad"), code=1).remedy is None
    assert measured(finding()).remedy is None
    assert measured(finding(alone=True, world_size=8)).remedy is None


@pytest.mark.parametrize("gathers", [True, False])
def test_an_error_after_whole_steps_where_other_ranks_do_not_exist(gathers: bool) -> None:
    """The figures until then count, and the steps made are how far the next run should go."""
    found = measured(raised("ValueError: bad plan", alone=True, world_size=8, steps=2, gathers_states=gathers), code=1)
    assert found.remedy.options == ("--steps", "2")
    (note,) = [n for n in found.notes if n.startswith("the error came after 2 steps")]
    assert ("where the states of all ranks are put together" in note) == gathers
    assert note.endswith("The figures until then are right; --steps 2 ends the run there")


def test_no_step_or_real_ranks_are_no_such_case() -> None:
    """Before the first whole step nothing is measured, and real ranks have each other's states."""
    assert measured(raised("ValueError: bad", alone=True, steps=0), code=1).remedy is None
    assert measured(raised("ValueError: bad", world_size=8, steps=2, gathers_states=True), code=1).remedy is None
