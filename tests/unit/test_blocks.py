"""The choice of an action for each block, against every choice there is."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from oomproof.plan.block_programme import run_order, useful
from oomproof.plan.block_surveys import Survey, SurveyedBlock, problem_from_surveys
from oomproof.plan.blocks import (
    Action,
    BlockGroup,
    Choice,
    Infeasible,
    Problem,
    frontier,
    least_peak,
    solve,
)

SEEDS = range(24)


def action(name: str, retained: int, forward: int, backward: int, seconds: float) -> Action:
    return Action(
        name=name,
        retained_bytes=retained,
        forward_transient_bytes=forward,
        backward_transient_bytes=backward,
        seconds=seconds,
    )


def random_problem(seed: int, *, unit: int = 1) -> Problem:
    """Return at most 6 blocks in groups, of figures without any pattern; some let go of more than they retain."""
    draw = random.Random(seed)

    def group() -> BlockGroup:
        actions = [
            action(
                name,
                draw.randint(-3, 20) * unit,
                draw.randint(0, 25) * unit,
                draw.randint(0, 25) * unit,
                draw.randint(0, 6),
            )
            for name in draw.sample("abcd", draw.randint(1, 3))
        ]
        return BlockGroup(actions=tuple(actions), gradient_bytes=draw.randint(0, 8) * unit, count=draw.randint(1, 3))

    groups = [group() for _ in range(2)]
    return Problem(
        groups=tuple(groups),
        base_bytes=draw.randint(0, 50) * unit,
        tail_bytes=draw.randint(0, 30) * unit,
        tail_left_bytes=draw.randint(-5, 15) * unit,
        front_forward_bytes=draw.randint(-5, 20) * unit,
        front_backward_bytes=draw.randint(0, 20) * unit,
        optimizer_transient_bytes=draw.randint(0, 40) * unit,
        gradients_resident=draw.random() < 0.3,
    )


def every_choice(problem: Problem) -> Iterator[Choice]:
    names = [[action.name for action in block.actions] for block in problem.blocks]
    return (problem.predict(actions) for actions in itertools.product(*names))


def best_of_all(choices: Sequence[Choice], budget: int) -> tuple[float, int] | None:
    """Return the seconds and kinds of the best choice, None when none fits."""
    return min(((c.seconds, len(c.kinds)) for c in choices if c.peak_bytes <= budget), default=None)


@pytest.mark.parametrize("unit", [1, (512 << 20) - 512])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_is_better(seed: int, unit: int) -> None:
    """At every budget the answer is as fast as the best of all choices, fits, and uses as few kinds of actions."""
    problem = random_problem(seed, unit=unit)
    choices = list(every_choice(problem))
    peaks = sorted({choice.peak_bytes for choice in choices})
    for budget in [peaks[0] - 1, *peaks[:: max(1, len(peaks) // 6)], peaks[-1]]:
        found = solve(problem, budget)
        best = best_of_all(choices, budget)
        if best is None:
            assert isinstance(found, Infeasible)
        else:
            assert isinstance(found, Choice)
            assert (found.seconds, len(found.kinds)) == best
            assert found.peak_bytes <= budget
            assert found == replace(problem.predict(found.actions), proven=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_least_peak_is_the_lowest(seed: int) -> None:
    """What is called the least is the lowest peak of all choices, and one byte below it nothing fits."""
    problem = random_problem(seed)
    least = min(choice.peak_bytes for choice in every_choice(problem))
    assert least_peak(problem).peak_bytes == least
    found = solve(problem, least - 1)
    assert isinstance(found, Infeasible)
    assert found.least_bytes == found.closest.peak_bytes == least
    assert isinstance(solve(problem, least), Choice)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_is_never_slower(seed: int) -> None:
    """Along rising budgets seconds never rise, and what fitted once fits from there on."""
    draw = random.Random(seed)
    blocks = tuple(
        BlockGroup(
            actions=(
                action("keep", kept := draw.randint(1000, 2000), kept + 100, 150, 0.0),
                action("recompute", kept // 20, kept // 3, kept + 150, seconds := draw.uniform(0.5, 1.5)),
                action("selective", kept // 2, kept, kept // 2, seconds * draw.uniform(0.05, 0.3)),
            ),
            gradient_bytes=draw.randint(0, 100),
        )
        for _ in range(12)
    )
    problem = Problem(groups=blocks, base_bytes=5000, tail_bytes=800)
    least, most = least_peak(problem).peak_bytes, problem.predict(["keep"] * 12).peak_bytes
    budgets = [least - 1, *(least + (most - least) * step // 25 for step in range(26))]
    answers = [solve(problem, budget) for budget in budgets]
    assert isinstance(answers[0], Infeasible)
    seconds = [answer.seconds for answer in answers[1:] if isinstance(answer, Choice)]
    assert len(seconds) == 26
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0 < seconds[0]


def test_frontier_answers_as_solve_does() -> None:
    """A frontier has the answer of solve for each budget, in the order asked for."""
    problem = random_problem(3)
    peaks = [choice.peak_bytes for choice in every_choice(problem)]
    budgets = [max(peaks), min(peaks) - 1, *peaks[:4], max(peaks)]
    answers = frontier(problem, budgets)
    for budget, answer in zip(budgets, answers, strict=True):
        alone = solve(problem, budget)
        assert type(answer) is type(alone)
        if isinstance(alone, Choice) and isinstance(answer, Choice):
            assert (answer.seconds, len(answer.kinds)) == (alone.seconds, len(alone.kinds))
            assert answer.peak_bytes <= budget


def three_ways(count: int = 6) -> Problem:
    group = BlockGroup(
        actions=(
            action("keep", 100, 110, 20, 1.0),
            action("recompute", 10, 60, 115, 1.5),
            action("selective", 50, 80, 60, 1.125),
        ),
        gradient_bytes=5,
        count=count,
        name="layers",
    )
    return Problem(groups=(group,), base_bytes=1000, tail_bytes=50, tail_left_bytes=7)


def test_blocks_that_recompute_come_first() -> None:
    """Among identical blocks those that recompute stand first, where the others leave room for recomputing."""
    problem = three_ways()
    order = run_order(problem.groups[0], [0, 1, 2], gradients_resident=False)
    assert order is not None
    assert [problem.groups[0].actions[index].name for index in order] == ["recompute", "selective", "keep"]
    counts = dict.fromkeys(["recompute", "keep"], 3)
    sorted_way = problem.predict([name for name, count in counts.items() for _ in range(count)]).peak_bytes
    arrangements = set(itertools.permutations(["keep"] * 3 + ["recompute"] * 3))
    assert sorted_way == min(problem.predict(actions).peak_bytes for actions in arrangements)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_an_order_loses_nothing(seed: int, resident: bool) -> None:
    """Where a group's actions have an order, no arrangement of any choice has a lower peak than the sorted one."""
    draw = random.Random(seed)
    actions = tuple(
        action(name, draw.randint(-2, 9), draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 3)) for name in "abc"
    )
    group = BlockGroup(actions=actions, gradient_bytes=draw.randint(0, 5), count=4)
    order = run_order(group, [0, 1, 2], gradients_resident=resident)
    if order is None:
        return
    problem = Problem(groups=(group,), base_bytes=0, tail_bytes=0, gradients_resident=resident)
    rank = {actions[index].name: place for place, index in enumerate(order)}
    for chosen in itertools.product("abc", repeat=4):
        sorted_way = problem.predict(sorted(chosen, key=lambda name: rank[name]))
        assert sorted_way.peak_bytes <= problem.predict(chosen).peak_bytes


