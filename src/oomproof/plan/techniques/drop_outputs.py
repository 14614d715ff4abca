"""Letting go of a step's outputs before the next one."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

_SMALL = 1 << 20  # losses are kept to be printed


class DropOutputs(Technique):
    """A name such as ``outputs`` holds the last step's outputs until the next forward pass has made new ones.

    Only the script can let go of its names, so this is proposed. On the phantom the outputs that are still there when
    the model is called again are emptied: what that saves is what ``del outputs, loss`` would.
    """

    name = "drop-outputs"
    title = "let go of a step's outputs before the next forward pass"
    fidelity = "exact"
    lowers = ("activation",)
    keeps = "anything where the peak is in the first step, or where the script reads the outputs later on"
    rests_on = "del"
    source = "https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory"
    rank = 1
    proposal_only = True

    def install(self, injection: Injection, options: Options) -> None:
        if not injection.rehearsal:
            raise CannotApply("only the script can let go of its outputs: put `del outputs, loss` after the step")
        torch = injection.torch
        kind = torch.UntypedStorage
        models: list[_Outputs] = []

        def wrap(model: Any) -> None:
            outputs = _Outputs(kind)
            models.append(outputs)
            wrap_forward(model, functools.partial(around, model, outputs))

        def around(model: Any, outputs: _Outputs, forward: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if outputs.old:
                kept = {s.data_ptr() for s in _storages(torch, (args, kwargs, list(model.parameters())))}
                freed = outputs.empty(kept | {b.untyped_storage().data_ptr() for b in model.buffers()})
                if freed:
                    what = f"{freed:,} B of the last step's outputs are still held when the next step's are made"
                    injection.say(self.name, what, type(model).__name__)
            output = forward(*args, **kwargs)
            outputs.note(_storages(torch, output))
            return output

        def stepped(*_: Any) -> None:
            for outputs in models:
                outputs.old, outputs.new = outputs.old + outputs.new, []

        injection.on_model.append(wrap)
        importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(stepped)

    def caution(self, facts: Facts, options: Options) -> str | None:
        return "on the phantom the outputs are emptied, not their names: a script that reads them later on fails there"

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework in ("trainer", "lightning"):
            return None  # their loops hold nothing over a step
        return (
            "for batch in loader:\n"
            "    outputs = model(batch)\n"
            "    loss = loss_of(outputs)\n"
            "    loss.backward()\n"
            "    optimizer.step()\n"
            "    optimizer.zero_grad()\n"
            "    losses.append(loss.item())  # a number, not the tensor with its graph\n"
            "    del outputs, loss"
        )


class _Outputs:
    """Weak references to the storages of a model's outputs: of this step, and of those before."""

    def __init__(self, kind: Any) -> None:
        self.new: list[int] = []
        self.old: list[int] = []
        self._kind = kind

    def note(self, storages: list[Any]) -> None:
        """Remember what is large enough to matter."""
        self.new += [storage._weak_ref() for storage in storages if storage.nbytes() >= _SMALL]

    def empty(self, kept: set[int]) -> int:
        """Empty the storages of the steps before that still exist, except those in use; return the bytes."""
        freed = 0
        for reference in self.old:
            storage = self._kind._new_with_weak_ptr(reference)
            if storage is not None and storage.data_ptr() not in kept:
                freed += storage.nbytes()
                storage.resize_(0)
            self._kind._free_weak_ref(reference)
        self.old = []
        return freed


def _storages(torch: Any, value: Any) -> list[Any]:
    """Return the storages of the tensors in a value, each once."""
    from torch.utils._pytree import tree_leaves

    found = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "_lazy") and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


TECHNIQUE = DropOutputs()
