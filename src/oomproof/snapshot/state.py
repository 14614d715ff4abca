"""The allocator's state at any event of a trace.

A snapshot has the state at its end; the state at its start is found by undoing the events backwards, and every other by
doing them again. Events have the bytes that were asked for. What a block really takes is the request rounded up, and in
segments for large blocks also a rest of up to 1 MiB that PyTorch does not split off (``should_split`` in
CUDACachingAllocator.cpp, unchanged from 2.0 to 2.14); the blocks around it say whether there is such a rest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from oomproof.snapshot.model import Action, Block, Events, Snapshot
from oomproof.snapshot.segments import Extent, Extents

_SMALLEST_BLOCK = 512
_SMALL_LIMIT = 2**20  # requests up to this come from the pool of small blocks, and rests up to this stay with a block
_MOST_PROBLEMS = 20

_SEGMENT_ADDED = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_SEGMENT_REMOVED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


@dataclass(slots=True, kw_only=True, eq=False)
class Allocation:
    """One block from its allocation to its free. Events are indices into the device's trace."""

    address: int
    size_bytes: int  # what it takes; see ``exact``
    requested_bytes: int
    stream: int
    pool: tuple[int, int]
    stack: int  # of the allocation; 0 when that was before the trace and the block did not live to its end
    born: int | None = None  # None: before the trace
    free_requested: int | None = None  # None: not freed in the trace
    freed: int | None = None  # when it could be used again
    pending_at_start: bool = False  # freed before the trace, but still in use by another stream
    exact: bool = True  # False: up to 1 MiB more than ``size_bytes``; nothing in the file says how much

    def live_after(self, event: int) -> bool:
        """Return whether it is allocated once the event is done; -1 for the start of the trace."""
        return (
            (self.born is None or self.born <= event)
            and not self.pending_at_start
            and (self.free_requested is None or self.free_requested > event)
        )

    def active_after(self, event: int) -> bool:
        """Return whether it cannot be given to anyone else once the event is done."""
        return (self.born is None or self.born <= event) and (self.freed is None or self.freed > event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest figure of a trace."""

    size_bytes: int
    event: int  # the event after which it is first reached; -1 for the start of the trace


@dataclass(slots=True, kw_only=True)
class State:
    """What the allocator holds once an event is done."""

    event: int
    segments: Extents
    blocks: list[Allocation] = field(default_factory=list)  # active ones, in order of address

    @property
    def allocated_bytes(self) -> int:
        """Bytes in blocks that were not freed, as ``torch.cuda.memory_allocated`` counts them."""
        return sum(block.size_bytes for block in self.blocks if block.live_after(self.event))

    @property
    def reserved_bytes(self) -> int:
        """Bytes in segments, as ``torch.cuda.memory_reserved`` counts them."""
        return self.segments.total_bytes


class History:
    """One device's trace from its start to its end.

    ``allocations`` are all blocks that ever lived in it, those from before the trace first; ``start_segments`` what was
    reserved at its start. ``peak_active`` is the most that was in blocks in use, those included that another stream
    still needed. ``unsure`` counts blocks of the start that may be up to 1 MiB larger than said here. ``problems`` says
    where events and final segments contradict each other; without any, all figures are exact.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.device = device
        self.events: Events = snapshot.events(device)
        self.pools = snapshot.pools
        self.settings = snapshot.settings
        self.problems: list[str] = []
        self.problem_count = 0
        self.new_regions: set[int] = set()  # events that map pages beside no others
        self.allocations: list[Allocation] = []
        segments = [segment for segment in snapshot.segments if segment.device == device]
        self.final_segments = Extents(Extent.of(segment) for segment in segments)
        self._final = {
            block.address: (block, Extent.of(segment))
            for segment in segments
            for block in segment.blocks
            if block.active
        }
        self._rounding = Rounding(snapshot.settings)
        # Events up to torch 2.11 do not say their pool: it is known of segments that are there at the end.
        self._segment_pools: dict[int, tuple[int, int]] = {}
        self.start_segments, start = self._undo()
        self._redo(start)
        self.unsure = sum(not allocation.exact for allocation in self.allocations)
        self.peak_allocated, self.peak_reserved = self._peaks()
        self.peak_active = self._peak_active()

    def state_after(self, event: int) -> State:
        """Return the state once ``event`` is done; -1 for the start, ``len(events) - 1`` for the end."""
        segments = self.start_segments.copy()
        for index in range(min(event + 1, len(self.events))):
            self._apply_segment(segments, index, forwards=True)
        blocks = [allocation for allocation in self.allocations if allocation.active_after(event)]
        return State(event=event, segments=segments, blocks=sorted(blocks, key=lambda block: block.address))

    def live_after(self, event: int) -> list[Allocation]:
        """Return the blocks that are allocated once ``event`` is done, the largest first."""
        live = [allocation for allocation in self.allocations if allocation.live_after(event)]
        return sorted(live, key=lambda block: (-block.size_bytes, block.address))

    def pool_of_freed(self, event: int) -> tuple[int, int]:
        """Return the pool of a segment that is freed at an event, as far as the trace says it."""
        return self._segment_pools.get(event) or self.pools[self.events.pool[event]]

    # ---- backwards ------------------------------------------------------------------------------------------------

    def _undo(self) -> tuple[Extents, dict[int, Allocation]]:
        """Return segments and blocks of the start: the final ones with every event taken back."""
        segments = self.final_segments.copy()
        live: dict[int, Allocation] = {}
        for address, (block, extent) in self._final.items():
            live[address] = _from_final(block, extent)
        events = self.events
        action, addresses, sizes, streams = events.action, events.address, events.size, events.stream
        for index in range(len(events) - 1, -1, -1):
            kind, address = action[index], addresses[index]
            if kind == Action.ALLOC:
                if live.pop(address, None) is None:
                    self._problem(index, f"the block at {address:#x} is allocated here and in use by nothing later")
            elif kind == Action.FREE_COMPLETED:
                if address in live:
                    self._problem(index, f"the block at {address:#x} is freed here and still in use later")
                live[address] = Allocation(
                    address=address, size_bytes=0, requested_bytes=sizes[index], stream=streams[index],
                    pool=self.pools[events.pool[index]], stack=0, exact=False,
                )  # fmt: skip
            else:
                self._apply_segment(segments, index, forwards=False)
        return segments, live

    def _apply_segment(self, segments: Extents, index: int, *, forwards: bool) -> None:
        events = self.events
        kind = events.action[index]
        added = kind in _SEGMENT_ADDED
        if not added and kind not in _SEGMENT_REMOVED:
            return
        address, size = events.address[index], events.size[index]
        if added == forwards:
            extent = Extent(
                address=address,
                size_bytes=size,
                stream=events.stream[index],
                pool=self._segment_pools.get(index) or self.pools[events.pool[index]],
                expandable=kind in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP),
            )
            before = len(segments)
            done = segments.add(extent)
            if extent.expandable and forwards and len(segments) > before:
                self.new_regions.add(index)
        else:
            there = segments.at(address)
            if there is not None and not forwards:
                self._segment_pools[index] = there.pool
            done = segments.remove(address, size)
        if not done and not forwards:  # forwards it would be the same once more
            self._problem(index, f"the segment at {address:#x} of {size:,} B does not agree with later ones")

    # ---- forwards -------------------------------------------------------------------------------------------------

    def _redo(self, start: dict[int, Allocation]) -> None:
        segments = self.start_segments.copy()
        layout = _Layout()
        for address in sorted(start):
            layout.add(start[address])
        self.allocations.extend(start[address] for address in layout.addresses)
        for block in self.allocations:
            extent = segments.at(block.address)
            block.pool = extent.pool if extent else block.pool
            if not block.exact:
                self._size_at_start(block, layout, extent)
        events = self.events
        for index in range(len(events)):
            kind, address = events.action[index], events.address[index]
            if kind == Action.ALLOC:
                self._allocate(index, layout, segments)
            elif kind == Action.FREE_REQUESTED:
                freeing = layout.blocks.get(address)
                if freeing is not None and freeing.free_requested is None:
                    freeing.free_requested = index
            elif kind == Action.FREE_COMPLETED:
                freed = layout.remove(address)
                if freed is not None:
                    freed.freed = index
                    if freed.free_requested is None:
                        freed.pending_at_start = freed.born is None
                        freed.free_requested = index
            else:
                self._apply_segment(segments, index, forwards=True)
        self._check_end(layout)

    def _size_at_start(self, block: Allocation, layout: _Layout, extent: Extent | None) -> None:
        """Find what a block takes that was there at the start and is freed in the trace."""
        block.size_bytes = self._rounding(block.requested_bytes)
        if extent is None or block.size_bytes <= _SMALL_LIMIT or extent.expandable:
            block.exact = True
            return
        room = layout.room(block.address, extent)
        if room - block.size_bytes <= _SMALL_LIMIT:  # a free block that small cannot be here: it is the block's rest
            block.size_bytes = max(room, block.size_bytes)
            block.exact = True

    def _allocate(self, index: int, layout: _Layout, segments: Extents) -> None:
        events = self.events
        address, requested = events.address[index], events.size[index]
        extent = segments.at(address)
        left = layout.before(address)
        if left is not None and not left.exact and extent is not None and left.address >= extent.address:
            # A new block begins where the free room began, so where the block to the left of it ends.
            left.size_bytes = address - left.address
            left.exact = True
        size = self._rounding(requested)
        if extent is None:
            self._problem(index, f"the block at {address:#x} is in no segment")
        elif size > _SMALL_LIMIT and not extent.expandable:
            room = layout.room(address, extent)
            if room - size <= _SMALL_LIMIT or size >= self._rounding.never_split:
                size = max(room, size)
        block = Allocation(
            address=address, size_bytes=size, requested_bytes=requested, stream=events.stream[index],
            pool=extent.pool if extent else self.pools[events.pool[index]], stack=events.stack[index], born=index,
        )  # fmt: skip
        if address in layout.blocks:
            layout.remove(address)
        layout.add(block)
        self.allocations.append(block)

    def _check_end(self, layout: _Layout) -> None:
        """What lives at the end has its size in the file: the rule must give the same."""
        last = len(self.events) - 1
        for address, (block, _) in self._final.items():
            found = layout.blocks.get(address)
            if found is None:
                self._problem(last, f"the block at {address:#x} is in the final segments and was freed before")
            elif found.size_bytes != block.size_bytes:
                self._problem(
                    last,
                    f"the block at {address:#x} takes {block.size_bytes:,} B, by its events {found.size_bytes:,} B",
                )
                found.size_bytes = block.size_bytes

    def _peaks(self) -> tuple[Peak, Peak]:
        events = self.events
        change = dict.fromkeys(range(-1, 0), 0)
        for block in self.allocations:
            if block.pending_at_start:
                continue
            at = -1 if block.born is None else block.born
            change[at] = change.get(at, 0) + block.size_bytes
            if block.free_requested is not None:
                change[block.free_requested] = change.get(block.free_requested, 0) - block.size_bytes
        allocated = most_allocated = change[-1]
        reserved = most_reserved = self.start_segments.total_bytes
        allocated_at = reserved_at = -1
        for index in range(len(events)):
            kind = events.action[index]
            if kind in _SEGMENT_ADDED:
                reserved += events.size[index]
                if reserved > most_reserved:
                    most_reserved, reserved_at = reserved, index
            elif kind in _SEGMENT_REMOVED:
                reserved -= events.size[index]
            elif kind <= Action.FREE_REQUESTED:
                allocated += change.get(index, 0)
                if allocated > most_allocated:
                    most_allocated, allocated_at = allocated, index
        return Peak(size_bytes=most_allocated, event=allocated_at), Peak(size_bytes=most_reserved, event=reserved_at)

    def _peak_active(self) -> int:
        """Return the most bytes in blocks that could not be given to anyone else."""
        change = [0] * (len(self.events) + 1)
        for block in self.allocations:
            change[0 if block.born is None else block.born + 1] += block.size_bytes
            if block.freed is not None:
                change[block.freed + 1] -= block.size_bytes
        return max(accumulate(change))

    def _problem(self, index: int, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"event {index:,}: {text}")


