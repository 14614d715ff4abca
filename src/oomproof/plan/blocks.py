"""Which repeated block keeps, recomputes or offloads what: the fastest choice whose every moment fits.

A step is a line of moments at which memory can peak. With blocks 0 to n-1 in forward order, each under one action,
S(j) the sum of ``retained_bytes`` of the blocks before j and G(j) that of ``gradient_bytes`` from j on:

    front      base + front_forward                            before the first block
    forward j  base + S(j) + forward_transient(j)
    turn       base + S(n) + tail                              after the last block's forward, before its backward
    backward j base + tail_left + S(j+1) + G(j+1) + backward_transient(j)
    end        base + tail_left + G(0) + front_backward        after the first block's backward
    optimizer  base + G(0) + optimizer_transient

Where gradients are resident before the step, G(0) is there from the start, and blocks add none. All figures are
differences between levels that a run shows (``oomproof.plan.block_surveys``), so under a choice that was surveyed the
line is exact. Blocks may hold on to each other's tensors, so another choice is verified by a run, and
``Problem.corrected`` learns from the run.

``solve`` gives the fastest choice under a budget, with the fewest kinds of actions among equals; ``frontier`` does so
for several budgets. Seconds are compared in ticks of at most 2^-15 of the largest difference between two actions of a
block: what is smaller is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Phase = Literal["front", "forward", "turn", "backward", "end", "optimizer"]
MeasuredPhase = Literal["forward", "backward", "optimizer"]

#: The phases whose predictions a peak measured in a phase of the run speaks of; the turn is part of both.
_SPEAKS_OF: dict[MeasuredPhase, tuple[Phase, ...]] = {
    "forward": ("front", "forward", "turn"),
    "backward": ("turn", "backward", "end"),
    "optimizer": ("optimizer",),
}
_TICKS = 1 << 16  # of the largest difference between two actions of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What one block takes when it is treated in one way.

    The transients are the highest level during its forward or backward, less the level at which that began: of a
    forward it includes what will be retained, of a backward the recomputation.
    """

    name: str
    retained_bytes: int  # the level after its forward less that before; negative when it lets go of its input
    forward_transient_bytes: int
    backward_transient_bytes: int
    seconds: float  # of a step; only differences between actions matter


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Successive blocks with the same figures."""

    actions: tuple[Action, ...]
    gradient_bytes: int  # left by one block's backward
    count: int = 1
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A moment of the step and the memory predicted for it."""

    phase: Phase
    block: int | None  # None outside the blocks
    allocated_bytes: int

    def __str__(self) -> str:
        return self.phase if self.block is None else f"{self.phase} of block {self.block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The true peak of a choice."""

    actions: tuple[str, ...]
    peak_bytes: int
    phase: MeasuredPhase | None  # where it was; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An action for each block; ``peak_bytes`` is predicted, or measured where ``Problem`` has seen this choice."""

    actions: tuple[str, ...]
    peak_bytes: int
    seconds: float
    binds: Position  # the highest moment of the prediction
    measured: bool = False
    proven: bool = True  # False: the solver's time ran out before it knew that nothing is faster

    @property
    def kinds(self) -> tuple[str, ...]:
        """The different actions, in order of first use."""
        return tuple(dict.fromkeys(self.actions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No choice fits; ``closest`` is one with the lowest peak, ``least_bytes``."""

    least_bytes: int
    closest: Choice


@dataclass(frozen=True, kw_only=True)  # not slotted: cached properties
class Problem:
    """The blocks, what lies around them and what runs have taught. Raises ValueError with everything that is wrong."""

    groups: tuple[BlockGroup, ...]
    base_bytes: int  # the level when the first block's forward begins: parameters, states, inputs
    tail_bytes: int  # highest between the blocks' forward and their backward (head, loss), above base and retained
    tail_left_bytes: int = 0  # of that, what stays during the blocks' backward: the head's gradients and the output's
    front_forward_bytes: int = 0  # highest before the first block, above base
    front_backward_bytes: int = 0  # highest after the first block's backward, above base, tail_left and gradients
    optimizer_transient_bytes: int = 0  # highest during the step, above base and the blocks' gradients
    gradients_resident: bool = False  # accumulated: the blocks' gradients, not in base, are there from the start
    observations: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        wrong = []
        if not self.groups:
            wrong.append("no blocks")
        for index, group in enumerate(self.groups):
            where = f"group {index}" + (f" ({group.name})" if group.name else "")
            names = [action.name for action in group.actions]
            if group.count < 1:
                wrong.append(f"{where} has {group.count} blocks")
            if not names:
                wrong.append(f"{where} has no action")
            if len(set(names)) < len(names):
                wrong.append(f"{where} has two actions of one name")
            wrong += [
                f"{where}, {action.name}: {action.seconds} seconds"
                for action in group.actions
                if not math.isfinite(action.seconds)
            ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @cached_property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """The group of each block."""
        return tuple(group for group in self.groups for _ in range(group.count))

    @cached_property
    def gradients_after(self) -> tuple[int, ...]:
        """What gradients are there during each block's backward, and when all are done."""
        total = sum(block.gradient_bytes for block in self.blocks)
        if self.gradients_resident:
            return (total,) * len(self.blocks) + (total,)
        after = [total]
        for block in self.blocks:
            after.append(after[-1] - block.gradient_bytes)
        return (*after[1:], total)

    @cached_property
    def resident_bytes(self) -> int:
        """The base, with the gradients that are there from the start."""
        return self.base_bytes + (self.gradients_after[-1] if self.gradients_resident else 0)

    @cached_property
    def tick_seconds(self) -> float:
        """The unit in which seconds are compared: a power of two, so that round figures stay exact."""
        spread = max(
            max(action.seconds for action in group.actions) - min(action.seconds for action in group.actions)
            for group in self.groups
        )
        return 2.0 ** math.ceil(math.log2(spread / _TICKS)) if spread > 0 else 1.0

    def ticks(self, group: BlockGroup, action: Action) -> int:
        """Return what an action costs beyond the group's fastest, in ticks."""
        fastest = min(other.seconds for other in group.actions)
        return round((action.seconds - fastest) / self.tick_seconds)

    def offset_bytes(self, phase: Phase) -> int:
        """Return what runs have taught to add to the prediction of a phase; negative when it is too high."""
        return self._offsets[phase]

    @cached_property
    def _offsets(self) -> dict[Phase, int]:
        plain = replace(self, observations=()) if self.observations else self
        found: dict[Phase, list[int]] = {phase: [] for phases in _SPEAKS_OF.values() for phase in phases}
        for seen in self.observations:
            told = _SPEAKS_OF[seen.phase] if seen.phase else tuple(found)
            positions = plain.positions(seen.actions)
            highest = max(position.allocated_bytes for position in positions if position.phase in told)
            for phase in found:
                if phase in told:
                    found[phase].append(seen.peak_bytes - highest)
                else:
                    # Elsewhere memory stayed below the peak, so a prediction above it was too high by the difference.
                    there = max((p.allocated_bytes for p in positions if p.phase == phase), default=0)
                    found[phase].append(min(0, seen.peak_bytes - there))
        return {phase: max(values, default=0) for phase, values in found.items()}

    def positions(self, actions: Sequence[str]) -> list[Position]:
        """Return the predicted memory of every moment of a step, in order, with what runs have taught.

        Raises ValueError when there isn't one known action for each block.
        """
        chosen = self._chosen(actions)
        resident, left = self.resident_bytes, self.base_bytes + self.tail_left_bytes
        offset = self._offsets if self.observations else dict.fromkeys(_ALL_PHASES, 0)
        found: list[tuple[Phase, int | None, int]] = [("front", None, resident + self.front_forward_bytes)]
        retained = [0]
        for block, action in enumerate(chosen):
            found.append(("forward", block, resident + retained[-1] + action.forward_transient_bytes))
            retained.append(retained[-1] + action.retained_bytes)
        found.append(("turn", None, resident + retained[-1] + self.tail_bytes))
        for block in reversed(range(len(chosen))):
            level = left + retained[block + 1] + self.gradients_after[block]
            found.append(("backward", block, level + chosen[block].backward_transient_bytes))
        gradients = self.gradients_after[-1]
        found.append(("end", None, left + gradients + self.front_backward_bytes))
        found.append(("optimizer", None, self.base_bytes + gradients + self.optimizer_transient_bytes))
        return [
            Position(phase=phase, block=block, allocated_bytes=level + offset[phase]) for phase, block, level in found
        ]

    def predict(self, actions: Sequence[str]) -> Choice:
        """Return the predicted peak and seconds of a choice."""
        chosen = self._chosen(actions)
        highest = max(self.positions(actions), key=lambda position: position.allocated_bytes)
        ticks = sum(self.ticks(block, action) for block, action in zip(self.blocks, chosen, strict=True))
        fastest = math.fsum(min(action.seconds for action in block.actions) for block in self.blocks)
        return Choice(
            actions=tuple(actions),
            peak_bytes=highest.allocated_bytes,
            seconds=fastest + ticks * self.tick_seconds,
            binds=highest,
        )

    def corrected(
        self, choice: Choice | Sequence[str], measured_peak_bytes: int, phase: MeasuredPhase | None = None
    ) -> Problem:
        """Return the problem with what a run of a choice has shown.

        Predictions of the phase (of all phases when it is not known) are shifted by the largest difference that any
        run has shown, so a choice that missed the budget is never proposed for it again, nor is one that takes as much
        by the prediction. A choice that was run counts with its measured peak.
        """
        actions = tuple(choice.actions if isinstance(choice, Choice) else choice)
        self._chosen(actions)
        seen = Observation(actions=actions, peak_bytes=measured_peak_bytes, phase=phase)
        return replace(self, observations=(*self.observations, seen))

    def _chosen(self, actions: Sequence[str]) -> list[Action]:
        if len(actions) != len(self.blocks):
            raise ValueError(f"{len(actions)} actions for {len(self.blocks)} blocks")
        known = [{action.name: action for action in group.actions} for group in self.groups]
        tables = [table for table, group in zip(known, self.groups, strict=True) for _ in range(group.count)]
        missing = sorted({name for name, table in zip(actions, tables, strict=True) if name not in table})
        if missing:
            raise ValueError(f"not an action of its block: {', '.join(missing)}")
        return [table[name] for name, table in zip(actions, tables, strict=True)]


_ALL_PHASES: tuple[Phase, ...] = ("front", "forward", "turn", "backward", "end", "optimizer")


def solve(problem: Problem, budget_bytes: int, *, limit_seconds: float | None = None) -> Choice | Infeasible:
    """Return the fastest choice whose predicted peak is at most the budget.

    More budget never gives a slower choice. ``limit_seconds`` ends the search for a proof: the choice then fits, and
    ``proven`` is false. Needs scipy, which is imported here.
    """
    from oomproof.plan import block_programme

    least = least_peak(problem)
    seen = [_measured(problem, observation) for observation in problem.observations]
    fitting = [choice for choice in seen if choice.peak_bytes <= budget_bytes]
    if least.peak_bytes <= budget_bytes:
        actions, proven = block_programme.fastest(problem, budget_bytes, least.actions, limit_seconds)
        choice = replace(problem.predict(actions), proven=proven)
        if choice.peak_bytes > budget_bytes:
            raise AssertionError(f"{choice} is above the budget of {budget_bytes} bytes")
        fitting.append(choice)
    if fitting:  # of equals a measured one comes first
        return min(fitting, key=lambda choice: (choice.seconds, len(choice.kinds)))
    closest = min([*seen, least], key=lambda choice: choice.peak_bytes)
    return Infeasible(least_bytes=closest.peak_bytes, closest=closest)


def frontier(
    problem: Problem, budgets_bytes: Iterable[int], *, limit_seconds: float | None = None
) -> list[Choice | Infeasible]:
    """Return ``solve`` for each budget, in the order given; ``limit_seconds`` is for each."""
    budgets = list(budgets_bytes)
    found: dict[int, Choice | Infeasible] = {}
    last: Choice | Infeasible | None = None
    for budget in sorted(set(budgets), reverse=True):
        # The best of a larger budget that fits a smaller one is the best there, too.
        if not (isinstance(last, Choice) and last.proven and last.peak_bytes <= budget):
            last = solve(problem, budget, limit_seconds=limit_seconds)
        found[budget] = last
    return [found[budget] for budget in budgets]


def least_peak(problem: Problem) -> Choice:
    """Return a choice with the lowest predicted peak of all.

    Whether a limit can be met is decided block by block: every moment is bounded from above by a level that grows with
    what the blocks before retain, so of the actions that fit at a block the one that retains least leaves most room
    for all that follow. The lowest limit is found by bisection.
    """
    fixed = [
        p.allocated_bytes for p in problem.positions(_names(problem, 0)) if p.phase in ("front", "end", "optimizer")
    ]
    low, high = max(fixed), max(problem.predict(_names(problem, 0)).peak_bytes, *fixed)
    best = _within(problem, high)
    assert best is not None  # the first action of each block fits by construction
    while low < high:
        middle = (low + high) // 2
        found = _within(problem, middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return problem.predict(best)


def _within(problem: Problem, limit_bytes: int) -> tuple[str, ...] | None:
    """Return a choice whose blocks and turn stay within a limit, None when there is none."""
    forward = limit_bytes - problem.resident_bytes - problem.offset_bytes("forward")
    backward = limit_bytes - problem.base_bytes - problem.tail_left_bytes - problem.offset_bytes("backward")
    turn = limit_bytes - problem.resident_bytes - problem.tail_bytes - problem.offset_bytes("turn")
    retained = 0
    chosen = []
    for block, gradients in zip(problem.blocks, problem.gradients_after, strict=False):
        fits = [
            action
            for action in block.actions
            if retained + action.forward_transient_bytes <= forward
            and retained + action.retained_bytes + gradients + action.backward_transient_bytes <= backward
        ]
        if not fits:
            return None
        action = min(fits, key=lambda action: (action.retained_bytes, action.seconds))
        retained += action.retained_bytes
        chosen.append(action.name)
    return tuple(chosen) if retained <= turn else None


def _names(problem: Problem, index: int) -> tuple[str, ...]:
    return tuple(block.actions[index].name for block in problem.blocks)


def _measured(problem: Problem, seen: Observation) -> Choice:
    predicted = problem.predict(seen.actions)
    return replace(predicted, peak_bytes=seen.peak_bytes, measured=True)
