"""Peak allocated and reserved bytes of a PyTorch memory snapshot, from its own events and addresses.

``python peaks.py SNAPSHOT.pickle…`` prints them. ``--as OTHER.pickle`` in front leaves only the last events of each, as
many as OTHER has: under ``oomproof run`` a script's snapshot also holds what came before its own recording.

An event holds the size that was asked for; the block that served it can be larger, since PyTorch leaves a remainder of
up to 1 MiB in place (512 B in small segments). The recorded addresses say where each block began and what lay behind
it, so its size follows without choosing blocks anew. One thing a snapshot does not say: the size of a block that was
there when the recording began and was freed in it. Such blocks are taken to hold their remainder; ``guessed_blocks``
counts those that have one.
"""

from __future__ import annotations

import bisect
import pickle
import sys
from pathlib import Path
from typing import Any

ROUND = 512
SMALL = 1 << 20  # requests up to this come from small segments; also the largest remainder left unsplit in large ones


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a snapshot holds plain values only, this one names {module}.{name}")


class _Layout:
    """Segments and the blocks taken in them."""

    def __init__(self) -> None:
        self.segments: list[int] = []
        self.segment_size: dict[int, int] = {}
        self.starts: list[int] = []
        self.size: dict[int, int] = {}
        self.allocated = 0
        self.reserved = 0
        self.uncertain = 0

    def add_segment(self, address: int, size: int) -> None:
        bisect.insort(self.segments, address)
        self.segment_size[address] = size
        self.reserved += size

    def drop_segment(self, address: int) -> None:
        self.segments.remove(address)
        self.reserved -= self.segment_size.pop(address)

    def room(self, address: int) -> int:
        """Return the bytes from ``address`` to the next taken block or the end of its segment."""
        at = bisect.bisect_right(self.segments, address) - 1
        if at < 0 or address >= self.segments[at] + self.segment_size[self.segments[at]]:
            raise ValueError(f"no segment holds {address:#x}; was the snapshot taken with expandable segments?")
        end = self.segments[at] + self.segment_size[self.segments[at]]
        behind = bisect.bisect_right(self.starts, address)
        return min(end, self.starts[behind]) - address if behind < len(self.starts) else end - address

    def take(self, address: int, asked: int, size: int | None = None) -> None:
        rounded = max(ROUND, -(-asked // ROUND) * ROUND)
        if size is None:
            room = self.room(address)
            left = room - rounded
            whole = left < ROUND if rounded <= SMALL else left <= SMALL
            self.uncertain += whole and left > 0
            size = room if whole else rounded
        bisect.insort(self.starts, address)
        self.size[address] = size
        self.allocated += size

    def free(self, address: int) -> None:
        self.starts.pop(bisect.bisect_left(self.starts, address))
        self.allocated -= self.size.pop(address)


COUNTED = ("alloc", "free_completed", "segment_alloc", "segment_free")


def load(path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the segments of a snapshot and the events that change them, of the first device that has events."""
    with open(path, "rb") as file:
        snapshot = _PlainUnpickler(file).load()
    events = next(trace for trace in snapshot["device_traces"] if trace)
    return snapshot["segments"], [event for event in events if event["action"] in COUNTED]


def _start(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> _Layout:
    """Return the layout when the recording began: the last one, with every event undone."""
    live: dict[int, tuple[int, int | None]] = {}  # start address -> bytes asked for, bytes of the block where known
    sizes = {segment["address"]: segment["total_size"] for segment in segments}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                live[block.get("address", address)] = (block.get("requested_size", block["size"]), block["size"])
            address += block["size"]
    for event in reversed(events):
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            live.pop(address, None)
        elif action == "free_completed":
            live[address] = (size, None)
        elif action == "segment_alloc":
            sizes.pop(address, None)
        else:
            sizes[address] = size
    layout = _Layout()
    for address, size in sizes.items():
        layout.add_segment(address, size)
    for address in sorted(live, reverse=True):  # the block behind is known before the one in front of it
        layout.take(address, *live[address])
    return layout


def peaks(path: str | Path, last: int | None = None) -> dict[str, int]:
    """Return the peaks during the last events of a recording (all of them by default), and the blocks guessed."""
    segments, events = load(path)
    events = events if last is None else events[-last:]
    layout = _start(segments, events)
    guessed = layout.uncertain
    allocated = reserved = 0
    for event in events:
        allocated, reserved = max(allocated, layout.allocated), max(reserved, layout.reserved)
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            layout.take(address, size)
        elif action == "free_completed":
            layout.free(address)
        elif action == "segment_alloc":
            layout.add_segment(address, size)
        else:
            layout.drop_segment(address)
    return {
        "allocated_bytes": max(allocated, layout.allocated),
        "reserved_bytes": max(reserved, layout.reserved),
        "guessed_blocks": guessed,
    }


def main(names: list[str]) -> None:
    last = None
    if names and names[0] == "--as":
        last = len(load(names[1])[1])
        names = names[2:]
    for name in names:
        found = peaks(name, last)
        guessed = f", {found['guessed_blocks']} block sizes guessed" if found["guessed_blocks"] else ""
        print(f"{found['allocated_bytes']:>15,} allocated {found['reserved_bytes']:>15,} reserved  {name}{guessed}")


if __name__ == "__main__":
    main(sys.argv[1:])
