"""A profile from a memory snapshot of a real GPU: what lived at the peak, and how memory moved.

A snapshot knows sizes, addresses, times and stacks, no modules, shapes or phases. Phases are read off the stacks
(autograd's engine, torch.optim, a module's call) and off the recorded steps of optimizers; categories follow from the
phase a block was made in and the one it was freed in. What no rule covers stays unknown; the profile's notes say so.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from oomproof.errors import UsageError
from oomproof.measure.ledger import Block as Followed
from oomproof.measure.ledger import Mark
from oomproof.measure.profile import Block, Profile, Stack
from oomproof.measure.series import Series, growth
from oomproof.snapshot.model import Action, Frame, Snapshot
from oomproof.snapshot.state import Allocation, History

STACK_LINES = 32
#: PyTorch's default for cuBLAS before Hopper, ":4096:2:16:8" in KiB (CublasHandlePool.cpp); no tensor that lives on has
#: this size by chance.
CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
BEFORE = "(from before the recording)"
RULES = (
    "from a memory snapshot: it has no modules, names or shapes; phases and categories are read off the recorded "
    "stacks, and blocks from before the recording have none: begin it before the model is built"
)
_ACTIONS = {
    Action.ALLOC: "alloc",
    Action.FREE_REQUESTED: "free_requested",
    Action.SEGMENT_ALLOC: "segment_alloc",
    Action.SEGMENT_FREE: "segment_free",
    Action.SEGMENT_MAP: "segment_map",
    Action.SEGMENT_UNMAP: "segment_unmap",
}
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+(?:Backward\w*|AccumulateGrad)|AccumulateGrad)::apply")
_OPTIM = os.sep + "optim" + os.sep
_MODULE = os.sep.join(("torch", "nn", "modules", "module.py"))


def profile(snapshot: Snapshot, device: int | None = None) -> Profile:
    """Return the profile of one device of a snapshot, by default the one with the highest peak.

    Raises UsageError when the device has neither events nor segments.
    """
    devices = snapshot.devices()
    if device is not None and device not in devices:
        raise UsageError(
            f"the snapshot has nothing of device {device}; it has {', '.join(map(str, devices)) or 'none'}"
        )
    if not devices:
        raise UsageError("the snapshot is empty: nothing was allocated when it was written")
    histories = [History(snapshot, d) for d in (devices if device is None else [device])]
    history = max(histories, key=lambda h: h.peak_allocated.size_bytes)
    return _Maker(snapshot, history).profile()


class _Maker:
    def __init__(self, snapshot: Snapshot, history: History) -> None:
        self._snapshot = snapshot
        self._history = history
        self._events = history.events
        self._kinds: dict[int, str | None] = {}
        self._shown: dict[int, Stack] = {}
        self._common = _common_folder(snapshot.stacks.frames)
        self._marks = list(in_steps(self._phases()))
        self._followed = {id(a): self._follow(a) for a in history.allocations}

    def profile(self) -> Profile:
        history, events = self._history, self._events
        series = self._series()
        peak = history.peak_allocated
        live = history.live_after(peak.event)
        blocks = tuple(self._row(allocation) for allocation in live)
        left = history.live_after(len(events) - 1)
        notes = [RULES, *self._snapshot.notes, *(f"the record contradicts itself: {p}" for p in history.problems[:3])]
        if history.unsure:
            notes.append(f"{history.unsure} blocks of the start may each be up to 1 MiB larger than said here")
        return Profile(
            source="snapshot",
            device=history.device,
            events=series.events,
            peak_event=max(0, peak.event),
            allocated_bytes=peak.size_bytes,
            reserved_bytes=history.peak_reserved.size_bytes,
            limit_bytes=None,
            blocks=blocks,
            slack_bytes=peak.size_bytes - sum(block.size_bytes for block in blocks),
            points=series.points(),
            steps=series.steps(),
            growth=growth(
                (self._followed[id(a)] for a in left if a.born is not None), lambda block: self._stack(block.stack)
            ),
            segments=series.segments(lambda frames, module: self._stack(frames)),
            notes=tuple(notes),
        )

    def _series(self) -> Series:
        series = Series()
        series.reserved = series.most_reserved = self._history.start_segments.total_bytes
        changed: dict[int, Allocation] = {}
        before = []
        for allocation in self._history.allocations:
            if allocation.born is None:
                if not allocation.pending_at_start:
                    before.append(self._followed[id(allocation)])
            else:
                changed[allocation.born] = allocation
            if allocation.free_requested is not None and not allocation.pending_at_start:
                changed[allocation.free_requested] = allocation
        changes = [i for i, kind in enumerate(self._events.action) if kind in (Action.ALLOC, Action.FREE_REQUESTED)]
        touched = [self._followed[id(changed[i])] if i in changed else None for i in changes]
        series.feed(self._as_trace(), touched, [self._marks[i] for i in changes], before)
        return series

    def _as_trace(self) -> Iterator[dict[str, Any]]:
        events = self._events
        for index, kind in enumerate(events.action):
            action = _ACTIONS.get(Action(kind))
            if action is not None:
                frames = _as_frames(events.stack[index])
                time_us = events.time_us[index]
                yield {"action": action, "size": events.size[index], "time_us": max(time_us, 0), "frames": frames}

    # ---- phases ----------------------------------------------------------------------------------------------------

    def _phases(self) -> Iterator[tuple[int, str, None]]:
        """Yield for each event its time, and the phase that its stack or an earlier one told."""
        events = self._events
        optimizing = _Intervals(self._snapshot, self._history.device)
        phase = "init"
        allocations = {a.free_requested: a for a in self._history.allocations if a.free_requested is not None}
        for index, action in enumerate(events.action):
            stack, time_us = events.stack[index], events.time_us[index]
            # where only allocations were recorded with stacks, a free has that of its block
            own = stack and not (index in allocations and allocations[index].stack == stack)
            if optimizing.at(time_us):
                phase = "optimizer"
            elif own or action == Action.ALLOC:
                if stack not in self._kinds:
                    self._kinds[stack] = self._phase_of(stack)
                # a script's own lines between the model and the backward pass compute the loss
                phase = self._kinds[stack] or (phase if phase in ("init", "forward") else "other")
            yield max(time_us, 0), phase, None

    def _phase_of(self, stack: int) -> str | None:
        called = python = False
        for frame in self._snapshot.stacks[stack]:
            if frame.name.startswith("torch::autograd::Engine::") or frame.name == "_engine_run_backward":
                return "backward"
            if frame.filename.endswith(".py"):
                python = True
                if _OPTIM in frame.filename:
                    return "optimizer"
                called = called or (frame.filename.endswith(_MODULE) and frame.name == "_call_impl")
        if called:
            return "forward"
        return None if python or len(self._snapshot.stacks) == 1 else "backward"  # autograd's threads have no Python

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def _follow(self, allocation: Allocation) -> Followed:
        born, freed = allocation.born, allocation.free_requested
        mark = self._marks[born] if born is not None else Mark(0, 0, "init", None)
        block = Followed(allocation.address, allocation.size_bytes, mark, _as_frames(allocation.stack), born or 0)
        block.died = self._marks[freed] if freed is not None else None
        block.label = self._category(allocation, mark, block.died)
        return block

    def _category(self, allocation: Allocation, born: Mark, freed: Mark | None) -> str:
        frames = self._snapshot.stacks[allocation.stack]
        names = {frame.name for frame in frames}
        in_modules = any(frame.filename.endswith(_MODULE) for frame in frames)
        if "_init_group" in names and any(_OPTIM in frame.filename for frame in frames):
            return "optimizer_state"
        if in_modules and names & {"_apply", "convert"}:
            return "parameter"
        kept = allocation.free_requested is None
        if kept and (allocation.size_bytes == CUBLAS_WORKSPACE_BYTES or any("CUDABlasHandle" in n for n in names)):
            return "workspace"
        if allocation.born is None:
            return "unknown"
        return by_phases(born, freed)

    def _row(self, allocation: Allocation) -> Block:
        block = self._followed[id(allocation)]
        recorded = allocation.born is not None
        return Block(
            address=allocation.address,
            size_bytes=allocation.size_bytes,
            category=block.category(),
            step=block.born.step if recorded else None,
            phase=block.born.phase if recorded else None,
            module=None,
            stack=self._stack(block.stack) or (() if recorded else (BEFORE,)),
            forward_stack=False,
            name=None,
            shape=None,
            dtype=None,
            born=block.born_event,
            freed=allocation.free_requested,
            freed_step=block.died.step if block.died else None,
            freed_phase=block.died.phase if block.died else None,
        )

    # ---- stacks ----------------------------------------------------------------------------------------------------

    def _stack(self, frames: list[dict[str, Any]]) -> Stack:
        number = frames[0]["line"] if frames else 0
        if number not in self._shown:
            frames_here = self._snapshot.stacks[number]
            lines = [self._line(f) for f in frames_here if is_shown(f)] or _autograd_node(frames_here)
            self._shown[number] = tuple(lines[:STACK_LINES])
        return self._shown[number]

    def _line(self, frame: Frame) -> str:
        name = frame.filename
        if "site-packages" in name:
            name = name.partition("site-packages")[2].lstrip("/\\")
        elif name.startswith(self._common):
            name = name[len(self._common) :]
        return f"{name}:{frame.line} {frame.name}"


def in_steps(moments: Iterable[tuple[int, str, str | None]]) -> Iterator[Mark]:
    """Make marks of times, phases and modules: a step begins with the first pass after an optimizer's."""
    step, stepped = 1, False
    for time_us, phase, module in moments:
        if phase == "optimizer":
            stepped = True
        elif stepped and phase in ("forward", "backward"):
            step, stepped = step + 1, False
        yield Mark(time_us, step, phase, module)


