"""A training process tells ``oomproof watch`` its allocator's figures, in one small file per process.

Runs in the user's interpreter: Python 3.9, standard library, and the torch that the script has imported already.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_PER_SECOND = 4.0

_last = float("-inf")
_step = 0


def runtime_folder() -> Path:
    """Return this user's folder of published figures, in XDG_RUNTIME_DIR or else in the temporary folder."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "oomproof" if base else Path(tempfile.gettempdir()) / f"oomproof-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Return whether only this user can write to ``folder``: in a shared temporary folder anyone may have made it."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def publish(step: int | None = None, *, most_per_second: float = MOST_PER_SECOND) -> bool:
    """Write this process's allocator figures for ``oomproof watch``; call it once a step.

    ``step`` is counted from 1 when it is left out. At most ``most_per_second`` files are written; other calls only
    count. Peaks are the process's own since it last reset them: resetting them here would change what the script
    sees. Returns whether it wrote. Raises PermissionError when the folder belongs to somebody else.
    """
    global _last, _step
    _step = _step + 1 if step is None else step
    now = time.monotonic()
    if now - _last < 1 / most_per_second:
        return False
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # asking would start CUDA in the script's place
        return False
    _last = now
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(
            f"{folder} can be written by others; remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )
    target = folder / f"{os.getpid()}.json"
    part = folder / f"{os.getpid()}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "time": time.time(), "step": _step, "devices": _devices(torch)}))
    part.replace(target)
    return True


def _devices(torch: Any) -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        figures = torch.cuda.memory_stats(index)
        if not figures.get("reserved_bytes.all.peak"):
            continue  # this process has nothing there
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # torch 2.4
        found.append(
            {
                "index": index,
                "uuid": None if uuid is None else str(uuid),
                "allocated_bytes": figures["allocated_bytes.all.current"],
                "allocated_peak_bytes": figures["allocated_bytes.all.peak"],
                "reserved_bytes": figures["reserved_bytes.all.current"],
                "not_reusable_bytes": figures.get("inactive_split_bytes.all.current", 0),
                "retries": figures["num_alloc_retries"],
                "ooms": figures["num_ooms"],
                "pinned_bytes": _pinned(torch),
            }
        )
    return found


def _pinned(torch: Any) -> int | None:
    statistics = getattr(torch.cuda, "host_memory_stats", None)  # torch 2.8
    return None if statistics is None else statistics().get("allocated_bytes.current")
