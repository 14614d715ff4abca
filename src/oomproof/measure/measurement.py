"""The Measurement: what one run showed. Pure values, no torch; ``oomproof.measurement/1`` in JSON."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from oomproof.errors import CaptureError

SCHEMA = "oomproof.measurement/1"

Verdict = Literal["fits", "does-not-fit", "unknown"]
Phase = Literal["init", "forward", "backward", "optimizer", "other"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """The GPU the run was measured for, as the phantom reported it."""

    name: str
    memory_bytes: int  # torch.cuda.get_device_properties().total_memory
    compute_capability: str  # "8.0"
    sm_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest allocated memory and where it was.

    ``allocated_bytes`` and ``reserved_bytes`` are ``torch.cuda.max_memory_allocated()`` and
    ``max_memory_reserved()`` of the observed process. ``device_bytes`` is the highest of reserved plus
    everything outside the allocator (``Outside``), which is what nvidia-smi would show.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    step: int | None = None  # 1 is the first optimizer step; None before any step or when unknown
    phase: Phase | None = None
    module: str | None = None  # qualified name and class, such as "h.0.attn (GPT2Attention)"
    stack: tuple[str, ...] = ()  # innermost first, "file.py:12 function"; empty when not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Live bytes by category at the allocated peak; the fields add up to ``Peak.allocated_bytes``."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_state_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    buffer_bytes: int = 0
    workspace_bytes: int = 0
    temporary_bytes: int = 0
    communication_bytes: int = 0
    unknown_bytes: int = 0

    def total_bytes(self) -> int:
        """Return the sum of all categories."""
        return sum(getattr(self, f.name) for f in dataclasses.fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Device memory that is no live block: the allocator's cache, and what lies outside the allocator."""

    cached_bytes: int = 0  # reserved - allocated at the peak
    context_bytes: int = 0  # estimate from the catalogue
    communication_bytes: int = 0  # estimate: communicators' buffers
    other_bytes: int = 0  # the program's own device allocations past PyTorch's allocator, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A figure that cannot be known exactly: what it is, its bounds, and why."""

    what: str  # "context", "communication", "cuDNN workspace", "values"
    low_bytes: int
    high_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Peaks within one optimizer step, from the end of the step before to its own end."""

    step: int  # 1 is the first
    allocated_bytes: int
    reserved_bytes: int
    seconds: float  # host time under the phantom; says nothing of the real GPU's speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Peak of one outermost module call, for scripts that never make an optimizer step."""

    module: str
    count: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRead:
    """A number that was read back from the device though a kernel should have computed it."""

    location: str  # "train.py:31"
    operation: str  # "aten::_local_scalar_dense (float32)"
    count: int
    affects_memory: bool | None = None  # False: only a float went to the script; None: not known
    least: int | None = None  # bounds of a count that sizes something; None where shapes do not tell
    most: int | None = None
    taken: str | None = None  # how such a count was answered: "least", "most", "assumed"; None: it was no such count


