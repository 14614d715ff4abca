"""``oomproof tree``: the peak as a tree of modules, of stacks or of categories."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from oomproof.measure.profile import Block, Profile
from oomproof.report.blocks import (
    NO_MODULE,
    NO_STACK,
    ROUNDING,
    base_name,
    colour,
    has_modules,
    module_path,
    owner,
    shares,
    split_module,
    words,
)  # fmt: skip
from oomproof.report.sheet import Body, Sheet
from oomproof.report.source import Source
from oomproof.report.words import NextCommand, place, plural, share
from oomproof.units import format_bytes

WAYS = ("module", "stack", "category")
DEPTH = {"module": 4, "stack": 8, "category": 4}
LEVELS = 64  # a name with more dots than any model has is no reason to overflow a stack
CHILDREN = 8
NEARLY_ALL = 0.995  # of a branch: what is left is too little to be told
SMALL = 0.01  # of the peak: smaller branches are folded
FIGURES = 19  # cells before the names
ROOM_FOR_CATEGORIES = 50
NAME_SHARE = 0.6  # of the width beside the figures


@dataclass(slots=True, kw_only=True)
class Node:
    """A branch: what it is called, and the bytes in it and below."""

    name: str
    kind: str = ""  # a module's class
    alike: int = 1  # so many layers in one row
    size_bytes: int = 0
    blocks: int = 0
    categories: Counter[str] = field(default_factory=Counter)
    children: dict[str, Node] = field(default_factory=dict)

    def add(self, category: str, size_bytes: int, blocks: int) -> None:
        """Count blocks of one category."""
        self.size_bytes += size_bytes
        self.blocks += blocks
        self.categories[category] += size_bytes

    def ordered(self) -> list[Node]:
        """Return the branches below, the biggest first."""
        return sorted(self.children.values(), key=_place)


def _place(node: Node) -> tuple[int, int, str]:
    """Return what puts the biggest first, and equal layers in their order."""
    return -node.size_bytes, int(node.name) if _numbered(node) else -1, node.name


def build(profile: Profile, by: str) -> Node:
    """Return the tree of the peak's blocks; ``by`` is one of ``WAYS``. The root's size is what is allocated."""
    path_of = _paths(profile, by)
    kinds: dict[tuple[str, ...], str] = {}
    sums: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for block in profile.blocks:
        path = path_of(block)
        known = sums.setdefault((path, block.category), [0, 0])
        known[0] += block.size_bytes
        known[1] += 1
        if by != "stack" and path not in kinds:
            kinds[path] = split_module(owner(block) or "").kind
    if profile.slack_bytes > 0:
        sums[((ROUNDING,), "unknown")] = [profile.slack_bytes, 0]
    root = Node(name="the peak")
    for (path, category), (size_bytes, blocks) in sums.items():
        node = root
        node.add(category, size_bytes, blocks)
        for name in path:
            node = node.children.setdefault(name, Node(name=name))
            node.add(category, size_bytes, blocks)
        kind = kinds.get(path, "")
        node.kind = kind if kind != node.name else ""
    return root


def _paths(profile: Profile, by: str) -> Callable[[Block], tuple[str, ...]]:
    modules = has_modules(profile)

    def of_stack(block: Block) -> tuple[str, ...]:
        return tuple(reversed(block.stack)) or (NO_STACK,)

    def of_module(block: Block) -> tuple[str, ...]:
        path = module_path(block)
        if path == NO_MODULE:
            return NO_MODULE, *of_stack(block)
        levels = path.split(".")
        return (*levels[: LEVELS - 1], ".".join(levels[LEVELS - 1 :])) if len(levels) > LEVELS else tuple(levels)

    def of_category(block: Block) -> tuple[str, ...]:
        return words(block.category), *(of_module if modules else of_stack)(block)

    return {"module": of_module, "stack": of_stack, "category": of_category}[by]


def joined(node: Node) -> Node:
    """Return the node with what is below it, if that is all there is in it: "transformer.h", "step, from main"."""
    names = [node.name]
    first = node
    while node.children:
        child = max(node.children.values(), key=lambda child: child.size_bytes)
        if child.size_bytes < NEARLY_ALL * node.size_bytes or node.alike > 1:
            break
        names.append(child.name)
        node = child
    if node is first:
        return node
    frames = any(":" in name for name in names)  # "train.py:12 step"; no module's name has a colon
    name = ", from ".join(reversed(names)) if frames else ".".join(names)
    return _with(first, name=name, kind=node.kind, children=node.children)


def alike(nodes: list[Node]) -> list[Node]:
    """Return the branches with equal layers as one: "0 to 23", with their sum."""
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        groups.setdefault(_shape(node) if _numbered(node) else id(node), []).append(node)
    rows = [group[0] if len(group) == 1 else _merged(group) for group in groups.values()]
    return sorted(rows, key=_place)


def _numbered(node: Node) -> bool:
    return node.name.isascii() and node.name.isdecimal() and len(node.name) < 9


def _shape(node: Node) -> object:
    return node.kind, node.size_bytes, tuple(sorted((name, _shape(child)) for name, child in node.children.items()))


def _merged(group: list[Node]) -> Node:
    whole = Node(name="", kind=group[0].kind)
    for node in group:
        _add_all(whole, node)
    return _with(whole, name=_numbers(sorted(int(node.name) for node in group)), alike=len(group))


def _add_all(into: Node, node: Node) -> None:
    into.size_bytes += node.size_bytes
    into.blocks += node.blocks
    into.categories.update(node.categories)
    for name, child in node.children.items():
        _add_all(into.children.setdefault(name, Node(name=name, kind=child.kind)), child)


def _numbers(found: list[int]) -> str:
    """Return "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], f"and {sum(map(len, runs[3:]))} more"])


