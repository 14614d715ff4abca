"""Why a step in micro-batches is not the same step as a whole one. Runs in the user's process; Python 3.9."""

from __future__ import annotations

from typing import Any


def doubts(torch: Any, model: Any, sizes: list[int], counted: bool) -> list[str]:
    """Return what makes a step in micro-batches of ``sizes`` differ from a step of the whole batch.

    Layers tell; what a loss function does across the samples of a batch (contrastive losses) cannot be seen.
    """
    found = []
    norm, drop = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd
    training = [(name, module) for name, module in model.named_modules() if module.training]
    norms = [name for name, module in training if isinstance(module, norm)]
    if norms:
        found.append(
            f"BatchNorm in training mode ({_list(norms)}) normalises each micro-batch by itself: not the same step as "
            "the whole batch's; use GroupNorm, or put these layers in evaluation mode"
        )
    drops = [name for name, module in training if isinstance(module, drop) and module.p > 0]
    unequal = len(set(sizes)) > 1
    if drops:
        uneven = f" ({', '.join(map(str, sizes))} samples)" if unequal else ""
        found.append(
            f"dropout ({_list(drops)}) draws other masks for micro-batches{uneven} than for the whole batch: equal on "
            "average, not in bits"
        )
    if unequal and not counted:
        found.append(
            f"micro-batches of {', '.join(map(str, sizes))} samples are weighted by samples: right where the loss is a "
            "mean over samples; give count= where it is a mean over tokens"
        )
    return found


def _list(names: list[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
