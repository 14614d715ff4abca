"""What is in a memory snapshot: events in columns, final segments with their blocks, stacks each kept once.

Snapshot
├── traces     one Events for each device, and host_trace for pinned memory
├── segments   the allocator's state when the snapshot was taken: Segment, with its Blocks
├── stacks     every stack once; events, segments and blocks have its number, 0 for none
└── settings   the allocator's settings as recorded (torch 2.4 or newer), else empty
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

NO_TIME = -1
HOST = -1  # the device of pinned memory's segments, as PyTorch writes it

DEFAULT_POOL = (0, 0)


class Action(IntEnum):
    """What an event says; ``segment`` events are calls of the driver."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2  # from here on the block can be used again; later than requested after record_stream
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5  # expandable segments grow
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8  # its address is what was free on the device
    USER_DEFINED = 9
    OTHER = 255  # of a later PyTorch


ACTIONS = {action.name.lower(): action for action in Action if action is not Action.OTHER}


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    name: str
    filename: str
    line: int


class Stacks:
    """Every stack of a snapshot once, as a tree from the outermost frame inwards.

    A stack's number is that of its innermost node. Node 0 is the empty stack.
    """

    __slots__ = ("_frame_numbers", "_nodes", "frame_of", "frames", "parents")

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.parents = array("I", [0])
        self.frame_of = array("I", [0])  # the node's own frame; meaningless for node 0
        self._nodes: dict[int, int] = {}
        self._frame_numbers: dict[Frame, int] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def frame_number(self, frame: Frame) -> int:
        """Return the number of a frame, a new one when it was not seen before."""
        number = self._frame_numbers.get(frame)
        if number is None:
            number = self._frame_numbers[frame] = len(self.frames)
            self.frames.append(frame)
        return number

    def child(self, parent: int, frame_number: int) -> int:
        """Return the node of a frame called from ``parent``."""
        key = parent << 32 | frame_number
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = len(self.parents)
            self.parents.append(parent)
            self.frame_of.append(frame_number)
        return node

    def add(self, innermost_first: Sequence[int]) -> int:
        """Return the number of the stack of these frame numbers."""
        node = 0
        for number in reversed(innermost_first):
            node = self.child(node, number)
        return node

    def __getitem__(self, stack: int) -> tuple[Frame, ...]:
        """Return the frames of a stack, innermost first as PyTorch has them."""
        found = []
        while stack:
            found.append(self.frames[self.frame_of[stack]])
            stack = self.parents[stack]
        return tuple(found)


class Events:
    """One device's trace, oldest first, a column for each figure."""

    __slots__ = ("action", "address", "context", "metadata", "pool", "size", "stack", "stream", "time_us")

    def __init__(self) -> None:
        self.action = array("B")
        self.address = array("Q")  # for OOM: what was free on the device
        self.size = array("Q")  # bytes as asked for, before the allocator rounds them up; of segments, theirs
        self.stream = array("Q")
        self.time_us = array("q")  # NO_TIME where the format has none (torch 2.0)
        self.stack = array("I")  # number in Snapshot.stacks
        self.pool = array("I")  # number in Snapshot.pools; 0 where the format has none (torch 2.11 and older)
        self.metadata = array("I")  # number in Snapshot.texts: what annotations of the user say
        self.context = array("I")  # number in Snapshot.texts: torch.compile's graph and frame

    def __len__(self) -> int:
        return len(self.action)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over (action, address, size, stream)."""
        return zip(self.action, self.address, self.size, self.stream, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a segment when the snapshot was taken."""

    address: int
    size_bytes: int
    requested_bytes: int | None  # None: the format has none, or it is the rest of a block that was freed
    state: str  # "active_allocated", "active_pending_free" or "inactive"
    stack: int

    @property
    def active(self) -> bool:
        """Whether it cannot be given to anyone else."""
        return self.state != "inactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Memory that the allocator has from the driver; of expandable segments, a run of mapped pages."""

    device: int  # HOST for pinned memory
    address: int
    size_bytes: int
    stream: int
    small: bool  # of the pool for blocks up to 1 MiB
    pool: tuple[int, int]  # DEFAULT_POOL, or that of a CUDA graph or MemPool
    expandable: bool
    stack: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The beginning or end of something the program named, such as ``Optimizer.step#AdamW.step``."""

    stage: str  # "START" or "END"
    name: str
    device: int
    time_us: int


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A memory snapshot. Read one with ``snapshot.load(path)``."""

    segments: list[Segment] = field(default_factory=list)  # of all devices
    traces: list[Events] = field(default_factory=list)  # by device
    host_segments: list[Segment] = field(default_factory=list)
    host_trace: Events = field(default_factory=Events)
    stacks: Stacks = field(default_factory=Stacks)
    pools: list[tuple[int, int]] = field(default_factory=lambda: [DEFAULT_POOL])
    texts: list[str] = field(default_factory=lambda: [""])
    settings: Mapping[str, Any] = field(default_factory=dict)
    annotations: list[Annotation] = field(default_factory=list)
    pools_recorded: bool = False  # events say their pool: torch 2.14 does, 2.11 does not
    overflowed: bool = False  # PyTorch says that it forgot the oldest events
    notes: list[str] = field(default_factory=list)  # what the file lacks, for a person

    def devices(self) -> list[int]:
        """Return the devices that have events or segments, in order."""
        busy = {device for device, events in enumerate(self.traces) if len(events)}
        return sorted(busy | {segment.device for segment in self.segments})

    def events(self, device: int) -> Events:
        """Return a device's trace; an empty one when nothing was recorded."""
        return self.traces[device] if 0 <= device < len(self.traces) else Events()