def by_phases(born: Mark, freed: Mark | None) -> str:
    """Return the category that follows from when a block was made and freed; None: it outlived the record."""
    same = freed is not None and (freed.step, freed.phase) == (born.step, born.phase)
    if born.phase == "forward":
        return "temporary" if same else "activation"
    if born.phase == "backward":
        return "gradient" if freed is None or freed.phase != "backward" else "temporary"
    if born.phase == "optimizer":
        return "temporary" if same else "optimizer_state"
    return "unknown"


class _Intervals:
    """When an optimizer was stepping, by the annotations that PyTorch records (2.1 and newer)."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        told = [a for a in snapshot.annotations if a.device == device and a.name.startswith("Optimizer.step")]
        self._at = [a.time_us for a in told]
        self._starts = [a.stage == "START" for a in told]

    def at(self, time_us: int) -> bool:
        """Return whether an optimizer was stepping then."""
        place = bisect_right(self._at, time_us) - 1
        return place >= 0 and self._starts[place]


def _as_frames(stack: int) -> list[dict[str, Any]]:
    """Carry a stack's number through ``Series``, which keeps frames as they come."""
    return [{"filename": "", "line": stack, "name": ""}]


def _autograd_node(frames: Iterable[Frame]) -> list[str]:
    """Return the node of the backward pass that C++ frames name, such as "MmBackward0 (autograd)"."""
    for frame in frames:
        found = _NODE.search(frame.name)
        if found:
            return [f"{found.group(1)} (autograd)"]
    return []


def is_shown(frame: Frame) -> bool:
    """Return whether a frame is Python of the user or of a library other than torch."""
    parts = PurePath(frame.filename.replace("\\", "/")).parts
    python = frame.filename.endswith(".py") or "ipykernel" in frame.filename or frame.filename.startswith("<ipython")
    inside = "site-packages" in parts and parts[parts.index("site-packages") + 1 : -1][:1] == ("torch",)
    ours = parts[-3:-1] == ("oomproof", "measure")  # a snapshot from a run of ours
    return python and not inside and not ours and not frame.filename.startswith("<frozen")


def _common_folder(frames: list[Frame]) -> str:
    """Return the folder that all of the user's own files are in, with a slash at its end."""
    own = {
        os.path.dirname(f.filename)
        for f in frames
        if is_shown(f) and "site-packages" not in f.filename and "/lib/python" not in f.filename
        and f.filename.startswith("/")
    }  # fmt: skip
    return os.path.commonpath(own) + "/" if own else "/"
