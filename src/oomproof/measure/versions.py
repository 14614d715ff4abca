"""What differs between versions of torch, in one place: everything else here is the same for all of them.

Python 3.9; torch is imported only where it is used, so that the unit tests need none.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import Any

#: The versions that tests/phantom is run with: by ``make test-versions``, with the result in docs/versions.md.
TESTED = ("2.4.1", "2.6.0", "2.11.0", "2.14.1")


def numbers(version: str) -> tuple[int, ...]:
    """Return (2, 14, 1) for "2.14.1+cu130", (2, 15, 0) for "2.15.0a0+git1234"."""
    return tuple(int(found) for found in re.findall(r"\d+", re.split(r"[+a-zA-Z]", version)[0]))


def note(version: str) -> str | None:
    """Return what the report says of a torch outside the tested range, None inside it."""
    oldest, newest = TESTED[0], TESTED[-1]
    if numbers(oldest)[:2] <= numbers(version)[:2] and numbers(version) <= numbers(newest):
        return None
    age = "newer" if numbers(version) > numbers(newest) else "older"
    return f"torch {version} is {age} than those that oomproof is tested with, {oldest} to {newest}"


def allocator_config() -> str:
    """Return the allocator's settings from the environment; from torch 2.9 on PYTORCH_ALLOC_CONF comes first."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def checkpoint_generators() -> Iterator[str]:
    """Yield the names of the functions in torch.utils.checkpoint that run a non-reentrant checkpoint.

    From 2.14 on there is a second, which the first calls.
    """
    from torch.utils import checkpoint

    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):
        if hasattr(checkpoint, name):
            yield name


def pass_higher_order_operators(mode: type) -> None:
    """Let higher-order operators through a dispatch mode.

    Before 2.7 they refuse a mode that is not registered with each: in a table that is called python_key_mode_table
    before 2.5. From 2.7 on ``supports_higher_order_operators`` says it, and this does nothing.
    """
    import torch

    if hasattr(mode.__mro__[1], "supports_higher_order_operators"):
        return
    import torch._higher_order_ops  # they register themselves

    for operator in list(torch._ops._higher_order_ops.values()):
        table = getattr(operator, "python_key_table", None)
        if table is None:
            table = operator.python_key_mode_table
        if mode not in table:
            operator.py_impl(mode)(functools.partial(_pass_through, operator))


def _pass_through(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def seeded(func: Any) -> Any:
    """Return the overload of a random operator that takes a generator, None where it has none.

    Before 2.8 randint_like had none.
    """
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    packet, overload = func.overloadpacket, func._overloadname
    name = "generator" if overload == "default" else overload + "_generator"
    return getattr(packet, name) if name in packet.overloads() else None


def shape_of_gradient(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the first gradient that a node of the backward pass is given; None before 2.5."""
    if not hasattr(node, "_input_metadata"):
        return None
    return tuple(int(size) for size in node._input_metadata[0].shape)


def gradient_of(node: Any) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype of the gradient of an operator that keeps the shape of its input.

    Before 2.5 they are those of the saved input, whose saved-tensor hooks run for that.
    """
    shape = shape_of_gradient(node)
    if shape is not None:
        return shape, node._input_metadata[0].dtype
    saved = node._saved_self
    return tuple(saved.shape), saved.dtype
