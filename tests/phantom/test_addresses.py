"""Segments lie where the driver put them in recorded runs: PyTorch's best fit breaks ties by address."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from child import PYTHON

import oomproof
from oomproof.gpus import get_gpu
from oomproof.phantom.launch import describe

REPLAY = Path(__file__).with_name("programs") / "replay.py"
SNAPSHOTS = Path(__file__).parents[3] / "shared" / "snapshots"


class PlainUnpickler(pickle.Unpickler):
    """Reads lists, dicts, strings and numbers, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refused: {module}.{name}")


def segment_events(name: str) -> list[tuple[str, int, int]]:
    """Return (action, address, size) of a snapshot's driver calls, oldest first; skip when it is not there."""
    path = SNAPSHOTS / name
    if not path.exists():
        pytest.skip(f"no recorded snapshot {path.name}")
    snapshot = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    traces = [trace for trace in snapshot["device_traces"] if trace]
    assert len(traces) == 1
    wanted = ("segment_alloc", "segment_free")
    return [(e["action"], e["addr"], e["size"]) for e in traces[0] if e["action"] in wanted]


def replay(events: Sequence[tuple[str | int, ...]], folder: Path, *, rising: bool = False) -> list[int]:
    """Return the addresses that the device library gives for the same calls, one for each allocation.

    In a process of its own, since a process describes its GPUs once.
    """
    job = folder / "job.json"
    job.write_text(json.dumps({"events": events, "gpu": describe(get_gpu("b200")), "rising": rising}))
    source = Path(oomproof.__file__).parents[1]
    done = subprocess.run(
        [PYTHON, str(REPLAY), str(job)],
        env={**os.environ, "PYTHONPATH": str(source), "OOMPROOF_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    addresses: list[int] = json.loads(done.stdout)
    return addresses


def ordered_pairs(events: list[tuple[str, int, int]], ours: list[int]) -> tuple[int, int]:
    """Return how many pairs of equally large segments lie in the recorded order, and how many pairs there are.

    Best fit looks at addresses only among blocks of one size, so this order is all that it sees of them.
    """
    recorded = [(address, size) for action, address, size in events if action == "segment_alloc"]
    same = pairs = 0
    for (mine, (address, size)), (other, (other_address, other_size)) in itertools.combinations(
        zip(ours, recorded, strict=True), 2
    ):
        if size == other_size:
            pairs += 1
            same += (mine < other) == (address < other_address)
    return same, pairs


@pytest.mark.parametrize(
    ("name", "rising", "same", "pairs"),
    [
        # WSL2, from an empty allocator. Three pairs are those of the first segment with later ones that lie in a
        # hole below it, left by what the process had loaded before.
        ("lm4_train_100", True, 923, 926),
        # Linux, from the middle of a run, so what lay there before is unknown.
        ("lora_8bit_old_format", False, 2921, 2921),
        ("lm_2.7b_full_step_128", False, 109_544, 110_017),
    ],
)
def test_order_of_recorded_segments(tmp_path: Path, name: str, rising: bool, same: int, pairs: int) -> None:
    """The driver calls of a recorded run give segments in the recorded order of addresses."""
    events = segment_events(f"{name}.pickle")
    found = ordered_pairs(events, replay(events, tmp_path, rising=rising))
    assert found[1] == pairs
    assert found[0] >= same
    backwards = ordered_pairs(events, replay(events, tmp_path, rising=not rising))
    assert backwards[0] < pairs * 0.2, "the other platform's rule gives another order"


def offsets(tmp_path: Path, *calls: int, rising: bool = False) -> list[int]:
    """Return addresses in MiB from the first, for sizes in MiB; -n frees the n-th allocation, counted from 1."""
    events, sizes = [], []
    for call in calls:
        if call > 0:
            sizes.append(call)
            events.append(("segment_alloc", len(sizes), call << 20))
        else:
            events.append(("segment_free", -call, 0))
    given = replay(events, tmp_path, rising=rising)
    return [(address - given[0]) >> 20 for address in given]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        pytest.param((20, 20, 20), [0, -32, -64], id="each new chunk lies below the former ones"),
        pytest.param((20, 2, 2, 8), [0, 20, 22, 24], id="the rest of a chunk serves later, smaller segments"),
        pytest.param((100, 26), [0, 100], id="26 MiB sit in the 28 MiB that 100 MiB left of their chunk"),
        pytest.param((30, 26, 2), [0, -32, -6], id="the newest chunk with room comes first"),
        pytest.param((64, 64, 32, -1, 20, 2), [0, -64, -96, 32, 52], id="the newest chunk, not the lowest"),
        pytest.param((20, 8, 2, 2, -1, 2), [0, 20, 28, 30, 0], id="the smallest hole of a chunk"),
        pytest.param((32, 32, -1, 32), [0, -32, 0], id="a freed chunk is used again"),
        pytest.param((32, 64, 32, -2, 32, 32), [0, -64, -96, -32, -64], id="the highest gap first"),
        pytest.param((30, 2, -1, 20), [0, 30, 0], id="a chunk stays while a segment of it lives"),
    ],
)
def test_the_rule_on_linux(tmp_path: Path, calls: tuple[int, ...], expected: list[int]) -> None:
    """Address space comes in chunks of 32 MiB from above; holes are filled first."""
    assert offsets(tmp_path, *calls) == expected


