"""The figures in an out-of-memory message: what was asked for, what was free, who held the rest.

The sentences are PyTorch's, from 0.4 to 2.14, on CUDA, HIP, XPU and MPS, and those of other back ends that took its
allocator over. All of them count in powers of two, also where old ones write MB and GB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

from oomproof.units import GIB, KIB, MIB, TIB

_SIZE = r"(?<![\d.])(\d{1,20}(?:\.\d{1,6})?)\s?([KMGT]i?B|bytes|B)\b"
_FACTORS = {"b": 1, "bytes": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}

_REQUESTED = re.compile(rf"(?:Tried to allocate|trying to allocate|Requested\s*:|tried to allocate)\s*{_SIZE}")
_REQUESTED_OVER = re.compile(r"Tried to allocate more than 1EB")
_TOTAL = (
    re.compile(rf"total capaci?ty of\s*{_SIZE}"),  # "capacty" until 2.3
    re.compile(rf"{_SIZE}\s*total capaci?ty"),
    re.compile(rf"Device limit\s*:\s*{_SIZE}"),  # the cudaMallocAsync backend
)
_FREE = (
    re.compile(rf"of which\s*{_SIZE}\s*is free"),
    re.compile(rf"{_SIZE}\s*free;"),
    re.compile(rf"Free \(according to CUDA\)\s*:\s*{_SIZE}"),
)
_ALLOCATED = (
    re.compile(rf"Of the allocated memory\s*{_SIZE}\s*is allocated by PyTorch"),
    re.compile(rf"{_SIZE}\s*already allocated"),
    re.compile(rf"Currently allocated\s*:\s*{_SIZE}"),
    re.compile(rf"MPS allocated:\s*{_SIZE}"),
)
_UNALLOCATED = re.compile(rf"{_SIZE}\s*is reserved by PyTorch but unallocated")
_CACHED = re.compile(rf"{_SIZE}\s*cached\)")  # until 1.3: reserved less allocated
_RESERVED = re.compile(rf"{_SIZE}\s*reserved in total by PyTorch")
_ALLOWED = (
    re.compile(rf"{_SIZE}\s*allowed;"),
    re.compile(rf"max allowed:\s*{_SIZE}"),
    re.compile(rf"PyTorch limit \(set by user-supplied memory fraction\)\s*:\s*{_SIZE}"),
)
_POOLS = re.compile(rf"with\s*{_SIZE}\s*allocated in private pools")
_OUTSIDE = re.compile(rf"other allocations:\s*{_SIZE}")  # MPS
_OWN = re.compile(rf"this process has\s*{_SIZE}\s*memory in use", re.IGNORECASE)
_PROCESS = re.compile(rf"\bProcess (\d{{1,10}}) has\s*{_SIZE}\s*memory in use")
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU|device)[: ] ?(\d{1,5})\b")

#: cudaMallocAsync prints 2^64 - 1 bytes where no limit was set, NVML answers it for "not available" (Windows, WSL).
_NO_FIGURE_BYTES = 2**60


@dataclass(frozen=True)  # no slots, no kw_only: the guard uses it in the user's process, Python 3.9
class Figures:
    """Bytes as a message gives them; None where it does not say.

    ``own_bytes`` is what the driver counts for this process, CUDA context and libraries included;
    ``others_bytes`` the sum of the other processes that the message lists.
    """

    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None  # reserved by PyTorch but unallocated
    private_pools_bytes: int | None = None
    allowed_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()  # (process id, bytes)
    outside_bytes: int | None = None  # of this process, past PyTorch's allocator; only MPS says it itself
    device: int | None = None
    tensor_size: bool = False  # requested_bytes is the tensor's, not the segment's

    @property
    def reserved_bytes(self) -> int | None:
        """Return allocated plus unallocated, when both are known."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def needed_bytes(self) -> int | None:
        """Return what the allocator had to get from the driver for the request.

        PyTorch up to 1.3 prints the tensor's own size, later ones the segment's: 2 MiB for up to 1 MiB, 20 MiB for up
        to 10 MiB, else the next multiple of 2 MiB (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size).
        """
        if self.requested_bytes is None or not self.tensor_size:
            return self.requested_bytes
        if self.requested_bytes <= MIB:
            return 2 * MIB
        return 20 * MIB if self.requested_bytes < 10 * MIB else -(-self.requested_bytes // (2 * MIB)) * 2 * MIB

    @property
    def missing_bytes(self) -> int | None:
        """Return how much more free memory the request needed; 0 when enough was free."""
        if self.needed_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.needed_bytes - self.free_bytes)

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain values, bytes and None."""
        plain = asdict(self)
        plain["others"] = [{"pid": pid, "bytes": size} for pid, size in self.others]
        del plain["tensor_size"]
        return {**plain, "reserved_bytes": self.reserved_bytes, "missing_bytes": self.missing_bytes}


def parse_figures(text: str) -> Figures:
    """Return the figures of the first message in ``text``, which may be broken over lines, also within words."""
    figures = _parse(" ".join(text.split()))
    if "\n" not in text:
        return figures
    glued = _parse(" ".join("".join(text.splitlines()).split()))
    lacking = {item.name for item in fields(Figures) if getattr(figures, item.name) in (None, ())}
    return replace(figures, **{name: getattr(glued, name) for name in lacking})


def _parse(text: str) -> Figures:
    text = _first_message(text)
    allocated = _first(_ALLOCATED, text)
    reserved = _first((_RESERVED,), text)
    unallocated = _first((_UNALLOCATED, _CACHED), text)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    total = _first(_TOTAL, text)
    allowed = _first(_ALLOWED, text)
    if allowed is not None and allowed >= _NO_FIGURE_BYTES:
        allowed = None
    own = _first((_OWN,), text)
    if own is not None and own >= _NO_FIGURE_BYTES:
        own = None
    processes = [(int(match[1]), _bytes(match[2], match[3])) for match in _PROCESS.finditer(text)]
    processes = [item for item in processes if item[1] < _NO_FIGURE_BYTES]
    if own is None:
        own = _own_under_another_id(processes, (allocated or 0) + (unallocated or 0))
    device = _DEVICE.search(text)
    return Figures(
        requested_bytes=2**60 if _REQUESTED_OVER.search(text) else _first((_REQUESTED,), text),
        total_bytes=total,
        free_bytes=_first(_FREE, text),
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        private_pools_bytes=_first((_POOLS,), text),
        allowed_bytes=allowed,
        own_bytes=own,
        others_bytes=sum(size for _, size in processes) if processes or own is not None else None,
        others=tuple(processes),
        outside_bytes=_first((_OUTSIDE,), text),
        device=int(device[1]) if device else None,
        tensor_size=_CACHED.search(text) is not None,
    )


def _own_under_another_id(processes: list[tuple[int, int]], reserved: int) -> int | None:
    """Take this process out of the listed ones and return its bytes, if it can be told.

    In a container the driver names processes by the host's ids, so PyTorch does not recognise itself in its own
    message. It is the smallest one that holds at least what PyTorch has reserved, as far as the digits tell.
    """
    fitting = [item for item in processes if item[1] >= reserved * 0.99]
    if not reserved or not fitting:
        return None
    own = min(fitting, key=lambda item: item[1])
    processes.remove(own)
    return own[1]


def _first_message(text: str) -> str:
    """Cut ``text`` before a second message: several ranks print theirs one after another."""
    starts = [match.start() for match in re.finditer(r"Tried to allocate|would exceed allowed memory", text)]
    return text[: starts[1]] if len(starts) > 1 else text


def _first(patterns: Iterable[re.Pattern[str]], text: str) -> int | None:
    for pattern in patterns:
        if match := pattern.search(text):
            return _bytes(match[1], match[2])
    return None


def _bytes(number: str, unit: str) -> int:
    unit = unit.lower()
    return round(float(number) * _FACTORS.get(unit, _FACTORS.get(unit[0], 1)))
