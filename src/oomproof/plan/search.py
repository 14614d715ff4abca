"""Which changes to try, in which order, and when to stop. Pure: what running a candidate shows comes from outside.

Every technique that makes sense is first tried alone. What each does to the step time and to each category of the peak
gives a guess of what sets of them would do, and the sets are tried in the order of their guessed times, the first that
fits ending the search at its level of fidelity. The next level is opened where nothing fits, or only what is so slow
that less fidelity could be worth it. The order does not depend on the GPU's memory, and what is left out
because it could not fit is less with more memory: so more memory never leads to a slower plan, as far as the guesses of
time hold. A guess is never an answer: only what ran is.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from oomproof.measure.measurement import Breakdown
from oomproof.plan.candidate import AS_FAST, LEVELS, WORTH, Candidate, Trial, best, price
from oomproof.plan.facts import Facts
from oomproof.plan.technique import FIDELITIES, Change, Technique, conflict, techniques

#: Runs candidates, several at a time where there is room, and yields what each showed as it comes.
Evaluate = Callable[[Sequence[Candidate]], Iterator[Trial]]

#: Sets of more changes are not guessed at; they are still built around the best by the choice per block.
MOST_CHANGES = 4

#: A guessed peak may be so much above the memory and the set is still tried: savings overlap.
SLACK = 1.15

#: What could be faster than the best by less is not tried.
FASTER = 1 / AS_FAST

#: Where nothing is guessed to fit, so many of the smallest are tried for the answer how far it is.
CLOSEST = 6

#: Candidates that are given to be run together where a machine runs two at once.
AT_ONCE = 4

#: A technique makes sense where what it lowers is at least so much of the peak.
SHARE = 0.02

#: What a technique can lower besides categories of the breakdown: idle segments, and what is outside the allocator.
EVERYTHING = ("cached", "outside")


@dataclass(slots=True, kw_only=True)
class Budget:
    """How much a search may spend; None is no limit."""

    candidates: int | None = None
    seconds: float | None = None
    started: float = field(default_factory=time.monotonic)
    used: int = 0

    def left(self) -> int:
        """Return how many candidates may still be tried."""
        if self.seconds is not None and time.monotonic() - self.started >= self.seconds:
            return 0
        return 1_000_000 if self.candidates is None else max(0, self.candidates - self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to."""

    baseline: Trial
    trials: tuple[Trial, ...]  # in the order in which they were tried, without the baseline
    winner: Trial | None
    out_of_budget: bool
    unfit: tuple[tuple[str, str], ...] = ()  # techniques that were not tried, and why

    @property
    def closest(self) -> Trial:
        """Return the trial with the smallest peak."""
        ran = [t for t in (self.baseline, *self.trials) if t.peak_bytes is not None]
        return min(ran, key=lambda t: t.peak_bytes or 0)

    def frontier(self) -> list[Trial]:
        """Return the trials that no other beats in both memory and time, the fastest first."""
        ran = [t for t in (self.baseline, *self.trials) if t.peak_bytes is not None and math.isfinite(t.expected_time)]
        ran.sort(key=lambda t: (t.expected_time, t.peak_bytes or 0))
        line: list[Trial] = []
        for trial in ran:
            if not line or (trial.peak_bytes or 0) < (line[-1].peak_bytes or 0):
                line.append(trial)
        return line


