"""The optimizer's states and its step on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.optimizers import (
    ELEMENTWISE,
    STATES,
    call_closure,
    chosen,
    forbid_gradient_readers,
    gradients_needed,
    on_zero_grad,
    unfit_kinds,
)
from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: What the step on the CPU takes in place of what a group says for the GPU.
_SWITCHES = ("fused", "foreach", "capturable")
_SCALES = ("grad_scale", "found_inf")


class OffloadOptimizer(Technique):
    """The script's own optimizer, given copies of parameters and gradients on the host while it steps.

    Before a step gradients and parameters go to the host, after it the parameters come back. So clipping, the gradient
    scaler and whatever else the script does to ``.grad`` or to parameters counts, as ever. torchao's
    CPUOffloadOptimizer copies gradients during the backward pass: faster, but not with these.

    Option ``gradients``: send each gradient to the host as soon as it is there, and keep none on the GPU.
    """

    name = "offload-optimizer"
    title = "keep the optimizer's states on the host, and step there"
    fidelity = "equal"
    lowers = ("optimizer_state", "temporary")
    keeps = "parameters; and gradients, unless these are sent to the host as well"
    rests_on = "torch.optim.Optimizer.register_step_pre_hook and register_step_post_hook; the CPU's fused kernels"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_pre_hook.html"
    accepts = {"gradients": bool}
    excludes = (STATES - {"offload-optimizer"}) | {"step-in-backward"}
    rank = 60

    def unfit(self, facts: Facts) -> str | None:
        if "fsdp" in facts.uses:
            return "FSDP has its own: CPUOffloadPolicy"
        return unfit_kinds(facts, ELEMENTWISE, "it steps on the CPU with")

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {"gradients": False}
        if not gradients_needed(facts):
            yield {"gradients": True}

    def caution(self, facts: Facts, options: Options) -> str | None:
        trained = sum(o.parameters for o in facts.optimizers)
        return (
            f"It takes about {16 * trained / 1e9:.1f} GB of host memory with Adam in float32, half of it pinned, and "
            f"a step waits for the bus and the CPU. Keys of optimizer.state are the copies on the host."
        )

    def install(self, injection: Injection, options: Options) -> None:
        early = bool(options.get("gradients"))
        if early and injection.world_size > 1:
            raise CannotApply("gradients are exchanged between ranks after they are there; take gradients=False")

        def attach(optimizer: Any) -> None:
            if chosen(injection, self.name, optimizer, ELEMENTWISE):
                host = _Host(injection, optimizer, early, functools.partial(injection.refuse, self.name))
                host.attach()
                what = "gradients and states" if early else "states"
                injection.say(self.name, f"{type(optimizer).__name__} keeps its {what} on the host and steps there")

        injection.on_optimizer.append(attach)
        if early:
            forbid_gradient_readers(injection, self.name)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "deepspeed":
            return '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}'
        if framework == "fsdp":
            return "fully_shard(model, offload_policy=CPUOffloadPolicy())  # parameters and gradients as well"
        kind = facts.optimizers[0].kind if facts.optimizers else "AdamW"
        if options.get("gradients"):
            return "\n".join(
                [
                    "from torchao.optim import CPUOffloadOptimizer  # on a GPU only",
                    "",
                    "optimizer = CPUOffloadOptimizer(",
                    f"    model.parameters(), torch.optim.{kind}, offload_gradients=True, **given)  # as {kind} was",
                    "# without clip_grad_norm_, GradScaler and accumulation; set the rate in each of its param_groups",
                ]
            )
        return _CODE.format(kind=kind)


_CODE = """\
optimizer = torch.optim.{kind}(model.parameters(), ...)
on_host = {{}}  # parameter on the GPU: its copy
on_gpu = []

