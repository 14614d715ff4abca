"""Cross entropy of a linear layer's output that never exists as a whole: a block of the vocabulary at a time.

Imported in the user's process, once torch is there. Python 3.9.

A block of the vocabulary, and not of the tokens as elsewhere: each block of the weight's gradient is then one product,
as without blocks, and what has to be summed over the blocks is the gradient of the input, small enough to be summed
in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_HALF = (torch.float16, torch.bfloat16)


class Loss(NamedTuple):
    """The arguments of ``torch.nn.functional.cross_entropy`` beside input and target."""

    weight: Any = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


def linear_cross_entropy(
    hidden: Any, weight: Any, bias: Any, target: Any, loss: Loss, *, dtype: Any = None, blocks: int = 16
) -> Any:
    """Return ``cross_entropy(linear(hidden, weight, bias), target)``; the gradients too are made in blocks.

    ``hidden`` has the shape (N, in), ``target`` (N) holds classes. ``weight`` and ``bias`` may be wider than
    ``hidden``, as under autocast: the product is made in hidden's dtype, everything after it in at least float32. The
    result has the ``dtype``, hidden's where none is given. Costs one product more than the plain loss, in backward.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, loss, dtype or hidden.dtype, blocks)


def block_size(classes: int, blocks: int) -> int:
    """Return the classes in a block: a multiple of 64, so that the products are aligned."""
    return max(64, -(-classes // blocks + 63) // 64 * 64) if blocks > 1 else classes


class _LinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, target: Any, loss: Loss, dtype: Any, blocks: int) -> Any:
        classes = weight.shape[0]
        step = block_size(classes, blocks)
        wide = torch.float32 if hidden.dtype in _HALF else hidden.dtype
        valid = target != loss.ignore_index
        # PyTorch's own kernels trap an index that is no class; here it would be in no block, and pass unseen
        torch._assert_async((~valid | ((target >= 0) & (target < classes))).all())
        target = torch.where(valid, target, 0)
        share = loss.label_smoothing / classes
        mass = None if loss.weight is None else loss.weight.to(wide)

        lse = torch.full(target.shape, -torch.inf, dtype=wide, device=hidden.device)
        at_target = torch.zeros_like(lse)
        smooth = torch.zeros_like(lse)  # sum of the weighted logits
        for start in range(0, classes, step):
            stop = min(start + step, classes)
            logits = _logits(hidden, weight, bias, start, stop, wide)
            within = (target >= start) & (target < stop)
            place = torch.where(within, target - start, 0).unsqueeze(1)
            at_target += torch.where(within, logits.gather(1, place).squeeze(1), 0)
            if share:
                smooth += logits.sum(1) if mass is None else logits @ mass[start:stop]
            lse = torch.logaddexp(lse, torch.logsumexp(logits, 1))

        of_target = valid.to(wide) if mass is None else torch.where(valid, mass[target], 0)
        rows = (lse - at_target) * of_target * (1 - loss.label_smoothing)
        if share:
            total = classes if mass is None else mass.sum()
            rows = rows + torch.where(valid, (lse * total - smooth) * share, 0)
        count = of_target.sum() if loss.reduction == "mean" else None
        ctx.save_for_backward(hidden, weight, bias, target, valid, lse, of_target, mass, count)
        ctx.loss, ctx.step = loss, step
        if loss.reduction == "none":
            return rows.to(dtype)
        return (rows.sum() if count is None else rows.sum() / count).to(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        hidden, weight, bias, target, valid, lse, of_target, mass, count = ctx.saved_tensors
        loss, step = ctx.loss, ctx.step
        classes, wide = weight.shape[0], lse.dtype
        grad = grad.to(wide) if count is None else grad.to(wide) / count
        grad = torch.where(valid, grad, 0)  # a mean over nothing divides by nothing, and ignored tokens stay 0
        share = loss.label_smoothing / classes
        of_target = of_target * grad * (1 - loss.label_smoothing)
        total = classes if mass is None else mass.sum()
        row = of_target + grad * (total * share) if share else of_target

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for start in range(0, classes, step):
            stop = min(start + step, classes)
            change = _logits(hidden, weight, bias, start, stop, wide)
            change.sub_(lse.unsqueeze(1)).exp_().mul_(row.unsqueeze(1))
            within = (target >= start) & (target < stop)
            place = torch.where(within, target - start, 0).unsqueeze(1)
            change.scatter_add_(1, place, -torch.where(within, of_target, 0).unsqueeze(1))
            if share:
                change.sub_((grad * share).unsqueeze(1) * (1 if mass is None else mass[start:stop]))
            narrow = change.to(hidden.dtype)
            del change
            if grad_bias is not None:
                grad_bias[start:stop] = narrow.sum(0)
            if grad_weight is not None:
                if weight.dtype == hidden.dtype:
                    torch.mm(narrow.t(), hidden, out=grad_weight[start:stop])
                else:
                    grad_weight[start:stop] = narrow.t() @ hidden
            if grad_hidden is not None:
                part = weight[start:stop].to(hidden.dtype)
                if wide == hidden.dtype:
                    grad_hidden.addmm_(narrow, part)
                else:
                    grad_hidden += narrow @ part
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _logits(hidden: Any, weight: Any, bias: Any, start: int, stop: int, wide: Any) -> Any:
    part = weight[start:stop].to(hidden.dtype)
    offset = None if bias is None else bias[start:stop].to(hidden.dtype)
    return F.linear(hidden, part, offset).to(wide)
