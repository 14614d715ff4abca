"""Small memory snapshots as PyTorch would write them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomproof import snapshot
from oomproof.snapshot.state import History

MIB = 2**20
SHARED = Path(__file__).parents[3] / "shared" / "snapshots"

FRAME = {"name": "forward", "filename": "/home/user/train.py", "line": 12}
OUTER = {"name": "<module>", "filename": "/home/user/train.py", "line": 40}


def event(action: str, address: int, size: int, *, stream: int = 0, time_us: int = 0, **more: Any) -> dict[str, Any]:
    """Return one event; OOM events have ``device_free`` for an address."""
    where = "device_free" if action == "oom" else "addr"
    found = {"action": action, where: address, "size": size, "stream": stream, "time_us": time_us}
    return {**found, "frames": [FRAME, OUTER], **more}


def freed(address: int, size: int, **more: Any) -> list[dict[str, Any]]:
    """Return the two events of an ordinary free."""
    return [event("free_requested", address, size, **more), event("free_completed", address, size, **more)]


def block(address: int, size: int, requested: int | None = None, state: str = "active_allocated") -> dict[str, Any]:
    """Return a block of a segment."""
    requested = size if requested is None else requested
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": [FRAME]}


def segment(address: int, size: int, blocks: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a segment."""
    found = {
        "device": 0, "address": address, "total_size": size, "allocated_size": 0, "active_size": 0, "requested_size": 0,
        "stream": 0, "segment_type": "small" if size <= 2 * MIB else "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": list(blocks),
    }  # fmt: skip
    return {**found, **more}


def whole(events: Sequence[Any] = (), segments: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    """Return a snapshot of one device."""
    return {"segments": list(segments), "device_traces": [list(events)], **more}


def load(data: Any, folder: Path, protocol: int = 4) -> snapshot.Snapshot:
    """Write ``data`` as a pickle, or bytes as they are, and load it."""
    path = folder / "snapshot.pickle"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data, protocol))
    return snapshot.load(path)


def history(data: Any, folder: Path) -> History:
    """Return the history of device 0."""
    return History(load(data, folder), 0)
