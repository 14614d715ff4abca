"""From a pickle to a Snapshot: knows the shapes that PyTorch has written since 2.0, and older lists of segments."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from oomproof.errors import SnapshotError
from oomproof.snapshot import pickles
from oomproof.snapshot.model import (
    ACTIONS,
    DEFAULT_POOL,
    NO_TIME,
    Action,
    Annotation,
    Block,
    Events,
    Frame,
    Segment,
    Snapshot,
)

_MOST_KNOWN_RUNS = 200_000
_EVENT_BYTES = 50
_NODE_BYTES = 130
_FRAME_BYTES = 300
_BLOCK_BYTES = 400
_RUN_BYTES = 130  # and its own length


class FrameNumber(int):
    """A frame's number in ``Snapshot.stacks``."""

    __slots__ = ()


class StackNumber(int):
    """A stack's number in ``Snapshot.stacks``."""

    __slots__ = ()


class Row(tuple[int, ...]):
    """One event, in the order of ``_Table``'s columns."""

    __slots__ = ()


class _Table:
    def __init__(self) -> None:
        e = self.events = Events()
        self.columns: tuple[array[int], ...] = (
            e.action, e.address, e.size, e.stream, e.time_us, e.stack, e.pool, e.metadata, e.context,
        )  # fmt: skip

    def extend(self, items: Sequence[Any]) -> None:
        if any(type(item) is not Row for item in items):
            raise SnapshotError("something else stands between its events; give a file as PyTorch wrote it")
        try:
            for column, values in zip(self.columns, zip(*items, strict=True), strict=True):
                column.extend(values)
        except OverflowError:
            raise SnapshotError("an event has a number outside 64 bits; give a file as PyTorch wrote it") from None


def read(
    data: pickles.Data, *, limit_bytes: int, progress: Callable[[int, int], None] | None = None
) -> tuple[Snapshot, int]:
    """Return the snapshot in a pickle, and about how much memory reading it took."""
    shapes = _Shapes()
    top, machine_bytes = pickles.read(data, shapes, limit_bytes=limit_bytes, progress=progress)
    return shapes.snapshot(top), machine_bytes