def test_some_groups_have_an_order_and_some_have_none() -> None:
    """Both ways of writing the programme are met by the random groups of these tests."""
    orders = [
        run_order(group, useful(problem, group), gradients_resident=problem.gradients_resident) is not None
        for problem in map(random_problem, SEEDS)
        for group in problem.groups
        if group.count > 1 and len(group.actions) > 1
    ]
    assert any(orders)
    assert not all(orders)


def test_moments_of_a_step() -> None:
    """Each moment's memory is what the levels before it add up to."""
    blocks = BlockGroup(actions=(action("keep", 10, 12, 4, 0), action("drop", 1, 6, 14, 1)), gradient_bytes=3, count=2)
    problem = Problem(
        groups=(blocks,),
        base_bytes=100,
        tail_bytes=20,
        tail_left_bytes=2,
        front_forward_bytes=7,
        front_backward_bytes=5,
        optimizer_transient_bytes=30,
    )
    moments = {str(p): p.allocated_bytes for p in problem.positions(["drop", "keep"])}
    assert moments == {
        "front": 107,
        "forward of block 0": 106,
        "forward of block 1": 113,
        "turn": 131,
        "backward of block 1": 100 + 2 + 11 + 0 + 4,
        "backward of block 0": 100 + 2 + 1 + 3 + 14,
        "end": 100 + 2 + 6 + 5,
        "optimizer": 100 + 6 + 30,
    }
    choice = problem.predict(["drop", "keep"])
    assert (choice.peak_bytes, str(choice.binds), choice.seconds) == (136, "optimizer", 1.0)
    resident = replace(problem, gradients_resident=True)
    moments = {str(p): p.allocated_bytes for p in resident.positions(["drop", "keep"])}
    assert moments["forward of block 0"] == 112
    assert moments["backward of block 1"] == 123
    assert moments["optimizer"] == 136


