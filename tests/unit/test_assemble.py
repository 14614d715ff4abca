"""From what the processes of a run left to one Measurement and its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oomproof.errors import EnvironmentMissingError, ScriptError
from oomproof.gpus import get_gpu
from oomproof.measure.assemble import Outcome, assemble, read_outcome
from oomproof.measure.ledger import CATEGORIES

GPU = get_gpu("t4")
MIB = 1 << 20


def finding(**changes: Any) -> dict[str, Any]:
    """Return what one process leaves, with some of it changed."""
    breakdown = {f"{category}_bytes": 0 for category in CATEGORIES} | {"parameter_bytes": 100 * MIB}
    return {
        "pid": 1,
        "argv": ["train.py"],
        "used_gpu": True,
        "rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "device": 0,
        "torch": {"version": "2.14.1", "cuda": "13.0"},
        "allocator": {"config": "", "retries": 0, "ooms": 0},
        "ended": "steps-reached",
        "error": None,
        "gathers_states": False,
        "alone": False,
        "gpus": 1,
        "steps": 3,
        "per_step": [{"step": 1, "allocated_bytes": 100 * MIB, "reserved_bytes": 120 * MIB, "seconds": 0.1}],
        "calls": [],
        "allocated_bytes": 100 * MIB,
        "reserved_bytes": 120 * MIB,
        "process_peak_bytes": 120 * MIB + GPU.context_bytes[1],
        "communicators": [],
        "all_to_all": 0,
        "groups": [],
        "unanswered": 0,
        "in_kind": 0,
        "on_first_gpu": False,
        "own_answers": 0,
        "pinned_host_bytes": 0,
        "managed_bytes": 0,
        "no_kernels": False,
        "device_peak_bytes": 0,
        "refused": 0,
        "step": 1,
        "phase": "backward",
        "module": "Net",
        "stack": [],
        "breakdown": breakdown,
        "optional_workspaces": {},
        "values": "mirror",
        "value_reads": [],
        "oom": None,
        "notes": [],
        "snapshot": None,
        "profile": None,
        "seconds": 1.0,
    } | changes


def oom(caught: bool) -> dict[str, Any]:
    return {
        "message": "CUDA out of memory.", "step": 2, "phase": "forward", "module": "Net",
        "requested_bytes": MIB, "caught": caught,
    }  # fmt: skip


def measured(*findings: dict[str, Any], code: int = 0, unlimited: Any = None, **options: Any) -> Any:
    second = Outcome(exit_code=0, findings=tuple(unlimited)) if unlimited else None
    return assemble(["train.py"], GPU, Outcome(exit_code=code, findings=findings, **options), second)


@pytest.mark.parametrize(
    ("changes", "code", "verdict", "exit_code"),
    [
        ({}, 0, "fits", None),
        ({"ended": "stable"}, 0, "fits", None),
        ({"ended": "finished"}, 0, "fits", 0),
        ({"ended": "finished"}, 3, "unknown", 3),
        ({"ended": "raised", "error": "ValueError: x"}, 1, "unknown", 1),
        ({"ended": "oom", "oom": oom(False)}, 1, "does-not-fit", 1),
        ({"ended": "finished", "oom": oom(True)}, 0, "fits", 0),
        ({"used_gpu": False, "ended": "finished"}, 0, "unknown", 0),
    ],
)
def test_verdict(changes: dict[str, Any], code: int, verdict: str, exit_code: int | None) -> None:
    """Fits needs a good end on the GPU; an error that ended the script does not fit; anything else is unknown."""
    found = measured(finding(**changes), code=code)
    assert (found.verdict, found.exit_code) == (verdict, exit_code)


def test_interrupted_runs_have_no_verdict() -> None:
    """Ctrl-C leaves the figures and no verdict."""
    found = measured(finding(), code=-2, interrupted=True)
    assert (found.verdict, found.ended) == ("unknown", "interrupted")
    assert found.peak.allocated_bytes == 100 * MIB


def test_nothing_measured_is_an_error() -> None:
    """Without any process that imported torch there is no Measurement."""
    with pytest.raises(ScriptError, match="nothing was measured"):
        measured(code=1)


def test_the_largest_process_leads() -> None:
    """Of several processes the one with the highest peak is reported, and the others are mentioned."""
    small = finding(allocated_bytes=10 * MIB, process_peak_bytes=12 * MIB, steps=7)
    found = measured(small, finding(), finding(used_gpu=False))
    assert (found.steps, found.peak.allocated_bytes) == (3, 100 * MIB)
    assert any("2 processes used the GPU" in note for note in found.notes)


def test_the_process_that_ran_out_of_memory_leads() -> None:
    """A smaller process that ran out of memory decides: its error is the one to be told."""
    failed = finding(ended="oom", oom=oom(False), allocated_bytes=MIB, process_peak_bytes=2 * MIB)
    found = measured(finding(), failed, code=1)
    assert (found.verdict, found.ended) == ("does-not-fit", "oom")
    assert found.oom is not None


def test_demand_comes_from_the_unlimited_run() -> None:
    """When it does not fit, peak and breakdown are those of the second run, the error that of the first."""
    failed = finding(ended="oom", oom=oom(False), refused=2, allocator={"config": "", "retries": 1, "ooms": 1})
    wanted = finding(
        allocated_bytes=400 * MIB, reserved_bytes=500 * MIB, process_peak_bytes=600 * MIB, phase="optimizer"
    )
    assert Outcome(exit_code=1, findings=(failed,)).troubled
    found = measured(failed, code=1, unlimited=[wanted])
    assert found.peak.allocated_bytes == found.demand.allocated_bytes == 400 * MIB
    assert found.peak.phase == "optimizer"
    assert found.oom.step == 2
    assert (found.allocator.retries, found.allocator.ooms) == (1, 1)


def test_ranks_are_kept_and_the_worst_leads() -> None:
    """Each rank has a row, the highest first; the Measurement is the worst one's."""
    ranks = [
        finding(rank=r, world_size=3, device=r, allocated_bytes=r * MIB, process_peak_bytes=r * MIB) for r in range(3)
    ]
    found = measured(*ranks)
    assert (found.world.size, found.world.rank) == (3, 2)
    assert [row.rank for row in found.ranks] == [2, 1, 0]


