"""What one optimizer step executes, as ``measure.meter`` counted it: the record read, checked and summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Calls of one operator that are equal in phase, dtype, FLOPs and bytes."""

    operator: str
    """``aten::mm``, ``triton::NAME`` for a Triton kernel."""
    phase: str
    """``forward``, ``backward``, ``recompute`` (checkpoints, within backward), ``optimizer`` or ``other``."""
    device: str
    """``cuda`` or ``cpu``."""
    dtype: str
    """Under which name ``GPUSpec.flops`` has its peak; torch's name for others."""
    flops: int
    """Of one call."""
    bytes: int
    """Read and written by one call."""
    calls: int
    kernels: int
    """Launched by all calls together; a library's call counts as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copies between host and device that are equal in direction, phase and kind."""

    direction: str
    """``h2d`` or ``d2h``."""
    phase: str
    pinned: bool
    blocking: bool
    count: int
    bytes: int
    """Of all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind, size and group."""

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``, ``send`` ..."""
    phase: str
    bytes: int
    """Of one call: the whole result, or the whole input where that is larger."""
    ranks: int
    nodes: int
    """Machines that the group's ranks are on."""
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One optimizer step of one process."""

    rows: tuple[Row, ...] = ()
    copies: tuple[Copy, ...] = ()
    collectives: tuple[Collective, ...] = ()
    uncounted: tuple[str, ...] = ()
    """What ran and is not in the rows."""
    estimated: tuple[str, ...] = ()
    """What is in the rows as an upper bound."""

    def flops(self, *phases: str) -> int:
        """Return the FLOPs on the GPU of these phases, of all when none is named."""
        return sum(row.flops * row.calls for row in self._rows("cuda", phases))

    def bytes(self, *phases: str) -> int:
        """Return the bytes that operators on the GPU read and wrote in these phases, in all when none is named."""
        return sum(row.bytes * row.calls for row in self._rows("cuda", phases))

    def kernels(self, *phases: str) -> int:
        """Return the kernels that were launched in these phases, in all when none is named."""
        return sum(row.kernels for row in self._rows("cuda", phases))

    def _rows(self, device: str, phases: tuple[str, ...]) -> Iterator[Row]:
        return (row for row in self.rows if row.device == device and (not phases or row.phase in phases))

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Work:
        """Return the Work in a finding's ``work``; raises ValueError when it is none of this version."""
        if data.get("version") != VERSION:
            raise ValueError(
                f"this record of a step's work has version {data.get('version')!r}, this oomproof reads {VERSION}; "
                "measure again"
            )
        return cls(
            rows=tuple(_read(Row, item) for item in data["rows"]),
            copies=tuple(_read(Copy, item) for item in data["copies"]),
            collectives=tuple(_read(Collective, item) for item in data["collectives"]),
            uncounted=tuple(map(str, data["uncounted"])),
            estimated=tuple(map(str, data["estimated"])),
        )


_Part = TypeVar("_Part", Row, Copy, Collective)


def _read(kind: type[_Part], item: Mapping[str, Any]) -> _Part:
    names = {field.name: field.type for field in fields(kind)}
    if set(item) != set(names):
        raise ValueError(f"a record of a step's work has {sorted(item)} where {sorted(names)} belong; measure again")
    for name, type_name in names.items():
        value = item[name]
        if type(value).__name__ != type_name or (type_name == "int" and value < 0):
            raise ValueError(f"{name} = {value!r} in a record of a step's work is no {type_name}; measure again")
    return kind(**item)
