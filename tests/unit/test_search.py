"""plan/search.py: which candidates are tried, and what wins, over made-up runs whose truth is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import pytest
from measurement_samples import fitting

from oomproof.measure.measurement import Breakdown, Demand, Range
from oomproof.plan.candidate import AS_FAST, WORTH, Candidate, Trial, best
from oomproof.plan.cost import Ratio
from oomproof.plan.facts import Facts, Loader, Model, Optimizer
from oomproof.plan.search import AT_ONCE, Budget, Found, Search, applicable
from oomproof.plan.technique import Change, conflict

GIB = 1 << 30
MOVES = [
    Change("allocator-settings", {"settings": "expandable_segments:True"}),
    Change("checkpoint-blocks"),
    Change("checkpoint-selective"),
    Change("optimizer-implementation", {"use": "for-loop"}),
    Change("step-in-backward"),
    Change("autocast", {"dtype": "bfloat16"}),
    Change("optimizer-8bit", {"library": "torchao"}),
]
MODEL = Model("Net", "net", 1, 1, 4, ("float32",))
LOADER = Loader(batch_size=8, dataset=64, drop_last=True, used_in_training=True)
CATEGORIES = [f.name for f in fields(Breakdown)]


class World:
    """Made-up runs: each change has a factor on the time and on each category; together they save a little less."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.base = {name: self.random.randrange(0, 12) * GIB // 4 for name in CATEGORIES}
        self.base["activation_bytes"] += 2 * GIB
        self.effects: dict[str, tuple[float, dict[str, float]]] = {}
        for move in MOVES:
            lowered = self.random.sample(CATEGORIES, 3)
            factors = {name: self.random.choice((0.1, 0.3, 0.6, 0.9)) for name in lowered}
            self.effects[move.name] = self.random.choice((0.8, 1.0, 1.05, 1.3, 1.6)), factors
        self.ran: list[Candidate] = []

    def trial(self, candidate: Candidate, memory: int) -> Trial:
        parts, time = dict(self.base), 1.0
        for change in candidate.changes:
            factor, factors = self.effects[change.name]
            time *= factor
            for name, value in factors.items():
                parts[name] = int(parts[name] * value)
        allocated = sum(parts.values())
        reserved = allocated + GIB // 8 * (1 + len(candidate.changes))
        device = reserved + GIB // 4
        measured = replace(
            fitting(),
            verdict="fits" if device <= memory else "does-not-fit",
            breakdown=Breakdown(**parts),
            demand=Demand(allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device),
        )
        return Trial(
            candidate=candidate,
            verdict="fits" if device <= memory else "does-not-fit",
            measurement=measured,
            time=Ratio(low=time, expected=time, high=time),
        )

    def search(self, memory: int, **options: object) -> Found:
        def evaluate(candidates: Sequence[Candidate]) -> Iterator[Trial]:
            for candidate in candidates:
                self.ran.append(candidate)
                yield self.trial(candidate, memory)

        baseline = self.trial(Candidate(changes=()), memory)
        return Search(baseline=baseline, memory_bytes=memory, evaluate=evaluate, moves=MOVES, **options).run()  # type: ignore[arg-type]

    def too_small(self) -> list[int]:
        """Return sizes that the script does not fit as it is; where it does, nothing is looked for."""
        return [memory for memory in SIZES[::3] if not self.trial(Candidate(changes=()), memory).fits]

    def everything(self, memory: int) -> list[Trial]:
        sets = [s for n in range(5) for s in itertools.combinations(MOVES, n) if conflict(s) is None]
        return [self.trial(Candidate(changes=s), memory) for s in sets]


