"""What the page's charts and its table show, as plain values."""

from __future__ import annotations

from typing import Any

from oomproof.measure.profile import CATEGORIES, Block, Profile
from oomproof.report.blocks import by_category, has_modules, words
from oomproof.report.curve import allocated, spans, thinned
from oomproof.report.table import born, freed, largest_first, shape
from oomproof.report.tree import Node, build, joined
from oomproof.units import format_bytes

POINTS = 6000
BLOCKS = 4000
SPANS = 4000
LEVELS = 24
BRANCHES = 48  # of one node
SMALL = 0.001  # of the peak: smaller branches are folded

#: Readable on white and on near-black; neighbours in a stack differ in lightness too.
COLOURS = {
    "parameter": "#4e79c4",
    "gradient": "#b07bc0",
    "optimizer_state": "#2fa5a0",
    "activation": "#63a84c",
    "input": "#a57b5b",
    "buffer": "#7f93a8",
    "workspace": "#ee8a3a",
    "temporary": "#e3b53d",
    "communication": "#dc5f62",
    "unknown": "#9a9a9a",
}
STATES = ("parameter", "gradient", "optimizer_state")


def page_data(profile: Profile) -> dict[str, Any]:
    """Return what the page's scripts read."""
    return {
        "categories": [{"name": words(name), "colour": COLOURS[name]} for name in CATEGORIES],
        "allocated": profile.allocated_bytes,
        "atPeak": list(by_category(profile).values()),
        "limit": profile.limit_bytes,
        "curve": _curve(profile),
        "trees": _trees(profile),
        "blocks": _blocks(profile),
    }


def _curve(profile: Profile) -> dict[str, Any] | None:
    points = thinned(profile.points, POINTS)
    if len(points) < 2:
        return None
    phases: dict[str | None, int] = {}
    top = max(range(len(points)), key=lambda i: allocated(points[i]))
    found = spans(profile.points)
    whole = {row.step for row in profile.steps}  # what comes after the last one is no step
    return {
        "x": [point.event for point in points],
        "step": [point.step for point in points],
        "phase": [phases.setdefault(point.phase, len(phases)) for point in points],
        "reserved": [point.reserved_bytes for point in points],
        "bytes": [list(sizes) for sizes in zip(*(point.category_bytes for point in points), strict=True)],
        "peak": top,
        "spans": [
            [
                span.step if span.step in whole else None,
                phases.setdefault(span.phase, len(phases)),
                span.first_event,
                span.last_event,
            ]
            for span in found[:SPANS]
        ],
        "phases": list(phases),
        "of": len(profile.points),
    }


def _trees(profile: Profile) -> dict[str, Any]:
    trees: dict[str, Any] = {}
    if has_modules(profile):
        trees["module"] = _tree(build(profile, "module"), "module")
    trees["stack"] = _tree(build(profile, "stack"), "stack")
    states = tuple(block for block in profile.blocks if block.category in STATES)
    if states:
        whole = build(profile._replace(blocks=states, slack_bytes=0), "category")
        whole.name = "parameters, gradients, optimizer states"
        trees["states"] = _tree(whole, "category")
    return trees


def _tree(root: Node, by: str) -> dict[str, list[Any]]:
    """Return the nodes as columns, parents before their children."""
    names: list[str] = []
    parents: list[int] = []
    sizes: list[int] = []
    counts: list[int] = []
    categories: list[list[list[int]]] = []

    def add(node: Node, parent: int, level: int) -> None:
        number = len(names)
        names.append(f"{node.name} ({node.kind})" if node.kind else node.name)
        parents.append(parent)
        sizes.append(node.size_bytes)
        counts.append(node.blocks)
        mixed = [[CATEGORIES.index(name), size] for name, size in node.categories.most_common() if size]
        categories.append(mixed)
        if level >= LEVELS:
            return
        if by == "module" and not node.children and len(mixed) > 1:
            _split(node)
        ordered = node.ordered()
        shown = [child for child in ordered[:BRANCHES] if child.size_bytes >= SMALL * root.size_bytes]
        if len(shown) == len(ordered) - 1:
            shown = ordered
        for child in shown:
            add(child if by == "category" and not level else joined(child), number, level + 1)
        rest = ordered[len(shown) :]
        if rest:
            more = Node(name=f"{len(rest):,} more")
            for child in rest:
                more.size_bytes += child.size_bytes
                more.blocks += child.blocks
                more.categories.update(child.categories)
            add(more, number, level + 1)

    add(root, -1, 0)
    return {"names": names, "parents": parents, "bytes": sizes, "blocks": counts, "categories": categories}


def _split(node: Node) -> None:
    """Give a module without modules a branch for each category."""
    for category, size_bytes in node.categories.items():
        branch = Node(name=words(category))
        branch.add(category, size_bytes, 0)
        node.children[branch.name] = branch


def _blocks(profile: Profile) -> dict[str, Any]:
    texts: dict[str, int] = {}

    def text(value: str | None) -> int:
        return texts.setdefault(value or "", len(texts))

    def row(block: Block) -> list[Any]:
        return [
            block.size_bytes,
            CATEGORIES.index(block.category),
            text(block.name),
            text(shape(block) if block.shape is not None else None),
            text(block.dtype),
            text(block.module),
            text(born(block) if block.step is not None or block.phase is not None else None),
            text(freed(block)),
            text("\n".join(block.stack)),
            block.born,
        ]

    kept = sorted(profile.blocks, key=largest_first)[:BLOCKS]
    left = sum(block.size_bytes for block in profile.blocks) - sum(block.size_bytes for block in kept)
    rows = [row(block) for block in kept]
    return {
        "rows": rows,
        "texts": list(texts),
        "all": len(profile.blocks),
        "left": format_bytes(left) if len(kept) < len(profile.blocks) else None,
        "rounding": format_bytes(profile.slack_bytes) if profile.slack_bytes > 0 else None,
    }
