"""The largest value of one of a command's own options that fits: batch size, sequence length, anything that grows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oomproof import api
from oomproof.errors import ScriptError, UsageError
from oomproof.measure.measurement import Measurement
from oomproof.plan.planning import rehearse
from oomproof.plan.technique import Change

ROUNDS = 16  # runs at most: a line through two of them leads to the answer in five or six
MORE_ROUNDS = 8  # for the largest without retries, where the largest that fits needs some
MOST = 1 << 40
STRIDE = 16  # what fits by retries is gone on from by a sixteenth of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One value, and what a run with it showed."""

    value: int
    measurement: Measurement

    @property
    def fits(self) -> bool:
        """True when it ran on the GPU's memory."""
        return self.measurement.fits

    @property
    def retries(self) -> int:
        """How often it fitted only because the allocator gave back what it had cached."""
        return self.measurement.allocator.retries if self.fits else 0

    @property
    def fits_easily(self) -> bool:
        """True when it ran without giving anything back."""
        return self.fits and not self.retries


Enough = Callable[[Tried], bool]


#: What a value can be the largest of.
_FITS: Enough = operator.attrgetter("fits")
_EASILY: Enough = operator.attrgetter("fits_easily")


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What looking for the largest value came to."""

    option: str
    multiple: int
    tried: tuple[Tried, ...]  # in the order in which they were run

    @property
    def answer(self) -> Tried | None:
        """Return the largest value that was run and fitted; None where none did."""
        return self.bounds(_FITS)[0]

    @property
    def above(self) -> Tried | None:
        """Return the smallest value above the answer that was run and did not fit."""
        return self.bounds(_FITS)[1]

    @property
    def settled(self) -> bool:
        """True where the next value above the answer was run and did not fit."""
        return self._is_settled(_FITS)

    @property
    def easy(self) -> Tried | None:
        """Return the largest value that fitted without giving back cached memory; None where none did."""
        return self.bounds(_EASILY)[0]

    @property
    def easy_settled(self) -> bool:
        """True where the next value above that was run, and did not fit or not without giving back."""
        return self._is_settled(_EASILY)

    def bounds(self, enough: Enough) -> tuple[Tried | None, Tried | None]:
        """Return the largest value that is good enough, and the smallest above it that is not."""
        low = max((t for t in self.tried if enough(t)), key=lambda t: t.value, default=None)
        least = 0 if low is None else low.value
        above = (t for t in self.tried if not enough(t) and t.value > least)
        return low, min(above, key=lambda t: t.value, default=None)

    def _is_settled(self, enough: Enough) -> bool:
        low, high = self.bounds(enough)
        return low is not None and high is not None and high.value - low.value <= self.multiple


def find_largest(
    job: api.Job,
    option: str,
    *,
    changes: Sequence[Change] = (),
    multiple: int = 1,
    start: int | None = None,
    told: Callable[[Tried], None] | None = None,
) -> Largest:
    """Run a job with growing values of ``option`` and return the largest multiple of ``multiple`` that fits.

    ``option`` is a word of the command such as "--batch-size" or "data.batch_size"; its value is the next word, or
    what stands after "=". ``start`` is the first value, by default the command's own. ``told`` is called with every
    run. Raises UsageError where the command has no such option, ScriptError where the script fails with a value that
    should have been small enough. Where the largest fits by giving back cached memory only, the largest that fits
    without is looked for too.
    """
    first = start if start is not None else value_of(job.words, option)
    if multiple < 1:
        raise UsageError(f"multiple of {multiple}; it must be at least 1")
    tried: list[Tried] = []
    memory = job.settings.gpu.memory_bytes

    def run(value: int) -> None:
        measured = rehearse(with_value(job, option, value), changes).measurement
        if measured.verdict == "unknown":
            raise ScriptError(
                f"with {option} {value} the script {measured.ended}; {len(tried)} values were tried before"
            )
        tried.append(Tried(value=value, measurement=measured))
        if told is not None:
            told(tried[-1])

    def so_far() -> Largest:
        return Largest(option=option, multiple=multiple, tried=tuple(tried))

    run(max(multiple, first // multiple * multiple))
    for enough, rounds in ((_FITS, ROUNDS), (_EASILY, ROUNDS + MORE_ROUNDS)):
        answer = so_far().answer
        if enough is _EASILY and (answer is None or not answer.retries):
            break
        while len(tried) < rounds:
            halve = len(tried) >= ROUNDS // 2
            following = _next(so_far(), memory, enough, halve=halve)
            if following is None:
                break
            run(following)
    return so_far()


def _next(so_far: Largest, memory_bytes: int, enough: Enough, *, halve: bool) -> int | None:
    """Return the value to run next, None where the answer is known. ``halve``: whatever a line says."""
    (low, high), step = so_far.bounds(enough), so_far.multiple
    least = 0 if low is None else low.value
    if high is not None and high.value - least <= step:
        return None
    if len(so_far.tried) == 1:
        only = so_far.tried[0].value
        guess = only * 2 if enough(so_far.tried[0]) else only // 2
    else:
        guess = _on_line(so_far.tried[-2], so_far.tried[-1], memory_bytes)
    guess = guess // step * step
    if low is not None and low.measurement.demand.device_bytes >= memory_bytes:  # by retries: no line ends there
        halve, guess = True, least + max(step, least // STRIDE // step * step)
    if high is None:  # nothing was too much yet: at least a step on, at most eight times as far
        return min(max(guess, least + step), max(least, step) * 8) if least < MOST else None
    middle = (least + high.value) // 2 // step * step
    inside = least < guess < high.value
    if halve or not inside:  # the line misleads: halve
        guess = middle if least < middle < high.value else least + step
    return guess if least < guess < high.value else None


def _on_line(one: Tried, other: Tried, memory_bytes: int) -> int:
    """Return where a line through two runs reaches the memory."""
    rise = other.measurement.demand.device_bytes - one.measurement.demand.device_bytes
    if rise == 0 or other.value == one.value:
        return 2 * other.value
    slope = rise / (other.value - one.value)
    return int(other.value + (memory_bytes - other.measurement.demand.device_bytes) / slope)


def value_of(words: Sequence[str], option: str) -> int:
    """Return the value of an option in a command. Raises UsageError where it has none, or no whole number."""
    place, inline = _find(words, option)
    text = words[place].partition("=")[2] if inline else words[place + 1] if place + 1 < len(words) else ""
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{option} is {text!r} in the command; it must be a whole number to begin with, such as 8")
    return int(text)


def with_value(job: api.Job, option: str, value: int) -> api.Job:
    """Return a job whose command has another value for the option."""

    def changed(words: Sequence[str]) -> tuple[str, ...]:
        place, inline = _find(words, option)
        new = list(words)
        if inline:
            new[place] = f"{option}={value}"
        else:
            new[place + 1] = str(value)
        return tuple(new)

    return replace(job, words=changed(job.words), program=changed(job.program))


def _find(words: Sequence[str], option: str) -> tuple[int, bool]:
    for place, word in enumerate(words):
        if word == option:
            return place, False
        if word.startswith(option + "="):
            return place, True
    raise UsageError(
        f"the command has no {option}; write it with a value to begin with, as in: oomproof plan --largest {option} -- "
        f"python train.py {option} 8"
    )