class Rounding:
    """How the allocator rounds requests up, under the settings that a snapshot has (none before torch 2.4)."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        limit = settings.get("max_split_size", -1)
        self.never_split = limit if type(limit) is int and 0 < limit < 2**63 else 2**64
        table = settings.get("roundup_power2_divisions", {})
        pairs = table.items() if isinstance(table, Mapping) else ()
        found = [(int(k), v) for k, v in pairs if str(k).isdigit() and type(v) is int and 0 < v <= 64]
        self._divisions = dict(found)  # from this many MiB on: so many steps to the next power of two

    def __call__(self, size_bytes: int) -> int:
        """Return how many bytes a request takes at least."""
        if size_bytes < _SMALLEST_BLOCK:
            return _SMALLEST_BLOCK
        divisions = self._of(size_bytes)
        if divisions > 1 and size_bytes > _SMALLEST_BLOCK * divisions and size_bytes & (size_bytes - 1):
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return -(-size_bytes // _SMALLEST_BLOCK) * _SMALLEST_BLOCK

    def _of(self, size_bytes: int) -> int:
        if not self._divisions:
            return 0
        power = max(0, min(15, size_bytes.bit_length() - 1 - 20))  # PyTorch has 16 intervals, from 1 MiB on
        return self._divisions.get(1 << power, 0)


class _Layout:
    """Active blocks in order of address."""

    def __init__(self) -> None:
        self.blocks: dict[int, Allocation] = {}
        self.addresses: list[int] = []

    def add(self, block: Allocation) -> None:
        self.blocks[block.address] = block
        insort(self.addresses, block.address)

    def remove(self, address: int) -> Allocation | None:
        block = self.blocks.pop(address, None)
        if block is not None:
            del self.addresses[bisect_left(self.addresses, address)]
        return block

    def before(self, address: int) -> Allocation | None:
        place = bisect_left(self.addresses, address)
        return self.blocks[self.addresses[place - 1]] if place else None

    def room(self, address: int, extent: Extent) -> int:
        """Return how far it is from an address to the next block, or to the segment's end."""
        place = bisect_right(self.addresses, address)
        following = self.addresses[place] if place < len(self.addresses) else extent.end
        return min(following, extent.end) - address


def _from_final(block: Block, extent: Extent) -> Allocation:
    return Allocation(
        address=block.address,
        size_bytes=block.size_bytes,
        requested_bytes=block.size_bytes if block.requested_bytes is None else block.requested_bytes,
        stream=extent.stream,
        pool=extent.pool,
        stack=block.stack,
    )
