"""Cutting a batch into pieces along its first dimension. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from oomproof.plan.technique import CannotApply


def sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of at most ``parts`` pieces, as equal as can be, the larger first: 10 in 4 is 3, 3, 2, 2."""
    parts = min(parts, total)
    return [total // parts + (place < total % parts) for place in range(parts)]


def batch_size(torch: Any, batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of its tensors.

    Raises CannotApply where that is not certain.
    """
    found = {tensor.shape[0] for tensor in _tensors(torch, batch) if tensor.dim() > 0}
    if len(found) != 1:
        what = f"tensors with first dimensions {', '.join(map(str, sorted(found)))}" if found else "no tensor"
        raise CannotApply(f"a batch has {what}: it is not known along which dimension its samples lie")
    return int(next(iter(found)))


def split(torch: Any, batch: Any, pieces: list[int]) -> Iterator[Any]:
    """Yield the pieces of a batch: tensors and lists of strings are cut, numbers are in every piece.

    Raises CannotApply for what it cannot cut.
    """
    total, start = sum(pieces), 0
    for size in pieces:
        yield _cut(torch, batch, total, start, start + size)
        start += size


def join(torch: Any, found: list[Any], sizes: list[int]) -> Any:
    """Return one output from those of the pieces: the reverse of ``split``.

    Raises CannotApply for what is not cut along its first dimension: a loss, a state.
    """
    first = found[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            raise CannotApply("the model returns a number, such as its loss, for the whole batch")
        if [output.shape[0] for output in found] != sizes:
            raise CannotApply(
                f"the model returns a tensor with first dimension {first.shape[0]} for {sizes[0]} samples: it is not "
                "known along which dimension they lie"
            )
        return torch.cat(found)
    if first is None or isinstance(first, (bool, int, float, str)):
        if any(output != first for output in found):
            raise CannotApply(f"the model returns a {type(first).__name__} that depends on the batch")
        return first
    if isinstance(first, Mapping):
        joined = {key: join(torch, [output[key] for output in found], sizes) for key in first}
        return joined if type(first) is dict else type(first)(**joined)
    if isinstance(first, (list, tuple)):
        items = [join(torch, list(outputs), sizes) for outputs in zip(*found)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    raise CannotApply(f"the model returns a {type(first).__name__}, which cannot be put together from pieces")


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(torch, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(torch, item)


def _cut(torch: Any, value: Any, total: int, start: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() > 0 else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        cut = {key: _cut(torch, item, total, start, end) for key, item in value.items()}
        return cut if type(value) is dict else type(value)(cut)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        if any(True for _ in _tensors(torch, value)):
            items = [_cut(torch, item, total, start, end) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not value:
            return value
        if len(value) == total:
            return value[start:end]
    raise CannotApply(f"a batch has a {type(value).__name__} in it, which cannot be cut into pieces")
