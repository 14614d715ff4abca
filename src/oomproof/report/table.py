"""``oomproof table``: the blocks of the peak one by one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.text import Text

from oomproof.measure.profile import Block
from oomproof.report.blocks import NO_MODULE, NO_STACK, colour, line, module_path, short_line, words
from oomproof.report.sheet import Body, Sheet
from oomproof.report.source import Source
from oomproof.report.tree import headline
from oomproof.report.words import NextCommand, share
from oomproof.units import format_bytes

LIMIT = 25
UNKNOWN = "?"
BEFORE = "(before the recording)"
SAYS_NOTHING = frozenset((UNKNOWN, "", "? - never", "? - later", "unknown", NO_STACK))
SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


def largest_first(block: Block) -> Any:
    """Return what sorts blocks by size; of equal ones those of which something is known stand first."""
    return -block.size_bytes, block.category == "unknown", not block.stack, block.born


#: What --sort takes, and the order it means; equal blocks stay largest first.
ORDERS: dict[str, Callable[[Block], Any]] = {
    "size": largest_first,
    "category": lambda block: block.category,
    "module": module_path,
    "name": lambda block: block.name or "\uffff",
    "line": lambda block: line(block.stack),
    "dtype": lambda block: block.dtype or "\uffff",
    "born": lambda block: block.born,
    "freed": lambda block: float("inf") if block.freed is None else block.freed,
}
COLUMNS = (
    "size_bytes", "category", "name", "shape", "dtype", "module", "born_step", "born_phase", "freed_step",
    "freed_phase", "line", "address",
)  # fmt: skip


def ordered(blocks: Sequence[Block], sort: str) -> list[Block]:
    """Return the blocks in the order that ``sort``, a key of ``ORDERS``, means."""
    return sorted(sorted(blocks, key=largest_first), key=ORDERS[sort])


def born(block: Block) -> str:
    """Return when a block was made, "2 fwd"; UNKNOWN when nobody knows."""
    return _when(block.step, block.phase) or UNKNOWN


def freed(block: Block) -> str:
    """Return when a block was given back, "2 bwd"; "never" when it outlived the record."""
    return "never" if block.freed is None else _when(block.freed_step, block.freed_phase) or "later"


def _when(step: int | None, phase: str | None) -> str:
    return " ".join(str(part) for part in (step, SHORT.get(phase or "", phase)) if part is not None)


def shape(block: Block) -> str:
    """Return "8x512x768", or UNKNOWN."""
    return UNKNOWN if block.shape is None else "x".join(map(str, block.shape)) or "scalar"


def place(block: Block, source: str) -> str:
    """Return the line that made a block; a snapshot has none of those that were there when its recording began."""
    before = source == "snapshot" and not block.born and block.phase is None
    return BEFORE if before and not block.stack else line(block.stack)


def _row(block: Block) -> dict[str, Any]:
    return {
        "size_bytes": block.size_bytes,
        "category": block.category,
        "name": block.name,
        "shape": None if block.shape is None else list(block.shape),
        "dtype": block.dtype,
        "module": block.module,
        "born_step": block.step,
        "born_phase": block.phase,
        "freed_step": block.freed_step,
        "freed_phase": block.freed_phase,
        "line": block.stack[0] if block.stack else None,
        "address": block.address,
    }


def to_json_text(source: Source, blocks: Sequence[Block]) -> str:
    """Return the blocks as JSON, each with its whole stack, innermost line first."""
    rows = [_row(block) | {"stack": list(block.stack)} for block in blocks]
    table = {
        "schema": "oomproof.table/1",
        "allocated_bytes": source.profile.allocated_bytes,
        "rounding_bytes": source.profile.slack_bytes,
        "all_blocks": len(source.profile.blocks),
        "blocks": rows,
    }
    return json.dumps(table, indent=2) + "\n"


def to_csv_text(blocks: Sequence[Block]) -> str:
    """Return the blocks as CSV with a heading; what is not known is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for block in blocks:
        row = _row(block) | {"shape": None if block.shape is None else shape(block)}
        writer.writerow([_harmless(row[name]) for name in COLUMNS])
    return out.getvalue()