TOLD = AS_FAST + 1e-9  # times that are closer count as equal
SEEDS = range(12)
SIZES = [n * GIB // 2 for n in range(2, 40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_wins_was_run_and_fits(seed: int) -> None:
    world = World(seed)
    for memory in SIZES:
        found = world.search(memory)
        if found.winner is not None:
            assert found.winner.fits
            assert found.winner.peak_bytes is not None
            assert found.winner.peak_bytes <= memory
            assert found.winner is found.baseline or found.winner.candidate in world.ran


def no_worse(one: Trial, other: Trial) -> bool:
    """Return whether a plan costs no more than another, and of the same level is no slower."""
    if one.candidate.level == other.candidate.level:
        return one.expected_time <= other.expected_time * TOLD
    return one.price <= other.price * TOLD


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_never_gives_a_costlier_or_slower_plan(seed: int) -> None:
    world = World(seed)
    before: Trial | None = None
    for memory in SIZES:
        found = world.search(memory)
        winner = found.winner
        if winner is found.baseline:
            break  # nothing has to change, and nothing is looked for
        if winner is not None:
            assert before is None or no_worse(winner, before), memory
            before = winner
        else:
            assert before is None, "less memory had a plan"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_winner_is_never_worse_than_one_change_alone(seed: int) -> None:
    world = World(seed)
    for memory in world.too_small():
        winner = world.search(memory).winner
        alone = [world.trial(Candidate(changes=(m,)), memory) for m in MOVES]
        for other in alone:
            if other.fits:
                assert winner is not None
                assert no_worse(winner, other)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_any_set_fits_one_is_found(seed: int) -> None:
    """And none costs less by more than the guesses tell."""
    world = World(seed)
    for memory in world.too_small():
        winner = world.search(memory).winner
        fitting_sets = [t for t in world.everything(memory) if t.fits]
        assert (winner is not None) == bool(fitting_sets)
        if winner is not None:
            cheapest = best(fitting_sets)
            assert cheapest is not None
            assert no_worse(winner, cheapest)


def timed(change: Change, time: float | None, peak: int) -> Trial:
    world = World(0)
    trial = replace(world.trial(Candidate(changes=()), 100 * GIB), candidate=Candidate(changes=(change,)))
    assert trial.measurement is not None
    demand = Demand(allocated_bytes=peak, reserved_bytes=peak, device_bytes=peak)
    ratio = None if time is None else Ratio(low=time, expected=time, high=time)
    return replace(trial, time=ratio, measurement=replace(trial.measurement, demand=demand))


def test_a_level_of_fidelity_is_worth_twice_the_time_and_no_more() -> None:
    """What takes 21 times as long is no answer where an 8-bit optimizer does in the same time."""
    rough = timed(Change("optimizer-8bit", {"library": "torchao"}), 1.0, GIB)
    exact = Change("checkpoint-blocks")
    assert best([timed(exact, 1.9, GIB), rough]).candidate.level == 0  # type: ignore[union-attr]
    assert best([timed(exact, 2.1, GIB), rough]) is rough
    fast = replace(rough, time=Ratio(low=0.3, expected=0.3, high=0.3))
    assert best([timed(exact, 1.0, GIB), fast]).candidate.level == 0  # type: ignore[union-attr]
    doubtful = replace(timed(exact, 1.1, GIB), time=Ratio(low=1.0, expected=1.1, high=9.0, unknown=("a kernel",)))
    assert best([doubtful, rough]) is doubtful


def test_of_equally_fast_plans_one_that_surely_fits_wins() -> None:
    """Even where another is simpler, but the range of what cannot be known reaches past the GPU for it."""
    sure = timed(Change("micro-batch", {"parts": 2}), 1.0, GIB)
    assert sure.measurement is not None
    assert sure.surely_fits
    exact = timed(Change("checkpoint-blocks"), 1.0, GIB)
    assert exact.measurement is not None
    assert best([sure, exact]) is exact
    memory = exact.measurement.peak.device_bytes
    wide = Range(what="workspace", low_bytes=0, high_bytes=memory, reason="")
    gpu = replace(exact.measurement.gpu, memory_bytes=memory)
    doubtful = replace(exact, measurement=replace(exact.measurement, gpu=gpu, ranges=(wide,)))
    assert not doubtful.surely_fits
    assert best([sure, doubtful]) is sure


def test_of_unknown_times_the_mildest_of_the_most_faithful_wins() -> None:
    """Not the strongest, whose cost nobody knows."""
    mild = timed(Change("micro-batch", {"parts": 2}), None, 3 * GIB)
    strong = timed(Change("micro-batch", {"parts": 16}), None, GIB)
    rough = timed(Change("optimizer-8bit", {"library": "torchao"}), 1.0, GIB)
    assert best([strong, rough, mild]) is mild


def test_what_is_less_faithful_than_allowed_is_not_tried() -> None:
    """Though the same maths in another order of rounding is as welcome as the same bits where both are allowed."""
    facts = Facts(models=(MODEL,), optimizers=(Optimizer("AdamW", "torch.optim.adamw", {}, 1),), loaders=(LOADER,))
    exact, unfit = applicable(facts, "exact")
    assert exact
    assert {c.technique.fidelity_of(c.options) for c in exact} == {"exact"}
    assert any(name == "micro-batch" and "--allow equal" in reason for name, reason in unfit)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_change_is_in_a_plan_for_nothing(seed: int) -> None:
    """Without any one of them it does not fit, or is slower, or less faithful: that was tried."""
    world = World(seed)
    for memory in world.too_small():
        world.ran.clear()
        winner = world.search(memory).winner
        if winner is not None and len(winner.candidate.changes) > 1:
            for change in winner.candidate.changes:
                fewer = Candidate(changes=tuple(c for c in winner.candidate.changes if c is not change))
                assert fewer.key in {c.key for c in world.ran}
                trial = world.trial(fewer, memory)
                assert not trial.fits or trial.expected_time * TOLD > winner.expected_time


def test_nothing_is_run_where_it_fits_as_it_is() -> None:
    world = World(0)
    found = world.search(100 * GIB)
    assert found.winner is found.baseline
    assert not world.ran


def test_the_budget_of_candidates_is_kept_and_said() -> None:
    world = World(1)
    found = world.search(GIB, budget=Budget(candidates=3))
    assert len(world.ran) == 3
    assert found.out_of_budget


def test_less_faithful_changes_are_not_even_run_where_the_same_maths_fits() -> None:
    world = World(3)
    for memory in SIZES:
        world.ran.clear()
        winner = world.search(memory).winner
        if winner is not None and winner.price <= WORTH:
            assert all(c.level == 0 for c in world.ran)


def test_the_frontier_has_no_trial_that_another_beats_in_both() -> None:
    found = World(5).search(4 * GIB)
    line = found.frontier()
    assert line
    for one, other in itertools.pairwise(line):
        assert one.expected_time <= other.expected_time
        assert (one.peak_bytes or 0) > (other.peak_bytes or 0)


def test_no_set_is_begun_after_the_time_is_up() -> None:
    """A few that were begun together may still end."""
    world = World(1)
    budget = Budget(seconds=1e-9)
    found = world.search(GIB, budget=budget)
    assert not world.ran
    assert found.out_of_budget
    assert found.winner is None


def test_sets_are_handed_out_few_at_a_time() -> None:
    """So that the budget is asked between them."""
    world, sizes = World(1), []

    def evaluate(candidates: Sequence[Candidate]) -> Iterator[Trial]:
        sizes.append(len(candidates))
        return (world.trial(candidate, GIB) for candidate in candidates)

    baseline = world.trial(Candidate(changes=()), GIB)
    Search(baseline=baseline, memory_bytes=GIB, evaluate=evaluate, moves=MOVES).run()
    assert max(sizes) <= AT_ONCE
