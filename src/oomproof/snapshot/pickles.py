"""A pickle machine for plain data that reads files of any size in bounded memory and can run nothing.

Python's own unpickler keeps every object of the file, since the pickle may refer to each of them again: 20 GB for a
snapshot of 1 GB. Here each finished dict is handed to ``shape``, which turns it to something small, and that is what
the machine goes on with. Opcodes that import, call or build objects are refused.
"""

from __future__ import annotations

import mmap as mapping
import re
import struct
import sys
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any, Protocol

from oomproof.errors import SnapshotError

Data = mmap | bytes

_LARGEST_TEXT_BYTES = 2**24
_LARGEST_LONG_BYTES = 16
_MOST_GAPS = 2**20  # numbers that pickletools.optimize left out of the memo, in one place
_OPCODES_BETWEEN_CHECKS = 4096
_PAGES_AT_ONCE = 2**24
_CONTAINER_BYTES = 72
_ITEM_BYTES = 8
_PAIR_BYTES = 104  # of a dict, with a number as its value

_UNSIGNED, _SIGNED, _SHORT = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")

#: ``]``, its place in the memo, ``(``, nothing but references, ``e``: how the pickler writes a list of known objects.
_REFERENCES = re.compile(rb"\]\x94\(((?:j.{4}|h.){1,4096})e", re.DOTALL)

_RUNS_CODE = {
    ord("c"): "GLOBAL", 0x93: "STACK_GLOBAL", ord("R"): "REDUCE", ord("b"): "BUILD", ord("i"): "INST", ord("o"): "OBJ",
    0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}  # fmt: skip


class Dict(dict[Any, Any]):
    """A dict that is still being filled; ``place`` is its number in the memo."""

    __slots__ = ("place",)
    place: int | None


class List(list[Any]):
    """A list; ``place`` is its number in the memo."""

    __slots__ = ("place",)
    place: int | None


class Shape(Protocol):
    """Turns what the machine reads to what is kept."""

    def dict_done(self, items: Dict) -> Any:
        """Return what is kept of a dict; the dict itself when it is of no known kind."""

    def list_done(self, key: Any, items: List) -> Any:
        """Return what is kept of a list that a dict has under ``key``; the list itself if it is of no known kind."""

    def table(self, first: Any) -> Table | None:
        """Return where the items of a list go whose first item is this, None to keep them in the list."""

    def references(self, run: bytes, memo: Sequence[Any]) -> Any:
        """Return what is kept of a list of memo references, given as opcodes; None when it is of no known kind."""

    def used_bytes(self) -> int:
        """Return about how much memory that takes which is kept outside the machine."""


class Table(Protocol):
    """Takes items of a list instead of the list."""

    def extend(self, items: Sequence[Any]) -> None:
        """Take items that ``Shape.dict_done`` made."""


def read(
    data: Data, shape: Shape, *, limit_bytes: int, progress: Callable[[int, int], None] | None = None
) -> tuple[Any, int]:
    """Return the object in ``data`` as ``shape`` made it, and about how many bytes the machine itself used.

    ``progress(position, size)`` is called now and then. Raises SnapshotError when the pickle is cut short, would
    run code, is no plain data, or takes more than about ``limit_bytes`` of memory.
    """
    machine = _Machine(data, shape, limit_bytes, progress)
    try:
        return machine.run(), machine.most_bytes
    except (IndexError, struct.error):
        raise SnapshotError(f"it is cut short or damaged at byte {machine.position:,}; copy it again") from None
    except (ValueError, UnicodeDecodeError):
        raise SnapshotError(f"it is damaged at byte {machine.position:,}; copy it again") from None


