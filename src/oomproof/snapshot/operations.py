"""A recorded run as the operations that ``replay_child`` does with PyTorch's allocator."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomproof.snapshot.model import DEFAULT_POOL, Action, Snapshot
from oomproof.snapshot.replay_child import (
    ALLOCATE,
    COLUMNS,
    DRIVER_CALL,
    EMPTY_CACHE,
    FREE,
    POOL,
    REFUSED,
    REGION,
    RELEASE_POOL,
    RELEASED,
    SMALL_LIMIT,
)
from oomproof.snapshot.segments import Extent
from oomproof.snapshot.state import Allocation, History

_SMALL_SEGMENT = 2 * 2**20
_LARGE_PAGE = 20 * 2**20  # how expandable segments for large blocks grow
_WSL_BELOW = 0x6000_0000_0000  # published snapshots from WSL2 have addresses below this, those from Linux above

_ADDED = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_REMOVED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


@dataclass(slots=True)
class Operations:
    """What happens, in columns; ``event`` is the event of the trace that an operation stands for."""

    kind: array[int] = field(default_factory=lambda: array(COLUMNS["kind"]))
    size: array[int] = field(default_factory=lambda: array(COLUMNS["size"]))
    address: array[int] = field(default_factory=lambda: array(COLUMNS["address"]))
    stream: array[int] = field(default_factory=lambda: array(COLUMNS["stream"]))
    slot: array[int] = field(default_factory=lambda: array(COLUMNS["slot"]))
    event: array[int] = field(default_factory=lambda: array(COLUMNS["event"]))

    def add(self, kind: int, event: int, *, size: int = 0, address: int = 0, stream: int = 0, slot: int = 0) -> None:
        """Append one operation."""
        self.kind.append(kind)
        self.size.append(size)
        self.address.append(address)
        self.stream.append(stream)
        self.slot.append(slot)
        self.event.append(event)

    def write(self, folder: Path) -> None:
        """Write a file for each column."""
        for name in COLUMNS:
            (folder / f"{name}.column").write_bytes(getattr(self, name).tobytes())


class Recorded:
    """Everything that a replay needs of one device's history."""

    def __init__(self, history: History, snapshot: Snapshot) -> None:
        self.history = history
        self.segments = [segment for segment in snapshot.segments if segment.device == history.device]
        addresses = [extent.address for extent in (*history.start_segments, *history.final_segments)]
        #: whether the driver puts new segments above older ones
        self.rising = bool(addresses) and max(addresses) < _WSL_BELOW
        self._by_age = snapshot.pools_recorded
        self._streams: dict[int, int] = {0: 0}
        self._pools: dict[tuple[int, int], int] = {DEFAULT_POOL: 0}
        self._slots = {id(allocation): slot for slot, allocation in enumerate(history.allocations)}
        self.operations = Operations()
        self._entered = 0
        self.driver_calls: list[list[int]] = []
        self.expandable = any(e.expandable for e in (*history.start_segments, *history.final_segments)) or any(
            kind in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP) for kind in history.events.action
        )
        events = history.events
        self._mapped_below = {
            address + size: address for kind, address, size, _ in events if kind == Action.SEGMENT_MAP and size
        }
        self._translate()
        self.start = self._start()
        self.packed = [
            [block.requested_bytes, self._stream(block.stream), self._pool(block.pool), self._slots[id(block)]]
            for block in self._start_blocks()
        ]

    def job(self) -> dict[str, Any]:
        """Return what ``replay_child`` reads beside the columns."""
        return {
            "driver_calls": self.driver_calls,
            "expandable": self.expandable,
            "start": self.start,
            "packed": self.packed,
            "final": self._final(),
            "slots": len(self.history.allocations),
            "streams": len(self._streams),
            "pools": len(self._pools),
            "pools_known": self._by_age or len(self._pools) == 1,
        }

    def _stream(self, stream: int) -> int:
        return self._streams.setdefault(stream, len(self._streams))

    def _pool(self, pool: tuple[int, int]) -> int:
        return self._pools.setdefault(pool, len(self._pools))

    # ---- the trace ------------------------------------------------------------------------------------------------

    def _translate(self) -> None:
        events = self.history.events
        born = {block.born: block for block in self.history.allocations if block.born is not None}
        freed = {block.freed: block for block in self.history.allocations if block.freed is not None}
        index, count = 0, len(events)
        add = self.operations.add
        while index < count:
            kind = events.action[index]
            if kind == Action.ALLOC:
                block = born[index]
                self._enter(self._pool(block.pool), index)
                add(
                    ALLOCATE, index, size=block.requested_bytes, address=block.address,
                    stream=self._stream(block.stream), slot=self._slots[id(block)],
                )  # fmt: skip
            elif kind == Action.FREE_COMPLETED and index in freed:
                add(FREE, index, slot=self._slots[id(freed[index])])
            elif kind == Action.OOM:
                self._enter(self._pool(self.history.pools[events.pool[index]]), index)
                add(REFUSED, index, size=events.size[index], stream=self._stream(events.stream[index]))
            elif kind in _ADDED:
                self._driver_call(index)
                if kind == Action.SEGMENT_MAP and index in self.history.new_regions:
                    add(REGION, index)
            elif kind in _REMOVED:
                index = self._release(index)
                continue
            index += 1

    def _enter(self, pool: int, index: int) -> None:
        if pool != self._entered:
            self.operations.add(POOL, index, size=pool)
            self._entered = pool

    def _driver_call(self, index: int) -> None:
        events = self.history.events
        if events.action[index] in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):  # pages come in the allocator's own way
            allocates = events.action[index] == Action.SEGMENT_ALLOC
            self.driver_calls.append([int(allocates), events.address[index], events.size[index]])
            self.operations.add(DRIVER_CALL, index)

    def _release(self, index: int) -> int:
        """Translate frees of segments in a row; return the event after them.

        The allocator frees segments when the driver refuses it one, and when the program says so (empty_cache). In the
        first case they have the stack of the allocation that comes next, which will cause them again by itself.
        """
        events = self.history.events
        after = index
        while after < len(events) and events.action[after] in _REMOVED:
            after += 1
        cause = after
        while cause < len(events) and events.action[cause] in _ADDED:
            cause += 1
        by_itself = cause < len(events) and (
            events.action[cause] == Action.OOM
            or (
                events.action[cause] == Action.ALLOC
                and events.stack[index] == events.stack[cause] != 0
                and (cause > after)
            )
        )
        # One release frees everything that is unused: a row may be one or several of them, doing it once is the same.
        self._enter(0, index)  # inside a pool the allocator takes a graph to be captured, and keeps what is unused
        if not by_itself:  # of a pool that is in use, the program's own release frees nothing
            freed = {self.history.pool_of_freed(free) for free in range(index, after)}
            for pool in sorted(freed - {DEFAULT_POOL}):
                self.operations.add(RELEASE_POOL, index, size=self._pool(pool))
        self.operations.add(RELEASED if by_itself else EMPTY_CACHE, index)
        for free in range(index, after):
            self._driver_call(free)
        return after

    # ---- its start ------------------------------------------------------------------------------------------------

    def _start_blocks(self) -> list[Allocation]:
        return [block for block in self.history.allocations if block.born is None]

    def _start(self) -> list[dict[str, Any]]:
        blocks = self._start_blocks()
        start = []
        for extents in self._regions():
            first, last = extents[0], extents[-1]
            small = self._is_small(first)
            inside = [block for block in blocks if first.address <= block.address < last.end]
            pieces: list[list[Any]] = []
            begin = self._beginning(first)
            if begin < first.address:
                pieces.append([begin, first.address - begin, -1, True, 0])
            cursor = first.address
            for position, extent in enumerate(extents):
                if position:
                    pieces.append([cursor, extent.address - cursor, -1, True, 0])
                    cursor = extent.address
                for block in inside:
                    if extent.address <= block.address < extent.end:
                        self._gap(pieces, cursor, block.address, small)
                        pieces.append([block.address, block.size_bytes, self._slots[id(block)], False, 0])
                        cursor = block.address + block.size_bytes
                self._gap(pieces, cursor, extent.end, small)
                cursor = extent.end
            start.append(
                {
                    "address": begin,
                    "size": last.end - begin,
                    "small": small,
                    "stream": self._stream(first.stream),
                    "pool": self._pool(first.pool),
                    "expandable": first.expandable,
                    "pieces": pieces,
                }
            )
        # A PyTorch that says each event's pool may go by the age of segments, and on Linux the older ones lie higher.
        return start[::-1] if self._by_age and not self.rising else start

    def _beginning(self, extent: Extent) -> int:
        """Return where an expandable segment begins, as far as the trace maps pages below those of its start."""
        begin = extent.address
        while extent.expandable and begin in self._mapped_below:
            begin = self._mapped_below[begin]
        return begin

    @staticmethod
    def _gap(pieces: list[list[Any]], start: int, end: int, small: bool) -> None:
        size = end - start
        if size <= 0:
            return
        if not small and size <= SMALL_LIMIT and pieces and pieces[-1][2] >= 0:
            pieces[-1][4] = size  # too small to be asked for from the pool of large blocks
        else:
            pieces.append([start, size, -1, False, 0])

    def _regions(self) -> list[list[Extent]]:
        """Return the segments of the start; the mapped pages of one expandable segment together."""
        regions: list[list[Extent]] = []
        expandable: dict[tuple[int, tuple[int, int], bool], list[Extent]] = {}
        for extent in self.history.start_segments:
            if not extent.expandable:
                regions.append([extent])
                continue
            key = (extent.stream, extent.pool, self._is_small(extent))
            if key not in expandable:
                expandable[key] = []
                regions.append(expandable[key])
            expandable[key].append(extent)
        return regions

    def _is_small(self, extent: Extent) -> bool:
        if not extent.expandable:
            return extent.size_bytes <= _SMALL_SEGMENT
        for segment in self.segments:
            if segment.address < extent.end and extent.address < segment.address + segment.size_bytes:
                return segment.small
        return extent.size_bytes % _LARGE_PAGE != 0

    def _final(self) -> dict[str, Any]:
        return {
            str(segment.address): [
                segment.size_bytes,
                [[block.address, block.size_bytes] for block in segment.blocks if block.active],
            ]
            for segment in self.segments
        }
