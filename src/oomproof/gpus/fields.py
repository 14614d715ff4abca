"""How a GPU's figures are read from TOML: one reader per field, for the catalogue and users' GPU files."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from oomproof.gpus.spec import DTYPES
from oomproof.units import parse_size

_LIMIT = 2**60
_MAX_NAME_BYTES = 200  # cudaDeviceProp.name holds 256


def read_fields(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the known keys of ``table``, and one line with its cure for every fault."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for key, raw in table.items():
        reader = READERS.get(key)
        if reader is None:
            faults.append(f"{key} is no field of a GPU; {nearest(key, READERS)}")
            continue
        try:
            values[key] = reader(raw)
        except ValueError as error:
            faults.append(f"{key}: {error}")
    return values, faults


def nearest(word: str, known: Collection[str]) -> str:
    """Return the cure for a misspelt ``word``: the nearest known words, or all of them when none is near."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(known)}"


def read_capability(raw: object) -> tuple[int, int]:
    """Return a compute capability written as "8.9", 8.9 or [8, 9]."""
    if isinstance(raw, list) and len(raw) == 2 and all(type(part) is int for part in raw):
        return raw[0], raw[1]
    major, _, minor = str(raw).partition(".")
    if isinstance(raw, str | float) and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit():
        return int(major), int(minor)
    raise ValueError(f'{raw!r} is no compute capability; write it like "8.9"')


def _count(raw: object) -> int:
    if type(raw) is int and 0 < raw < 2**31:
        return raw
    raise ValueError(f"{raw!r} is no count; write a whole number above zero")


def _size_or_zero(raw: object) -> int:
    return 0 if type(raw) is int and raw == 0 else _size(raw)


def _size(raw: object) -> int:
    if isinstance(raw, str):
        return _parsed(raw)
    if type(raw) is int and 0 < raw < _LIMIT:
        return raw
    raise ValueError(f'{raw!r} is no size; write it like "20GiB" or 21474836480')


def _rate(raw: object) -> int:
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 1 <= raw < _LIMIT:
        return int(raw)
    if isinstance(raw, str) and raw.endswith("/s"):
        return _parsed(raw.removesuffix("/s"))
    raise ValueError(f'{raw!r} is no bandwidth; write it like "1555GB/s" or 1.555e12')


def _parsed(text: str) -> int:
    size = parse_size(text)
    if size >= _LIMIT:
        raise ValueError("the number is too large; write a size like 20GiB")
    return size


def _rate_or_none(raw: object) -> int | None:
    return None if type(raw) is int and raw == 0 else _rate(raw)


def _text(raw: object) -> str:
    if isinstance(raw, str) and raw.strip() and raw.isprintable() and len(raw.encode()) <= _MAX_NAME_BYTES:
        return raw
    raise ValueError(f"{raw!r} is no line of text; write at most {_MAX_NAME_BYTES} characters in quotes")


def _texts(raw: object) -> tuple[str, ...]:
    if isinstance(raw, list):
        return tuple(_text(item) for item in raw)
    raise ValueError(f'{raw!r} is no list of names; write it like ["mine", "my-card"]')


def _flag(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    raise ValueError(f"{raw!r} is neither true nor false; write one of them, without quotes")


def _context(raw: object) -> tuple[int, int, int]:
    if not isinstance(raw, list) or len(raw) != 3:
        raise ValueError(f'{raw!r} is no context; write low, typical and high, like ["300MiB", "400MiB", "600MiB"]')
    low, typical, high = (_size(item) for item in raw)
    if not low <= typical <= high:
        raise ValueError(f"{raw!r} is out of order; write low, typical and high, the smallest first")
    return low, typical, high


def _flops(raw: object) -> dict[str, float]:
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"{raw!r} is no table of peaks; write it like {{ fp32 = 19.5e12, bf16 = 312e12 }}")
    wrong = [dtype for dtype in raw if dtype not in DTYPES]
    if wrong:
        raise ValueError(f"no dtype is named {', '.join(wrong)}; use {', '.join(DTYPES)}")
    for dtype, peak in raw.items():
        if not isinstance(peak, int | float) or isinstance(peak, bool) or not 0 < peak < 1e18:
            raise ValueError(f"{dtype} = {peak!r} is no peak; write FLOP/s like 19.5e12")
    return {dtype: float(peak) for dtype, peak in raw.items()}


def _sources(raw: object) -> dict[str, str]:
    if isinstance(raw, dict):
        return {str(name): _text(text) for name, text in raw.items()}
    raise ValueError(f'{raw!r} is no table of sources; write it like {{ memory_bytes = "measured" }}')


READERS: dict[str, Callable[[object], Any]] = {
    "name": _text,
    "aliases": _texts,
    "mig": _flag,
    "memory_bytes": _size,
    "nvml_memory_bytes": _size,
    "context_bytes": _context,
    "compute_capability": read_capability,
    "sm_count": _count,
    "max_threads_per_sm": _count,
    "max_blocks_per_sm": _count,
    "registers_per_sm": _count,
    "shared_memory_per_block_bytes": _size,
    "shared_memory_per_block_optin_bytes": _size,
    "shared_memory_per_sm_bytes": _size,
    "reserved_shared_memory_per_block_bytes": _size_or_zero,
    "l2_bytes": _size,
    "clock_khz": _count,
    "memory_clock_khz": _count,
    "memory_bus_bits": _count,
    "memory_bandwidth_bytes_per_s": _rate,
    "flops": _flops,
    "link_bytes_per_s": _rate_or_none,
    "pcie_bytes_per_s": _rate,
    "sources": _sources,
}
"""Every field that a table of TOML may give, with the reader that checks it."""