def test_the_rule_on_wsl(tmp_path: Path) -> None:
    """Addresses rise without gaps, and the lowest gap is used first."""
    assert offsets(tmp_path, 20, 2, 40, -1, 10, 10, 10, rising=True) == [0, 20, 22, 0, 10, 62]


PLACED = {
    "in the arena": ([(64, -128), 32, 32], [-128, -160, -192]),  # not at 0, though there is room: see new_chunk
    "above it": ([(64, 64), 32], [64, 0]),
    "in two": ([(32, -128), (32, -64), 32], [-128, -64, -160]),
    "not on a chunk's boundary": ([(2, -30), 32], [-30, -64]),
    "twice": ([(20, -64), (20, -50)], [-64, -96]),
    "on what has its usual place": ([20, (20, 0)], [0, -32]),
    "next to it": ([(20, -64), (20, -44), (20, -84)], [-64, -44, -84]),
}


@pytest.mark.parametrize("case", PLACED)
def test_no_address_is_given_twice(tmp_path: Path, case: str) -> None:
    """Where a replay places segments inside the arena, the usual places stay clear of them, and they of each other.

    The recorded addresses are those of another process, so where they lie to the arena of this one is chance.
    Calls are sizes in MiB, with the distance from the first segment (freed again) where a place is asked for.
    """
    calls, expected = PLACED[case]
    events: list[tuple[str | int, ...]] = [("segment_alloc", 0, 32 << 20), ("segment_free", 0, 0)]
    for number, call in enumerate(calls, 1):
        size, *distance = (call,) if isinstance(call, int) else call
        events.append(("segment_alloc", number, size << 20, *(d * (1 << 20) for d in distance)))
    first, *given = replay(events, tmp_path)
    assert [(address - first) >> 20 for address in given] == expected


def test_usual_places_among_placed_ones(tmp_path: Path) -> None:
    """With the lowest gap first (WSL2), a segment goes above a placed one where the gap below is too small for it."""
    mib = 1 << 20
    events: list[tuple[str | int, ...]] = [("segment_alloc", 0, 2 * mib), ("segment_free", 0, 0)]
    events += [("segment_alloc", 1, 20 * mib, 10 * mib), ("segment_alloc", 2, 20 * mib), ("segment_alloc", 3, 8 * mib)]
    first, *given = replay(events, tmp_path, rising=True)
    assert [(address - first) // mib for address in given] == [10, 30, 0]
