"""Optimizer steps within the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import (
    bare_step,
    forbid_gradient_readers,
    gradients_needed,
    line_that_reads_gradients,
    no_parameters,
)
from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

_RATES = ("lr", "betas", "eps", "weight_decay", "momentum")


class StepInBackward(Technique):
    """Steps over each parameter as soon as its gradient is there, and lets go of the gradient.

    The script's own optimizer steps, over one parameter at a time: its groups, its states and its checkpoints are as
    ever, and its ``step()`` finds nothing to do.
    """

    name = "step-in-backward"
    title = "step over each parameter within the backward pass, and keep no gradients"
    fidelity = "exact"
    lowers = ("gradient", "temporary")
    keeps = "parameters, the optimizer's states, and the gradients of one layer at a time"
    rests_on = "torch.Tensor.register_post_accumulate_grad_hook"
    source = "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"
    excludes = frozenset(("offload-optimizer", "optimizer-bf16-states", "clear-gradients"))
    rank = 30

    def unfit(self, facts: Facts) -> str | None:
        if not facts.optimizers:
            return "the script builds no optimizer of PyTorch's"
        if any(o.kind == "LBFGS" for o in facts.optimizers):
            return "LBFGS steps over all parameters at once"
        return gradients_needed(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "Parameters are new when backward() returns, and gradients are gone: code that skips a step for a loss "
            "that is not finite must do so before backward()."
        )

    def install(self, injection: Injection, options: Options) -> None:
        if injection.world_size > 1:
            raise CannotApply("gradients are exchanged between ranks after they are there")
        attached: list[Any] = []

        def attach(optimizer: Any) -> None:
            if attached:
                raise CannotApply("the script has several optimizers; one's backward pass would step another's")
            attached.append(optimizer)
            if type(optimizer).__name__ == "LBFGS":
                raise CannotApply("LBFGS steps over all parameters at once")
            _Stepping(injection, optimizer).attach()
            injection.say(self.name, f"{type(optimizer).__name__} steps within the backward pass")

        injection.on_optimizer.append(attach)
        forbid_gradient_readers(injection, self.name)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework in ("deepspeed", "fsdp"):
            return None
        if framework == "trainer":
            return (
                "# not in TrainingArguments; HF's Trainer clips gradients unless max_grad_norm=0. Of its optimizers, "
                '"galore_adamw_layerwise" steps in backward'
            )
        kind = facts.optimizers[0].kind if facts.optimizers else "AdamW"
        return _CODE.format(kind=kind)


_CODE = """\
optimizers = {{p: torch.optim.{kind}([p], ...) for p in model.parameters() if p.requires_grad}}

def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for p in optimizers:
    p.register_post_accumulate_grad_hook(step)
# then loss.backward() steps; leave optimizer.step() out. LR schedulers: one for each optimizer, or set the rates"""


class _Stepping:
    """Has one optimizer step over each parameter when its gradient is there."""

    def __init__(self, injection: Injection, optimizer: Any) -> None:
        self._injection = injection
        self._optimizer = optimizer
        self._groups: dict[Any, dict[str, Any]] = {}  # parameter that has the hook: its group
        self._done: dict[Any, tuple[Any, ...]] = {}  # parameter: the rates it was stepped with
        self._looked = False

    def attach(self) -> None:
        self._optimizer.register_step_pre_hook(lambda *_: self._hook_parameters())
        self._optimizer.register_step_post_hook(lambda *_: self._check())
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Hook parameters that have no hook; groups can be added, and loading a checkpoint makes new groups."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._groups:
                    parameter.register_post_accumulate_grad_hook(self._step)
                self._groups[parameter] = group

    def _step(self, parameter: Any) -> None:
        if not self._looked:
            self._looked = True
            line = line_that_reads_gradients()
            if line is not None:
                self._refuse(f"{line} reads gradients, which are gone when backward() returns")
        if parameter in self._done:
            self._refuse("a parameter got gradients twice in one step: of several backward passes or losses")
        optimizer = self._optimizer
        group = self._groups[parameter]
        if not any(group is g for g in optimizer.param_groups):
            self._hook_parameters()
            group = self._groups[parameter]
        with no_parameters(optimizer):
            group["params"] = [parameter]
            bare_step(optimizer)(optimizer)
        self._done[parameter] = _rates(group)
        parameter.grad = None

    def _check(self) -> None:
        changed = [p for p, rates in self._done.items() if _rates(self._groups[p]) != rates]
        if changed:
            self._refuse("the script sets the learning rate between backward() and step(): set it before backward()")
        self._done.clear()

    def _refuse(self, reason: str) -> None:
        self._injection.refuse(StepInBackward.name, reason)


def _rates(group: dict[str, Any]) -> tuple[Any, ...]:
    values: list[Any] = [group.get(name) for name in _RATES]
    return tuple(float(v) if hasattr(v, "item") else v for v in values)


TECHNIQUE = StepInBackward()
