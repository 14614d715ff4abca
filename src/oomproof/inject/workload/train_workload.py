"""Trains what a function builds, as a script: ``train_workload.py FILE FUNCTION``.

The function takes nothing and returns (model, batch, loss, optimizer): ``loss(model, batch)`` gives the loss, and
the tensors in ``batch`` have their samples along the first dimension. Stops when the observer has seen enough steps.
It is in a folder of its own, since Python puts that on its path. Python 3.9, standard library and torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

EPOCH = 1000  # batches


class Samples(Dataset):  # type: ignore[misc] # torch has no types here
    """One batch over and over, sample by sample: so that changes to the batch size find a DataLoader."""

    def __init__(self, batch: Any) -> None:
        leaves, self.structure = pytree.tree_flatten(batch)
        if not leaves or not all(isinstance(t, torch.Tensor) and t.dim() for t in leaves):
            sys.exit("the workload's batch must be made of tensors whose first dimension is the samples")
        sizes = {t.shape[0] for t in leaves}
        if len(sizes) != 1:
            sys.exit(f"the tensors of the workload's batch have {sorted(sizes)} samples; they must have as many")
        self.size = sizes.pop()
        self.leaves = [t.cpu() for t in leaves]

    def __len__(self) -> int:
        return int(self.size) * EPOCH

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return pytree.tree_unflatten([t[index % self.size] for t in self.leaves], self.structure)


def build(file: str, name: str) -> Any:
    """Return what the function builds."""
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(file))[0], file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found()


def main() -> None:
    model, batch, loss, optimizer = build(sys.argv[1], sys.argv[2])
    device = next(model.parameters()).device
    samples = Samples(batch)
    while True:
        for micro in DataLoader(samples, samples.size):
            loss(model, pytree.tree_map(lambda t: t.to(device), micro)).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
