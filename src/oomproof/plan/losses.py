"""Recognising what a backward pass starts from: which mean a loss is. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

_KEY = "oomproof-loss"

#: Means over all elements of what they are given: samples of one size weigh the same. Where the reduction is, at least.
_MEANS = {"mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3}
_watching: dict[str, bool] = {}
_MEAN = 1  # torch.nn._reduction.get_enum("mean")

#: Nodes of the graph that multiply a loss by a number, copy or cast it.
_SCALES = frozenset(("MulBackward0", "DivBackward0", "ToCopyBackward0", "AliasBackward0", "CloneBackward0",
                     "ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0"))  # fmt: skip


class Loss(NamedTuple):
    """A loss whose meaning is certain."""

    kind: str  # "cross-entropy", "mean"
    weight: Any  # of a cross-entropy, a tensor: what its sum was divided by; None for means and where not counted
    elements: int  # of its targets
    in_batch: bool = False  # as many classes as rows: perhaps each sample is told from the others of the batch


def watch(torch: Any, count: bool = False) -> None:
    """Have torch's losses leave on their result what they are.

    ``count``: and what they divide by, for which small tensors are allocated; a survey must not.
    What torch.nn.functional calls is wrapped: its own functions are known by identity to subclasses of Tensor.
    """
    native = torch._C._nn
    _watching["count"] = _watching.get("count", False) or count
    if getattr(native.cross_entropy_loss, "oomproof_watched", False):
        return
    cross_entropy = native.cross_entropy_loss

    @functools.wraps(cross_entropy)
    def cross_entropy_loss(scores: Any, target: Any, weight: Any, reduction: Any, *rest: Any) -> Any:
        result = cross_entropy(scores, target, weight, reduction, *rest)
        if reduction == _MEAN and len(rest) == 2 and not torch.compiler.is_compiling():
            mark_cross_entropy(torch, result, scores.shape, target, weight, *rest)
        return result

    cross_entropy_loss.oomproof_watched = True  # type: ignore[attr-defined]
    native.cross_entropy_loss = cross_entropy_loss
    for name, place in _MEANS.items():
        setattr(native, name, _watched(torch, getattr(native, name), place))
    torch.binary_cross_entropy_with_logits = _watched(torch, torch.binary_cross_entropy_with_logits, 4)


def mark_cross_entropy(
    torch: Any, result: Any, shape: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float
) -> None:
    """Leave on a result that it is a mean cross-entropy of scores of a shape, if anybody watches."""
    if not _watching or getattr(result, "grad_fn", None) is None:
        return
    if weight is not None and label_smoothing > 0:
        return  # a sum of two means with different weights
    in_batch = len(shape) == 2 and shape[0] == shape[1]
    if not _watching["count"]:
        result.grad_fn.metadata[_KEY] = Loss("cross-entropy", None, 0, in_batch)
        return
    with torch.no_grad():
        if target.is_floating_point():  # a distribution for each sample: divided by the samples
            count = target.numel() // max(1, target.shape[1] if target.dim() > 1 else target.shape[0])
            divisor, elements = torch.full((), count, device=target.device), count
        else:
            valid = target != ignore_index
            elements = target.numel()
            if weight is None:
                divisor = valid.sum()
            else:
                divisor = weight[target.where(valid, torch.zeros_like(target))].where(valid, 0).sum()
    result.grad_fn.metadata[_KEY] = Loss("cross-entropy", divisor, elements, in_batch)


def of(tensors: Any) -> Loss | None:
    """Return the loss that a backward pass starts from, None where it is not one of torch's means.

    One root that is such a loss, or a multiple of it by a number. A sum of two losses is none: each is another mean.
    """
    if len(tensors) != 1:
        return None
    node = tensors[0].grad_fn
    while node is not None:
        found: Loss | None = node.metadata.get(_KEY)
        if found is not None:
            return found
        following = [n for n, _ in node.next_functions if n is not None]
        if type(node).__name__ not in _SCALES or len(following) != 1:
            return None
        node = following[0]
    return None


def _watched(torch: Any, original: Any, place: int) -> Any:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        reduction = args[place] if len(args) > place else kwargs.get("reduction")
        if reduction == _MEAN and not torch.compiler.is_compiling() and getattr(result, "grad_fn", None) is not None:
            result.grad_fn.metadata[_KEY] = Loss("mean", None, args[0].numel())
        return result

    return loss
