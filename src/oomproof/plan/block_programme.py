"""The integer programme behind ``oomproof.plan.blocks.solve``, on scipy's HiGHS.

A block has a binary for each action. Identical blocks have a count for each action instead, where their order can be
settled beforehand. Write d for what a block adds to the level and p for its peak above the level before it: in forward
order, d = retained and p = forward_transient for the forward; d = retained - gradient and p = d + backward_transient
for the backward (with time reversed, the level is S(j) + G(j)). Exchanging two neighbours x, y changes no level but
the one between them, so x before y is no worse when

    max(p_x, d_x + p_y) <= max(p_y, d_y + p_x)

for the forward and for the backward alike. If the actions can be put in a row in which that holds for each against
all later ones, then sorting the blocks of any choice by it, one exchange of neighbours after another, never raises a
peak: some best choice has its actions in runs of that order, and counts lose nothing. Within a run the level goes
one way, so only its first or its last block matters. As a rule blocks that recompute come first and blocks that keep
come last: the recomputation of a block has the more room, the less the blocks before it retain. Where no order serves
both directions, the blocks of the group are told apart.

An action that is slower than another of its block and takes as much in every figure is never part of a fastest choice,
and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomproof.plan.blocks import Action, BlockGroup, Problem

_SCALE = 1 << 20  # the largest figure of a row, so that HiGHS's tolerance of 1e-6 is far below a byte's share
_ATTEMPTS = 4


def useful(problem: Problem, group: BlockGroup) -> list[int]:
    """Return the actions that a fastest choice may use."""

    def beaten(action: Action, by: Action) -> bool:
        return (
            problem.ticks(group, by) < problem.ticks(group, action)
            and by.retained_bytes <= action.retained_bytes
            and by.forward_transient_bytes <= action.forward_transient_bytes
            and by.backward_transient_bytes <= action.backward_transient_bytes
        )

    actions = group.actions
    return [index for index, action in enumerate(actions) if not any(beaten(action, other) for other in actions)]


def run_order(group: BlockGroup, indices: list[int], *, gradients_resident: bool) -> list[int] | None:
    """Return the order in which runs of some of a group's actions lose nothing, None where there is none."""
    gradient = 0 if gradients_resident else group.gradient_bytes
    forward = [(action.retained_bytes, action.forward_transient_bytes) for action in group.actions]
    backward = [
        (action.retained_bytes - gradient, action.retained_bytes - gradient + action.backward_transient_bytes)
        for action in group.actions
    ]

    def may_precede(x: int, y: int) -> bool:
        return all(
            max(line[x][1], line[x][0] + line[y][1]) <= max(line[y][1], line[y][0] + line[x][1])
            for line in (forward, backward)
        )

    left = list(indices)
    order: list[int] = []
    while left:
        # Any that may precede all others will do: an order of the others remains an order without it.
        first = next((x for x in left if all(may_precede(x, y) for y in left if y != x)), None)
        if first is None:
            return None
        order.append(first)
        left.remove(first)
    return order


@dataclass(slots=True)
class _Part:
    """Neighbouring blocks that are decided together: one block, or a group in runs."""

    group: BlockGroup
    first: int  # its first block
    count: int
    order: list[int]  # of actions
    column: int  # of the first action in order; for runs, one column more per action says whether it is used


def _parts(problem: Problem) -> tuple[list[_Part], int]:
    parts = []
    block = column = 0
    for group in problem.groups:
        indices = useful(problem, group)
        resident = problem.gradients_resident
        order = run_order(group, indices, gradients_resident=resident) if group.count > 1 else None
        if order is None:
            order = indices
            for _ in range(group.count):
                parts.append(_Part(group, block, 1, order, column))
                block, column = block + 1, column + len(order)
        else:
            parts.append(_Part(group, block, group.count, order, column))
            block, column = block + group.count, column + 2 * len(order)
    return parts, column


class _Rows:
    """Rows ``coefficients . x <= limit`` in bytes."""

    def __init__(self) -> None:
        self.coefficients: list[Any] = []
        self.limits: list[int] = []

    def add(self, coefficients: Any, limit: int) -> None:
        self.coefficients.append(coefficients)
        self.limits.append(limit)


