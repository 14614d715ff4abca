"""Which memory the allocator has from the driver, as events change it: whole segments, or pages of expandable ones."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from oomproof.snapshot.model import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A segment without its blocks."""

    address: int
    size_bytes: int
    stream: int
    pool: tuple[int, int]
    expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    @classmethod
    def of(cls, segment: Segment) -> Extent:
        """Return the extent of a segment in a snapshot."""
        return cls(
            address=segment.address, size_bytes=segment.size_bytes, stream=segment.stream, pool=segment.pool,
            expandable=segment.expandable,
        )  # fmt: skip


class Extents:
    """Extents that can be looked up by address."""

    __slots__ = ("_by_start", "_starts", "total_bytes")

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._by_start = {extent.address: extent for extent in extents}
        self._starts = sorted(self._by_start)
        self.total_bytes = sum(extent.size_bytes for extent in self._by_start.values())

    def __iter__(self) -> Iterator[Extent]:
        return (self._by_start[start] for start in self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def copy(self) -> Extents:
        """Return a copy that changes on its own."""
        return Extents(self)

    def at(self, address: int) -> Extent | None:
        """Return the extent that holds an address."""
        place = bisect_right(self._starts, address)
        if not place:
            return None
        found = self._by_start[self._starts[place - 1]]
        return found if address < found.end else None

    def add(self, extent: Extent) -> bool:
        """Add an extent; pages of an expandable segment join those beside them. False when something is there."""
        place = bisect_right(self._starts, extent.address)
        before = self._by_start[self._starts[place - 1]] if place else None
        after = self._by_start[self._starts[place]] if place < len(self._starts) else None
        if (before and before.end > extent.address) or (after and after.address < extent.end):
            return False
        self.total_bytes += extent.size_bytes
        if before and _join(before, extent):
            self._drop(before)
            extent = replace(before, size_bytes=before.size_bytes + extent.size_bytes)
        if after and _join(extent, after):
            self._drop(after)
            extent = replace(extent, size_bytes=extent.size_bytes + after.size_bytes)
        self._put(extent)
        return True

    def remove(self, address: int, size_bytes: int) -> bool:
        """Remove a segment, or pages out of one. False when they are not there."""
        found = self.at(address)
        if found is None or address + size_bytes > found.end or not size_bytes:
            return False
        if not found.expandable and (address, size_bytes) != (found.address, found.size_bytes):
            return False
        self._drop(found)
        self.total_bytes -= size_bytes
        if found.address < address:
            self._put(replace(found, size_bytes=address - found.address))
        if address + size_bytes < found.end:
            self._put(replace(found, address=address + size_bytes, size_bytes=found.end - address - size_bytes))
        return True

    def _put(self, extent: Extent) -> None:
        self._by_start[extent.address] = extent
        insort(self._starts, extent.address)

    def _drop(self, extent: Extent) -> None:
        del self._by_start[extent.address]
        del self._starts[bisect_right(self._starts, extent.address) - 1]


def _join(left: Extent, right: Extent) -> bool:
    return (
        left.expandable
        and right.expandable
        and left.end == right.address
        and (left.stream, left.pool) == (right.stream, right.pool)
    )