def applicable(
    facts: Facts,
    allow: str,
    baseline: Trial | None = None,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> tuple[list[Change], list[tuple[str, str]]]:
    """Return the changes worth trying alone, mildest first, and the techniques that are not, with the reason."""
    moves: list[tuple[int, int, Change]] = []
    unfit: list[tuple[str, str]] = []
    for technique in techniques().values():
        if (only and technique.name not in only) or technique.name in without:
            unfit.append((technique.name, "left out, as asked"))
            continue
        reason = technique.unfit(facts) or _pointless(technique, baseline)
        if reason is not None:
            unfit.append((technique.name, reason))
            continue
        for options in technique.variants(facts):
            fidelity = technique.fidelity_of(options)
            if FIDELITIES.index(fidelity) > FIDELITIES.index(allow):
                unfit.append((technique.name, f"less faithful than a plan may be; --allow {fidelity} lets it"))
                break
            moves.append((LEVELS[fidelity], technique.rank, Change(technique.name, options)))
    moves.sort(key=lambda move: move[:2])
    return [change for *_, change in moves], unfit


def _pointless(technique: Technique, baseline: Trial | None) -> str | None:
    measured = baseline.measurement if baseline is not None else None
    if baseline is None or measured is None or measured.breakdown is None:
        return None
    total = max(1, measured.demand.device_bytes)
    parts = parts_of(baseline)
    share = sum(parts[f"{what}_bytes"] for what in technique.lowers)
    if share >= SHARE * total:
        return None
    return f"at the peak there is hardly anything that it lowers ({', '.join(technique.lowers)}: {share / total:.1%})"


class Search:
    """One search; ``run`` does it."""

    def __init__(
        self,
        *,
        baseline: Trial,
        memory_bytes: int,
        evaluate: Evaluate,
        moves: Sequence[Change],
        allow: str = "approximate",
        budget: Budget | None = None,
        explore: bool = False,
        at_once: int = AT_ONCE,
        by_hand: Callable[[Change], bool] = lambda change: change.technique.proposal_only,
        refine: Callable[[Trial | None, int], Iterable[Trial]] | None = None,
    ) -> None:
        """``moves`` are the changes to try. ``refine`` yields trials of choices per block around the best so far.

        With ``explore`` the rest of the budget goes into sets that need not be tried for the answer. ``at_once`` is how
        many candidates are given to be run together: the budget is asked between them. ``by_hand`` tells
        which changes only a person can make: they are run alone, and never win.
        """
        self._baseline = baseline
        self._memory = memory_bytes
        self._evaluate = evaluate
        self._allow = LEVELS[allow]
        self._budget = budget or Budget()
        self._refine = refine
        self._explore = explore
        self._at_once = at_once
        self._by_hand = by_hand
        self._moves = list(moves)
        self._trials: dict[str, Trial] = {baseline.candidate.key: baseline}

    def run(self) -> Found:
        """Try candidates until the cheapest that fits is known, or the budget is used up."""
        if not self._baseline.fits:
            for level in range(self._allow + 1):
                found = self._best()
                if found is not None and found.price <= WORTH**level and not self._explore:
                    break  # no plan of this level costs less
                self._try_level(level)
            self._leave_out()
        if self._explore:
            self._try_rest()
        trials = list(self._trials.values())
        return Found(
            baseline=self._baseline,
            trials=tuple(trials[1:]),
            winner=best(trials),
            out_of_budget=self._budget.left() == 0,
        )

    def _try_level(self, level: int) -> None:
        for slow in (False, True):
            self._try([c for c in self._singles(slow=slow) if c.level == level])
            guesses = [g for g in self._guesses(level) if g.candidate.level == level]
            self._first_that_fits([g for g in guesses if g.peak_bytes <= self._memory * SLACK])
            if not slow and self._refine is not None and self._budget.left():
                self._take(self._refine(self._best(), level))
            if self._best() is not None:
                return
        closest = sorted(guesses, key=lambda g: (g.peak_bytes, g.time))
        self._try([g.candidate for g in closest[:CLOSEST]])

    def _leave_out(self) -> None:
        """Try the best without each of its changes, so that none is in it for nothing."""
        before = None
        while (found := self._best()) is not before and found is not None and len(found.candidate.changes) > 1:
            before, changes = found, found.candidate.changes
            self._try([Candidate(changes=tuple(c for c in changes if c is not change)) for change in changes])

    def _try_rest(self) -> None:
        """Try sets of all changes in the order of their guessed times until the budget is used up."""
        self._try(self._singles(slow=False))
        self._try([g.candidate for g in self._guesses(self._allow)])

    def _guesses(self, level: int) -> list[Guess]:
        """Return what sets of changes that are useful alone would do, the fastest first; none less faithful."""
        singles = (*self._singles(slow=False), *self._singles(slow=True))
        useful = [c.changes[0] for c in singles if c.level <= level and self._is_useful(c)]
        guesses = [self._guess(changes) for changes in _sets(useful)]
        return sorted(guesses, key=lambda g: (g.time, len(g.candidate.changes), g.candidate.key))

    def _best(self) -> Trial | None:
        return best(list(self._trials.values()))

    def _singles(self, *, slow: bool) -> list[Candidate]:
        moves = [move for move in self._moves if move.technique.slow_to_try(move.options) == slow]
        return [Candidate(changes=(move,), by_hand=self._by_hand(move)) for move in moves]

    def _guess(self, changes: tuple[Change, ...]) -> Guess:
        return Guess(self._baseline, [self._trials[Candidate(changes=(change,)).key] for change in changes])

    def _is_useful(self, candidate: Candidate) -> bool:
        """Return whether a change ran alone, and lowers something or makes a step faster."""
        trial = self._trials.get(candidate.key)
        if trial is None or trial.measurement is None or trial.peak_bytes is None or candidate.by_hand:
            return False
        return trial.expected_time < FASTER or any(
            factor < 1 - SHARE / 2 for factor in factors(self._baseline, trial).values()
        )

    def _first_that_fits(self, guesses: list[Guess]) -> None:
        """Try sets in the order of their guessed times until none could be faster than the best that fits."""
        ahead = [g for g in guesses if g.candidate.key not in self._trials]
        while self._budget.left():
            batch = [g.candidate for g in ahead[: self._at_once] if self._could_win(g)]
            if not batch:
                return
            self._try(batch)
            ahead = ahead[self._at_once :]

    def _could_win(self, guess: Guess) -> bool:
        found = self._best()
        if found is None:
            return True
        if guess.candidate.level == found.candidate.level:
            return guess.time < found.expected_time * FASTER
        return price(guess.candidate.level, guess.expected) < found.price

    def _try(self, candidates: Sequence[Candidate]) -> None:
        fresh = [c for c in candidates if c.key not in self._trials]
        while fresh and self._budget.left():
            some = fresh[: min(self._at_once, self._budget.left())]
            self._take(self._evaluate(some))
            fresh = fresh[len(some) :]

    def _take(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self._budget.used += 1
            self._trials[trial.candidate.key] = trial
            if not self._budget.left():
                return


class Guess:
    """What a set of changes would do if each did what it does alone: factors on the time and on each category."""

    __slots__ = ("candidate", "expected", "peak_bytes", "time")

    def __init__(self, baseline: Trial, singles: Sequence[Trial]) -> None:
        self.candidate = Candidate(changes=tuple(t.candidate.changes[0] for t in singles))
        self.time = math.prod(t.expected_time if math.isfinite(t.expected_time) else 1.0 for t in singles)
        self.expected = math.prod(t.time.expected if t.time is not None else 1.0 for t in singles)
        parts = parts_of(baseline)
        for trial in singles:
            for what, factor in factors(baseline, trial).items():
                parts[what] *= min(1.0, factor)
        self.peak_bytes = sum(parts.values())


def parts_of(trial: Trial) -> dict[str, float]:
    """Return the bytes of the peak by category, with what is cached and what is outside the allocator."""
    measured = trial.measurement
    assert measured is not None
    breakdown = measured.breakdown or Breakdown(unknown_bytes=measured.demand.allocated_bytes)
    parts = {f.name: float(getattr(breakdown, f.name)) for f in fields(Breakdown)}
    parts["cached_bytes"] = float(measured.demand.reserved_bytes - measured.demand.allocated_bytes)
    parts["outside_bytes"] = float(measured.demand.device_bytes - measured.demand.reserved_bytes)
    return parts


def factors(baseline: Trial, trial: Trial) -> dict[str, float]:
    """Return what a trial makes of each part of the baseline's peak; 1 where the baseline has none of it."""
    before, after = parts_of(baseline), parts_of(trial)
    return {what: after[what] / size if size else 1.0 for what, size in before.items()}


def _sets(moves: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    for size in range(2, MOST_CHANGES + 1):
        for chosen in itertools.combinations(moves, size):
            if conflict(chosen) is None:
                yield chosen
