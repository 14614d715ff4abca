"""What the planner tries, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oomproof.measure.measurement import Measurement
from oomproof.plan.cost import Ratio
from oomproof.plan.technique import FIDELITIES, Change, fidelity

#: Fidelities that are equally welcome: rounding is no reason to take a slower plan.
LEVELS = {"exact": 0, "equal": 0, "approximate": 1, "changes-model": 2}

#: A plan may take so many times as long as one that is a level less faithful, and be preferred all the same.
WORTH = 2.0

#: Times that are closer count as equal: a roofline tells no finer.
AS_FAST = 1.05

Verdict = Literal["fits", "does-not-fit", "cannot-apply", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A set of changes, in the order in which they are installed."""

    changes: tuple[Change, ...]
    by_hand: bool = False  # some change is one that only the person can make; the phantom shows what it would save

    @property
    def key(self) -> str:
        """What tells candidates apart, whatever the order of their changes."""
        return " + ".join(sorted(repr(change.to_json()) for change in self.changes))

    @property
    def label(self) -> str:
        """Return what tables show: "checkpoint-blocks + optimizer-8bit"; of no change "as it is"."""
        return " + ".join(change.label for change in self.changes) or "as it is"

    @property
    def fidelity(self) -> str:
        """Return that of the least faithful change."""
        return fidelity(self.changes)

    @property
    def level(self) -> int:
        """Return 0 for the same maths, 1 for approximate, 2 for another model."""
        return LEVELS[self.fidelity]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What running a candidate on the phantom showed."""

    candidate: Candidate
    verdict: Verdict
    reason: str = ""  # why it cannot be applied, or what the script failed with
    measurement: Measurement | None = None
    time: Ratio | None = None  # of a step, to a step of the script as it is; None where nothing could be counted
    time_reason: str = ""  # why there is none
    said: tuple[Mapping[str, str], ...] = ()  # what was changed where

    @property
    def fits(self) -> bool:
        """True when it ran on the GPU's memory to the end."""
        return self.verdict == "fits"

    @property
    def peak_bytes(self) -> int | None:
        """Return the device memory that it takes when nothing holds it back."""
        return self.measurement.demand.device_bytes if self.measurement is not None else None

    @property
    def surely_fits(self) -> bool:
        """True when it fits at the high end of what cannot be known, too."""
        measured = self.measurement
        return self.fits and measured is not None and measured.device_bounds[1] <= measured.gpu.memory_bytes

    @property
    def expected_time(self) -> float:
        """Return the expected ratio: the high end where more was not counted than of the script as it is.

        Infinite where nothing was counted. So what is not known never makes a plan look cheap.
        """
        if self.time is None:
            return float("inf")
        return self.time.high if self.time.unknown and self.candidate.changes else self.time.expected

    @property
    def price(self) -> float:
        """Return what time and fidelity cost together: how often as long as the script as it is, twice for each level.

        To be faster than the script as it is makes up for nothing, and no fidelity is given up for a mere doubt about
        the time: it counts as expected, an unknown one as ``WORTH``.
        """
        return price(self.candidate.level, WORTH if self.time is None else self.time.expected)

    def order(self) -> tuple[int, float, int, int, str]:
        """Return what trials that fit are sorted by: level of fidelity, time, number of changes; the mildest first."""
        candidate = self.candidate
        return candidate.level, self.expected_time, len(candidate.changes), -(self.peak_bytes or 0), candidate.key


def price(level: int, time: float) -> float:
    """Return the price of a plan of a level of fidelity with this relative time of a step."""
    return max(1.0, time) * WORTH**level


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the one of least price of those that fit.

    Of equally fast ones it is one that surely fits, then the most faithful, then the simplest.
    None of them has a change that only the person can make.
    """
    fitting = [t for t in trials if t.fits and not t.candidate.by_hand]
    levels = sorted({t.candidate.level for t in fitting})
    of_levels = [_best_of_level([t for t in fitting if t.candidate.level == level]) for level in levels]
    return min(of_levels, key=lambda t: t.price, default=None)


def _best_of_level(fitting: Sequence[Trial]) -> Trial:
    first = min(fitting, key=Trial.order)
    same = [t for t in fitting if _as_fast(t, first)]
    return min(same, key=_preference)


def _preference(trial: Trial) -> tuple[Any, ...]:
    candidate = trial.candidate
    return not trial.surely_fits, FIDELITIES.index(candidate.fidelity), len(candidate.changes), trial.order()


def _as_fast(one: Trial, other: Trial) -> bool:
    return one.expected_time <= other.expected_time * AS_FAST


def to_json(trial: Trial) -> dict[str, Any]:
    """Return what ``plan --json`` shows of a trial."""
    candidate, measured = trial.candidate, trial.measurement
    return {
        "techniques": [change.to_json() for change in candidate.changes],
        "verdict": trial.verdict,
        "reason": trial.reason or None,
        "peak": None
        if measured is None
        else {
            "allocated_bytes": measured.demand.allocated_bytes,
            "reserved_bytes": measured.demand.reserved_bytes,
            "device_bytes": measured.demand.device_bytes,
        },
        "headroom_bytes": None if measured is None else measured.gpu.memory_bytes - measured.demand.device_bytes,
        "retries": None if measured is None else measured.allocator.retries,
        "relative_time": None
        if trial.time is None
        else {"low": trial.time.low, "expected": trial.time.expected, "high": trial.time.high},
        "relative_time_reason": trial.time_reason or None,
        "fidelity": candidate.fidelity,
        "by_hand": candidate.by_hand,
        "changed": [dict(entry) for entry in trial.said],
    }
