"""A choice for each block around the best changes so far: surveyed, solved, run, corrected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from oomproof.plan.block_surveys import Survey, problem_from_surveys
from oomproof.plan.blocks import Choice, Problem, solve
from oomproof.plan.candidate import Candidate, Trial, best
from oomproof.plan.facts import Facts
from oomproof.plan.search import FASTER
from oomproof.plan.technique import Change, techniques

NAME = "block-actions"
ACTIONS = ("keep", "recompute", "selective", "offload", "recompute-offload")

#: Techniques that a choice per block takes the place of.
REPLACED = frozenset(("checkpoint-blocks", "checkpoint-selective", "offload-activations", "compile-budget", NAME))

#: Solutions that are run around one set of changes; each miss corrects the next.
ROUNDS = 4

#: Less of the memory is aimed at after a miss that no correction explains.
STEP_BACK = 0.01

#: The solver may prove for so long that nothing is faster.
SOLVER_SECONDS = 3.0


class Runs(Protocol):
    """What runs candidates; ``Trials`` does."""

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[Trial]:
        """Yield what each showed."""

    def survey_blocks(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Trial, Survey | None]]:
        """Yield what each showed, and what its blocks took where that is known."""


class BlockChoice:
    """``Search``'s refinement."""

    def __init__(self, runs: Runs, facts: Facts, memory_bytes: int) -> None:
        self._runs = runs
        self._facts = facts
        self._memory = memory_bytes
        self._done: set[str] = set()

    def __call__(self, found: Trial | None, level: int) -> Iterator[Trial]:
        """Yield trials of choices per block, around the best so far and around the script as it is."""
        technique = techniques()[NAME]
        if len(self._facts.models) != 1 or technique.unfit(self._facts):
            return
        around = [()] if found is None else [_without_blocks(found.candidate.changes), ()]
        for base in dict.fromkeys(Candidate(changes=changes).key for changes in around):
            if base in self._done:
                continue
            self._done.add(base)
            changes = next(c for c in around if Candidate(changes=c).key == base)
            for trial in self._around(changes, found):
                found = best([trial] if found is None else [found, trial])
                yield trial

    def _around(self, base: tuple[Change, ...], found: Trial | None) -> Iterator[Trial]:
        problem, gap = self._problem(base)
        if problem is None:
            return
        budget = self._memory - gap
        for _ in range(ROUNDS):
            choice = solve(problem, budget, limit_seconds=SOLVER_SECONDS)
            if not isinstance(choice, Choice):
                return
            if choice.measured or (found is not None and choice.seconds >= found.expected_time * FASTER):
                return
            actions = {n: a for n, a in zip(self._names(), choice.actions, strict=True) if a != "keep"}
            trial = next(self._runs.evaluate([Candidate(changes=(*base, Change(NAME, {"actions": actions})))]))
            yield trial
            measured = trial.measurement
            if measured is None or trial.fits:
                return
            problem = problem.corrected(choice, measured.demand.allocated_bytes)
            held = self._memory - (measured.demand.device_bytes - measured.demand.allocated_bytes)
            budget = min(held, int(budget - STEP_BACK * self._memory))

    def _problem(self, base: tuple[Change, ...]) -> tuple[Problem | None, int]:
        """Return the problem that one run per action describes, and the least memory outside the allocator."""
        names = self._names()
        candidates = {
            action: Candidate(
                changes=base if action == "keep" else (*base, Change(NAME, {"actions": dict.fromkeys(names, action)}))
            )
            for action in ACTIONS
        }
        surveys: dict[str, Survey] = {}
        times: dict[str, float] = {}
        gap: int | None = None
        by_key = {candidate.key: action for action, candidate in candidates.items()}
        for trial, survey in self._runs.survey_blocks(list(candidates.values())):
            if survey is None or trial.measurement is None or trial.time is None or len(survey.blocks) != len(names):
                continue
            action = by_key[trial.candidate.key]
            surveys[action], times[action] = survey, trial.time.expected
            demand = trial.measurement.demand
            outside = demand.device_bytes - demand.reserved_bytes
            gap = outside if gap is None else min(gap, outside)
        if "keep" not in surveys or len(surveys) < 2 or gap is None:
            return None, 0
        return problem_from_surveys(surveys, self._seconds(surveys["keep"], times)), gap

    def _seconds(self, keep: Survey, times: dict[str, float]) -> dict[str, list[float]]:
        """Return the share of each block in a step's relative time.

        No operator tells which block it belongs to, so what an action adds is shared among the groups of blocks by the
        activations that they keep, and evenly within a group.
        """
        shares: list[float] = []
        start = 0
        total = max(1, sum(max(0, block.retained_bytes) for block in keep.blocks))
        for group in self._facts.blocks:
            blocks = keep.blocks[start : start + len(group.names)]
            start += len(blocks)
            shares += [sum(max(0, b.retained_bytes) for b in blocks) / total / len(blocks)] * len(blocks)
        return {action: [time * share for share in shares] for action, time in times.items()}

    def _names(self) -> list[str]:
        return [name for group in self._facts.blocks for name in group.names]


def _without_blocks(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.name not in REPLACED)
