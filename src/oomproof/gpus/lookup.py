"""Finding a GPU by the name that a person, the driver or a cloud gives it."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache

from oomproof.errors import UnknownGPUError
from oomproof.gpus.catalogue import all_gpus
from oomproof.gpus.spec import GPUSpec

DEFAULT_KEY = "h100-80gb"
"""The GPU that is meant when nobody names one: large enough that most scripts reach their peak on it."""

_VENDOR_WORDS = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gpu")
_NOT_NAMING = re.compile(r"[^a-z0-9]+")


def get_gpu(name: str) -> GPUSpec:
    """Return the GPU called ``name``.

    Case, spaces, dashes, underscores and the words NVIDIA, GeForce, Tesla, Quadro and RTX do not matter. A
    name that leaves the memory size out means the smallest card of that name, in its SXM form where it has
    one: what fits there fits on the larger ones. Raises UnknownGPUError with the nearest names.
    """
    spec = _index().get(_normalise(name))
    if spec is None:
        raise UnknownGPUError(f"no GPU is called {name!r}; {_suggestion(name)}`oomproof gpus` lists all of them")
    return spec


def default_gpu() -> GPUSpec:
    """Return the GPU that is meant when nobody names one."""
    return get_gpu(DEFAULT_KEY)


@lru_cache(maxsize=1)
def _index() -> dict[str, GPUSpec]:
    """Return the specs by normalised name; keys and aliases go before driver's names, which some share."""
    index: dict[str, GPUSpec] = {}
    for spec in all_gpus():
        for name in (spec.key, *spec.aliases):
            index.setdefault(_normalise(name), spec)
    for spec in all_gpus():
        index.setdefault(_normalise(spec.name), spec)
    return index


def _normalise(name: str) -> str:
    return _VENDOR_WORDS.sub("", _NOT_NAMING.sub("", name.lower()))


def _suggestion(name: str) -> str:
    wanted = _normalise(name)
    near = difflib.get_close_matches(wanted, _index(), n=8, cutoff=0.5)
    near.sort(key=lambda form: _common_start(wanted, form), reverse=True)  # stable: then by likeness
    keys = list(dict.fromkeys(_index()[form].key for form in near))[:3]
    return f"did you mean {', '.join(keys)}? " if keys else ""


def _common_start(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
