"""A profile from the ``[memory]`` events of a torch.profiler trace (``export_chrome_trace``, ``profile_memory=True``).

Events have sizes and addresses; the spans around them tell phases, modules and, with ``with_stack=True``, lines. What
was allocated before the profiler began is one block that nothing is known of.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oomproof.errors import SnapshotError, UsageError
from oomproof.measure.ledger import Block as Followed
from oomproof.measure.ledger import Mark
from oomproof.measure.profile import Block, Profile, Stack
from oomproof.measure.series import Series, growth
from oomproof.snapshot.profile import CUBLAS_WORKSPACE_BYTES, STACK_LINES, by_phases, in_steps

#: Of JSON text; Python's objects of it take about seven times as much.
LIMIT_BYTES = 512 * 2**20
CUDA = 1  # Device Type of the events, c10::DeviceType
RULES = (
    "from a profiler trace: names and shapes are not in it; phases, modules and lines are those of the spans around "
    "each event, categories follow from the phases"
)
_LINE = re.compile(r"(.+\.py)\((\d+)\): (.+)")
_STEP, _BACKWARD, _MODULE = "Optimizer.step", "autograd::engine::evaluate_function: ", "nn.Module: "
#: Files of torch, Python and this tool; names are relative to sys.path, or absolute.
_NOT_SHOWN = re.compile(r"torch/|.*site-packages/torch/|<frozen|.*oomproof/measure/")


class _Event(NamedTuple):
    time_us: float
    thread: Any
    size: int  # below zero: a free
    address: int
    allocated: int  # after it
    reserved: int


class _Place(NamedTuple):
    """What the spans around an event say."""

    phase: str | None
    module: str | None
    stack: Stack


def is_trace(start: bytes) -> bool:
    """Return whether a file that begins like this is a profiler trace, packed or not."""
    return start[:2] == b"\x1f\x8b" or (start.lstrip()[:1] == b"{" and b'"traceEvents"' in start)


def profile(path: Path) -> Profile:
    """Return the profile of the GPU with the highest peak in a trace.

    Raises SnapshotError when the file is no trace, has no memory events or is larger than 512 MiB of text.
    """
    found = _read(path)
    events = _memory_events(found)
    if not events:
        raise SnapshotError(
            f"{path} has no [memory] events of a GPU; record it with torch.profiler.profile(profile_memory=True, "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
        )
    device = max(events, key=lambda d: max(e.allocated for e in events[d]))
    chosen = sorted(events[device], key=lambda event: event.time_us)
    return _Maker(device, chosen, list(_places(chosen, found))).profile()


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            text = file.read(LIMIT_BYTES + 1)
        if len(text) > LIMIT_BYTES:
            raise SnapshotError(f"{path} is over 512 MiB of JSON; profile fewer steps (torch.profiler.schedule)")
        data = json.loads(text.decode("utf-8", "replace"), strict=False)  # torch 2.6 writes bytes that are no UTF-8
        found = data["traceEvents"]
        if not isinstance(found, list):
            raise ValueError
        return [event for event in found if isinstance(event, dict)]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a file of export_chrome_trace") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, RecursionError):
        raise SnapshotError(f"{path} is no trace of torch.profiler, or cut short; export it again") from None


def _memory_events(found: list[dict[str, Any]]) -> dict[int, list[_Event]]:
    events: dict[int, list[_Event]] = {}
    for event in found:
        args = event.get("args")
        if event.get("name") != "[memory]" or not isinstance(args, dict) or args.get("Device Type") != CUDA:
            continue
        try:
            row = _Event(
                float(event["ts"]), event.get("tid"), int(args["Bytes"]), int(args["Addr"]),
                int(args["Total Allocated"]), int(args["Total Reserved"]),
            )  # fmt: skip
            events.setdefault(int(args["Device Id"]), []).append(row)
        except (KeyError, TypeError, ValueError):
            raise SnapshotError("a [memory] event of the trace is malformed; export it again") from None
    return events


def _places(events: list[_Event], found: list[dict[str, Any]]) -> Iterator[_Place]:
    """Yield for each event what the spans of its thread say that are open then."""
    spans: dict[Any, list[tuple[float, float, str]]] = {}
    for span in found:
        if span.get("ph") == "X" and span.get("cat") in ("cpu_op", "python_function", "user_annotation"):
            start, length = float(span.get("ts", 0)), float(span.get("dur", 0))
            spans.setdefault(span.get("tid"), []).append((start, start + length, str(span.get("name"))))
    for rows in spans.values():
        rows.sort(key=lambda span: (span[0], -span[1]))
    next_span = dict.fromkeys(spans, 0)
    open_spans: dict[Any, list[tuple[float, str]]] = {thread: [] for thread in spans}
    for event in events:
        rows, opened = spans.get(event.thread, []), open_spans.get(event.thread, [])
        at = next_span.get(event.thread, 0)
        while at < len(rows) and rows[at][0] <= event.time_us:
            while opened and opened[-1][0] < rows[at][0]:
                opened.pop()
            opened.append(rows[at][1:])
            at += 1
        next_span[event.thread] = at
        yield _place([name for end, name in reversed(opened) if end >= event.time_us])


def _place(names: list[str]) -> _Place:
    phase = "optimizer" if any(n.startswith(_STEP) for n in names) else None
    node = next((n[len(_BACKWARD) :] for n in names if n.startswith(_BACKWARD)), None)
    module = next((n[len(_MODULE) :] for n in names if n.startswith(_MODULE)), None)
    phase = phase or ("backward" if node else "forward" if module else None)
    lines = [found for found in map(_LINE.fullmatch, names) if found]
    stack = [f"{m[1]}:{m[2]} {m[3]}" for m in lines if not _NOT_SHOWN.match(m[1])]
    return _Place(phase, module, tuple(stack[:STACK_LINES]) or ((f"{node} (autograd)",) if node else ()))


class _Maker:
    def __init__(self, device: int, events: list[_Event], places: list[_Place]) -> None:
        self._device = device
        self._events = events
        self._places = places
        self._stacks: dict[int, Stack] = {}  # by id of the block

    def profile(self) -> Profile:
        marks = list(in_steps(self._moments()))
        blocks, before, touched = self._follow(marks)
        series = Series()
        series.reserved = series.most_reserved = self._events[0].reserved
        series.feed(self._as_trace(), touched, marks, before)
        top = max(range(len(self._events)), key=lambda i: self._events[i].allocated)
        live = [b for b in blocks if b.born_event <= top and (b.died_event is None or b.died_event > top)]
        live.sort(key=lambda b: -b.size)
        left = [b for b in blocks if b.died_event is None and b not in before]
        return Profile(
            source="snapshot",
            device=self._device,
            events=series.events,
            peak_event=top + 1,
            allocated_bytes=self._events[top].allocated,
            reserved_bytes=max(event.reserved for event in self._events),
            limit_bytes=None,
            blocks=tuple(self._row(block, block in before) for block in live),
            slack_bytes=self._events[top].allocated - sum(block.size for block in live),
            points=series.points(),
            steps=series.steps(),
            growth=growth(left, lambda block: self._stacks.get(id(block), ())),
            segments=(),
            notes=(RULES,),
        )

    def _moments(self) -> Iterator[tuple[int, str, str | None]]:
        phase = "init"
        for event, place in zip(self._events, self._places, strict=True):
            phase = place.phase or (phase if phase in ("init", "forward") else "other")
            yield int(event.time_us), phase, place.module

    def _follow(self, marks: list[Mark]) -> tuple[list[Followed], list[Followed], list[Followed | None]]:
        """Return all blocks, those from before the trace, and the one that each event is about."""
        live: dict[int, Followed] = {}
        blocks: list[Followed] = []
        before: list[Followed] = []
        touched: list[Followed | None] = []
        start = Mark(0, 0, "init", None)
        for index, event in enumerate(self._events):
            if event.size >= 0:
                block = Followed(event.address, event.size, marks[index], [], index)
                self._stacks[id(block)] = self._places[index].stack
                live[event.address] = block
                blocks.append(block)
            else:
                gone = live.pop(event.address, None)
                if gone is None:
                    gone = Followed(event.address, -event.size, start, [], -1)
                    before.append(gone)
                gone.died, gone.died_event = marks[index], index
                block = gone
            touched.append(block)
        first = self._events[0]
        rest = first.allocated - first.size - sum(block.size for block in before)
        if rest > 0:
            before.append(Followed(0, rest, start, [], -1))
        for block in blocks:
            kept = block.died is None and block.size == CUBLAS_WORKSPACE_BYTES
            block.label = "workspace" if kept else by_phases(block.born, block.died)
        for block in before:
            block.label = "unknown"
        return [*before, *blocks], before, touched

    def _as_trace(self) -> Iterator[dict[str, Any]]:
        reserved = self._events[0].reserved
        for event in self._events:
            if event.reserved != reserved:
                grown = event.reserved - reserved
                action = "segment_alloc" if grown > 0 else "segment_free"
                yield {"action": action, "size": abs(grown), "time_us": int(event.time_us)}
                reserved = event.reserved
            yield {"action": "alloc" if event.size >= 0 else "free_requested", "time_us": int(event.time_us)}

    def _row(self, block: Followed, from_before: bool) -> Block:
        return Block(
            address=block.address,
            size_bytes=block.size,
            category=block.category(),
            step=None if from_before else block.born.step,
            phase=None if from_before else block.born.phase,
            module=block.born.module,
            stack=self._stacks.get(id(block), ()),
            forward_stack=False,
            name="allocated before the trace" if from_before and not block.address else None,
            shape=None,
            dtype=None,
            born=max(0, block.born_event),
            freed=block.died_event,
            freed_step=block.died.step if block.died else None,
            freed_phase=block.died.phase if block.died else None,
        )
