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
from oomproof.measure.profile import Profile
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
        return " ".join(("oomproof run -o FILE.oomp", *options, "--gpu", gpu or self._gpu_key(), "--", script))

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
    made = from_elsewhere(path)
    if made is not None:
        return Source(path=os.fspath(path), profile=made, measurement=None)
    measured = read_capture(path)
    profile = read_profile(path)
    if profile is None:
        command = shlex.join(measured.command) or "train.py"
        raise CaptureError(
            f"{path} has no profile: it is saved --json output, or an earlier oomproof wrote it; "
            f"measure again with `oomproof run -o FILE.oomp -- {command}`"
        )
    return Source(path=os.fspath(path), profile=profile, measurement=measured)


def from_elsewhere(path: str | os.PathLike[str]) -> Profile | None:
    """Return the profile of a memory snapshot or a profiler trace, None where the file is neither."""
    if is_snapshot(path):
        return profile_of(load_snapshot(path))
    return trace.profile(Path(path)) if trace.is_trace(_start(path)) else None


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a pickle, as PyTorch's memory snapshots are."""
    return _start(path)[:1] == b"\x80"


def _start(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(2**16)
    except OSError:  # whoever reads it says what is wrong
        return b""
