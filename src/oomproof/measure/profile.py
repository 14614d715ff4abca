"""The profile: which blocks made up the peak, and how memory moved over the steps. Pure values, no torch.

A capture has one beside its Measurement (``oomproof.profile/1`` in JSON); one is built from a memory snapshot in the
same form, with what a snapshot does not tell left as None. Reports are made from profiles only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from oomproof.errors import CaptureError
from oomproof.measure.ledger import CATEGORIES as CATEGORIES

SCHEMA = "oomproof.profile/1"

#: Frames innermost first, each "train.py:12 function".
Stack = tuple[str, ...]


class Block(NamedTuple):
    """One block that was live at the peak."""

    address: int
    size_bytes: int  # what the allocator gave, as far as it is known
    category: str
    step: int | None  # it was born in; 1 is the first optimizer step
    phase: str | None
    module: str | None  # whose forward pass it serves, such as "h.0.attn (GPT2Attention)"
    stack: Stack  # of the allocation
    forward_stack: bool  # the stack is that of its module's forward pass: it was born on autograd's own thread
    name: str | None  # of the tensor, such as "h.0.attn.weight" or "exp_avg of h.0.attn.weight"
    shape: tuple[int, ...] | None
    dtype: str | None  # "float32"
    born: int  # number of the event
    freed: int | None  # None: it outlived the record
    freed_step: int | None
    freed_phase: str | None


class Point(NamedTuple):
    """The state right after one event: of the events since the point before, the one with the most allocated."""

    event: int
    time_us: int | None
    step: int | None
    phase: str | None
    reserved_bytes: int
    category_bytes: tuple[int, ...]  # in the order of CATEGORIES; their sum is what is allocated


class StepRow(NamedTuple):
    """One step: its highest point by category, and what is left at its end."""

    step: int
    reserved_bytes: int  # the highest
    end_allocated_bytes: int
    end_reserved_bytes: int
    category_bytes: tuple[int, ...]  # at the highest point


class Growth(NamedTuple):
    """Blocks of one place in the code that are never freed though each of several steps makes new ones: a leak."""

    stack: Stack
    module: str | None
    category: str
    blocks: int
    size_bytes: int
    steps: int  # how many steps made some of them
    first_step: int
    last_step: int


class Segments(NamedTuple):
    """Segments that the allocator asked the device for: how many, by the step and the place that needed them."""

    step: int | None
    module: str | None
    stack: Stack
    segments: int
    size_bytes: int


class Profile(NamedTuple):
    """What was live at the peak, and how memory moved."""

    source: str  # "run" or "snapshot"
    device: int
    events: int  # allocations and frees seen
    peak_event: int
    allocated_bytes: int  # at the peak, by the allocator's counters where they are known
    reserved_bytes: int  # the highest
    limit_bytes: int | None  # the GPU's memory
    blocks: tuple[Block, ...]
    slack_bytes: int  # allocated_bytes - the blocks' sizes: blocks are larger than what was asked for
    points: tuple[Point, ...]
    steps: tuple[StepRow, ...]
    growth: tuple[Growth, ...]
    segments: tuple[Segments, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; strings and stacks are written once and referred to by number."""
        frames: dict[str, int] = {}
        stacks: dict[Stack, int] = {}

        def plain(value: Any) -> Any:
            return list(value) if isinstance(value, tuple) else value

        def rows(items: Iterable[Any]) -> list[list[Any]]:
            found = []
            for item in items:
                row = item._asdict()
                if "stack" in row:
                    row["stack"] = stacks.setdefault(item.stack, len(stacks))
                found.append([plain(value) for value in row.values()])
            return found

        data: dict[str, Any] = {"schema": SCHEMA, "categories": list(CATEGORIES)}
        for name, value in self._asdict().items():
            data[name] = rows(value) if name in _ROWS else plain(value)
        data["columns"] = {name: list(kind._fields) for name, kind in _ROWS.items()}
        data["stacks"] = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks]
        data["frames"] = list(frames)
        return data

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Build a Profile from parsed JSON. Raises CaptureError for another schema or what is malformed."""
        schema = data.get("schema") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(schema, str):
            raise CaptureError("its profile has no schema; the file is damaged, write the capture anew")
        if schema != SCHEMA:
            raise CaptureError(
                f"its profile's schema {schema[:40]!r} cannot be read, only {SCHEMA!r}; "
                "use the oomproof that wrote the file"
            )
        part = "stacks"
        try:
            frames = data["frames"]
            stacks = [tuple(str(frames[i]) for i in stack) for stack in data["stacks"]]
            values: dict[str, Any] = {}
            for part in cls._fields:
                values[part] = data[part] if part in _ROWS or part == "notes" else _single(part, data[part])
            for name, kind in _ROWS.items():
                part = name
                order = [data["columns"][name].index(field) for field in kind._fields]
                values[name] = tuple(_row(kind, [row[i] for i in order], stacks) for row in values[name])
            part = "notes"
            values["notes"] = tuple(map(str, values["notes"]))
            return cls(**values)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise CaptureError(f"its profile is damaged, in {part}; write the capture anew") from None


_ROWS: dict[str, Any] = {"blocks": Block, "points": Point, "steps": StepRow, "growth": Growth, "segments": Segments}
_TEXTS = frozenset(("category", "phase", "module", "name", "dtype", "freed_phase"))
_LISTS = frozenset(("shape", "category_bytes"))


_OPTIONAL = frozenset(
    ("step", "phase", "module", "name", "shape", "dtype", "freed", "freed_step", "freed_phase", "time_us")
)


def _single(name: str, value: Any) -> Any:
    if name == "source":
        if not isinstance(value, str):
            raise ValueError(name)
        return value
    return None if name == "limit_bytes" and value is None else _whole(value)


def _row(kind: Any, row: Sequence[Any], stacks: Sequence[Stack]) -> Any:
    values: dict[str, Any] = dict(zip(kind._fields, row, strict=True))
    for name, value in values.items():
        if name == "stack":
            if not 0 <= value < len(stacks):
                raise ValueError("a stack's number")
            values[name] = stacks[value]
        elif value is None:
            if name not in _OPTIONAL or kind is StepRow:
                raise ValueError(name)
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise ValueError(name)
        elif name in _LISTS:
            values[name] = tuple(map(_whole, value))
        elif name == "forward_stack":
            values[name] = bool(value)
        else:
            _whole(value)
    if "category" in values and values["category"] not in CATEGORIES:
        raise ValueError(f"category {values['category']!r}")
    if "category_bytes" in values and len(values["category_bytes"]) != len(CATEGORIES):
        raise ValueError("category_bytes")
    return kind(**values)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"{value!r:.40} where a whole number should be")
    return value
