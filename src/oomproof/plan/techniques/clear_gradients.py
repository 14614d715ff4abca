"""Gradients let go of earlier."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import line_that_reads_gradients, on_zero_grad, parameters_of
from oomproof.plan.technique import Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class ClearGradients(Technique):
    """Gradients that the script has done with are freed, not kept through the next forward pass.

    Option ``when``: "zero-grad" has ``zero_grad(set_to_none=False)`` free them; "after-step" frees them after the step
    in scripts that call ``zero_grad`` only after the forward pass, as Lightning does.
    """

    name = "clear-gradients"
    title = "free gradients before the next forward pass"
    fidelity = "exact"
    lowers = ("gradient",)
    keeps = "the gradients of the backward pass itself: it lowers a peak that lies in the forward pass or soon after"
    rests_on = "torch.optim.Optimizer.zero_grad(set_to_none=True)"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"
    accepts = {"when": ("zero-grad", "after-step")}
    excludes = frozenset(("step-in-backward",))
    rank = 5

    def unfit(self, facts: Facts) -> str | None:
        if facts.framework == "deepspeed":
            return "DeepSpeed clears the gradients itself"
        if not {"keeps-gradients", "late-zero-grad"} & facts.uses:
            return "the script frees its gradients before the forward pass"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        if "keeps-gradients" in facts.uses:
            yield {"when": "zero-grad"}
        if "late-zero-grad" in facts.uses:
            yield {"when": "after-step"}

    def caution(self, facts: Facts, options: Options) -> str | None:
        if options["when"] == "zero-grad":
            return "Code that reads a gradient after zero_grad() finds None, not zeros."
        return "Code that reads a gradient between step() and zero_grad(), to log its norm, finds None."

    def install(self, injection: Injection, options: Options) -> None:
        if options["when"] == "zero-grad":
            self._free_in_zero_grad(injection)
        else:
            self._free_after_step(injection)

    def _free_in_zero_grad(self, injection: Injection) -> None:
        torch = injection.torch
        zeros: set[Any] = set()  # parameters whose gradients would be zeros, not None

        def freeing(original: Any, parameters: Any) -> Any:
            @functools.wraps(original)
            def zero_grad(self: Any, set_to_none: bool = True) -> Any:
                if not set_to_none:
                    zeros.update(p for p in parameters(self) if p.grad is not None)
                    injection.say(ClearGradients.name, "zero_grad(set_to_none=False) frees the gradients")
                return original(self, set_to_none=True)

            return zero_grad

        for kind, parameters in ((torch.optim.Optimizer, parameters_of), (torch.nn.Module, _of_module)):
            kind.zero_grad = freeing(kind.zero_grad, parameters)

        def fill(optimizer: Any, args: Any, kwargs: Any) -> None:
            # a gradient of zeros still decays weights and moves by momentum; None does not
            for parameter in parameters_of(optimizer):
                if parameter.grad is None and parameter in zeros:
                    parameter.grad = torch.zeros_like(parameter)

        injection.on_optimizer.append(lambda optimizer: optimizer.register_step_pre_hook(fill) and None)

    def _free_after_step(self, injection: Injection) -> None:
        cleared: set[Any] = set()  # parameters whose gradients were freed here; the script has yet to clear them
        looked: list[bool] = []

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not looked:
                looked.append(True)
                line = line_that_reads_gradients()
                if line is not None:
                    injection.refuse(
                        self.name, f"{line} reads gradients: move zero_grad() up yourself, after that line"
                    )
                injection.say(self.name, f"{type(optimizer).__name__} frees its gradients after each step")
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad = None
                    cleared.add(parameter)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if any(p in cleared and p.grad is not None for p in parameters_of(optimizer)):
                injection.refuse(self.name, "the script does not call zero_grad() between two steps: it keeps adding")

        on_zero_grad(injection.torch, cleared.difference_update)

        def attach(optimizer: Any) -> None:
            optimizer.register_step_post_hook(after)
            optimizer.register_step_pre_hook(before)

        injection.on_optimizer.append(attach)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "deepspeed":
            return None
        if options["when"] == "zero-grad":
            return "optimizer.zero_grad()  # without set_to_none=False"
        if framework == "lightning":
            return (
                "class Model(LightningModule):\n"
                "    def on_train_batch_end(self, outputs, batch, batch_idx):\n"
                "        self.optimizers().zero_grad()  # Lightning does it only after the next forward pass"
            )
        return "optimizer.step()\noptimizer.zero_grad()  # here, not after the next forward pass"


def _of_module(module: Any) -> list[Any]:
    return list(module.parameters())


TECHNIQUE = ClearGradients()
