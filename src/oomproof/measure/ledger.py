"""Who owned what, and when: the allocator's own event trace read against what the observer saw.

Pure bookkeeping over PyTorch's recorded events; no torch, Python 3.9. The allocator ran for real; here its blocks
are only followed from birth to death and given a phase, a module and a category.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from oomproof.measure.series import Series

#: Categories that a label can give, the strongest claim first.
LABELS = ("parameter", "gradient", "optimizer_state", "buffer", "workspace", "communication", "input")
CATEGORIES = (
    "parameter", "gradient", "optimizer_state", "activation", "input", "buffer",
    "workspace", "temporary", "communication", "unknown",
)  # fmt: skip
OUTSIDE = "(outside modules)"
ROUNDING_BYTES = 512  # kMinBlockSize of the caching allocator


class Mark:
    """From ``time_us`` on, until the next mark: the phase and module that the process was in."""

    __slots__ = ("module", "phase", "step", "time_us")

    def __init__(self, time_us: int, step: int, phase: str, module: str | None) -> None:
        self.time_us = time_us
        self.step = step
        self.phase = phase
        self.module = module


class Tag(NamedTuple):
    """What the observer knows of the tensor in a block."""

    name: str  # "h.0.attn.weight", "output of h.0"
    shape: tuple[int, ...]
    dtype: str
    module: str | None  # that it belongs to; None: the one that was running when it was made


#: Time in µs, category (None for a tag alone), addresses that held it then, their tags or none.
Label = tuple[int, "str | None", "list[int]", "Sequence[Tag | None] | None"]


class Block:
    """One allocation: where it was born, what it is, and the phase that freed it."""

    __slots__ = ("address", "born", "born_event", "died", "died_event", "label", "recomputed", "size", "stack", "tag")

    def __init__(self, address: int, size: int, born: Mark, stack: list[dict[str, Any]], event: int) -> None:
        self.address = address
        self.size = size
        self.born = born
        self.born_event = event
        self.died: Mark | None = None
        self.died_event: int | None = None
        self.label: str | None = None
        self.tag: Tag | None = None
        self.stack = stack
        self.recomputed = False

    def module(self) -> str | None:
        """Return the module whose forward pass the block serves, None before and between the passes."""
        if self.tag is not None and self.tag.module is not None:
            return self.tag.module
        return module_at(self.born)

    def category(self) -> str:
        """Return what the block held.

        A label from the observer decides. Else a block of the forward pass that outlived it was kept for the
        backward pass: an activation; one that died in the phase it was born in was a temporary.
        """
        if self.label is not None:
            return self.label
        phase = self.born.phase
        same = self.died is not None and (self.died.step, self.died.phase) == (self.born.step, phase)
        if phase == "forward":
            return "temporary" if same else "activation"
        if phase == "backward":
            return "activation" if self.recomputed else "temporary"
        if phase == "optimizer":
            return "temporary" if same else "unknown"
        return "temporary" if same and self.born.module is not None else "unknown"


def module_at(mark: Mark) -> str | None:
    """Return the module that a mark is in; a loss computed by the script itself is outside of them."""
    if mark.module:
        return mark.module.lstrip("+")
    return OUTSIDE if mark.phase in ("forward", "backward") else None


class Moment:
    """The live blocks at the highest point so far."""

    __slots__ = ("blocks", "event", "mark", "stack")

    def __init__(self, event: int, mark: Mark, stack: list[dict[str, Any]], blocks: list[Block]) -> None:
        self.event = event
        self.mark = mark
        self.stack = stack
        self.blocks = blocks


class Ledger:
    """Follows one device's blocks through successive pieces of its trace."""

    def __init__(self, series: Series | None = None) -> None:
        self.series = series
        #: Frames of the first allocation in each module's forward pass, for what the backward pass makes for it.
        self.forward_stacks: dict[str, list[dict[str, Any]]] = {}
        self._events = 0
        self._live: dict[int, Block] = {}
        self._total = 0
        self.peak: Moment | None = None
        self.optional: dict[str, list[int]] = {}  # library -> [highest total with its workspace, largest workspace]
        self._high = 0

    def feed(
        self,
        events: list[dict[str, Any]],
        marks: list[Mark],
        labels: list[Label],
        optional: Iterable[tuple[int, str, int]] = (),
        step: int | None = None,
    ) -> None:
        """Take the next piece of the trace.

        ``step``: the highest point is known to lie in it; it is looked for there. PyTorch's counters know, and the
        trace does not quite: it has the sizes asked for, which are a little less than what blocks take.

        ``events`` are PyTorch's trace entries, oldest first; ``marks`` are in time order; ``optional`` are (time in µs,
        library, bytes) of workspaces that were not asked for but might be on a real GPU.
        """
        times = [mark.time_us for mark in marks]
        changes = [e for e in events if e["action"] in ("alloc", "free_requested")]
        places = [marks[max(0, bisect.bisect_right(times, e["time_us"]) - 1)] for e in changes]
        top = self._highest(changes, places, step)
        queue = sorted(
            [(t, 1, label) for t, *label in labels] + [(t, 2, (what, size)) for t, what, size in optional],
            key=lambda item: item[:2],
        )
        position = 0
        before = list(self._live.values()) if self.series else []
        touched: list[Block | None] = []
        for index, event in enumerate(changes):
            now = event["time_us"]
            while position < len(queue) and queue[position][0] <= now:
                self._note(queue[position][1], queue[position][2])
                position += 1
            mark = places[index]
            touched.append(self._apply(event, mark))
            if index == top:
                self.peak = Moment(self._events, mark, event.get("frames", []), list(self._live.values()))
        for _, kind, item in queue[position:]:
            self._note(kind, item)
        if self.series:
            self.series.feed(events, touched, places, before)

    def _highest(self, changes: list[dict[str, Any]], places: list[Mark], step: int | None) -> int | None:
        """Return the index of the event that reaches a new high, None when this piece has none."""
        total, best, high = self._total, None, self._high
        sizes = {address: block.size for address, block in self._live.items()}
        for index, event in enumerate(changes):
            if event["action"] == "alloc":
                sizes[event["addr"]] = size = rounded(event["size"])
                total += size
                if total > high and (step is None or places[index].step == step):
                    high, best = total, index
            else:
                total -= sizes.pop(event["addr"], 0)
        self._high = high
        return best

    def live(self) -> list[Block]:
        """Return the blocks that live after the last piece."""
        return list(self._live.values())

    def _apply(self, event: dict[str, Any], mark: Mark) -> Block | None:
        address = event["addr"]
        self._events += 1
        if event["action"] == "alloc":
            block = Block(address, rounded(event["size"]), mark, event.get("frames", []), self._events)
            block.recomputed = mark.phase == "backward" and mark.module is not None and mark.module.startswith("+")
            if block.stack and mark.phase == "forward":
                self.forward_stacks.setdefault(module_at(mark) or OUTSIDE, block.stack)
            self._live[address] = block
            self._total += block.size
            return block
        gone = self._live.pop(address, None)
        if gone is not None:
            gone.died, gone.died_event = mark, self._events
            self._total -= gone.size
        return gone

    def _note(self, kind: int, item: Any) -> None:
        if kind == 1:
            self._label(*item)
        else:
            what, size = item
            known = self.optional.setdefault(what, [0, 0])
            known[:] = [max(known[0], self._total + size), max(known[1], size)]

    def _label(self, category: str | None, addresses: list[int], tags: Sequence[Tag | None] | None = None) -> None:
        starts: list[int] | None = None
        for number, address in enumerate(addresses):
            block = self._live.get(address)
            if block is None:  # inside a block: a view, a shard of a flat buffer
                if starts is None:
                    starts = sorted(self._live)
                at = bisect.bisect_right(starts, address) - 1
                block = self._live[starts[at]] if at >= 0 else None
                if block is None or address >= block.address + block.size:
                    continue
            if category is not None and (block.label is None or LABELS.index(category) < LABELS.index(block.label)):
                block.label = category
                block.tag = None
            if tags and block.tag is None and category == block.label:
                block.tag = tags[number]

    def correct_sizes(self, segments: Iterable[dict[str, Any]]) -> None:
        """Take the true sizes of blocks that are still live: an unsplit block is larger than what was asked for."""
        at_peak = {id(block) for block in self.peak.blocks} if self.peak else set()
        for segment in segments:
            address = segment["address"]
            for entry in segment["blocks"]:
                block = self._live.get(entry.get("address", address))
                if block is not None and entry["state"] == "active_allocated":
                    more = entry["size"] - block.size
                    self._total += more
                    self._high += more if id(block) in at_peak else 0
                    block.size = entry["size"]
                address += entry["size"]


def rounded(size: int) -> int:
    """Return what the allocator takes for a request, at the least."""
    return max(ROUNDING_BYTES, -(-size // ROUNDING_BYTES) * ROUNDING_BYTES)


def breakdown(moment: Moment, allocated_bytes: int) -> dict[str, int]:
    """Return ``<category>_bytes`` of the live blocks at a moment; they add up to ``allocated_bytes``.

    The trace records what was asked for. What the allocator gave beyond it, in blocks it did not split, is known in
    total only and counts as unknown.
    """
    totals = dict.fromkeys(CATEGORIES, 0)
    for block in moment.blocks:
        totals[block.category()] += block.size
    slack = allocated_bytes - sum(totals.values())
    totals["unknown"] += slack
    if totals["unknown"] < 0:  # true sizes of a later moment: take it from the largest
        largest = max(CATEGORIES, key=lambda c: totals[c])
        totals[largest] += totals["unknown"]
        totals["unknown"] = 0
    return {f"{category}_bytes": size for category, size in totals.items()}