def _harmless(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula."""
    if not isinstance(value, str):
        return value
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def body(source: Source, blocks: Sequence[Block], sort: str) -> Body:
    """Return what draws ``blocks``; what there is no room for is left out from the right."""
    profile = source.profile

    def lines(sheet: Sheet) -> Iterator[Text]:
        order = "largest first" if sort == "size" else f"by {sort}"
        yield headline(source, f"{len(blocks):,} shown, {order}" if len(blocks) < len(profile.blocks) else order)
        if not blocks:
            yield Text("no block was seen there")
            return
        yield Text()
        yield from _table(sheet, blocks, profile.allocated_bytes, profile.source)
        rest = len(profile.blocks) - len(blocks)
        if rest > 0:
            left = sum(b.size_bytes for b in profile.blocks) - sum(b.size_bytes for b in blocks)
            yield Text(f"{format_bytes(left):>10}  in {rest:,} more; --limit 0 shows all", "dim")
        if profile.slack_bytes > 0:
            yield Text(f"{format_bytes(profile.slack_bytes):>10}  rounding: blocks are larger than asked for", "dim")

    return lines


def _table(sheet: Sheet, blocks: Sequence[Block], whole_bytes: int, source: str) -> Iterator[Text]:
    """Yield rows with the columns that there is room for and that say something."""
    cells = [
        [
            format_bytes(b.size_bytes),
            share(b.size_bytes, whole_bytes),
            words(b.category).removesuffix(" state"),
            sheet.clean(b.name or _of(b)),
            shape(b),
            sheet.clean(b.dtype or UNKNOWN),
            f"{born(b)} - {freed(b)}",
            sheet.clean(place(b, source)),
        ]
        for b in blocks
    ]
    heads = ["size", "", "category", "what", "shape", "dtype", "born - freed", "line"]
    most = [10, 4, 15, 40, 18, 10, 20, 40]
    least = [10, 4, 10, 16, 9, 7, 14, 20]
    kept = [i for i in range(len(heads)) if i == 0 or any(row[i] not in SAYS_NOTHING for row in cells)]
    if 2 not in kept and any(row[7] == BEFORE for row in cells):  # of other blocks the category may be known
        kept = sorted((*kept, 2))
    needed = {i: min(most[i], max(len(heads[i]), *(len(row[i]) for row in cells))) for i in kept}
    for drop in (1, 5, 4, 6, 7):  # by how little they are missed
        if sum(min(needed[i], least[i]) + 2 for i in kept) - 2 <= sheet.width:
            break
        kept = [i for i in kept if i != drop]
    widths = {i: min(needed[i], least[i]) for i in kept}
    spare = sheet.width - sum(widths[i] + 2 for i in kept) + 2
    for i in sorted(kept, key=lambda i: (i != 6, i not in (3, 4, 7), i)):
        more = max(0, min(spare, needed[i] - widths[i]))
        widths[i] += more
        spare -= more
    yield _line([(heads[i].rjust(widths[i]) if i <= 1 else sheet.cut(heads[i], widths[i]), "dim") for i in kept])
    for block, row in zip(blocks, cells, strict=True):
        styles = {2: colour(block.category), 3: "bold", 1: "dim", 6: "dim", 7: "dim"}
        yield _line([(_cell(sheet, i, row[i], widths[i]), styles.get(i)) for i in kept])


def _cell(sheet: Sheet, column: int, text: str, cells: int) -> str:
    if column <= 1:
        return text.rjust(cells)
    return sheet.cut(short_line(text, cells) if column == 7 else text, cells, left=column == 3)


def _of(block: Block) -> str:
    """Return what stands for a block without a name: the module it serves."""
    path = module_path(block)
    return "" if path == NO_MODULE else f"in {path}"


def _line(parts: Sequence[tuple[str, str | None]]) -> Text:
    text = Text(no_wrap=True)
    for number, (part, style) in enumerate(parts):
        text.append(("  " if number else "") + part, style)
    text.rstrip()
    return text


def after(source: Source) -> NextCommand:
    """Return what to type after the table."""
    if len(source.profile.steps) > 1:
        return NextCommand(reason="see how memory moves over the steps", command=f"oomproof timeline {source.quoted}")
    return NextCommand(reason="see the whole of it in a browser", command=_page(source))


def _page(source: Source) -> str:
    return f"oomproof report {source.quoted} -o report.html"
