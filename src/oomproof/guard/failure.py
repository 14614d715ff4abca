"""An out-of-memory in a step: recognised, and let go of. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from oomproof.guard.refusal import GuardError
from oomproof.triage.kinds import Finding, classify

#: Another attempt does not help against these.
_HOPELESS = ("corrupt-size", "not-oom", "other-rank")


class Failure(NamedTuple):
    """What is kept of an out-of-memory: no exception, as that would keep its frames and their tensors."""

    finding: Finding
    phase: str  # "forward", "backward", "optimizer"
    message: str  # its first line

    @property
    def fragmented(self) -> bool:
        """Whether the figures say that PyTorch had enough cached, in pieces: giving the cache back may suffice."""
        figures = self.finding.figures
        requested, unallocated = figures.requested_bytes, figures.unallocated_bytes
        return requested is not None and unallocated is not None and unallocated >= requested


def recognise(error: BaseException, phase: str, outside: BaseException | None = None) -> Failure | None:
    """Return what failed where ``error``, or what it was raised from, is an out-of-memory; None for all else.

    ``outside`` is what was being handled when the step began: Python chains it to every error of the step.
    """
    for link in _chain(error, outside):
        if isinstance(link, GuardError):
            return None
        text = f"{_name(link)}: {link}"
        finding = classify(text, traceback.format_tb(link.__traceback__))
        if finding is not None and finding.kind not in _HOPELESS:
            return Failure(finding, phase, text.split("\n", 1)[0])
    return None


def let_go(error: BaseException, outside: BaseException | None = None) -> None:
    """Drop all that pins the failed attempt's tensors: the frames of the whole chain, and the interpreter's memory."""
    for link in list(_chain(error, outside)):
        traceback.clear_frames(link.__traceback__)  # frames that still run, such as the guard's, stay
        link.__traceback__ = link.__cause__ = link.__context__ = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):  # of an error at an interactive prompt; last_exc since Python 3.12
            delattr(sys, name)


def _chain(error: BaseException, outside: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = {id(outside)}
    left: list[BaseException | None] = [error]
    while left:
        link = left.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        left += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]  # those of an exception group


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