def test_ranges_say_what_is_not_known() -> None:
    """Context always, communicators and optional workspaces when there are any; never above the GPU's memory."""
    assert [r.what for r in measured(finding()).ranges] == ["context"]
    found = measured(finding(communicators=[2], process_peak_bytes=120 * MIB + 544_000_000 + GPU.context_bytes[1]))
    communication = next(r for r in found.ranges if r.what == "communication")
    assert found.outside.communication_bytes == communication.low_bytes > 0
    assert found.peak.device_bytes == 120 * MIB + GPU.context_bytes[1] + communication.low_bytes
    assert measured(finding(used_gpu=False, ended="finished")).ranges == ()


def test_memory_refused_to_another_library_does_not_fit() -> None:
    """NCCL that gets no memory ends the script with its own error; that is no fault of the script's."""
    died = finding(ended="raised", error="DistBackendError: unhandled error", refused=1)
    found = measured(died, code=1)
    assert found.verdict == "does-not-fit"
    assert any("NCCL" in note for note in found.notes)


def test_a_gpu_without_kernels_gets_no_verdict() -> None:
    """What could not start on the real GPU does not fit and does not not fit."""
    assert measured(finding(no_kernels=True)).verdict == "unknown"


def test_device_memory_adds_up() -> None:
    """Reserved, context and what the program took past the allocator are the device's peak."""
    found = measured(finding(process_peak_bytes=130 * MIB + GPU.context_bytes[1]))
    outside = found.outside
    assert outside.other_bytes == 10 * MIB
    assert outside.cached_bytes == 20 * MIB
    assert found.peak.reserved_bytes + outside.context_bytes + outside.other_bytes == found.peak.device_bytes


