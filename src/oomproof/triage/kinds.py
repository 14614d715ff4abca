"""Kinds of out-of-memory: one plain function from an error's text and figures to its kind.

Needs nothing but the text, so that the same function serves a log, a capture, a snapshot and a running program.
The rules for messages with figures use those figures alone; docs/triage.md states them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from oomproof.triage.figures import Figures, parse_figures
from oomproof.triage.signatures import SIGNATURES, Confidence, Kind, Signature
from oomproof.units import GIB, format_bytes

MEANING: dict[Kind, str] = {
    "device-full": "the GPU's memory was full",
    "fragmentation": "PyTorch had enough memory cached, but in pieces that the request did not fit",
    "process-cap": "a limit on this process was reached, not the GPU's memory",
    "other-process": "other processes held memory of this GPU",
    "outside-pytorch": "memory that PyTorch's allocator does not manage was lacking",
    "library-workspace": "a library of NVIDIA's or AMD's got no memory for its handle or workspace",
    "collective-library": "NCCL got no memory for its buffers",
    "pinned-host": "pinned (page-locked) host memory was lacking, not the GPU's",
    "host": "the machine's or the job's own RAM ran out, not the GPU's",
    "nvml-assert": "an out-of-memory whose message could not be written, because NVML refused to answer",
    "corrupt-size": "the size asked for can only be a wrong number",
    "other-rank": "another rank ran out of memory; this one failed because of it",
    "not-oom": "no out-of-memory ended this",
}

#: A request above this many times the GPU is no plausible tensor.
IMPLAUSIBLE_RATIO = 1000
IMPLAUSIBLE_BYTES = 2**45  # 32 TiB, where the GPU's memory is not known
#: What others hold counts as the cause from this share of the GPU on; a desktop or a small context is below it.
NOTABLE_SHARE = 10
#: A cache below this share of what PyTorch reserved is little: without fragmentation the next request would fail.
SLIGHT_SHARE = 20
#: A process's memory outside PyTorch must also exceed any CUDA context.
NOTABLE_OUTSIDE_BYTES = GIB
#: What of the memory that a message does not account for may be this process's CUDA context.
CONTEXT_BYTES = GIB // 2
#: With less than this share free the GPU is full, even where the last bytes would have sufficed.
FULL_SHARE = 20

_PINNED = re.compile(
    r"_pin_memory_loop|pin_memory\.py|\.pin_memory\(|in pin_memory|pin memory thread"
    r"|cudaHost(?:Alloc|Register)|HostAllocator"
)
_STARTING = re.compile(r"_cuda_init|_lazy_init|[sS]et_?[dD]evice|torch/cuda/__init__|DeviceGuard")
_COLLECTIVE = re.compile(r"distributed_c10d|ProcessGroupNCCL|\bnccl", re.IGNORECASE)


@dataclass(frozen=True)  # no slots, no kw_only: the guard uses it in the user's process, Python 3.9
class Finding:
    """What one message says: its kind, how sure that is, and why."""

    kind: Kind
    confidence: Confidence
    why: str
    figures: Figures
    signature: str  # which sentence was recognised, such as "caching allocator"


def classify(message: str, context: Sequence[str] = ()) -> Finding | None:
    """Return the kind of out-of-memory that ``message`` tells of, or None when it tells of none.

    ``context`` are the lines before it, such as its traceback: some messages say only "out of memory", and the frames
    tell whose. Use ``str(error)`` with the class's name before it, or a log's lines.
    """
    for signature in SIGNATURES:
        if signature.pattern.search(message):
            return judge(signature, message, context)
    return None


def classify_figures(figures: Figures, *, source: str = "the message") -> tuple[Kind, Confidence, str]:
    """Return kind, confidence and reason for an allocator's failure from its figures alone.

    For messages of the caching allocator, and for a memory snapshot's ``oom`` event, which has a size and the
    device's free memory.
    """
    f = figures
    requested, total, free = f.requested_bytes, f.total_bytes, f.free_bytes
    needed = f.needed_bytes or 0
    if requested is not None and requested >= (IMPLAUSIBLE_RATIO * total if total else IMPLAUSIBLE_BYTES):
        return "corrupt-size", "high" if requested >= 2**55 else "medium", _implausible(f)
    if requested is None:
        return "device-full", "low", f"{source} gives no figures, so it is taken at its word"
    if free is None:
        return _without_free(f, requested)
    if f.allowed_bytes is not None and free >= needed and _over_cap(f, requested):
        return "process-cap", "high", _capped(f)
    if free >= needed:
        return _enough_was_free(f, requested, free)
    if f.unallocated_bytes is not None and f.unallocated_bytes >= requested and not _others_prevail(f, free):
        return _fragmented(f, f.unallocated_bytes, requested, free)
    return _full(f, requested, free)


def judge(signature: Signature, message: str, context: Sequence[str] = ()) -> Finding:
    """Return the kind of a message whose sentence is recognised already."""
    figures = parse_figures(message)
    kind, confidence, why = signature.kind, signature.confidence, signature.why
    if signature.figured:
        kind, confidence, why = _mps(figures) if "MPS" in message else classify_figures(figures)
        if "larger than 4GB" in message:
            kind, confidence, why = "process-cap", "high", "this platform grants no single block above 4 GiB"
    elif signature.bare:
        kind, confidence, why = _bare(message, context)
    return Finding(kind=kind, confidence=confidence, why=why, figures=figures, signature=signature.name)


def _bare(message: str, context: Sequence[str]) -> tuple[Kind, Confidence, str]:
    """Judge an error that says "out of memory" without whose: by the frames before it."""
    around = "\n".join((*context, message))
    if _PINNED.search(around):
        return "pinned-host", "high", "CUDA refused page-locked host memory: the frames are those of pinning"
    if _COLLECTIVE.search("\n".join(context[-4:])):
        return "collective-library", "medium", "CUDA refused memory inside a collective's set-up"
    if _STARTING.search("\n".join(context[-6:])):
        why = "CUDA could not even start on this GPU, so its memory was taken before this process had any"
        return "other-process", "medium", why
    why = "a CUDA call outside PyTorch's allocator got no memory (its own message would have figures)"
    return "outside-pytorch", "low", why


def _mps(f: Figures) -> tuple[Kind, Confidence, str]:
    """Judge the Metal back end's message: its limit stands for the memory that the GPU shares with the CPU."""
    if f.allowed_bytes is None or f.requested_bytes is None:
        return "device-full", "low", "the message gives no figures, so it is taken at its word"
    held, other = f.allocated_bytes or 0, f.outside_bytes or 0
    missing = held + other + f.requested_bytes - f.allowed_bytes
    if other >= max(missing, held):
        why = f"{format_bytes(other)} is held by other Metal allocations, more than PyTorch's {format_bytes(held)}"
        return "outside-pytorch", "medium", why
    why = (
        f"{format_bytes(held + other)} in use and {format_bytes(f.requested_bytes)} asked for exceed the limit of "
        f"{format_bytes(f.allowed_bytes)}"
    )
    return "device-full", "high", why


