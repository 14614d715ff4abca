"""What a technique is: one change that alters memory, how it gets into a script, what a person would write instead.

Techniques run in two places: the planner asks what they are and when they make sense, the user's process installs them.
So this package is Python 3.9 and imports torch only inside ``install``.
"""

from __future__ import annotations

import importlib
import keyword
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: Best first. exact: the same bits; equal: the same maths, rounding may differ; approximate: different arithmetic.
FIDELITIES = ("exact", "equal", "approximate", "changes-model")

FRAMEWORKS = ("code", "trainer", "lightning", "accelerate", "deepspeed", "fsdp")

Options = Mapping[str, Any]


class CannotApply(Exception):
    """A technique cannot be put into this script; the message says why and what to do instead."""


class Change(NamedTuple):
    """One technique with its options, as a plan lists it."""

    name: str
    options: dict[str, Any] = {}

    @property
    def technique(self) -> Technique:
        """The technique that is meant. Raises KeyError for a name that this version does not know."""
        return techniques()[self.name]

    @property
    def label(self) -> str:
        """Return the short form that tables show: "checkpoint-blocks(every=2)"."""
        shown = self.technique.shown(self.options)
        return f"{self.name}({shown})" if shown else self.name

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads."""
        return {"technique": self.name, **({"options": self.options} if self.options else {})}


class Technique:
    """Base of all techniques; a subclass is one file with a ``TECHNIQUE`` in it.

    ``excludes`` names techniques that it cannot be combined with. ``needs`` are packages of the script's environment,
    by their import names, and ``extra`` is what to install for them. ``rank`` orders techniques of the same fidelity:
    simpler ones first.
    """

    name: str
    title: str  # "recompute every block in the backward pass"
    fidelity: str
    lowers: tuple[str, ...]  # categories of the breakdown, "cached" or "outside"
    keeps: str = ""  # what it does not save, where people believe it does
    rests_on: str  # the library call
    source: str  # URL of its documentation
    needs: tuple[str, ...] = ()
    extra: str = ""
    excludes: frozenset[str] = frozenset()
    accepts: Mapping[str, Any] = {}  # options: the type of each, a tuple of types, or of the values there are
    rank: int = 50
    proposal_only: bool = False  # the real run is the person's to change; the phantom shows what it would save

    def wrong(self, options: Options) -> str | None:
        """Return which option there is not, or what it cannot be; None where all are known."""
        for name, value in options.items():
            if name not in self.accepts:
                return f"{self.name} has no option {name}; it has {', '.join(self.accepts) or 'none'}"
            wanted = self.accepts[name]
            choices = wanted if isinstance(wanted, tuple) else (wanted,)
            if not any(_is(value, choice) for choice in choices):
                words = (c.__name__ if isinstance(c, type) else repr(c) for c in choices)
                return f"{name} of {self.name} is {value!r}; it can be {' or '.join(words)}"
        return None

    def shown(self, options: Options) -> str:
        """Return the options as tables show them."""
        return ", ".join(f"{key}={value}" for key, value in options.items() if not isinstance(value, (list, dict)))

    def fidelity_of(self, options: Options) -> str:
        """Return the fidelity with these options."""
        return self.fidelity

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        """Return why it is less faithful with these options than it is mostly; None where it is not."""
        return None

    def unfit(self, facts: Facts) -> str | None:
        """Return why this makes no sense for a script, None where it does."""
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        """Yield the options worth trying for a script, the mildest first."""
        yield {}

    def environment(self, options: Options, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables to set before the script's process starts."""
        return {}

    def imports(self, options: Options) -> tuple[str, ...]:
        """Return the packages that it imports into the script's process whenever it is applied."""
        chosen = options.get("library")
        return self.needs if chosen is None else tuple({chosen.replace("-", "_")}.intersection(self.needs))

    def slow_to_try(self, options: Options) -> bool:
        """Return whether a run takes ten times as long as others: it is tried where nothing else does."""
        return False

    def world_size(self, options: Options) -> int | None:
        """Return how many GPUs the script is to run on, one process each; None where it stays one process."""
        return None

    def only_proposed(self, facts: Facts, options: Options) -> bool:
        """Return whether this script has to be changed by hand for it: ``apply`` refuses, the phantom measures it."""
        return self.proposal_only

    def caution(self, facts: Facts, options: Options) -> str | None:
        """Return what the person must know before applying it to this script, None where there is nothing."""
        return None

    def install(self, injection: Injection, options: Options) -> None:
        """Put the change into this process: register what is to happen when models, optimizers, batches appear.

        Raises CannotApply, here or later from a callback, where the script makes it impossible.
        """

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        """Return what a person would write instead; None where a framework has no way of its own for it."""
        return None


def in_code(name: str) -> str:
    """Return the expression for a submodule of ``model`` in the code that a person would write."""
    if not name:
        return "model"
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        return f"model.{name}"
    return f"model.get_submodule({name!r})"  # members of a list or a Sequential have numbers for names


def _is(value: Any, choice: Any) -> bool:
    """Return whether a value is a choice, or of that type: True is no number, but a whole number may be a float."""
    if not isinstance(choice, type):
        return type(value) is type(choice) and value == choice
    return (
        type(value) is choice or (choice is float and type(value) is int) or (choice is list and type(value) is tuple)
    )


@cache
def techniques() -> dict[str, Technique]:
    """Return all techniques by name."""
    from oomproof.plan import techniques as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        technique = importlib.import_module(f"{package.__name__}.{module.name}").TECHNIQUE
        found[technique.name] = technique
    return found


def fidelity(changes: tuple[Change, ...]) -> str:
    """Return the fidelity of a set of changes: that of the least faithful one; of none "exact"."""
    return max((c.technique.fidelity_of(c.options) for c in changes), key=FIDELITIES.index, default="exact")


def environment(changes: Iterable[Change], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a set of changes needs beside those of ``base``."""
    found: dict[str, str] = {}
    for change in changes:
        found.update(change.technique.environment(change.options, {**base, **found}))
    return found


def world_size(changes: tuple[Change, ...]) -> int | None:
    """Return how many GPUs a set of changes runs on, None where none of them asks for a world.

    The changes must not ``conflict``: those that ask for worlds ask for the same.
    """
    return next((size for c in changes if (size := c.technique.world_size(c.options)) is not None), None)


def conflict(changes: tuple[Change, ...]) -> str | None:
    """Return why these cannot be applied together, None where they can."""
    for place, one in enumerate(changes):
        for other in changes[place + 1 :]:
            if one.name == other.name:
                return f"{one.name} is there twice"
            if other.name in one.technique.excludes or one.name in other.technique.excludes:
                return f"{one.name} and {other.name} exclude each other"
            sizes = one.technique.world_size(one.options), other.technique.world_size(other.options)
            if None not in sizes and sizes[0] != sizes[1]:
                return f"{one.name} is for {sizes[0]} GPUs and {other.name} for {sizes[1]}"
    return None
