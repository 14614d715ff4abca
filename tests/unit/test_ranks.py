"""Which ranks are worth measuring, what communicators take, and what a launcher's options say of a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_assemble import finding

from oomproof.api import _measure_ranks
from oomproof.gpus import get_gpu
from oomproof.measure.assemble import Outcome
from oomproof.measure.communicators import communication_bytes
from oomproof.measure.ranks import MOST_RANKS, that_can_differ, which_were_measured
from oomproof.phantom import launch
from oomproof.phantom.launch import gpus_wanted, nodes_wanted
from oomproof.phantom.world import environment


def test_ends_of_each_group_and_of_the_world() -> None:
    """A mesh of 4 x 8 seen from rank 0: the last of its row, of its column, and of all."""
    groups = [
        {"ranks": list(range(32)), "sends": False},
        {"ranks": [0, 8, 16, 24], "sends": False},
        {"ranks": list(range(8)), "sends": False},
    ]
    assert that_can_differ(groups, 32, 0) == [0, 7, 24, 31]


def test_every_rank_of_a_group_that_sends() -> None:
    """Pipeline stages may each be different."""
    groups = [{"ranks": [0, 8, 16, 24], "sends": True}, {"ranks": list(range(8)), "sends": False}]
    assert that_can_differ(groups, 32, 0) == [0, 7, 8, 16, 24, 31]


def test_long_groups_are_measured_at_intervals() -> None:
    """No more than MOST_RANKS, the first and the last among them."""
    chosen = that_can_differ([{"ranks": list(range(1024)), "sends": True}], 1024, 0)
    assert len(chosen) <= MOST_RANKS + 1
    assert chosen[0] == 0
    assert chosen[-1] == 1023


@pytest.mark.parametrize(
    ("ranks", "wanted", "size", "note"),
    [
        ([0], [0], 1, "measured: the only rank of a world of 1"),
        ([0, 1], [0, 1], 2, "measured: ranks 0, 1, which are all of a world of 2"),
        ([0, 5], [0, 5], 8, "measured: ranks 0, 5 of a world of 8, whose other ranks do not exist"),
        ([0], [0, 5], 8, "measured: rank 0 of a world of 8, whose other ranks do not exist"),
        (
            [3],
            [3],
            8,
            "measured: rank 3 of a world of 8, whose other ranks do not exist; --ranks worst measures every rank that "
            "can differ",
        ),
    ],
)
def test_the_note_of_ranks(ranks: list[int], wanted: list[int], size: int, note: str) -> None:
    """It is right for one rank, several, all of them and a world of one; the first may have failed, and ended it."""
    assert which_were_measured(ranks, wanted, size) == [note]


def test_the_note_of_senders() -> None:
    """One rank or several, beside one or several: the note agrees in number."""
    _, one = which_were_measured([3], [3], 8, [2])
    _, several = which_were_measured([3, 7], [3, 7], 8, [0, 2])
    assert one == "run beside it for what they send: rank 2"
    assert several == "run beside them for what they send: ranks 0, 2"


@pytest.mark.parametrize(
    ("communicators", "all_to_all", "low", "high"),
    [
        ([], 0, 0, 0),
        ([2], 0, 544_000_000, 1_600_000_000),
        ([8, 2], 0, 1_232_000_000, 3_200_000_000),
        ([8], 1, 688_000_000, 4_880_000_000),
    ],
)
def test_communicators_take_a_range(communicators: list[int], all_to_all: int, low: int, high: int) -> None:
    """544 MB for two GPUs, 688 MB for more, up to 1.6 GB each, and 3.28 GB more for an all-to-all."""
    assert communication_bytes(communicators, all_to_all) == (low, high)


@pytest.mark.parametrize(
    ("command", "gpus", "nodes"),
    [
        ("python train.py", 1, 1),
        ("torchrun --nproc-per-node 4 train.py", 4, 1),
        ("torchrun --nnodes=16 --nproc_per_node=8 train.py", 8, 16),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 train.py", 2, 4),
        ("accelerate launch --num_machines 2 --num_processes 16 train.py", 8, 2),
        ("python train.py --nnodes 3", 1, 1),
        ("torchrun --nproc-per-node gpu train.py", 1, 1),
    ],
)
def test_launchers_say_how_many(command: str, gpus: int, nodes: int) -> None:
    """GPUs of one machine, and machines; what follows the script is the script's own."""
    assert (gpus_wanted(command.split()), nodes_wanted(command.split())) == (gpus, nodes)


def test_a_rank_gets_what_torchrun_would_set() -> None:
    """Rank 13 of 20 on machines of 8 is the sixth on the second of three."""
    variables = environment(20, 13, 8)
    assert {k: variables[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")} == {
        "RANK": "13", "WORLD_SIZE": "20", "LOCAL_RANK": "5", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3",
    }  # fmt: skip


class Runner:
    """Runs ranks until the person has had enough."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.senders: set[int] = set()

    def go(self, settings: Any, purpose: str = "gpu") -> Outcome:
        """Return a rank's findings, or Ctrl-C."""
        if self.patience == 0:
            raise KeyboardInterrupt
        self.patience -= 1
        return Outcome(exit_code=0, findings=(finding(rank=settings.world.rank),))


def test_ranks_measured_before_an_interrupt_are_kept(tmp_path: Path) -> None:
    """Ctrl-C at the third rank leaves a report of two; at the first there is nothing to tell."""
    settings = launch.Settings(gpu=get_gpu("t4"), gpu_count=4)
    limited, _, notes = _measure_ranks(Runner(2), settings, 4, [0, 1, 2, 3], tmp_path)  # type: ignore[arg-type]
    assert limited.interrupted
    assert [f["rank"] for f in limited.findings] == [0, 1]
    assert any("ranks 0, 1" in note for note in notes)
    with pytest.raises(KeyboardInterrupt):
        _measure_ranks(Runner(0), settings, 4, [0, 1], tmp_path)  # type: ignore[arg-type]
