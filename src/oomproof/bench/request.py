"""What is asked of a bench, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from oomproof.measure.assemble import Outcome
from oomproof.phantom.launch import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One run of the bench's command."""

    settings: Settings
    tag: Hashable = None  # the asker's own; comes back with the answer
    arguments: tuple[str, ...] | None = None  # the command's own words after the script; None: as the command has them
    env: Mapping[str, str] = field(default_factory=dict)  # beside the bench's
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a request ended: with an outcome, or with the reason why there is none."""

    request: Request
    outcome: Outcome | None
    seconds: float
    error: str | None = None  # "timed out", "stopped", or an error's message
    output: str = ""  # the end of what a command that failed printed
    forked: bool = False  # from a warm process