def _with(node: Node, **changes: Any) -> Node:
    return dataclasses.replace(node, **changes)


def folded(node: Node, whole_bytes: int) -> tuple[list[Node], list[Node]]:
    """Return the branches to show and those to fold; one alone is never folded."""
    ordered = alike(list(node.children.values()))
    shown = [n for n in ordered[:CHILDREN] if n.size_bytes >= SMALL * whole_bytes]
    if len(shown) == len(ordered) - 1:
        return ordered, []
    return shown, ordered[len(shown) :]


def body(source: Source, by: str, depth: int | None) -> Body:
    """Return what draws the tree."""
    profile = source.profile
    root = build(profile, by)

    def lines(sheet: Sheet) -> Iterator[Text]:
        yield headline(source, f"by {by}")
        if not profile.blocks:
            yield Text("no block was seen there")
            return
        yield Text()
        rows = list(_walk(root, by, depth if depth is not None else DEPTH[by], sheet))
        cells = _name_cells(rows, sheet)
        for prefix, node in rows:
            yield _row(sheet, prefix, node, root.size_bytes, cells)

    return lines


def headline(source: Source, what: str) -> Text:
    """Return the first line: how high the peak is, where it is, and what follows."""
    profile, measured = source.profile, source.measurement
    text = Text(f"Peak {format_bytes(profile.allocated_bytes)}", "bold")
    text.append(f" allocated in {plural(len(profile.blocks), 'block')}")
    if measured is not None:
        at = measured.peak
        if at.step is not None or at.phase is not None:
            text.append(f"; {place(at.step, at.phase, None)}")
    text.append(f"; {what}", "dim")
    return text


def _walk(root: Node, by: str, depth: int, sheet: Sheet) -> Iterator[tuple[str, Node]]:
    plain = sheet.dots == "..."
    branch, last, pipe = ("|- ", "`- ", "|  ") if plain else ("├─ ", "└─ ", "│  ")
    if by == "stack":  # which is deep
        branch, last, pipe = (mark[0] + " " for mark in (branch, last, pipe))

    def below(node: Node, prefix: str, level: int) -> Iterator[tuple[str, Node]]:
        shown, rest = folded(node, root.size_bytes)
        rows = [child if by == "category" and not level else joined(child) for child in shown]
        if rest:
            rows.append(_more(rest, sheet))
        for number, child in enumerate(rows):
            ending = number == len(rows) - 1
            lead = prefix + (last if ending else branch) if level else ""
            yield lead, child
            if level + 1 < depth:
                yield from below(child, prefix + (" " * len(pipe) if ending else pipe) if level else "", level + 1)

    yield from below(root, "", 0)