class _Machine:
    def __init__(self, data: Data, shape: Shape, limit_bytes: int, progress: Callable[[int, int], None] | None) -> None:
        self.data = data
        self.shape = shape
        self.limit_bytes = limit_bytes
        self.progress = progress
        self.position = 0
        self.most_bytes = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.texts: dict[str, str] = {}  # PyTorch writes the same text anew for each event
        self.used = 0
        self.forgotten = 0

    def run(self) -> Any:
        while not self.read_some(_OPCODES_BETWEEN_CHECKS):
            self.check()
            self.forget_pages()
            if self.progress:
                self.progress(self.position, len(self.data))
        return self.settle(self.stack.pop())

    def read_some(self, count: int) -> bool:
        """Read up to so many opcodes; return whether the pickle is at its end.

        The opcodes that make up nearly all of a snapshot are done here, with local names: this loop is what reading a
        large file waits for.
        """
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        push = stack.append
        unsigned, signed, short = _UNSIGNED.unpack_from, _SIGNED.unpack_from, _SHORT.unpack_from
        position = self.position
        for _ in range(count):
            opcode = data[position]
            if opcode == 0x68:  # BINGET
                push(memo[data[position + 1]])
                position += 2
            elif opcode == 0x6A:  # LONG_BINGET
                push(memo[unsigned(data, position + 1)[0]])
                position += 5
            elif opcode == 0x94:  # MEMOIZE
                top = stack[-1]
                if type(top) is Dict or type(top) is List:
                    top.place = len(memo)
                memo.append(top)
                position += 1
            elif opcode == 0x8A and data[position + 1] <= _LARGEST_LONG_BYTES:  # LONG1
                end = position + 2 + data[position + 1]
                if end > len(data):
                    raise IndexError
                push(int.from_bytes(data[position + 2 : end], "little", signed=True))
                position = end
            elif opcode == 0x4B:  # BININT1
                push(data[position + 1])
                position += 2
            elif opcode == 0x4A:  # BININT
                push(signed(data, position + 1)[0])
                position += 5
            elif opcode == 0x4D:  # BININT2
                push(short(data, position + 1)[0])
                position += 3
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
                position += 1
            elif opcode == 0x7D:  # EMPTY_DICT
                made = Dict()
                made.place = None
                push(made)
                self.used += _CONTAINER_BYTES
                position += 1
            else:
                self.position = position
                if self.step(opcode, position):
                    return True
                position = self.position
        self.position = position
        return False

    def forget_pages(self) -> None:
        """Let go of the file's pages that were read: they would count as this process's memory."""
        here = self.position // _PAGES_AT_ONCE * _PAGES_AT_ONCE
        if here > self.forgotten and isinstance(self.data, mmap) and hasattr(self.data, "madvise"):
            self.data.madvise(mapping.MADV_DONTNEED, self.forgotten, here - self.forgotten)
            self.forgotten = here

    def check(self) -> None:
        places = 40 * len(self.stack) + 8 * len(self.memo) + 8 * len(self.marks)
        used = self.used + places + self.shape.used_bytes()
        self.most_bytes = max(self.most_bytes, used)
        if used > self.limit_bytes:
            raise SnapshotError(
                f"reading it takes more than {self.limit_bytes / 2**20:,.0f} MiB of memory; record fewer events "
                "(max_entries of torch.cuda.memory._record_memory_history), or raise the limit"
            )

    def step(self, opcode: int, position: int) -> bool:
        """Read one opcode that ``read_some`` does not; return whether it is the end."""
        data = self.data
        if opcode == 0x5D:  # EMPTY_LIST
            match = _REFERENCES.match(data, position)
            kept = self.shape.references(match[1], self.memo) if match else None
            if match and kept is not None:
                self.memo.append(kept)
                self.stack.append(kept)
                self.position = match.end()
            else:
                self.push_list([])
                self.position = position + 1
        elif opcode == 0x75:  # SETITEMS
            self.position = position + 1
            self.set_items(self.pop_mark(), at_once=True)
        elif opcode == 0x65:  # APPENDS
            self.position = position + 1
            self.extend(self.pop_mark())
        elif opcode == 0x8C:  # SHORT_BINUNICODE
            self.push_text(position + 2, data[position + 1])
        elif opcode == 0x58:  # BINUNICODE
            self.push_text(position + 5, _UNSIGNED.unpack_from(data, position + 1)[0])
        elif opcode == 0x95:  # FRAME: how much the unpickler may read at once
            self.position = position + 9
        else:
            return self.rare(opcode, position)
        return False

    def rare(self, opcode: int, position: int) -> bool:
        data, stack = self.data, self.stack
        self.position = position + 1
        if opcode == 0x2E:  # STOP
            return True
        if opcode == 0x80:  # PROTO
            if data[position + 1] > 5:
                raise SnapshotError(f"its pickle protocol {data[position + 1]} is unknown; no PyTorch writes it")
            self.position = position + 2
        elif opcode == 0x71:  # BINPUT
            self.position = position + 2
            self.remember(data[position + 1])
        elif opcode == 0x72:  # LONG_BINPUT
            self.position = position + 5
            self.remember(struct.unpack_from("<I", data, position + 1)[0])
        elif opcode == 0x61:  # APPEND
            item = stack.pop()
            self.extend([item])
        elif opcode == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            self.set_items([key, value], at_once=False)
        elif opcode in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
            count = opcode - 0x84
            self.push_tuple([stack.pop() for _ in range(count)][::-1])
        elif opcode == 0x74:  # TUPLE
            self.push_tuple(self.pop_mark())
        elif opcode == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif opcode in (0x4E, 0x88, 0x89):  # NONE, NEWTRUE, NEWFALSE
            stack.append({0x4E: None, 0x88: True, 0x89: False}[opcode])
        elif opcode == 0x47:  # BINFLOAT
            stack.append(struct.unpack_from(">d", data, position + 1)[0])
            self.position = position + 9
        elif opcode == 0x8A:  # LONG1, of more bytes than a number has
            self.push_long(position + 2, data[position + 1])
        elif opcode == 0x8B:  # LONG4
            self.push_long(position + 5, struct.unpack_from("<i", data, position + 1)[0])
        elif opcode == 0x8D:  # BINUNICODE8
            self.push_text(position + 9, struct.unpack_from("<Q", data, position + 1)[0])
        elif opcode == 0x6C:  # LIST
            self.push_list(self.pop_mark())
        elif opcode == 0x64:  # DICT
            items = self.pop_mark()
            made = Dict()
            made.place = None
            stack.append(made)
            self.used += _CONTAINER_BYTES
            self.set_items(items, at_once=False)
        elif opcode == 0x30:  # POP
            if self.marks and self.marks[-1] == len(stack):
                self.marks.pop()
            else:
                stack.pop()
        elif opcode == 0x31:  # POP_MARK
            self.pop_mark()
        elif opcode == 0x32:  # DUP
            stack.append(stack[-1])
        elif opcode in b"ILFVpg":
            self.text_opcode(chr(opcode), self.line())
        elif opcode in _RUNS_CODE:
            raise SnapshotError(
                f"it asks Python to run code ({_RUNS_CODE[opcode]} at byte {position:,}), which no memory snapshot "
                "does; do not open it with anything else either"
            )
        else:
            raise SnapshotError(
                f"it is no memory snapshot: {bytes([opcode])!r} at byte {position:,} is not what PyTorch writes; give "
                "a file of torch.cuda.memory._dump_snapshot"
            )
        return False

    def text_opcode(self, opcode: str, text: bytes) -> None:
        """Do one of protocol 0's opcodes, whose argument is a line of text."""
        if opcode == "V":
            self.push(text.decode("raw-unicode-escape"))
        elif opcode == "F":
            self.stack.append(float(text))
        elif opcode == "p":
            self.remember(int(text))
        elif opcode == "g":
            self.stack.append(self.memo[_at_least_0(int(text))])
        elif text in (b"00", b"01"):
            self.stack.append(text == b"01")
        else:
            self.stack.append(int(text.rstrip(b"L")))

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position, self.position + _LARGEST_TEXT_BYTES)
        if end < 0:
            raise IndexError
        text = self.data[self.position : end]
        if len(text) > 40 and self.data[self.position - 1] != 0x56:
            raise ValueError  # no number of a snapshot; int() takes quadratic time
        self.position = end + 1
        return text

    def remember(self, place: int) -> None:
        memo = self.memo
        top = self.stack[-1]
        if place < len(memo):
            memo[_at_least_0(place)] = top
        else:
            if place > len(memo) + _MOST_GAPS:
                raise ValueError
            memo.extend([None] * (place - len(memo)))
            memo.append(top)
        if type(top) in (Dict, List):
            top.place = place

    def push(self, text: str) -> None:
        known = self.texts.get(text)
        if known is None:
            known = self.texts[text] = text
            self.used += sys.getsizeof(text) + _PAIR_BYTES
        self.stack.append(known)

    def push_text(self, start: int, size: int) -> None:
        if size > _LARGEST_TEXT_BYTES:
            raise SnapshotError(f"a text at byte {self.position:,} has {size:,} bytes; no memory snapshot has such")
        raw = self.data[start : start + size]
        if len(raw) < size:
            raise IndexError
        self.push(str(raw, "utf-8", "surrogatepass"))
        self.position = start + size

    def push_long(self, start: int, size: int) -> None:
        if not 0 <= size <= _LARGEST_LONG_BYTES:
            raise SnapshotError(f"a number at byte {self.position:,} has {size:,} bytes; no memory snapshot has such")
        raw = self.data[start : start + size]
        if len(raw) < size:
            raise IndexError
        self.stack.append(int.from_bytes(raw, "little", signed=True))
        self.position = start + size

    def push_tuple(self, items: list[Any]) -> None:
        self.used += _CONTAINER_BYTES + _ITEM_BYTES * len(items)
        self.stack.append(tuple(self.settle(item) for item in items))

    def push_list(self, items: list[Any]) -> None:
        made = List()
        made.place = None
        self.stack.append(made)
        self.used += _CONTAINER_BYTES
        if items:
            self.extend(items)

    def pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def settle(self, value: Any) -> Any:
        """Return what is kept of a value that goes into another one."""
        if type(value) is Dict:
            kept = self.shape.dict_done(value)
            if kept is not value:
                self.used -= _CONTAINER_BYTES + _PAIR_BYTES * len(value)
                if value.place is not None:
                    self.memo[value.place] = kept
                value.clear()
            return kept
        return value

    def set_items(self, items: list[Any], *, at_once: bool) -> None:
        target = self.stack[-1]
        if type(target) is not Dict or len(items) % 2:
            raise ValueError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and type(key) is not int:  # of a nested tuple, the hash takes forever
                raise ValueError
            if type(value) is List:
                kept = self.shape.list_done(key, value)
                if kept is not value:
                    self.used -= _CONTAINER_BYTES + _ITEM_BYTES * len(value)
                    if value.place is not None:
                        self.memo[value.place] = kept
                    value.clear()
                    value = kept
            elif type(value) is Dict:
                value = self.settle(value)
            target[key] = value
        self.used += _PAIR_BYTES * (len(items) // 2)
        if at_once:
            self.stack[-1] = self.settle(target)

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        items = [self.settle(item) if type(item) is Dict else item for item in items]
        if type(target) is List:
            table = self.shape.table(items[0]) if items and not target else None
            if table is None:
                target.extend(items)
                self.used += _ITEM_BYTES * len(items)
                return
            if target.place is not None:
                self.memo[target.place] = table
            self.stack[-1] = target = table
        if not hasattr(target, "extend") or isinstance(target, dict):
            raise ValueError
        target.extend(items)


def _at_least_0(place: int) -> int:
    if place < 0:
        raise ValueError
    return place
