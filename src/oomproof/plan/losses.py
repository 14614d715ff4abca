"""Recognising what a backward pass starts from: which mean a loss is. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

_KEY = "oomproof-loss"

#: Means over all elements of what they are given: samples of one size weigh the same.
_MEANS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
          "binary_cross_entropy_with_logits")  # fmt: skip

#: Nodes of the graph that multiply a loss by a number, copy or cast it.
_SCALES = frozenset(("MulBackward0", "DivBackward0", "ToCopyBackward0", "AliasBackward0", "CloneBackward0",
                     "ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0"))  # fmt: skip


class Loss(NamedTuple):
    """A loss whose meaning is certain."""

    kind: str  # "cross-entropy", "mean"
    weight: Any  # of a cross-entropy, a tensor: what its sum was divided by; None for means
    elements: int  # of its targets
    in_batch: bool = False  # as many classes as rows: perhaps each sample is told from the others of the batch


def watch(torch: Any) -> None:
    """Have torch's losses leave on their result what they are. Once in a process."""
    functional = torch.nn.functional
    if getattr(functional.cross_entropy, "oomproof_watched", False):
        return
    functional.cross_entropy = _watched(torch, functional.cross_entropy, _cross_entropy)
    for name in _MEANS:
        setattr(functional, name, _watched(torch, getattr(functional, name), _mean))


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


def _watched(torch: Any, original: Any, describe: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and getattr(result, "grad_fn", None) is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if given["reduction"] == "mean" and not given.get("size_average") and not given.get("reduce"):
                found = describe(torch, given)
                if found is not None:
                    result.grad_fn.metadata[_KEY] = found
        return result

    loss.oomproof_watched = True  # type: ignore[attr-defined]
    return loss


def _cross_entropy(torch: Any, given: Any) -> Loss | None:
    target, scores = given["target"], given["input"]
    in_batch = scores.dim() == 2 and scores.shape[0] == scores.shape[1]
    with torch.no_grad():
        if target.is_floating_point():  # a distribution for each sample: divided by the samples
            count = target.numel() // max(1, target.shape[1] if target.dim() > 1 else target.shape[0])
            return Loss("cross-entropy", torch.full((), count, device=target.device), count, in_batch)
        if given["weight"] is not None and given["label_smoothing"] > 0:
            return None  # a sum of two means with different weights
        valid = target != given["ignore_index"]
        if given["weight"] is None:
            weight = valid.sum()
        else:
            weight = given["weight"][target.where(valid, torch.zeros_like(target))].where(valid, 0).sum()
    return Loss("cross-entropy", weight, target.numel(), in_batch)


def _mean(torch: Any, given: Any) -> Loss:
    return Loss("mean", None, given["input"].numel())