def _more(rest: list[Node], sheet: Sheet) -> Node:
    node = Node(name=f"{sheet.dots} {sum(item.alike for item in rest):,} more")
    for item in rest:
        _add_all(node, dataclasses.replace(item, children={}))
    return node


def _label(node: Node, sheet: Sheet) -> tuple[str, str]:
    many = f", {node.alike} alike" if node.alike > 1 else ""
    inside = (sheet.clean(node.kind) + many).removeprefix(", ")
    name = ", from ".join(map(base_name, node.name.split(", from "))) if ":" in node.name else node.name
    return sheet.clean(name), f" ({inside})" if inside else ""


def _name_cells(rows: list[tuple[str, Node]], sheet: Sheet) -> int:
    """Return the cells for names: what they need, but no more than leaves room for the categories."""
    room = sheet.width - FIGURES
    if room < ROOM_FOR_CATEGORIES:
        return room
    needed = max(len(prefix) + cell_len("".join(_label(node, sheet))) for prefix, node in rows)
    return min(needed, int(room * NAME_SHARE))


def _row(sheet: Sheet, prefix: str, node: Node, whole_bytes: int, cells: int) -> Text:
    text = Text(f"{format_bytes(node.size_bytes):>10}  ", no_wrap=True)
    text.append(f"{share(node.size_bytes, whole_bytes):>5}  ", "dim")
    text.append(prefix, "dim")
    cells -= len(prefix)
    name, kind = _label(node, sheet)
    if cells <= 4:  # deeper than there is room for
        name = kind = ""
    shown = sheet.cut(name, min(max(1, cells), max(1, cell_len(name))), left=":" not in name)
    text.append(shown, "dim" if name.startswith(sheet.dots) else "bold")
    left = max(0, cells - cell_len(shown))
    if left < cell_len(kind) and node.alike > 1:
        kind = f" ({node.alike} alike)"
    fits = left >= cell_len(kind)
    text.append(kind + " " * (left - cell_len(kind)) if fits else " " * left, "dim")
    room = sheet.width - FIGURES
    if room >= ROOM_FOR_CATEGORIES:
        strongest = max(node.categories, key=lambda name: node.categories[name], default="unknown")
        text.append("  " + shares(node.categories, sheet.width - text.cell_len - 2, sheet.dots), colour(strongest))
    return text


def to_json_text(source: Source, by: str, depth: int | None) -> str:
    """Return the tree as JSON, nothing folded; ``depth`` levels of it if given."""

    def plain(node: Node, level: int) -> dict[str, Any]:
        row: dict[str, Any] = {"name": node.name}
        if node.kind:
            row["class"] = node.kind
        row |= {
            "size_bytes": node.size_bytes,
            "blocks": node.blocks,
            "categories": {f"{name}_bytes": size for name, size in node.categories.most_common()},
        }
        if node.children and (depth is None or level < depth):
            row["children"] = [plain(child, level + 1) for child in node.ordered()]
        return row

    tree = {"schema": "oomproof.tree/1", "by": by, **plain(build(source.profile, by), 0)}
    return json.dumps(tree, indent=2) + "\n"


def after(source: Source, by: str) -> NextCommand:
    """Return what to type after the tree."""
    if by == "module" and any(block.stack for block in source.profile.blocks):
        return NextCommand(
            reason="see which lines of code it comes from", command=f"oomproof tree {source.quoted} --by stack"
        )
    return NextCommand(reason="see the largest blocks one by one", command=f"oomproof table {source.quoted}")
