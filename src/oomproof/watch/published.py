"""Reading what training processes publish."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from oomproof.watch.publish import is_private, runtime_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """An allocator's figures on one device, as its process wrote them; peaks are since the script last reset them."""

    uuid: str | None
    time: float
    step: int
    allocated_bytes: int
    allocated_peak_bytes: int
    reserved_bytes: int
    not_reusable_bytes: int
    retries: int
    ooms: int
    pinned_bytes: int | None

    @property
    def age_seconds(self) -> float:
        """Return how long ago the process wrote this."""
        return max(0.0, time.time() - self.time)


def read_published(pid: int) -> list[Published]:
    """Return the figures that process ``pid`` publishes, one per device; none when it publishes nothing readable."""
    folder = runtime_folder()
    if not is_private(folder):
        return []
    try:
        data = json.loads((folder / f"{pid}.json").read_text())
        return [
            Published(
                time=float(data["time"]),
                step=int(data["step"]),
                uuid=device["uuid"],
                **{name: device[name] for name in Published.__slots__ if name not in ("time", "step", "uuid")},
            )
            for device in data["devices"]
        ]
    except (OSError, ValueError, KeyError, TypeError):  # gone meanwhile, or written by another version
        return []


def remove_ended() -> None:
    """Remove the files of processes that have ended."""
    folder = runtime_folder()
    if not is_private(folder):
        return
    for file in folder.glob("*.json"):
        if file.stem.isdigit() and not _runs(int(file.stem)):
            file.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
