"""Ranks of one job on this machine: a rank that is stopped stays until the others are done.

Rank 0 may serve the store that the others meet at (DeepSpeed's launcher, mp.spawn; torchrun's agent does it itself),
and what it sent may still be on its way. Were it to leave first, the others would end with a connection error.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_EVERY_SECONDS = 0.05


def register(folder: Path) -> None:
    """Note that this process uses the GPU, and who started it."""
    (folder / f"gpu-process-{os.getpid()}").write_text(str(os.getppid()))


def wait_for_others(folder: Path, patience_seconds: float) -> None:
    """Return when each process that has this one's parent and uses the GPU has ended or written its findings."""
    end = time.monotonic() + patience_seconds
    while time.monotonic() < end and any(_at_work(folder, pid) for pid in _siblings(folder)):
        time.sleep(_EVERY_SECONDS)


def _siblings(folder: Path) -> list[int]:
    parent = str(os.getppid())
    found = [int(path.name.rpartition("-")[2]) for path in folder.glob("gpu-process-*") if path.read_text() == parent]
    return [pid for pid in found if pid != os.getpid()]


def _at_work(folder: Path, pid: int) -> bool:
    if (folder / f"process-{pid}.json").exists():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False  # it has ended
    return state not in ("Z", "X")
