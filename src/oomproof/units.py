"""Bytes and durations: how they are read from people and shown to them.

Memory is an ``int`` of bytes everywhere in code and JSON; people see binary units with the unit written out.
"""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_FACTORS = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip

_SIZE = re.compile(r"\s*(\d+(?:[._]\d+)*)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the bytes named by ``text``, such as ``20GiB`` or ``512 MiB``.

    ``KiB MiB GiB TiB`` are powers of 1024, ``kB MB GB TB`` powers of 1000, and a bare letter is binary.
    Raises ValueError with the accepted forms when the text is no positive size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 20GiB, 512MiB or 21474836480")
    try:
        size = int(Fraction(match[1].replace("_", "")) * factor)
    except ValueError:  # 1.2.3
        raise ValueError(f"{text!r} is not a size; write it like 20GiB, 512MiB or 21474836480") from None
    if size <= 0:
        raise ValueError(f"{text!r} is not above zero; write a size like 20GiB")
    if size >= 2**63:
        raise ValueError("the number is too large; write a size like 20GiB")
    return size


def format_bytes(size_bytes: int) -> str:
    """Return ``size_bytes`` for a person: ``61.24 GiB``, ``8.1 MiB``, ``512 B``; negative sizes keep their sign."""
    magnitude = abs(size_bytes)
    if magnitude >= GIB - 0.05 * MIB:  # what would round to 1,024.0 of the smaller unit
        return f"{size_bytes / GIB:,.2f} GiB"
    if magnitude >= MIB - 0.05 * KIB:
        return f"{size_bytes / MIB:,.1f} MiB"
    if magnitude >= KIB:
        return f"{size_bytes / KIB:,.1f} KiB"
    return f"{size_bytes} B"


def format_seconds(seconds: float) -> str:
    """Return a duration for a person: ``840 µs``, ``23 ms``, ``4.1 s``, ``12 min 5 s``, ``3 h 2 min``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