def fastest(
    problem: Problem, budget_bytes: int, fallback: tuple[str, ...], limit_seconds: float | None
) -> tuple[tuple[str, ...], bool]:
    """Return the best choice within a budget that ``fallback`` meets, and whether it is proven to be the best."""
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    parts, columns = _parts(problem)
    names = sorted({action.name for group in problem.groups for action in group.actions})
    kinds = {name: columns + index for index, name in enumerate(names)}
    width = columns + len(names)
    rows = _memory_rows(problem, budget_bytes, parts, width)
    upper = numpy.ones(width)
    cost = numpy.zeros(width)
    sums = []
    used: list[Any] = []
    for part in parts:
        one = numpy.zeros(width)
        for offset, index in enumerate(part.order):
            action, column = part.group.actions[index], part.column + offset
            upper[column] = part.count
            # Whole numbers, in which any tick weighs more than all kinds together.
            cost[column] = problem.ticks(part.group, action) * (len(names) + 1)
            one[column] = 1
            of_kind = numpy.zeros(width)
            of_kind[column], of_kind[kinds[action.name]] = 1, -part.count
            used.append(of_kind)
            if part.count > 1:
                of_run = numpy.zeros(width)
                of_run[column], of_run[column + len(part.order)] = 1, -part.count
                used.append(of_run)
        sums.append((one, part.count))
    cost[columns:] = 1
    matrix = numpy.array(rows.coefficients, dtype=float)
    limits = numpy.array(rows.limits, dtype=float)
    unit = max(float(numpy.abs(matrix).max(initial=0.0)) / _SCALE, 1.0)
    for _ in range(_ATTEMPTS):
        constraints = [
            LinearConstraint(numpy.array([one for one, _ in sums]), *([[count for _, count in sums]] * 2)),
            LinearConstraint(numpy.array(used), -numpy.inf, 0),
        ]
        if len(limits):
            constraints.append(LinearConstraint(matrix / unit, -numpy.inf, limits / unit))
        options = {"mip_rel_gap": 0.0, **({} if limit_seconds is None else {"time_limit": limit_seconds})}
        whole = numpy.ones(width)
        result = milp(cost, integrality=whole, bounds=Bounds(0, upper), constraints=constraints, options=options)
        if result.x is None:
            break
        actions = _in_runs(problem, _actions(parts, result.x), budget_bytes)
        over = problem.predict(actions).peak_bytes - budget_bytes
        if over <= 0:
            return actions, result.status == 0
        limits = limits - over  # rounding to whole numbers went over by a few bytes
    return fallback, False


def _in_runs(problem: Problem, actions: tuple[str, ...], budget_bytes: int) -> tuple[str, ...]:
    """Sort the actions of each group into runs, those with the highest backward first, where that fits as well."""
    tidy: list[str] = []
    for group in problem.groups:
        backward = {action.name: action.backward_transient_bytes for action in group.actions}
        members = actions[len(tidy) : len(tidy) + group.count]
        tidy += sorted(members, key=lambda name: (-backward[name], name))
    return tuple(tidy) if problem.predict(tidy).peak_bytes <= budget_bytes else actions


def _memory_rows(problem: Problem, budget_bytes: int, parts: list[_Part], width: int) -> _Rows:
    import numpy

    forward = budget_bytes - problem.resident_bytes - problem.offset_bytes("forward")
    backward = budget_bytes - problem.base_bytes - problem.tail_left_bytes - problem.offset_bytes("backward")
    rows = _Rows()
    retained = numpy.zeros(width)  # S at the start of the part, as a row; all figures are exact below 2^53
    for part in parts:
        actions = [part.group.actions[index] for index in part.order]
        count = len(actions)
        columns = slice(part.column, part.column + count)
        if part.count == 1:
            row = retained.copy()
            row[columns] = [action.forward_transient_bytes for action in actions]
            rows.add(row, forward)
            row = retained.copy()
            row[columns] = [action.retained_bytes + action.backward_transient_bytes for action in actions]
            rows.add(row, backward - problem.gradients_after[part.first])
        else:
            _run_rows(problem, parts, part, retained, rows, forward, backward)
        retained[columns] = [action.retained_bytes for action in actions]
    turn = budget_bytes - problem.resident_bytes - problem.tail_bytes - problem.offset_bytes("turn")
    rows.add(retained, turn)
    return rows


def _run_rows(
    problem: Problem, parts: list[_Part], part: _Part, retained: Any, rows: _Rows, forward: int, backward: int
) -> None:
    """Add the rows of a group in runs: the first or last block of each run, if the run is not empty."""
    actions = [part.group.actions[index] for index in part.order]
    last = problem.gradients_after[part.first + part.count - 1]  # during the last block's backward
    gradient = 0 if problem.gradients_resident else part.group.gradient_bytes
    for position, action in enumerate(actions):
        before = slice(part.column, part.column + position)
        here = part.column + position
        row = retained.copy()
        row[before] = [other.retained_bytes for other in actions[:position]]
        limit = forward - action.forward_transient_bytes
        if action.retained_bytes > 0:  # the last block of the run
            row[here] = action.retained_bytes
            limit += action.retained_bytes
        _if_used(rows, row, limit, parts, here + len(actions))
        row = retained.copy()
        row[before] = [other.retained_bytes - gradient for other in actions[:position]]
        limit = backward - last - part.count * gradient - action.backward_transient_bytes
        change = action.retained_bytes - gradient
        if change > 0:  # the last block of the run
            row[here] = change
        else:
            limit -= change
        _if_used(rows, row, limit, parts, here + len(actions))


def _if_used(rows: _Rows, row: Any, limit: int, parts: list[_Part], switch: int) -> None:
    """Add a row that counts only while the binary in column ``switch`` is one."""
    highest = sum(part.count * max(0.0, row[part.column : part.column + len(part.order)].max()) for part in parts)
    slack = int(highest) - limit
    if slack > 0:
        row[switch] = slack
        rows.add(row, limit + slack)


def _actions(parts: list[_Part], solution: Any) -> tuple[str, ...]:
    chosen: list[str] = []
    for part in parts:
        for offset, index in enumerate(part.order):
            chosen += [part.group.actions[index].name] * round(solution[part.column + offset])
    return tuple(chosen)