def to_host(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        on_gpu.append(group["params"])
        group["params"] = []
        for p in on_gpu[-1]:
            copy = on_host.setdefault(p, torch.empty_like(p, device="cpu", pin_memory=True))
            copy.data.copy_(p.data, non_blocking=True)
            if p.grad is None:
                copy.grad = None
            else:
                if copy.grad is None:
                    copy.grad = torch.empty_like(copy, pin_memory=True)
                copy.grad.copy_(p.grad, non_blocking=True)
            group["params"].append(copy)
    torch.cuda.current_stream().synchronize()

def to_gpu(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p, copy in zip(on_gpu[0], group["params"]):
            p.data.copy_(copy.data, non_blocking=True)
        group["params"] = on_gpu.pop(0)

optimizer.register_step_pre_hook(to_host)
optimizer.register_step_post_hook(to_gpu)
# optimizer.state_dict() needs the copies in param_groups as well: call it, and load_state_dict, between the two"""


class _Host:
    """The copies on the host of what one optimizer steps over.

    On the phantom states are of the "meta" device: a rehearsal must not need the host memory that training needs. The
    copies are real there too, so that transfers are seen; they are larger than what the phantom fills with values.
    """

    def __init__(self, injection: Injection, optimizer: Any, early: bool, refuse: Any) -> None:
        self._torch = injection.torch
        self._rehearsal = injection.rehearsal
        self._optimizer = optimizer
        self._early = early
        self._refuse = refuse
        self._copies: dict[Any, Any] = {}  # parameter: its copy on the host, which the optimizer steps over
        self._pinned: dict[Any, tuple[Any, Any]] = {}  # parameter: where it and its gradient arrive
        self._arrived: set[Any] = set()  # parameters whose gradients came early
        self._hooked: set[Any] = set()
        self._swapped: list[list[Any]] | None = None
        self._switches: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Register what happens around the optimizer's steps and state dicts."""
        optimizer = self._optimizer
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(lambda optimizer: self._swap())
        optimizer.register_state_dict_post_hook(lambda optimizer, state: self._swap_back())
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: self._swap())
        optimizer.register_load_state_dict_post_hook(lambda optimizer: self._swap_back())
        if self._early:
            self._watch_gradients()
            on_zero_grad(self._torch, self._arrived.difference_update)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = call_closure(self._torch, args, kwargs)
        if self._early:
            self._watch_gradients()
        devices = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                early = parameter in self._arrived
                copy = self._copies.get(parameter)
                if copy is not None:
                    copy.grad = None
                if parameter.grad is None and not early:
                    continue
                if parameter.grad is not None and early:
                    self._refuse("a parameter got gradients twice in one step; take gradients=False")
                copy = self._copy(parameter)
                self._pinned[parameter][0].copy_(parameter.detach(), non_blocking=True)
                gradient = self._gradient(parameter)
                if not early:
                    gradient.copy_(parameter.grad, non_blocking=True)
                copy.grad = self._stand_in(gradient)
                devices.add(parameter.device)
        self._wait(devices)
        self._swap(stepping=True)
        return args, kwargs

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._swap_back()
        self._arrived.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                copy = self._copies.get(parameter)
                if copy is not None and copy.grad is not None:
                    parameter.detach().copy_(self._pinned[parameter][0], non_blocking=True)

    def _wait(self, devices: set[Any]) -> None:
        for device in devices:
            if device.type == "cuda":
                self._torch.cuda.current_stream(device).synchronize()

    def _copy(self, parameter: Any) -> Any:
        if parameter not in self._copies:
            place = self._empty(parameter)
            copy = self._stand_in(place)
            self._copies[parameter] = copy.requires_grad_(parameter.requires_grad)
            self._pinned[parameter] = place, None
        return self._copies[parameter]

    def _empty(self, tensor: Any) -> Any:
        pinned = tensor.device.type == "cuda"
        return self._torch.empty_like(tensor.detach(), device="cpu", pin_memory=pinned)

    def _stand_in(self, tensor: Any) -> Any:
        """Return what the optimizer sees of a tensor on the host."""
        return self._torch.empty_like(tensor, device="meta") if self._rehearsal else tensor.detach()

    def _gradient(self, parameter: Any) -> Any:
        place, gradient = self._pinned[parameter]
        if gradient is None:
            gradient = self._empty(parameter)
            self._pinned[parameter] = place, gradient
        return gradient

    # ---- the copies in the parameters' places ------------------------------------------------------------------------

    def _swap(self, stepping: bool = False) -> None:
        if self._swapped is not None:
            return
        self._swapped, self._switches = [], []
        for group in self._optimizer.param_groups:
            params = group["params"]
            self._swapped.append(params)
            switches = {name: group[name] for name in _SWITCHES if name in group} if stepping else {}
            self._switches.append(switches)
            if any(p.device.type != "cpu" for p in params):  # else the script's own choice is for the CPU
                fused = not self._rehearsal and not group.get("differentiable")
                group.update({name: fused if name == "fused" else False for name in switches})
            group["params"] = [self._copy(p) if p.requires_grad else p for p in params]
        if stepping and self._rehearsal:
            for name in _SCALES:  # GradScaler leaves them here for a fused step
                if getattr(self._optimizer, name, None) is not None:
                    setattr(self._optimizer, name, None)

    def _swap_back(self) -> None:
        if self._swapped is None:
            return
        for group, params, switches in zip(self._optimizer.param_groups, self._swapped, self._switches):
            group["params"] = params
            group.update(switches)
        self._swapped = None

    # ---- gradients as soon as they are there -------------------------------------------------------------------------

    def _watch_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._hooked:
                    self._hooked.add(parameter)
                    parameter.register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, parameter: Any) -> None:
        if parameter in self._arrived:
            self._refuse("a parameter got gradients twice in one step; take gradients=False")
        self._copy(parameter)
        self._gradient(parameter).copy_(parameter.grad, non_blocking=True)  # on the stream that computed it
        self._arrived.add(parameter)
        parameter.grad = None


TECHNIQUE = OffloadOptimizer()