def test_notes() -> None:
    """What a person must know and no figure says."""
    raised = measured(finding(ended="raised", error="ValueError: bad"), code=1)
    assert any("ValueError: bad" in note for note in raised.notes)
    untouched = measured(finding(used_gpu=False, ended="finished"))
    assert any("nothing on the GPU" in note for note in untouched.notes)
    caught = measured(finding(ended="finished", oom=oom(True)))
    assert any("handled it" in note for note in caught.notes)
    pinned = measured(finding(pinned_host_bytes=2 << 30))
    assert any("2.00 GiB" in note for note in pinned.notes)


def test_the_note_of_an_error_has_its_first_words() -> None:
    """Launchers' messages begin with blank lines and rules; what mp.spawn quotes ends in the error of its process."""
    spawned = (
        "ProcessRaisedException: \n\n-- Process 2 terminated with the following error:\n"
        'Traceback (most recent call last):\n  File "a.py", line 3, in work\n    1 / 0\nZeroDivisionError: division\n'
    )
    for error, said in (
        (spawned, "raised ProcessRaisedException: ZeroDivisionError: division;"),
        ("ChildFailedError: \n====\ntrain.py FAILED\n----", "raised ChildFailedError: train.py FAILED;"),
        ("KeyboardInterrupt: ", "raised KeyboardInterrupt;"),
    ):
        found = measured(finding(ended="raised", error=error), code=1)
        assert any(said in note for note in found.notes), found.notes


def test_a_worst_rank_by_the_estimate_alone_is_told() -> None:
    """Ranks that differ only in how many communicators they are in, or that would be in another order without them."""
    more, one = {"communicators": [8, 2], "world_size": 8}, {"communicators": [8], "world_size": 8}
    low = 688_000_000
    higher = finding(rank=5, process_peak_bytes=900 * MIB + low + 544_000_000, **more)
    lower = finding(rank=0, process_peak_bytes=900 * MIB + low, **one)
    told = [n for n in measured(lower, higher).notes if "estimate of NCCL" in n]
    assert told == [
        "rank 5 is the worst by the estimate of NCCL's memory alone: it is in 2 communicators, rank 0 in 1, which "
        "takes as much apart from that"
    ]
    lower = finding(rank=0, process_peak_bytes=910 * MIB + low, **one)
    assert any("takes more apart from that" in n for n in measured(lower, higher).notes)
    lower = finding(rank=0, process_peak_bytes=890 * MIB + low, **one)
    assert not any("estimate of NCCL" in n for n in measured(lower, higher).notes)
    assert not any("estimate of NCCL" in n for n in measured(higher, finding(rank=6, **higher_of(higher))).notes)


def higher_of(other: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a finding as high as another, in as many communicators."""
    return {key: other[key] for key in ("process_peak_bytes", "communicators", "world_size")}


def test_outcomes_are_read_from_the_run_folder(tmp_path: Path) -> None:
    """Each process leaves one file; a message about a missing torch ends everything."""
    for pid in (1, 2):
        (tmp_path / f"process-{pid}.json").write_text(json.dumps(finding(pid=pid)))
    outcome = read_outcome(tmp_path, 0)
    assert [f["pid"] for f in outcome.findings] == [1, 2]
    assert not outcome.troubled
    (tmp_path / "error-3.txt").write_text("the torch here is a CPU-only build")
    with pytest.raises(EnvironmentMissingError, match="CPU-only"):
        read_outcome(tmp_path, 1)


def test_convolutions_leave_the_cache_open() -> None:
    """With cuDNN's workspaces the allocator caches differently: the device's low end is the allocated peak."""
    found = measured(finding(optional_workspaces={"cuDNN convolution": 50 * MIB}))
    low, high = found.device_bounds
    peak, context = found.peak, GPU.context_bytes
    assert low == peak.allocated_bytes + context[0]
    assert high == peak.reserved_bytes + 50 * MIB + context[2]
