"""A log as lines, read as a stream in bounded memory: any size, any line length, any bytes.

Colours are taken out, carriage returns and escaped line ends (of logs kept as JSON) end a line, UTF-16 is recognised
(PowerShell's ``>`` writes it), and what is no text is replaced. Stretches without any word of interest are counted,
not split, which is what makes gigabytes bearable.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 2**20
STRETCH_BYTES = 2**14
MAX_LINE_BYTES = 2**16
#: Pieces of a line that is too long share this much, so that a message across the cut is whole in one of them.
OVERLAP_BYTES = 2**12

_COLOUR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033|\\e)\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
_ENDS = re.compile(r"[\r\x0b\x0c\x85\u2028\u2029]+")
#: Only a traceback or a message kept as JSON is taken apart at ``\n``: in other lines it may be a Windows path.
_ESCAPED = re.compile(r"\(most recent call last\):\\+n|\\+n {2}File \\+\"|out of memory.{0,200}\\+n", re.DOTALL)
_ESCAPED_END = re.compile(r"\\+r?\\*n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log; ``continued`` when it begins with the end of the piece before it."""

    number: int  # as an editor counts, from 1
    text: str
    continued: bool = False


def read_lines(file: BinaryIO, interesting: Callable[[bytes], bool]) -> Iterator[Line]:
    """Yield the lines of those stretches of ``file`` for which ``interesting`` is True.

    ``interesting`` gets the stretch in lower case and may look at the caller's own state. Never holds more than a few
    megabytes.
    """
    number, rest, continued = 1, b"", False
    for chunk in _utf8_chunks(file):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:]
        for part in _parts(whole):
            if interesting(part.lower()):
                for raw in part.split(b"\n")[:-1]:
                    yield from _pieces(number, raw, continued)
                    continued = False
                    number += 1
            else:
                number += part.count(b"\n")
                continued = False
        while len(rest) > MAX_LINE_BYTES:
            # A line without an end: what is here is looked at, and all but the overlap is let go.
            piece, rest = rest[:MAX_LINE_BYTES], rest[MAX_LINE_BYTES - OVERLAP_BYTES :]
            if interesting(piece.lower()):
                yield from _pieces(number, piece, continued)
            continued = True
    if rest and interesting(rest.lower()):
        yield from _pieces(number, rest, continued)


def _parts(whole: bytes) -> Iterator[bytes]:
    """Yield ``whole`` in stretches of some kilobytes that end with a line: most of a log is passed over."""
    start = 0
    while start < len(whole):
        end = whole.find(b"\n", min(start + STRETCH_BYTES, len(whole) - 1)) + 1
        yield whole[start:end]
        start = end


def _pieces(number: int, raw: bytes, continued: bool) -> Iterator[Line]:
    while True:
        for text in clean_texts(raw[:MAX_LINE_BYTES].decode("utf-8", "replace")):
            yield Line(number, text, continued)
        if len(raw) <= MAX_LINE_BYTES:
            return
        raw, continued = raw[MAX_LINE_BYTES - OVERLAP_BYTES :], True


def clean_texts(text: str) -> Iterator[str]:
    """Yield the lines within one physical line, without colours and escaped quotes."""
    if "[" in text or "\x1b" in text:
        text = _COLOUR.sub("", text)
    for part in _ENDS.split(text) if _ENDS.search(text) else (text,):
        if "\\" in part and _ESCAPED.search(part):
            for line in _ESCAPED_END.split(part):
                yield line.replace('\\"', '"').replace("\\t", "\t")
        else:
            yield part


def _utf8_chunks(file: BinaryIO) -> Iterator[bytes]:
    first = file.read(CHUNK_BYTES)
    encoding = _wide_encoding(first)
    if encoding is None:
        chunk = first.removeprefix(codecs.BOM_UTF8)
        while chunk:
            yield chunk
            chunk = file.read(CHUNK_BYTES)
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    chunk = first
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace")
        chunk = file.read(CHUNK_BYTES)


def _wide_encoding(start: bytes) -> str | None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = start[:4096]
    if len(sample) < 8:
        return None
    half = len(sample) // 2
    even, odd = sample[0::2].count(0) / half, sample[1::2].count(0) / half
    if odd > 0.7 and even < 0.3:
        return "utf-16-le"
    return "utf-16-be" if even > 0.7 and odd < 0.3 else None
