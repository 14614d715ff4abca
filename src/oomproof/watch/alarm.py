"""Alarms over a training process's memory, with hysteresis. Pure: figures go in, alarms come out.

Standard library and Python 3.9 only, since guard asks it from inside the user's process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LEVEL, LEAK, RETRIES, OTHERS = "level", "leak", "retries", "others"


@dataclass(frozen=True)
class Figures:
    """What is known after one step, in bytes; None where there is no figure."""

    step: int
    limit_bytes: int
    """What the process and its neighbours may use together: the device's memory."""
    allocated_peak_bytes: int
    """Most that was allocated within the step."""
    not_reusable_bytes: int = 0
    """What nobody can allocate from: the context, libraries' own memory, cached blocks too small to serve."""
    others_bytes: int | None = None
    """Memory of other processes on the device."""
    retries: int = 0
    """Allocator retries since the process began."""

    @property
    def needed_bytes(self) -> int:
        """Return what cannot be given up: cached blocks that can be reused are not in it, as NVML's figure has them."""
        return self.allocated_peak_bytes + self.not_reusable_bytes + (self.others_bytes or 0)


@dataclass(frozen=True)
class Alarm:
    """One alarm that stands; ``hits_step`` is the step at which a growth reaches the limit, where one is known."""

    kind: str
    step: int
    text: str
    hits_step: int | None = None


@dataclass(frozen=True)
class Settings:
    """Where alarms rise and fall."""

    level: float = 0.85
    clear: float = 0.80
    """The level alarm falls only below this share of the limit."""
    window: int = 20
    """Steps over which growth is judged."""
    leak_steps: int = 1000
    """A leak is told when it would reach the limit within so many steps."""
    rising: float = 0.9
    """Share of the window's steps that must not fall for a growth to be a leak: a sawtooth is none."""
    others_growth: float = 0.05
    """Growth of other processes within the window, as a share of the limit."""

    def __post_init__(self) -> None:
        """Raise ValueError where an alarm could never fall or rise."""
        if not 0 < self.clear < self.level <= 1:
            raise ValueError("clear must lie above 0 and below level, and level be at most 1; 0.80 and 0.85 are usual")
        if self.window < 3:
            raise ValueError("window must be 3 steps or more: two points are always a line")


class Alarms:
    """The alarms of one process on one device."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._seen: deque[Figures] = deque(maxlen=self.settings.window)
        self._standing: dict[str, Alarm] = {}

    def observe(self, figures: Figures) -> list[Alarm]:
        """Take one step's figures and return the alarms that stand after it.

        A step that is not after the last one means that the script began again: growth is judged anew. Raises
        ValueError when the limit is not above zero.
        """
        if figures.limit_bytes <= 0:
            raise ValueError("limit_bytes must be above zero; leave devices without a figure out")
        if self._seen and figures.step <= self._seen[-1].step:
            self._seen.clear()
        self._seen.append(figures)
        for kind, alarm in (
            (LEVEL, self._level(figures)),
            (LEAK, self._leak(figures)),
            (RETRIES, self._retries(figures)),
            (OTHERS, self._others(figures)),
        ):
            if alarm is None:
                self._standing.pop(kind, None)
            else:
                self._standing[kind] = alarm
        return list(self._standing.values())

    def _level(self, now: Figures) -> Alarm | None:
        share = now.needed_bytes / now.limit_bytes
        if share < (self.settings.clear if LEVEL in self._standing else self.settings.level):
            return None
        return Alarm(LEVEL, now.step, f"{share:.1%} of the limit is needed and cannot be given up")

    def _leak(self, now: Figures) -> Alarm | None:
        points = [(seen.step, seen.needed_bytes - (seen.others_bytes or 0)) for seen in self._seen]
        if len(points) < self.settings.window or points[-1][1] <= points[0][1]:
            return None
        steps_up = sum(after[1] >= before[1] for before, after in zip(points, points[1:]))
        if steps_up < self.settings.rising * (len(points) - 1):
            return None
        # a warm-up that has ended is no leak: both halves must grow
        middle = points[len(points) // 2][1]
        if not points[0][1] < middle < points[-1][1]:
            return None
        # what others use comes off the limit: their growth is an alarm of its own
        hits = step_at(points, now.limit_bytes - (now.others_bytes or 0))
        # once told, it stands until the growth itself has ended or twice the horizon is clear
        horizon = self.settings.leak_steps * (2 if LEAK in self._standing else 1)
        if hits is None or hits - now.step > horizon:
            return None
        per_step = slope(points)
        return Alarm(LEAK, now.step, f"grows by {per_step:,.0f} B a step; the limit is reached at step {hits}", hits)

    def _retries(self, now: Figures) -> Alarm | None:
        more = now.retries - self._seen[0].retries
        if more <= 0:  # stands for a window after the last retry
            return None
        return Alarm(
            RETRIES, now.step, f"{more} allocator retries in the last {len(self._seen)} steps: it is thrashing"
        )

    def _others(self, now: Figures) -> Alarm | None:
        known = [seen.others_bytes for seen in self._seen if seen.others_bytes is not None]
        if now.others_bytes is None or len(known) < 2:
            return None
        grown = now.others_bytes - min(known)
        least = self.settings.others_growth * now.limit_bytes * (0.5 if OTHERS in self._standing else 1)
        if grown < least:
            return None
        return Alarm(OTHERS, now.step, f"other processes have grown by {grown:,} B")


def slope(points: list[tuple[int, int]]) -> float:
    """Return the growth per step of (step, bytes) by least squares; two different steps are needed."""
    top, bottom = _slope(points)
    return top / bottom


def _slope(points: list[tuple[int, int]]) -> tuple[int, int]:
    count = len(points)
    steps, sizes = sum(x for x, _ in points), sum(y for _, y in points)
    top = count * sum(x * y for x, y in points) - steps * sizes
    return top, count * sum(x * x for x, _ in points) - steps * steps


def step_at(points: list[tuple[int, int]], limit_bytes: int) -> int | None:
    """Return the first step at which the least-squares line reaches ``limit_bytes``; None when it does not grow.

    In whole numbers, so that it is exact on a line; never before the last step.
    """
    top, bottom = _slope(points)
    if top <= 0:
        return None
    count = len(points)
    steps, sizes = sum(x for x, _ in points), sum(y for _, y in points)
    # limit <= mean_y + top/bottom * (step - mean_x), solved for step and rounded up
    numerator = bottom * (count * limit_bytes - sizes) + top * steps
    return max(points[-1][0], -(-numerator // (top * count)))
