"""The parts of a training command, and in which two commands differ."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Parts(NamedTuple):
    """A training command: what starts it, what it runs, and the rest."""

    launcher: tuple[str, ...]
    program: str  # the script or module; the first word where there is neither
    script: str | None  # where it is a file of Python
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> Parts:
        """Return the parts of a command."""
        for place, word in enumerate(command):
            if word.endswith(".py"):
                return cls(_launcher(command[:place]), word, word, tuple(command[place + 1 :]))
            if word == "-m" and place + 1 < len(command) and not command[place + 1].startswith("torch.distributed"):
                return cls(_launcher(command[:place]), command[place + 1], None, tuple(command[place + 2 :]))
        return cls((), command[0], None, tuple(command[1:]))

    def same_program(self, other: Parts) -> bool:
        """Return whether two commands run a script or module of the same name."""
        return os.path.normpath(self.program) == os.path.normpath(other.program)


def _launcher(words: Sequence[str]) -> tuple[str, ...]:
    """Return what starts the program, without the interpreter: which Python it is shows in its torch."""
    return tuple(words[1:] if words and Path(words[0]).name.startswith("python") else words)


def command_difference(planned: Parts, given: Parts) -> str | None:
    """Return in what a command differs from the plan's besides the program: what was planned, and what is given."""
    parts = []
    if planned.launcher != given.launcher:
        parts.append(
            f"what starts it (planned {shlex.join(planned.launcher) or 'nothing'}, "
            f"given {shlex.join(given.launcher) or 'nothing'})"
        )
    before, now = _options(planned.arguments), _options(given.arguments)
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            parts.append(f"{name or 'arguments'} (planned {_value(name, before)}, given {_value(name, now)})")
    if not parts:
        return None
    return f"the command differs from the plan's in {', '.join(parts)}; the plan was proved for what was planned"


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option; those of "" are words before any.

    Whether a word is the value of the option before it is the script's to know; here it is taken for one.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        key, is_joined, value = word.partition("=")
        if word.startswith("-") and not _is_number(word):
            found.setdefault(key, []).extend([value] if is_joined else [])
            name = "" if is_joined else key
        elif is_joined and key.strip("+~").replace(".", "").replace("_", "").isalnum():  # as Hydra has them
            found.setdefault(key, []).append(value)
        else:
            found.setdefault(name, []).append(word)
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(name: str, options: Mapping[str, list[str]]) -> str:
    """Return what stands for an option: its values, or whether it is there at all."""
    if name not in options:
        return "without it" if name else "none"
    return shlex.join(options[name]) or "with it"