def _without_free(f: Figures, requested: int) -> tuple[Kind, Confidence, str]:
    """Judge a message that does not say what was free, as Intel's until 2.9."""
    total, reserved = f.total_bytes, f.reserved_bytes
    if total is None or reserved is None:
        return "device-full", "medium", f"{format_bytes(requested)} could not be had"
    if f.unallocated_bytes is not None and f.unallocated_bytes >= requested:
        why = f"{format_bytes(f.unallocated_bytes)} was cached and unused; {format_bytes(requested)} was asked for"
        return "fragmentation", "medium", why
    if requested + reserved <= total - total // FULL_SHARE:
        why = (
            f"{format_bytes(requested)} beside the {format_bytes(reserved)} that PyTorch has would fit "
            f"{format_bytes(total)}, yet it was refused"
        )
        return "outside-pytorch", "low", why
    why = f"{format_bytes(requested)} beside the {format_bytes(reserved)} that PyTorch has exceed {format_bytes(total)}"
    return "device-full", "high", why


def _others_prevail(f: Figures, free: int) -> bool:
    """Return whether what is not PyTorch's takes more of the GPU than PyTorch: its cache is then not the matter."""
    return f.total_bytes is not None and f.total_bytes - free - (f.reserved_bytes or 0) > (f.reserved_bytes or 0)


