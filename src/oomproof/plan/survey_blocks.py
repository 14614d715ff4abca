"""What each of a model's repeated blocks takes in one training step, under the action that is applied to it.

Runs in the user's interpreter: standard library and torch only, Python 3.9. The figures are differences between levels
of ``memory_allocated`` at the borders between blocks, so they add up to what the step took. A block's figures reach up
to the next one: its output counts as its own, its input as that of the block before. Eager code only; ``result`` is
what ``oomproof.plan.block_surveys.Survey.from_dict`` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class _Mark(NamedTuple):
    kind: str
    block: int
    level: int  # allocated now
    peak: int  # highest since the mark before


class BlockSurvey:
    """Hooks on repeated blocks, in forward order, of which the latest whole pass is kept.

    ``with BlockSurvey(blocks) as survey: step()``. Peak statistics are reset at each border, so ``peak_bytes`` in the
    result stands for ``max_memory_allocated()``. A block that runs again during backward is being recomputed: that is
    part of its backward.
    """

    def __init__(self, blocks: Iterable[Any], device: Any = None) -> None:
        self.blocks = list(blocks)
        if not self.blocks:
            raise ValueError("no blocks to survey")
        self.device = device
        self._marks: list[_Mark] = []
        self._handles: list[Any] = []
        self._in_backward = False
        self._after_last = False

    def __enter__(self) -> BlockSurvey:
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            self._handles.append(block.register_forward_pre_hook(self._before(index), with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._after(index, index == last)))
        self._handles.append(register_module_forward_pre_hook(self._another_module))
        self._handles.append(register_optimizer_step_pre_hook(lambda *_: self._mark("step")))
        self._handles.append(register_optimizer_step_post_hook(lambda *_: self._mark("stepped")))
        self._mark("start")
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._mark("exit")

    def _mark(self, kind: str, block: int = -1) -> None:
        level = torch.cuda.memory_allocated(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self._marks.append(_Mark(kind, block, level, peak))
        torch.cuda.reset_peak_memory_stats(self.device)

    def _before(self, index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if self._in_backward:
                return  # a block that recomputes itself
            self._after_last = False
            if index == 0:
                self._marks.clear()
            self._mark("forward", index)
            entered = _gradient_carrier((args, kwargs))
            if index == 0 and entered is not None:
                entered.register_hook(lambda _: self._mark("front"))

        return hook

    def _after(self, index: int, last: bool) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self._in_backward:
                return
            left = _gradient_carrier(output)
            if left is not None:
                left.register_hook(lambda _: self._backward(index))
            if last:
                self._mark("turn")
                self._after_last = True

        return hook

    def _another_module(self, module: Any, args: Any) -> None:
        # While a block returns, its caller still holds its input; the next module to run shows what really stays.
        if self._after_last:
            before = self._marks.pop().peak
            self._mark("turn")
            self._marks[-1] = self._marks[-1]._replace(peak=max(before, self._marks[-1].peak))
            self._after_last = False

    def _backward(self, index: int) -> None:
        self._after_last = False
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._mark("backward", index)

    def _end(self) -> None:
        self._in_backward = False
        self._mark("end")

    def result(self) -> dict[str, Any]:
        """Return the figures of the latest pass in bytes; raises ValueError when it was not a whole one."""
        marks = self._marks
        order = [(mark.kind, mark.block) for mark in marks]
        count = len(self.blocks)
        wanted = [("forward", index) for index in range(count)] + [("turn", -1)]
        wanted += [("backward", index) for index in reversed(range(count))]
        seen = [mark for mark in order if mark[0] in ("forward", "turn", "backward")]
        if seen != wanted:
            gap = _first_gap(seen, wanted)
            raise ValueError(f"the blocks did not run once each, forward and backward, in the order given: {gap}")
        after = {order[place]: marks[place + 1] for place in range(len(marks) - 1)}
        level = {order[place]: mark.level for place, mark in enumerate(marks) if mark.kind not in ("step", "stepped")}
        base = level[("forward", 0)]
        blocks = []
        for index in range(count):
            forward, backward = ("forward", index), ("backward", index)
            retained = after[forward].level - level[forward]
            blocks.append(
                {
                    "retained_bytes": retained,
                    "forward_transient_bytes": after[forward].peak - level[forward],
                    "backward_transient_bytes": after[backward].peak - level[backward],
                    "gradient_bytes": after[backward].level - level[backward] + retained,
                }
            )
        turn = ("turn", -1)
        gradients = sum(block["gradient_bytes"] for block in blocks)
        steps = [marks[place + 1].peak for place, mark in enumerate(marks) if mark.kind == "step"]
        left = after[turn].level - level[turn]
        front = after.get(("front", -1))
        return {
            "blocks": blocks,
            "base_bytes": base,
            "tail_bytes": after[turn].peak - level[turn],
            "tail_left_bytes": left,
            "front_forward_bytes": marks[0].peak - base,
            "front_backward_bytes": front.peak - (base + left + gradients) if front else 0,
            "optimizer_transient_bytes": max(steps) - (base + gradients) if steps else 0,
            "peak_bytes": max(mark.peak for mark in marks),
        }


def _gradient_carrier(value: Any) -> Any:
    """Return the first tensor in a block's inputs or outputs that gradients flow through."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad and value.is_floating_point() else None
    parts: Sequence[Any] = ()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = value
    return next((found for found in map(_gradient_carrier, parts) if found is not None), None)


def _first_gap(seen: list[tuple[str, int]], wanted: list[tuple[str, int]]) -> str:
    for place, expected in enumerate(wanted):
        if place >= len(seen):
            return f"nothing after {place} of {len(wanted)} borders; {expected[0]} of block {expected[1]} is missing"
        if seen[place] != expected:
            return f"{seen[place][0]} of block {seen[place][1]} came where {expected[0]} of block {expected[1]} was due"
    return f"{len(seen)} borders instead of {len(wanted)}"