class _Shapes:
    """Recognizes dicts by their keys."""

    def __init__(self) -> None:
        self.result = Snapshot()
        self.tables: list[_Table] = []
        self.stacks = self.result.stacks
        self.frames: list[FrameNumber] = []
        self.runs: dict[bytes, StackNumber] = {}
        self.run_bytes = 0
        self.blocks = 0
        self.text_numbers = {"": 0}
        self.pool_numbers = {DEFAULT_POOL: 0}
        self.unknown_actions: set[str] = set()

    # ---- what the machine asks ------------------------------------------------------------------------------------

    def dict_done(self, items: pickles.Dict) -> Any:
        if "filename" in items:
            return self.frame(items)
        if "action" in items:
            return self.event(items)
        if "blocks" in items:
            return self.segment(items)
        if "state" in items and "size" in items:
            self.blocks += 1
            return dict(items)
        if "real_size" in items:
            return (_integer(items, "real_size"), items.get("frames", 0))
        if "stage" in items and "time_us" in items:
            return Annotation(
                stage=_text(items, "stage"), name=_text(items, "name"), device=_signed(items, "device"),
                time_us=_signed(items, "time_us"),
            )  # fmt: skip
        return items

    def list_done(self, key: Any, items: pickles.List) -> Any:
        if key != "frames":
            return items
        if any(type(item) is not FrameNumber for item in items):
            raise SnapshotError("a stack holds something else than frames; give a file as PyTorch wrote it")
        return StackNumber(self.stacks.add(items))

    def table(self, first: Any) -> pickles.Table | None:
        if type(first) is not Row:
            return None
        self.tables.append(_Table())
        return self.tables[-1]

    def references(self, run: bytes, memo: Sequence[Any]) -> Any:
        known = self.runs.get(run)
        if known is not None:
            return known
        numbers = []
        position = 0
        while position < len(run):
            if run[position] == 0x68:
                item = memo[run[position + 1]]
                position += 2
            else:
                item = memo[int.from_bytes(run[position + 1 : position + 5], "little")]
                position += 5
            if type(item) is not FrameNumber:
                return None
            numbers.append(item)
        if len(self.runs) >= _MOST_KNOWN_RUNS:
            self.runs.clear()
            self.run_bytes = 0
        stack = self.runs[run] = StackNumber(self.stacks.add(numbers))
        self.run_bytes += len(run)
        return stack

    def used_bytes(self) -> int:
        return (
            _EVENT_BYTES * sum(len(table.events) for table in self.tables)
            + _NODE_BYTES * len(self.stacks)
            + _FRAME_BYTES * len(self.stacks.frames)
            + _BLOCK_BYTES * self.blocks
            + _RUN_BYTES * len(self.runs)
            + self.run_bytes
        )

    # ---- shapes ---------------------------------------------------------------------------------------------------

    def frame(self, items: dict[Any, Any]) -> FrameNumber:
        line = items.get("line", 0)
        frame = Frame(_text(items, "name"), _text(items, "filename"), line if type(line) is int else 0)
        number = self.stacks.frame_number(frame)
        if number == len(self.frames):
            self.frames.append(FrameNumber(number))
        return self.frames[number]

    def event(self, items: dict[Any, Any]) -> Row:
        name = _text(items, "action")
        action = ACTIONS.get(name, Action.OTHER)
        if action is Action.OTHER:
            self.unknown_actions.add(name[:40])
        return Row(
            (
                action,
                _integer(items, "device_free" if action is Action.OOM and "device_free" in items else "addr"),
                _integer(items, "size"),
                _integer(items, "stream"),
                _signed(items, "time_us") if "time_us" in items else NO_TIME,
                self.stack(items),
                self.pool(items["pool_id"]) if "pool_id" in items else 0,
                self.text(items.get("user_metadata", "")),
                self.text(items.get("compile_context", "")),
            )
        )

    def stack(self, items: dict[Any, Any]) -> int:
        found = items.get("frames", 0)
        if type(found) is StackNumber or found == 0:
            return int(found)
        raise SnapshotError("an event's stack is no list of frames; give a file as PyTorch wrote it")

    def text(self, text: Any) -> int:
        if text is None or text == "N/A":  # what PyTorch writes for none
            return 0
        if type(text) is not str:
            raise SnapshotError("an event's annotation is no text; give a file as PyTorch wrote it")
        number = self.text_numbers.get(text)
        if number is None:
            number = self.text_numbers[text] = len(self.result.texts)
            self.result.texts.append(text)
        return number

    def pool(self, pool: Any) -> int:
        pair = _pool(pool)
        self.result.pools_recorded = True
        number = self.pool_numbers.get(pair)
        if number is None:
            number = self.pool_numbers[pair] = len(self.result.pools)
            self.result.pools.append(pair)
        return number

    def segment(self, items: dict[Any, Any]) -> Segment:
        address = _integer(items, "address")
        blocks = []
        cursor = address
        for item in items["blocks"] if isinstance(items["blocks"], list) else [None]:
            if not isinstance(item, dict):
                raise SnapshotError("a segment holds something else than blocks; give a file as PyTorch wrote it")
            block = self.block(item, cursor)
            cursor = block.address + block.size_bytes
            blocks.append(block)
        size = _integer(items, "total_size")
        if cursor > address + size:
            raise SnapshotError("the blocks of a segment are larger than it; give a file as PyTorch wrote it")
        return Segment(
            device=_signed(items, "device"),
            address=address,
            size_bytes=size,
            stream=_integer(items, "stream") if "stream" in items else 0,  # old lists of segments may have none
            small=items.get("segment_type") == "small",
            pool=_pool(items.get("segment_pool_id", DEFAULT_POOL)),
            expandable=items.get("is_expandable") is True,
            stack=self.stack(items),
            blocks=tuple(blocks),
        )

    def block(self, items: dict[Any, Any], cursor: int) -> Block:
        """Return a block; up to torch 2.0 it has no address, and its request and stack are in its history."""
        history = items.get("history") or ()
        last = history[0] if isinstance(history, list) and history and isinstance(history[0], tuple) else None
        state = _text(items, "state")
        state = "active_pending_free" if state == "active_awaiting_free" else state
        if state not in ("active_allocated", "active_pending_free", "inactive"):
            raise SnapshotError(f"a block's state is {state[:40]!r}; this oomproof is too old for it, upgrade it")
        requested = _integer(items, "requested_size") if "requested_size" in items else last[0] if last else None
        return Block(
            address=_integer(items, "address") if "address" in items else cursor,
            size_bytes=_integer(items, "size"),
            requested_bytes=None if state == "inactive" else requested,
            state=state,
            stack=self.stack(items) if "frames" in items else self.stack({"frames": last[1]}) if last else 0,
        )

    # ---- the whole ------------------------------------------------------------------------------------------------

    def snapshot(self, top: Any) -> Snapshot:
        result = self.result
        if isinstance(top, list):  # torch.cuda.memory_snapshot(), which was all there was before 2.0
            top = {"segments": top}
            result.notes.append("a list of segments only: it has no events, so nothing is known of how they came about")
        if not isinstance(top, dict) or not isinstance(top.get("segments"), list):
            raise SnapshotError(
                "it is a pickle, but no memory snapshot; write one with torch.cuda.memory._dump_snapshot(FILE)"
            )
        result.segments = _segments(top["segments"])
        result.host_segments = _segments(top.get("host_segments", []))
        traces = top.get("device_traces", [])
        if not isinstance(traces, list):
            raise SnapshotError("its device_traces are no list; give a file as PyTorch wrote it")
        result.traces = [_events(trace) for trace in traces]
        result.host_trace = _events(top.get("host_traces", []))
        settings = top.get("allocator_settings", {})
        result.settings = dict(settings) if isinstance(settings, dict) else {}
        annotations = top.get("external_annotations", [])
        result.annotations = [a for a in annotations if isinstance(a, Annotation)] if annotations else []
        overflowed = top.get("trace_alloc_overflowed", False)
        result.overflowed = any(overflowed) if isinstance(overflowed, list) else overflowed is True
        if self.unknown_actions:
            names = ", ".join(sorted(self.unknown_actions)[:5])
            result.notes.append(f"events of kinds that this oomproof does not know are left out of account: {names}")
        return result