def _fragmented(f: Figures, unallocated: int, requested: int, free: int) -> tuple[Kind, Confidence, str]:
    why = (
        f"{format_bytes(unallocated)} was cached and unused, enough for the {format_bytes(requested)} asked for, and "
        f"only {format_bytes(free)} was free on the GPU"
    )
    if f.total_bytes is not None and (f.reserved_bytes or 0) > f.total_bytes:
        return "fragmentation", "medium", f"{why}; but PyTorch counts more than the GPU has, part of it not mapped"
    if unallocated * SLIGHT_SHARE >= (f.reserved_bytes or 0):
        return "fragmentation", "high", why
    return (
        "fragmentation",
        "medium",
        f"{why}; that is little of what PyTorch holds, so the GPU was all but full as well",
    )


def _over_cap(f: Figures, requested: int) -> bool:
    held = f.reserved_bytes if f.reserved_bytes is not None else f.allocated_bytes
    # Figures have two decimals: the last digit may hide what went over.
    return held is not None and f.allowed_bytes is not None and held + requested >= f.allowed_bytes * 0.998


def _capped(f: Figures) -> str:
    held = f.reserved_bytes if f.reserved_bytes is not None else f.allocated_bytes
    return (
        f"this process may have {format_bytes(f.allowed_bytes or 0)}, holds {format_bytes(held or 0)} and asked for "
        f"{format_bytes(f.requested_bytes or 0)}, while {format_bytes(f.free_bytes or 0)} was free on the GPU"
    )


def _enough_was_free(f: Figures, requested: int, free: int) -> tuple[Kind, Confidence, str]:
    if f.total_bytes is not None and free < f.total_bytes // FULL_SHARE:
        kind, confidence, why = _full(f, requested, free)
        return kind, "low" if confidence == "low" else "medium", why
    why = (
        f"{format_bytes(free)} was free when the message was written, more than the {format_bytes(requested)} asked "
        "for: something beyond PyTorch refused it, or another process gave memory back in between"
    )
    return "outside-pytorch", "low", why


def _full(f: Figures, requested: int, free: int) -> tuple[Kind, Confidence, str]:
    """Say who holds a full GPU: other processes, this one outside PyTorch, or PyTorch itself."""
    missing = f.missing_bytes or 0
    total, reserved = f.total_bytes, f.reserved_bytes
    base = f"{format_bytes(requested)} was asked for and {format_bytes(free)} was free"
    if total is not None and requested > total:
        return "device-full", "high", f"{base}; the request alone exceeds the GPU's {format_bytes(total)}"
    if total is None or (reserved is None and f.own_bytes is None):
        return "device-full", "medium", base
    notable = max(missing, total // NOTABLE_SHARE)
    if f.own_bytes is not None:
        others = max(total - free - f.own_bytes, f.others_bytes or 0)
        outside = f.own_bytes - reserved if reserved is not None else 0
        if others >= notable and others >= outside:
            why = f"{base}; other processes held {format_bytes(others)} of {format_bytes(total)}"
            return "other-process", "high", why
        if reserved is None:
            return "device-full", "medium", f"{base}; this process held {format_bytes(f.own_bytes)}"
        if outside >= max(notable, NOTABLE_OUTSIDE_BYTES):
            why = f"{base}; {format_bytes(outside)} of this process lies outside PyTorch's allocator"
            return "outside-pytorch", "high", why
        return "device-full", "high", f"{base}; PyTorch itself held {format_bytes(reserved)} of {format_bytes(total)}"
    assert reserved is not None  # or own_bytes was
    unaccounted = total - free - reserved
    if unaccounted >= max(notable + CONTEXT_BYTES, NOTABLE_OUTSIDE_BYTES):
        why = (
            f"{base}; of {format_bytes(total)} PyTorch held {format_bytes(reserved)}, so {format_bytes(unaccounted)} "
            "was held by others, or by this process outside PyTorch (the message does not tell which)"
        )
        return "other-process", "medium", why
    why = f"{base}; PyTorch itself held {format_bytes(reserved)} of {format_bytes(total)}"
    if reserved > total:
        why += ", more than the card has: the driver had lent host memory already (Windows)"
    return "device-full", "high", why


def _implausible(f: Figures) -> str:
    asked = "more than 1 EB" if f.requested_bytes == 2**60 else format_bytes(f.requested_bytes or 0)
    beside = f" on a GPU of {format_bytes(f.total_bytes)}" if f.total_bytes else ""
    return f"{asked} was asked for{beside}"
