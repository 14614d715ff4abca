"""Optimizer steps over one parameter at a time, or fused, in place of foreach."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import STATES, is_torch
from oomproof.plan.technique import Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: Adagrad's is for the CPU only (2.4 to 2.14).
_FUSED = frozenset(("Adam", "AdamW", "SGD"))
_NO_FOREACH = frozenset(("LBFGS", "SparseAdam", "Muon"))


class OptimizerImplementation(Technique):
    """foreach, PyTorch's default, makes temporaries of the size of all parameters; fused and the plain loop do not."""

    name = "optimizer-implementation"
    title = "let the optimizer step without foreach's temporaries"
    fidelity = "equal"
    lowers = ("temporary",)
    keeps = "the optimizer's states; and nothing where the peak is in the backward pass"
    rests_on = "torch.optim.AdamW(fused=True) and foreach=False"
    source = "https://docs.pytorch.org/docs/stable/optim.html"
    accepts = {"use": ("fused", "for-loop")}
    excludes = STATES - {"optimizer-bf16-states", "sgd"}  # the others bring a step of their own
    rank = 10

    def fidelity_of(self, options: Options) -> str:
        return "exact" if options["use"] == "for-loop" else "equal"

    def unfit(self, facts: Facts) -> str | None:
        if facts.framework == "deepspeed":
            return "DeepSpeed builds the optimizer that steps"
        if not any(is_torch(o.module) and o.kind not in _NO_FOREACH for o in facts.optimizers):
            return "the script builds none of torch's optimizers that use foreach"
        if all(o.options.get("fused") or o.options.get("foreach") is False for o in facts.optimizers):
            return "the script's optimizers do not use foreach"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if any(o.kind in _FUSED and not o.options.get("differentiable") for o in facts.optimizers):
            yield {"use": "fused"}
        yield {"use": "for-loop"}

    def install(self, injection: Injection, options: Options) -> None:
        fused = options["use"] == "fused"

        def choose(kind: Any, kwargs: dict[str, Any]) -> None:
            known = inspect.signature(kind.__init__).parameters
            if fused and kind.__name__ in _FUSED and not kwargs.get("differentiable"):
                kwargs.update(fused=True, foreach=None)
            elif not fused and "foreach" in known:
                kwargs.update(foreach=False, fused=None) if "fused" in known else kwargs.update(foreach=False)
            else:
                return
            injection.say(self.name, f"{kind.__name__}({'fused=True' if fused else 'foreach=False'})")

        injection.optimizer_options.append(choose)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        fused = options["use"] == "fused"
        if framework == "deepspeed":
            return None
        kind = facts.optimizers[0].kind if facts.optimizers else "AdamW"
        if framework == "trainer" and fused and kind == "AdamW":
            return 'TrainingArguments(..., optim="adamw_torch_fused")'
        if framework == "trainer":
            choice = '"fused": True' if fused else '"foreach": False'
            return f'Trainer(..., optimizer_cls_and_kwargs=(torch.optim.{kind}, {{"lr": ..., {choice}}}))'
        return f"torch.optim.{kind}(model.parameters(), ..., {'fused=True' if fused else 'foreach=False'})"


TECHNIQUE = OptimizerImplementation()
