"""Exact GPU memory of an unmodified PyTorch training script, without a GPU.

``run`` and ``fits`` measure a command on a phantom GPU and return a ``Measurement``; ``read_capture`` reads a saved
one. Importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oomproof.api import fits, run
    from oomproof.capture import read_capture, write_capture
    from oomproof.errors import OomproofError
    from oomproof.gpus import GPUSpec, get_gpu
    from oomproof.guard import Guard, GuardError
    from oomproof.measure.measurement import Measurement
    from oomproof.plan import planning as _planning

    plan = _planning.plan

__all__ = [
    "GPUSpec",
    "Guard",
    "GuardError",
    "Measurement",
    "OomproofError",
    "fits",
    "get_gpu",
    "plan",
    "read_capture",
    "run",
    "write_capture",
]

_HOMES = {
    "GPUSpec": "oomproof.gpus",
    "Guard": "oomproof.guard",
    "GuardError": "oomproof.guard",
    "Measurement": "oomproof.measure.measurement",
    "OomproofError": "oomproof.errors",
    "fits": "oomproof.api",
    "get_gpu": "oomproof.gpus",
    "read_capture": "oomproof.capture",
    "run": "oomproof.api",
    "write_capture": "oomproof.capture",
}


def __getattr__(name: str) -> Any:
    if name == "plan":
        return importlib.import_module("oomproof.plan")  # a package that can be called
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