@dataclass(frozen=True, slots=True, kw_only=True)
class OOM:
    """The first torch.OutOfMemoryError of the run on the GPU's own memory."""

    message: str
    step: int | None
    phase: Phase | None
    module: str | None
    requested_bytes: int | None
    caught: bool  # the script handled it and went on


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Which rank of which world was measured."""

    size: int = 1
    rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The PyTorch build that ran."""

    version: str
    cuda: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """The caching allocator's settings and its troubles on the GPU's own memory."""

    config: str = ""  # PYTORCH_ALLOC_CONF / PYTORCH_CUDA_ALLOC_CONF as the process saw it
    retries: int = 0  # cudaMalloc failures after which cached blocks were freed
    ooms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The same peaks with unlimited memory: what the run would take if nothing held it back."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Revision of the folder the command ran in; None when it is no git checkout."""

    revision: str
    dirty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's share of a run with several processes."""

    rank: int
    device: int
    peak: Peak
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What gets the next run past the error that ended this one, where the script is not at fault."""

    reason: str  # "give the machine as many GPUs as the script asks for"
    options: tuple[str, ...]  # of ``oomproof run``: "--gpus", "8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one run showed.

    With a verdict of "does-not-fit", ``peak`` and ``breakdown`` come from a second run with unlimited memory
    and ``oom`` from the run on the GPU's memory. With several ranks they are those of the worst one.
    """

    schema: str = SCHEMA
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]
    cwd_git: Git | None
    gpu: GPU
    torch: Torch
    allocator: Allocator
    world: World
    steps: int
    verdict: Verdict
    ended: str  # "steps-reached", "stable", "finished", "raised", "oom", "exited", "interrupted"
    exit_code: int | None  # the script's own, None when it was stopped by the tool
    peak: Peak
    demand: Demand
    breakdown: Breakdown | None  # None with a note when the allocator keeps no history
    outside: Outside
    ranges: tuple[Range, ...] = ()
    per_step: tuple[Step, ...] = ()
    calls: tuple[Call, ...] = ()
    values: str = "mirror"
    value_reads: tuple[ValueRead, ...] = ()
    demand_if_many: Demand | None = None  # with unknown counts at their largest; None when that was not run
    oom: OOM | None = None
    ranks: tuple[Rank, ...] = ()
    remedy: Remedy | None = None  # None where the script ended well, or its error says nothing of how it was run
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """True when the verdict is "fits"."""
        return self.verdict == "fits"

    @property
    def device_bounds(self) -> tuple[int, int]:
        """Return the lowest and highest device memory, in bytes, that the ranges allow for the peak.

        The peak holds what is in ``outside`` for the context, communication and the cache, and the low end of every
        other range.
        """
        held = {
            "context": self.outside.context_bytes,
            "communication": self.outside.communication_bytes,
            "cached": self.outside.cached_bytes,
            "values": self.peak.device_bytes,
        }
        low = high = self.peak.device_bytes
        for item in self.ranges:
            at = held.get(item.what, item.low_bytes)
            low += min(0, item.low_bytes - at)
            high += max(0, item.high_bytes - at)
        return max(0, low), high

    def __bool__(self) -> bool:
        """Return ``fits``, so that ``if oomproof.fits(...)`` reads as it means."""
        return self.fits

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers; ``from_json`` reads them back."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    @classmethod
    def from_json(cls, data: object) -> Measurement:
        """Build a Measurement from parsed JSON. Raises CaptureError for another schema or a malformed value.

        Unknown keys are ignored, so a file of a later minor tool version still reads.
        """
        if not isinstance(data, dict) or not isinstance(data.get("schema"), str):
            raise CaptureError("this is no measurement: it has no schema; write one with `oomproof run -o FILE`")
        if data["schema"] != SCHEMA:
            raise CaptureError(
                f"schema {reprlib.repr(data['schema'])} cannot be read, only {SCHEMA!r}; "
                "use the oomproof that wrote the file"
            )
        return _build(cls, data, "measurement")


# Cached: a long run has 100,000 steps, each built from the same class.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
_LARGEST = 2**63 - 1


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _build(kind: type[T], data: object, where: str) -> T:
    if not isinstance(data, dict):
        raise CaptureError(f"{where} should be an object, not {type(data).__name__}; the file is damaged")
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        if item.name in data:
            values[item.name] = _convert(hints[item.name], data[item.name], f"{where}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise CaptureError(f"{where}.{item.name} is missing; the file is damaged")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        hint = next(a for a in arguments if a is not type(None))
        return _convert(hint, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise CaptureError(f"{where} should be a list, not {type(value).__name__}; the file is damaged")
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise CaptureError(
                f"{where} is {reprlib.repr(value)}, not one of {', '.join(arguments)}; the file is damaged"
            )
        return value
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]
    if type(value) is int and hint in (int, float) and abs(value) > _LARGEST:
        raise CaptureError(f"{where} is out of range; the file is damaged")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise CaptureError(f"{where} should be {hint.__name__}, not {type(value).__name__}; the file is damaged")
    if hint is float and not math.isfinite(value):
        raise CaptureError(f"{where} is {value}, not a finite number; the file is damaged")
    if hint is int and value < 0 and where.endswith("_bytes"):
        raise CaptureError(f"{where} is below zero; the file is damaged")
    return value