def _segments(items: Any) -> list[Segment]:
    if not isinstance(items, list) or any(type(item) is not Segment for item in items):
        raise SnapshotError("its segments are no list of segments; give a file as PyTorch wrote it")
    return list(items)


def _events(trace: Any) -> Events:
    if isinstance(trace, _Table):
        return trace.events
    if trace != []:
        raise SnapshotError("a trace is no list of events; give a file as PyTorch wrote it")
    return Events()


def _pool(pool: Any) -> tuple[int, int]:
    if isinstance(pool, (tuple, list)) and len(pool) == 2 and all(type(n) is int and 0 <= n < 2**64 for n in pool):
        return (pool[0], pool[1])
    raise SnapshotError("a pool's id is no pair of numbers; give a file as PyTorch wrote it")


def _integer(items: dict[Any, Any], key: str) -> int:
    value = items.get(key)
    if type(value) is int and -(2**63) <= value < 2**64:
        return value & 0xFFFFFFFFFFFFFFFF  # torch's signed addresses and streams
    raise SnapshotError(f"{key} is {_shown(value)} where a number of 64 bits belongs; give a file as PyTorch wrote it")


def _signed(items: dict[Any, Any], key: str) -> int:
    value = items.get(key)
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise SnapshotError(f"{key} is {_shown(value)} where a number of 64 bits belongs; give a file as PyTorch wrote it")


def _text(items: dict[Any, Any], key: str) -> str:
    value = items.get(key)
    if type(value) is str:
        return value
    raise SnapshotError(f"{key} is {_shown(value)} where a text belongs; give a file as PyTorch wrote it")


def _shown(value: Any) -> str:
    """Return a value's kind: showing nested tuples themselves could take forever."""
    if type(value) is int:
        return "outside 64 bits"
    return "missing" if value is None else f"a {type(value).__name__}"
