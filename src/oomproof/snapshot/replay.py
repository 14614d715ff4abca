"""What PyTorch's allocator would have done with a recorded run under other settings.

The recorded allocations and frees go through PyTorch's real caching allocator in a process under the phantom. The first
replay is with the recorded settings and the recorded addresses of segments: it has to give the recorded run again, and
says where it does not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from oomproof.errors import EnvironmentMissingError, OomproofError, UsageError
from oomproof.gpus import GPUSpec, default_gpu
from oomproof.phantom import launch
from oomproof.snapshot.calls import CallTimes, call_times
from oomproof.snapshot.candidates import COLLECTING, candidates, variable
from oomproof.snapshot.model import DEFAULT_POOL, Snapshot
from oomproof.snapshot.operations import Recorded
from oomproof.snapshot.state import History

_ROOM_BYTES = 256 * 2**30  # of the GPU for replays without a limit, and twice the peak if that is more

#: What in a recorded setting changes how blocks are laid out; the rest this torch may not know.
_REPLAYED = frozenset(
    ("expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", COLLECTING, "roundup_power2_divisions")
)
_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[\w:,.> ]{0,400}\]|[\w.]{1,40})\s*(?:,|$)")

CHILD = Path(__file__).with_name("replay_child.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a replay and its record part."""

    event: int  # index into the device's trace; -1 is the state at its start
    recorded: str
    replayed: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The replay as recorded. Figures are the recorded ones; with ``exact`` the replay gave the same."""

    exact: bool
    first_difference: Difference | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_allocations: int | None  # None where the start could not be rebuilt
    device_frees: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The replay under one setting, up to its end or to where memory ran out."""

    config: str  # "" for PyTorch's defaults
    peak_allocated_bytes: int  # blocks in use, as this setting rounds them
    peak_reserved_bytes: int
    device_allocations: int  # calls that get memory from the driver
    device_frees: int
    retries: int  # the driver refused, so unused segments were freed first
    survives: bool
    failed_at_event: int | None
    failed_bytes: int | None  # the request that could not be served
    seconds: float

    @property
    def cached_bytes(self) -> int:
        """Reserved and not in use at the peaks."""
        return self.peak_reserved_bytes - self.peak_allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A recorded run under several settings of PyTorch's allocator."""

    device: int
    events: int
    operations: int
    torch: str
    baseline: Baseline
    outcomes: tuple[Outcome, ...]
    memory_bytes: int | None  # None: without a limit
    available_bytes: int | None  # the memory less the CUDA context
    start_bytes: int  # in use at the start of the trace; 0 for a trace from an empty allocator
    calls: CallTimes
    notes: tuple[str, ...]

    @property
    def variable(self) -> str:
        """The environment variable for the settings, by the version of torch."""
        return variable(self.torch)

    def best(self) -> Outcome | None:
        """Return the outcome to recommend: one that survives and reserves at most 1 % more than the least.

        Among those the one with the fewest settings, then the fewest calls of the driver, then the least reserved.
        """
        surviving = [outcome for outcome in self.outcomes if outcome.survives]
        if not surviving:
            return None
        enough = min(outcome.peak_reserved_bytes for outcome in surviving) * 1.01
        return min(
            (outcome for outcome in surviving if outcome.peak_reserved_bytes <= enough),
            key=lambda o: (
                len(o.config.split(",")) if o.config else 0,
                o.device_allocations + o.device_frees,
                o.peak_reserved_bytes,
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the replay for ``--json``."""
        b = self.baseline
        difference = b.first_difference
        best = self.best()
        return {
            "schema": "oomproof.replay/1",
            "device": self.device,
            "events": self.events,
            "torch": self.torch,
            "memory_bytes": self.memory_bytes,
            "baseline": {
                "exact": b.exact,
                "first_difference": None
                if difference is None
                else {
                    "event": difference.event,
                    "recorded": difference.recorded,
                    "replayed": difference.replayed,
                    "why": difference.why,
                },
                "peak_allocated_bytes": b.peak_allocated_bytes,
                "peak_reserved_bytes": b.peak_reserved_bytes,
                "device_allocations": b.device_allocations,
                "device_frees": b.device_frees,
            },
            "settings": [
                {
                    "config": o.config,
                    "peak_allocated_bytes": o.peak_allocated_bytes,
                    "peak_reserved_bytes": o.peak_reserved_bytes,
                    "cached_bytes": o.cached_bytes,
                    "device_allocations": o.device_allocations,
                    "device_frees": o.device_frees,
                    "device_seconds": round(self.calls.seconds(o.device_allocations, o.device_frees), 6),
                    "retries": o.retries,
                    "survives": o.survives,
                    "failed_at_event": o.failed_at_event,
                    "failed_bytes": o.failed_bytes,
                }
                for o in self.outcomes
            ],
            "assumed_us": {"device_allocation": self.calls.allocation_us, "device_free": self.calls.free_us},
            "best": None if best is None else {"config": best.config, "variable": self.variable},
            "notes": list(self.notes),
        }


def replay(
    snapshot: Snapshot,
    *,
    device: int | None = None,
    gpu: GPUSpec | None = None,
    python: str | None = None,
    on_setting: Callable[[int, int], None] | None = None,
) -> Replay:
    """Replay a snapshot's trace under its own settings, and then under others.

    ``device`` defaults to the one with the most events. ``gpu`` limits the replays under other settings to its memory
    less the CUDA context; without it they have no limit. ``python`` is the interpreter whose torch is used.
    ``on_setting(done, total)`` is called after each. Raises UsageError when there is no trace or no such interpreter,
    EnvironmentMissingError without a CUDA build of torch.
    """
    device = _device(snapshot, device)
    if python is not None and shutil.which(python) is None:
        raise UsageError(
            f"{python} is no interpreter that can be started; give its full path, such as .venv/bin/python"
        )
    history = History(snapshot, device)
    recorded = Recorded(history, snapshot)
    recorded_config = _recorded_config(snapshot, recorded.expandable)
    settings = candidates(limited=gpu is not None, recorded=recorded_config)
    roomy = replace(gpu or default_gpu(), memory_bytes=max(_ROOM_BYTES, 2 * history.peak_reserved.size_bytes))
    job = {
        **recorded.job(),
        "config": recorded_config,
        "fraction": COLLECTING in recorded_config,
        "settings": settings,
        "gpu": launch.describe(gpu or roomy),
        "largest_gpu": launch.describe(roomy),
        "unlimited": gpu is None,
        "rising": recorded.rising,
    }
    results = _run_child(job, recorded, gpu or roomy, python or launch.default_python(), on_setting)
    baseline = _baseline(snapshot, history, results[0])
    return Replay(
        device=device,
        events=len(history.events),
        operations=len(recorded.operations.kind),
        torch=results[0]["torch"],
        baseline=baseline,
        outcomes=tuple(_outcome(config, result) for config, result in zip(settings, results[1:], strict=True)),
        memory_bytes=gpu.memory_bytes if gpu else None,
        available_bytes=gpu.memory_bytes - gpu.context_bytes[1] if gpu else None,
        start_bytes=sum(block.size_bytes for block in history.state_after(-1).blocks),
        calls=call_times(history.events),
        notes=tuple(_notes(snapshot, history, gpu is not None)),
    )


def _device(snapshot: Snapshot, wanted: int | None) -> int:
    recorded = [device for device, events in enumerate(snapshot.traces) if len(events)]
    if not recorded:
        raise UsageError(
            "the snapshot has no events, so there is nothing to replay; call "
            "torch.cuda.memory._record_memory_history() before what should be recorded"
        )
    if wanted is None:
        return max(recorded, key=lambda device: len(snapshot.traces[device]))
    if wanted not in recorded:
        have = ", ".join(map(str, recorded))
        raise UsageError(f"the snapshot has no events of device {wanted}; it has some of {have}")
    return wanted


def _recorded_config(snapshot: Snapshot, expandable: bool) -> str:
    found = snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    parts = _SETTING.findall(found) if isinstance(found, str) else []
    config = ",".join(f"{key}:{value}" for key, value in parts if key in _REPLAYED)
    if not config and expandable:  # before torch 2.4 settings were not recorded
        config = "expandable_segments:True"
    return config


def _notes(snapshot: Snapshot, history: History, limited: bool) -> list[str]:
    notes = list(snapshot.notes)
    if snapshot.overflowed:
        notes.append("PyTorch forgot the oldest events (max_entries was reached)")
    if history.start_segments.total_bytes:
        notes.append(
            "the trace begins in the middle of a run; under other settings the blocks of its start are allocated anew, "
            "one after the other, so what had fragmented before the trace is not counted against them"
        )
    if history.unsure:
        notes.append(
            f"{history.unsure} blocks of the start may be up to 1 MiB larger: the trace does not show their end"
        )
    if not limited:
        notes.append(
            f"without a limit nothing runs out of memory, and {COLLECTING} does nothing; give --memory or --gpu"
        )
    else:
        notes.append(f"{COLLECTING} works only after torch.cuda.set_per_process_memory_fraction(1.0)")
    if history.problem_count:
        notes.append(
            f"{history.problem_count} events contradict the final segments (recording was perhaps switched off and "
            f"on): {history.problems[0]}"
        )
    return notes


def _run_child(
    job: dict[str, Any],
    recorded: Recorded,
    gpu: GPUSpec,
    python: str,
    on_setting: Callable[[int, int], None] | None,
) -> list[dict[str, Any]]:
    total = len(job["settings"]) + 1
    with tempfile.TemporaryDirectory(prefix="oomproof-replay-") as name:
        folder = Path(name)
        run_folder = folder / "run"
        run_folder.mkdir()
        (folder / "job.json").write_text(json.dumps(job))
        recorded.operations.write(folder)
        with (folder / "stderr").open("w+b") as errors:
            process = launch.start(
                [python, str(CHILD), str(folder)],
                launch.Settings(gpu=gpu, observe=False),
                run_folder,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            try:
                _wait(process, folder / "result.jsonl", total, on_setting)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # it forks
                    process.wait()
            results = _results(folder / "result.jsonl")
            if process.returncode or len(results) < total:
                raise _failure(python, process.returncode, run_folder, errors)
    for result in results:
        if "error" in result:
            last = result["error"].strip().splitlines()[-1]
            raise OomproofError(
                f"PyTorch's allocator could not be driven: {last}; report this with the snapshot's version"
            )
    return results


def _wait(
    process: subprocess.Popen[bytes], results: Path, total: int, on_setting: Callable[[int, int], None] | None
) -> None:
    told = 0
    while process.poll() is None:
        time.sleep(0.05)
        done = len(_results(results))
        while on_setting and told < min(done, total):
            told += 1
            on_setting(told, total)


def _results(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # the last one may still be written


def _failure(python: str, code: int | None, run_folder: Path, errors: IO[bytes]) -> OomproofError:
    for path in sorted(run_folder.glob("error-*.txt")):
        return EnvironmentMissingError(path.read_text())
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip().splitlines()
    last = text[-1] if text else f"exit code {code}"
    if "No module named 'torch'" in last:
        return EnvironmentMissingError(
            f"a replay needs a CUDA build of torch, and {python} has none; pip install torch"
        )
    return OomproofError(f"the replay's process failed: {last}; {sys.executable} -m oomproof doctor may say why")


def _baseline(snapshot: Snapshot, history: History, result: dict[str, Any]) -> Baseline:
    parted = result["parted"]
    difference = None
    why = _why(snapshot, history, result)
    if parted is not None:
        difference = Difference(
            event=parted["event"], recorded=parted["recorded"], replayed=parted["replayed"], why=why
        )
    else:
        peaks = (
            ("reserved", history.peak_reserved.size_bytes, result["peak_reserved_bytes"]),
            ("in use", history.peak_active, result["peak_allocated_bytes"]),
        )
        for what, recorded, replayed in peaks:
            if recorded != replayed and difference is None:
                difference = Difference(
                    event=len(history.events) - 1,
                    recorded=f"{recorded:,} B {what} at the peak",
                    replayed=f"{replayed:,} B",
                    why=why,
                )
    return Baseline(
        exact=difference is None,
        first_difference=difference,
        peak_allocated_bytes=history.peak_allocated.size_bytes,
        peak_reserved_bytes=history.peak_reserved.size_bytes,
        device_allocations=result.get("device_allocations"),
        device_frees=result.get("device_frees"),
        seconds=result.get("seconds"),
    )


def _why(snapshot: Snapshot, history: History, result: dict[str, Any]) -> str:
    if history.problem_count:
        return "events and final segments contradict each other: recording was perhaps switched off and on"
    if result.get("takes_oldest") and not snapshot.pools_recorded:
        return (
            f"torch {result['torch']} takes the oldest of equal free blocks, the older one that recorded this took the "
            "lowest address; replay with that version: --python PATH"
        )
    if any(segment.pool != DEFAULT_POOL for segment in snapshot.segments):
        if not result.get("takes_from_pools", True):
            return f"torch {result['torch']} takes from private pools only while it captures a graph; see --python"
        if not snapshot.pools_recorded:
            return "which blocks were of private pools that are gone: up to torch 2.11 events do not say their pool"
    if history.unsure:
        return f"how large {history.unsure} blocks of the start are, and so its layout, cannot be told from the trace"
    if history.start_segments.total_bytes:
        return "something of the layout at the start does not show in the trace"
    return "this PyTorch's allocator decides otherwise, or something that is not in the snapshot was set"


def _outcome(config: str, result: dict[str, Any]) -> Outcome:
    failed = result["failed_at"] is not None
    return Outcome(
        config=config,
        peak_allocated_bytes=result["peak_allocated_bytes"],
        peak_reserved_bytes=result["peak_reserved_bytes"],
        device_allocations=result["device_allocations"],
        device_frees=result["device_frees"],
        retries=result["retries"],
        survives=not failed,
        failed_at_event=result["failed_at"],
        failed_bytes=result["failed_bytes"] if failed else None,
        seconds=result["seconds"],
    )
