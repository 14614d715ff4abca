"""What the reports about memory read: a file's profile, and the Measurement beside it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from oomproof.capture import read_capture, read_profile
from oomproof.errors import CaptureError
from oomproof.gpus import all_gpus
from oomproof.measure.measurement import Measurement
from oomproof.measure.profile import CATEGORIES, Profile, StepRow
from oomproof.report.words import world_options
from oomproof.snapshot import trace
from oomproof.snapshot.load import load as load_snapshot
from oomproof.snapshot.profile import profile as profile_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, read."""

    path: str
    profile: Profile
    measurement: Measurement | None  # None: the file is no capture, so there is no verdict and no command

    @property
    def quoted(self) -> str:
        """Return the path as a person would type it."""
        return shlex.quote(self.path)

    def run_again(self, *options: str, gpu: str | None = None) -> str:
        """Return the command that measures the same script once more, for ``gpu`` or the GPU it was measured for."""
        measured = self.measurement
        script = shlex.join(measured.command) if measured is not None and measured.command else "train.py"
        world = world_options(measured) if measured is not None else []
        return " ".join(("oomproof run -o FILE.oomp", *options, "--gpu", gpu or self._gpu_key(), *world, "--", script))

    def _gpu_key(self) -> str:
        measured = self.measurement
        if measured is not None:
            for gpu in all_gpus():
                if (gpu.name, gpu.memory_bytes) == (measured.gpu.name, measured.gpu.memory_bytes):
                    return shlex.quote(gpu.key)
        return "NAME"


def load(path: str | os.PathLike[str]) -> Source:
    """Read the profile in a capture, or make one of a memory snapshot or a profiler trace of PyTorch's.

    Raises UsageError when there is no such file, CaptureError when it is damaged or has no profile.
    """
    if is_snapshot(path):
        return Source(path=os.fspath(path), profile=profile_of(load_snapshot(path)), measurement=None)
    if is_trace(path):
        return Source(path=os.fspath(path), profile=trace.profile(Path(path)), measurement=None)
    measured = read_capture(path)
    profile = read_profile(path)
    if profile is None:
        command = shlex.join(measured.command) or "train.py"
        raise CaptureError(
            f"{path} has no profile: it is saved --json output, or an earlier oomproof wrote it; "
            f"measure again with `oomproof run -o FILE.oomp -- {command}`"
        )
    return Source(path=os.fspath(path), profile=of_whole_steps(profile, measured), measurement=measured)


def of_whole_steps(profile: Profile, measured: Measurement) -> Profile:
    """Return a run's profile with the steps that the Measurement has, and with its figures for them.

    What comes after the last optimizer step is no step, though the run's marks number it as the next one. A step's
    allocated peak is that of the allocator's counters: the events miss what its blocks are larger than asked for.
    """
    last = measured.steps
    counted = {step.step: step.allocated_bytes for step in measured.per_step}
    return profile._replace(
        points=tuple(p._replace(step=None) if (p.step or 0) > last else p for p in profile.points),
        steps=tuple(_as_counted(row, counted.get(row.step)) for row in profile.steps if row.step <= last),
        segments=tuple(s._replace(step=None) if (s.step or 0) > last else s for s in profile.segments),
        blocks=tuple(
            b._replace(freed_step=None, freed_phase=None) if (b.freed_step or 0) > last else b for b in profile.blocks
        ),
    )


def _as_counted(row: StepRow, allocated_bytes: int | None) -> StepRow:
    if allocated_bytes is None:
        return row
    sizes = list(row.category_bytes)
    unknown = CATEGORIES.index("unknown")
    sizes[unknown] += allocated_bytes - sum(sizes)
    if sizes[unknown] < 0:  # true sizes of a later moment: the largest gives way, as it does at the peak
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] += sizes[unknown]
        sizes[unknown] = 0
    return row._replace(category_bytes=tuple(sizes))


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a pickle, as PyTorch's memory snapshots are."""
    return _start(path)[:1] == b"\x80"


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as a trace of torch.profiler does."""
    return trace.is_trace(_start(path))


def _start(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(2**16)
    except OSError:  # whoever reads it says what is wrong
        return b""
