"""Optimizer states in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import (
    CHECKPOINTS,
    ELEMENTWISE,
    STATES,
    bare_step,
    call_closure,
    chosen,
    no_parameters,
    unfit_kinds,
)
from oomproof.plan.technique import Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

CHUNK = 4 * 2**20  # elements that are stepped over at a time: 100 MB of temporaries with Adam
_LOW = -(2**16)  # all bits of a float32 that a bfloat16 has


class Bf16States(Technique):
    """The script's own optimizer steps in float32 over one piece of a parameter at a time; states rest in bfloat16.

    They are rounded up or down at random, in proportion. Rounded to the nearest, a second moment with beta 0.999 would
    not shrink: a step takes a thousandth of it off, and neighbouring bfloat16 numbers are 1/256 to 1/128 apart.
    """

    name = "optimizer-bf16-states"
    title = "keep the optimizer's states in bfloat16"
    fidelity = "approximate"
    lowers = ("optimizer_state", "temporary")
    keeps = "parameters and gradients"
    rests_on = "the script's own optimizer, over pieces of parameters; stochastic rounding from a generator of its own"
    source = "https://arxiv.org/abs/2010.06192"
    excludes = (STATES - {"optimizer-bf16-states"}) | {"step-in-backward"}
    rank = 35

    def unfit(self, facts: Facts) -> str | None:
        if "fsdp" in facts.uses:
            return "FSDP's parts of parameters are not stepped over in pieces"
        if facts.models and all(m.dtypes[:1] == ("bfloat16",) for m in facts.models):
            return "the parameters are in bfloat16, so the optimizer's states are as well"
        if all(o.kind == "SGD" and not o.options.get("momentum") for o in facts.optimizers):
            return "SGD without momentum keeps no states"
        return unfit_kinds(facts, ELEMENTWISE, "it steps over pieces with")

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return f"A checkpoint's states are rounded when they are loaded. {CHECKPOINTS.split(':')[0]}."

    def install(self, injection: Injection, options: Options) -> None:
        def attach(optimizer: Any) -> None:
            if chosen(injection, self.name, optimizer, ELEMENTWISE):
                _Pieces(injection.torch, optimizer).attach()
                injection.say(self.name, f"{type(optimizer).__name__} keeps its states in bfloat16")

        injection.on_optimizer.append(attach)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "deepspeed":
            return '{"bf16": {"enabled": true, "bf16_optimizer_states": true}, "zero_optimization": {"stage": 1}}'
        return _CODE


_CODE = """\
def rounded(x):  # to bfloat16, at random in proportion
    bits = x.float().view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**16)) & -(2**16)).view(torch.float32).bfloat16()

def widen(optimizer, args, kwargs):
    for state in optimizer.state.values():
        state.update({k: v.float() for k, v in state.items() if torch.is_tensor(v) and v.dtype == torch.bfloat16})

def narrow(optimizer, args, kwargs):
    for state in optimizer.state.values():
        state.update({k: rounded(v) for k, v in state.items() if torch.is_tensor(v) and v.dim()})

# between steps this is what the plan does; within a step it has all states in float32, the plan a piece at a time
optimizer.register_step_pre_hook(widen)
optimizer.register_step_post_hook(narrow)"""


class _Pieces:
    """Has one optimizer step over pieces of its parameters, with states that are in bfloat16 in between."""

    def __init__(self, torch: Any, optimizer: Any) -> None:
        self._torch = torch
        self._optimizer = optimizer
        self._lists: list[list[Any]] = []
        self._generators: dict[Any, Any] = {}

    def attach(self) -> None:
        self._optimizer.register_step_pre_hook(self._before)
        self._optimizer.register_step_post_hook(self._after)
        self._optimizer.register_load_state_dict_post_hook(self._loaded)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = call_closure(self._torch, args, kwargs)
        with no_parameters(optimizer) as lists:
            for group, parameters in zip(optimizer.param_groups, lists):
                for parameter in parameters:
                    if parameter.grad is not None:
                        self._step(group, parameter)
                group["params"] = []
        self._lists = lists
        for group in optimizer.param_groups:  # the step itself then has nothing to do
            group["params"] = []
        return args, kwargs

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, parameters in zip(optimizer.param_groups, self._lists):
            group["params"] = parameters

    def _step(self, group: dict[str, Any], parameter: Any) -> None:
        optimizer, torch = self._optimizer, self._torch
        if parameter.dtype != torch.float32 or parameter.dim() == 0:
            group["params"] = [parameter]
            bare_step(optimizer)(optimizer)
            return
        kept = optimizer.state.get(parameter) or {}
        data, gradient = parameter.detach(), parameter.grad
        if gradient.stride() != data.stride():
            gradient = torch.empty_like(data).copy_(gradient)
        flat, flat_gradient = _flat(torch, data), _flat(torch, gradient)
        after: dict[str, Any] = {}
        for start in range(0, flat.numel(), CHUNK):
            piece = flat[start : start + CHUNK]
            piece.grad = flat_gradient[start : start + CHUNK]
            if kept:
                optimizer.state[piece] = {
                    key: _flat(torch, v)[start : start + CHUNK].float() if _is_wide(v, parameter) else _copy(v)
                    for key, v in kept.items()
                }
            group["params"] = [piece]
            bare_step(optimizer)(optimizer)
            for key, value in optimizer.state.pop(piece, {}).items():
                if not _is_wide(value, piece):
                    after[key] = value
                    continue
                if start == 0:
                    whole = kept.get(key)
                    fits = whole is not None and whole.dtype == torch.bfloat16
                    after[key] = whole if fits else torch.empty_like(data, dtype=torch.bfloat16)
                _flat(torch, after[key])[start : start + CHUNK].copy_(self._rounded(value))
        optimizer.state[parameter] = after

    def _rounded(self, value: Any) -> Any:
        """Return a float32 tensor with the low bits gone, up or down at random; ``value`` is written to."""
        torch = self._torch
        generator = self._generators.get(value.device)
        if generator is None:  # the script's own random numbers stay what they are
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(0)
        bits = value.detach().view(torch.int32)
        bits.add_(torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
        return bits.bitwise_and_(_LOW).view(torch.float32)

    def _loaded(self, optimizer: Any) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if self._torch.is_tensor(value) and _is_wide(value, parameter):
                    state[key] = self._rounded(value.float().clone()).to(self._torch.bfloat16)


def _flat(torch: Any, tensor: Any) -> Any:
    """Return a dense tensor's elements as a vector, in the order in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())


def _is_wide(value: Any, parameter: Any) -> bool:
    """Return whether a state has an element for each of the parameter, not one for all of them."""
    return hasattr(value, "dim") and value.dim() > 0 and value.shape == parameter.shape


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


TECHNIQUE = Bf16States()
