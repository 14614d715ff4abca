"""Bars made of characters, in block characters or in ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters that bars are drawn with."""

    eighths: str  # from the emptiest part of a cell to a full one
    allocated: str
    cached: str
    outside: str
    free: str
    limit: str


BLOCKS = Glyphs(eighths="▏▎▍▌▋▊▉█", allocated="█", cached="▓", outside="▒", free="░", limit="│")
ASCII = Glyphs(eighths="#", allocated="#", cached="+", outside=":", free=".", limit="|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One run of equal cells in a stacked bar."""

    size_bytes: int
    glyph: str
    style: str


def glyphs_for(encoding: str) -> Glyphs:
    """Return block characters if ``encoding`` has all of them, else ASCII."""
    try:
        (BLOCKS.eighths + BLOCKS.cached + BLOCKS.outside + BLOCKS.free + BLOCKS.limit).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def bar(value: int, largest: int, width: int, glyphs: Glyphs) -> str:
    """Return a bar of at most ``width`` cells, full for ``largest``; any value above zero shows."""
    if value <= 0 or largest <= 0 or width <= 0:
        return ""
    steps = len(glyphs.eighths)
    filled = max(1, round(min(value, largest) * width * steps / largest))
    whole, rest = divmod(filled, steps)
    return glyphs.eighths[-1] * whole + (glyphs.eighths[rest - 1] if rest else "")


def stacked(parts: Sequence[Part], limit_bytes: int, width: int, glyphs: Glyphs) -> Text:
    """Return ``parts`` side by side on a scale that holds both them and ``limit_bytes``.

    Space below the limit is drawn as free; when the parts reach past it, a mark stands where it is.
    """
    total = sum(part.size_bytes for part in parts)
    scale = max(total, limit_bytes, 1)
    text = Text(no_wrap=True)
    end, drawn = 0, 0
    for part in parts:
        end += part.size_bytes
        upto = round(end * width / scale)
        text.append(part.glyph * (upto - drawn), part.style)
        drawn = upto
    text.append(glyphs.free * (width - drawn), "dim")
    if total > limit_bytes:
        at = min(limit_bytes * width // scale, width - 1)
        text.stylize("red", at + 1)
        text = text[:at] + Text(glyphs.limit, "bold") + text[at + 1 :]
    return text