def test_equal_seconds_take_fewer_kinds() -> None:
    """Of choices that take equally long the one with fewer kinds of actions is returned."""
    first = BlockGroup(actions=(action("a", 10, 10, 0, 1), action("b", 10, 10, 0, 1)), gradient_bytes=0)
    second = BlockGroup(actions=(action("b", 10, 10, 0, 2), action("c", 10, 10, 0, 2)), gradient_bytes=0, count=3)
    found = solve(Problem(groups=(first, second), base_bytes=0, tail_bytes=0), 100)
    assert isinstance(found, Choice)
    assert found.actions == ("b",) * 4


@pytest.mark.parametrize("phase", [None, "forward", "backward"])
@pytest.mark.parametrize("seed", range(15))
def test_a_miss_is_not_repeated(seed: int, phase: str | None) -> None:
    """Learning from runs that take more than predicted ends with a choice that fits or with none, repeating none."""
    problem = random_problem(seed)
    draw = random.Random(seed)
    extra = {name: draw.randint(0, 12) for name in "abcd"}  # what the model does not know

    def truth(actions: Sequence[str]) -> int:
        return problem.predict(actions).peak_bytes + sum(extra[name] for name in actions)

    peaks = sorted(choice.peak_bytes for choice in every_choice(problem))
    budget = peaks[len(peaks) // 2]
    learned, tried = problem, []
    while isinstance(found := solve(learned, budget), Choice):
        if found.measured:
            break
        assert found.actions not in tried
        tried.append(found.actions)
        learned = learned.corrected(found, truth(found.actions), phase)  # type: ignore[arg-type]
        assert learned.predict(found.actions).peak_bytes >= truth(found.actions)
    if isinstance(found, Choice):
        assert truth(found.actions) == found.peak_bytes <= budget
    else:
        assert all(truth(actions) > budget for actions in tried)
        assert found.least_bytes > budget


def test_a_run_below_its_prediction_gives_room() -> None:
    """A measured peak below the prediction lowers later ones, and the choice that was run counts as measured."""
    problem = three_ways()
    budget = problem.predict(["recompute", "recompute", "keep", "keep", "keep", "keep"]).peak_bytes
    first = solve(problem, budget)
    assert isinstance(first, Choice)
    learned = problem.corrected(first, first.peak_bytes - 40)
    assert learned.predict(first.actions).peak_bytes == first.peak_bytes - 40
    second = solve(learned, budget)
    assert isinstance(second, Choice)
    assert second.seconds < first.seconds
    assert second.peak_bytes <= budget


def test_a_phase_is_corrected_alone() -> None:
    """A peak seen in the optimizer step does not move what is predicted for the blocks."""
    problem = replace(three_ways(), optimizer_transient_bytes=900)
    keep = ["keep"] * 6
    learned = problem.corrected(keep, 3000, "optimizer")
    assert learned.predict(keep).peak_bytes == 3000
    assert learned.predict(keep).binds.phase == "optimizer"
    before = {str(p): p.allocated_bytes for p in problem.positions(keep)}
    after = {str(p): p.allocated_bytes for p in learned.positions(keep)}
    assert {name for name in before if before[name] != after[name]} == {"optimizer"}


def test_runs_are_read_into_a_problem() -> None:
    """Surveys of one action each become groups of blocks with the same figures; what is common is at its highest."""

    def survey(retained: int, base: int) -> Survey:
        block = {"retained_bytes": retained, "forward_transient_bytes": 30, "backward_transient_bytes": 9}
        data = {
            "blocks": [{**block, "gradient_bytes": 4}, {**block, "gradient_bytes": 4}, {**block, "gradient_bytes": 6}],
            "base_bytes": base,
            "tail_bytes": 5,
            "tail_left_bytes": 1,
            "front_forward_bytes": 0,
            "front_backward_bytes": 3,
            "optimizer_transient_bytes": 8,
            "peak_bytes": 500 + retained,
        }
        return Survey.from_dict(data)

    seconds = {"keep": [0.0] * 3, "drop": [1.0] * 3}
    problem = problem_from_surveys({"keep": survey(20, 100), "drop": survey(2, 101)}, seconds, alike_bytes=1)
    assert [group.count for group in problem.groups] == [2, 1]
    assert problem.base_bytes == 101
    assert [a.retained_bytes for a in problem.groups[0].actions] == [20, 2]
    found = solve(problem, 520)
    assert isinstance(found, Choice)
    assert (found.kinds, found.peak_bytes, found.measured) == (("keep",), 520, True)
    assert survey(20, 100).blocks[2] == SurveyedBlock(
        retained_bytes=20, forward_transient_bytes=30, backward_transient_bytes=9, gradient_bytes=6
    )
    with pytest.raises(ValueError, match="do not cover"):
        problem_from_surveys({"keep": survey(20, 100)}, {"keep": [0.0]})


def test_blocks_alike_are_one_group() -> None:
    """Blocks that differ by little form a group that retains as much as they do together."""

    def survey(retained: Sequence[int]) -> Survey:
        blocks = tuple(
            SurveyedBlock(
                retained_bytes=value, forward_transient_bytes=value, backward_transient_bytes=value, gradient_bytes=0
            )
            for value in retained
        )
        outside = dict.fromkeys(
            ("base_bytes", "tail_bytes", "tail_left_bytes", "front_forward_bytes", "front_backward_bytes"), 0
        )
        return Survey(blocks=blocks, **outside, optimizer_transient_bytes=0, peak_bytes=0)

    problem = problem_from_surveys({"keep": survey([90, 100, 110, 300])}, {"keep": [0.0] * 4}, alike_bytes=20)
    assert [group.count for group in problem.groups] == [3, 1]
    assert problem.groups[0].actions == (action("keep", 100, 110, 110, 0.0),)
    apart = problem_from_surveys({"keep": survey([90, 100])}, {"keep": [0.0, 1.0]}, alike_bytes=20)
    assert [group.count for group in apart.groups] == [1, 1]


def test_what_is_wrong_is_told_at_once() -> None:
    """A problem names all its faults, and a choice that does not belong to it is refused."""
    twice = (action("keep", 1, 1, 1, 0), action("keep", 1, 1, 1, float("nan")))
    with pytest.raises(ValueError, match=r"2 actions|two actions.*nan seconds.*0 blocks"):
        Problem(
            groups=(
                BlockGroup(actions=twice, gradient_bytes=0),
                BlockGroup(actions=twice[:1], gradient_bytes=0, count=0),
            ),
            base_bytes=0,
            tail_bytes=0,
        )
    with pytest.raises(ValueError, match="not an action of its block: sell"):
        three_ways(2).predict(["keep", "sell"])
    with pytest.raises(ValueError, match="1 actions for 2 blocks"):
        three_ways(2).predict(["keep"])


def test_scipy_is_imported_by_solving_alone() -> None:
    """Importing the blocks and predicting need neither numpy nor scipy."""
    code = (
        "import sys, oomproof.plan.block_surveys, oomproof.plan.block_programme; "
        "sys.exit(bool({'numpy', 'scipy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
