"""Computing an operator's small results on the CPU, into the device memory of its real results."""

from __future__ import annotations

import math
from typing import Any

import torch

from oomproof.measure import versions
from oomproof.measure.known import (
    FLOATS,
    TINY,
    Entry,
    Known,
    NotHere,
    covers_storage,
    host_view,
    is_ours,
    tensors_in,
)
from oomproof.measure.operators import (
    AGAINST_INFINITY,
    CHANGES_NOTHING,
    COLLECTIVES,
    COMPUTED,
    CONSTANTS,
    COPY_INTO,
    COUNTS,
    EMPTY,
    FULL,
    KEEPS_UNIFORM,
    NOTED,
    OF_FINITE,
    TO_COPY,
    Plan,
)
from oomproof.phantom.device import Device

#: The largest integer or boolean tensor that is computed from assumed values: one-hot choices of 8 in 128 experts for
#: 8,192 tokens.
ASSUMED_BYTES = 64 << 20


class Computer:
    """Makes results known where their inputs are; ``limit_bytes`` is the largest integer or boolean one.

    ``many`` assumes the choices that need the most memory.
    """

    def __init__(self, device: Device, known: Known, limit_bytes: int, many: bool) -> None:
        self._device = device
        self._known = known
        self._limit_bytes = limit_bytes
        self._many = many
        self._generator = torch.Generator()
        self._arrived: bool | None = None
        self._sent_assumed = False

    def compute(self, plan: Plan, args: Any, kwargs: Any, out: Any, fresh: list[Any], written: list[Any]) -> bool:
        """Make the results known; return False where they are not, and what was written must be forgotten."""
        known = self._known
        if not known.reachable((fresh or written)[0].data_ptr()) or torch._C._cuda_isCurrentStreamCapturing():
            return False
        if plan.namespace in COLLECTIVES:
            return self._collective(plan, args, fresh)
        if plan.namespace not in COMPUTED:
            return False
        if plan.name == "aten::lift_fresh":  # torch.tensor(3, device="cuda"): copied without an operator
            if fresh[0].numel() * fresh[0].element_size() <= self._limit_bytes and known.entry(fresh[0]) is None:
                known.add(fresh[0])
            return True
        if plan.name in EMPTY:
            return self._empty(fresh)
        if plan.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            for tensor in args[0]:
                known.forget(tensor)
            return True  # found_inf stays as it was: gradients are taken to be finite
        if plan.kind in (TO_COPY, COPY_INTO) and not args[plan.kind == COPY_INTO].is_cuda:
            return self._from_host(args[1] if written else args[0], (written or fresh)[0])
        known.saw_assumed = False
        if self._inputs_known(plan, args, kwargs):
            limit = ASSUMED_BYTES if known.saw_assumed else self._limit_bytes
            if all(self._is_small(t, limit) for t in (*fresh, *written)):
                return self._evaluate(plan, args, kwargs, out, fresh, written)
        if plan.finite and self._finite(plan.finite, args, fresh):
            return True
        return self._uniform(plan, args, kwargs, fresh)

    def _is_small(self, tensor: Any, limit: int | None = None) -> bool:
        if tensor.dtype in FLOATS:
            return bool(tensor.numel() <= TINY)
        return bool(tensor.numel() * tensor.element_size() <= (limit or self._limit_bytes))

    def _inputs_known(self, plan: Plan, args: Any, kwargs: Any) -> bool:
        if plan.shape_only:
            return True
        skip = {id(t) for t in plan.written_in(args, kwargs)} if plan.overwrites else ()
        uniform = []
        for tensor in tensors_in([list(args), list(kwargs.values())]):
            if id(tensor) in skip:
                continue
            if not tensor.is_cuda:
                if tensor.device.type != "cpu":
                    return False
                continue
            if tensor.dtype in FLOATS and tensor.numel() > TINY:
                return False
            entry = self._known.entry(tensor)
            if entry is None:
                return False
            self._known.saw_assumed |= entry.assumed
            if entry.pattern is not None:
                uniform.append((tensor, entry))
        return not uniform or (self._known.saw_assumed and all(self._fill(t, entry) for t, entry in uniform))

    def _fill(self, tensor: Any, entry: Entry) -> bool:
        """Put a noted constant into memory after all: one_hot of assumed choices begins with zeros."""
        if entry.size > ASSUMED_BYTES or not covers_storage(tensor) or not tensor.is_contiguous():
            return False
        assert entry.pattern is not None
        host_view(tensor).copy_(torch.frombuffer(bytearray(entry.pattern), dtype=tensor.dtype)[0])
        entry.pattern = None
        return True

    def _evaluate(self, plan: Plan, args: Any, kwargs: Any, out: Any, fresh: list[Any], written: list[Any]) -> bool:
        """Run the operator on CPU tensors over the device memory, and copy its results into the real ones."""
        func = plan.func
        assumed = self._known.saw_assumed
        host_args = [_on_host(a) for a in args]
        host_kwargs = {k: _on_host(v) for k, v in kwargs.items() if k != "pin_memory"}
        if plan.random:
            if any(t.dtype in FLOATS and t.numel() != 1 for t in (*fresh, *written)):
                return False
            result = self._sample(func, host_args, host_kwargs, (fresh or written)[0])
        elif plan.name == "aten::histc":  # the CPU counts no integers
            result = func(host_args[0].double(), *host_args[1:], **host_kwargs).to(host_args[0].dtype)
        else:
            result = func(*host_args, **host_kwargs)
        for target, value in zip(tensors_in(out), tensors_in(result)) if fresh else ():
            if target.shape != value.shape or target.dtype != value.dtype or not any(target is t for t in fresh):
                continue  # the CPU's _unique2 gives other shapes for results that were not asked for
            view = host_view(target)
            if view.data_ptr() != value.data_ptr():  # _unsafe_view gives its input's memory
                view.copy_(value)
            self._known.add(target, assumed=assumed)
        for target in written:
            entry = self._known.entry(target)
            if entry is not None:
                entry.assumed |= assumed
            elif covers_storage(target):
                self._known.add(target, assumed=assumed)
            else:
                self._known.forget(target)
        return True

    def _sample(self, func: Any, args: list[Any], kwargs: dict[str, Any], like: Any) -> Any:
        """Draw on the CPU, leaving the script's generators alone.

        The seed follows the CUDA generator, so that a run repeats, and a checkpointed function draws the same again.
        """
        generator = kwargs.pop("generator", None)
        if not isinstance(generator, torch.Generator) or generator.device.type != "cuda":
            generator = torch.cuda.default_generators[like.device.index or 0]
        seed = hash((generator.initial_seed(), generator.get_offset())) & (1 << 62) - 1
        drawing = versions.seeded(func)
        if drawing is None:
            default = torch.default_generator
            state = default.get_state()
            default.manual_seed(seed)
            try:
                return func(*args, **kwargs)
            finally:
                default.set_state(state)
        self._generator.manual_seed(seed)
        args = [None if isinstance(a, torch.Generator) else a for a in args]
        return drawing(*args, generator=self._generator, **kwargs)

    def _from_host(self, source: Any, into: Any) -> bool:
        """Do a host-to-device copy again, on the host: where the driver kept it, it changes nothing."""
        if source.device.type != "cpu" or into.numel() * into.element_size() > self._limit_bytes:
            return False
        entry = self._known.entry(into)
        if entry.pattern is not None if entry is not None else not covers_storage(into):
            return False
        host_view(into).copy_(source)
        if entry is None:
            self._known.add(into)
        return True

    def _empty(self, fresh: list[Any]) -> bool:
        """Let uninitialised integers be zeros, so that filling them piece by piece makes them known."""
        for tensor in fresh:
            if tensor.dtype not in FLOATS and self._is_small(tensor):
                if tensor.numel():
                    self._device.zero(tensor.data_ptr(), tensor.untyped_storage().nbytes())
                self._known.add(tensor)
        return True

    def collective(self, call: Any) -> Any:
        """Wrap a collective so that ranks tell each other which of the values they send are known."""

        def exchange(*args: Any, **kwargs: Any) -> Any:
            self._device.collective_begins(self._sends_known(args))
            try:
                return call(*args, **kwargs)
            finally:
                self._arrived = self._device.collective_ended()

        return exchange

    def _sends_known(self, args: Any) -> bool:
        """Return whether a collective's inputs are known: its second argument in c10d, where the first is written."""
        inputs = [t for t in tensors_in(list(args[1:2])) if is_ours(t)] or [
            t for t in tensors_in(args[0]) if is_ours(t)
        ]
        entries = [self._known.entry(t) if self._is_small(t) else None for t in inputs]
        self._sent_assumed = any(e is not None and e.assumed for e in entries)
        return bool(entries) and all(e is not None and e.pattern is None for e in entries)

    def _collective(self, plan: Plan, args: Any, fresh: list[Any]) -> bool:
        """Know what a collective brought if every rank knew what it sent."""
        if plan.name.partition("::")[2] in CHANGES_NOTHING:
            return True
        own = plan.namespace != "c10d"
        outputs = fresh if own else [t for t in tensors_in(args[0]) if is_ours(t)]
        inputs = list(tensors_in(args[0] if own else list(args[1:2])))
        same_count = len(inputs) == len(outputs)
        for place, into in enumerate(outputs):
            whole = self._known.entry(into) is not None or covers_storage(into)
            arrived = self._arrived
            if arrived is None:  # torch's fake process groups fill nothing
                if not inputs:
                    continue
                arrived = self._repeat(inputs[place if same_count else 0], into)
            if arrived and whole and self._is_small(into):
                self._known.add(into, assumed=self._sent_assumed)
            else:
                self._known.forget(into)
        return True

    def _repeat(self, source: Any, into: Any) -> bool:
        """Fill a gathered tensor with its only known part; return False where that part is not known."""
        if not self._is_small(into) or not source.numel() or into.numel() % source.numel():
            return False
        entry = self._known.entry(source)
        if entry is None or entry.pattern is not None or not into.is_contiguous():
            return False
        part = host_view(source).contiguous().reshape(-1)
        host_view(into).view(-1).copy_(part.repeat(into.numel() // part.numel()))
        return True

    # ---- assumptions -------------------------------------------------------------------------------------------

    def assume(self, plan: Plan, args: Any, out: Any) -> None:
        """Give possible results to an operator on unknown values: the places of a count, the choices of topk."""
        make = _ASSUMED.get(plan.name)
        if make is None:
            return
        into = out[1] if plan.name == "aten::topk" else out
        if into.numel() * into.element_size() > ASSUMED_BYTES or not self._known.reachable(into.data_ptr()):
            return
        with Bare():
            values = make(args, out, self._many)
            if values is not None:
                host_view(into).copy_(values)
                self._known.add(into, assumed=True)

    # ---- constants ---------------------------------------------------------------------------------------------

    def _finite(self, name: str, args: Any, fresh: list[Any]) -> bool:
        """Answer tests for infinity and NaN of a float that a kernel would have computed."""
        value = args[0]
        if len(fresh) != 1 or not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
            return False
        verdict = OF_FINITE.get(name)
        if verdict is None:
            other = args[1]
            if other is value:
                verdict = name in ("eq", "le", "ge")
            elif isinstance(other, float) and math.isinf(other):
                verdict = AGAINST_INFINITY[name][other < 0]
            else:
                return False
        return self._constant(fresh[0], bytes((verdict,)))

    def _constant(self, tensor: Any, pattern: bytes) -> bool:
        if tensor.numel() <= NOTED and self._is_small(tensor):
            if tensor.numel():
                host_view(tensor).copy_(torch.frombuffer(bytearray(pattern), dtype=tensor.dtype)[0])
            self._known.add(tensor)
        else:
            self._known.add(tensor, pattern)
        return True

    def _uniform(self, plan: Plan, args: Any, kwargs: Any, fresh: list[Any]) -> bool:
        """Follow integers and booleans that are too large to compute but have one value throughout."""
        if len(fresh) != 1 or fresh[0].dtype in FLOATS:
            return False
        into, short = fresh[0], plan.name.partition("::")[2]
        if short in CONSTANTS or short in FULL:
            value = CONSTANTS[short] if short in CONSTANTS else args[FULL[short]]
            result = torch.tensor([value], dtype=into.dtype)
        elif plan.name in KEEPS_UNIFORM:
            result = plan.func(
                *(self._one_value(a) for a in args),
                **{k: _on_host(v) for k, v in kwargs.items() if k not in ("memory_format", "pin_memory")},
            )
            if plan.name in COUNTS:
                result = result * (args[0].numel() // max(1, into.numel()))
        else:
            return False
        one = result.reshape(-1)[:1].to(into.dtype)
        return one.numel() == 1 and self._constant(into, bytes(one.view(torch.uint8).tolist()))

    def _one_value(self, value: Any) -> Any:
        """Return the value that all elements of a tensor share, in a tensor of as many dimensions."""
        if not isinstance(value, torch.Tensor):
            return value
        entry = self._known.entry(value) if value.is_cuda else None
        if entry is not None and entry.pattern is not None and len(entry.pattern) == value.element_size():
            one = torch.frombuffer(bytearray(entry.pattern), dtype=value.dtype)
        elif value.numel() == 1:
            one = self._known.host(value)
        else:
            raise NotHere
        return one.reshape((1,) * value.dim())


class Bare:
    """Operators run inside reach the CPU kernels directly: no modes, no autograd, no default device."""

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = (
            torch._C._DisableTorchDispatch(),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C.DisableTorchFunction(),
        )
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def _first_places(args: Any, out: Any, many: bool) -> Any:
    """Return as many places as were counted: the first ones."""
    places = torch.unravel_index(torch.arange(out.size(0)), args[0].shape)
    return torch.stack(places, 1) if places else torch.empty(out.shape, dtype=torch.int64)


def _first_boxes(args: Any, out: Any, many: bool) -> Any:
    return torch.arange(out.size(0))


def _choices(args: Any, out: Any, many: bool) -> Any:
    """Return which of its options each row chooses, None when there are too few rows to choose all of them.

    A router's tokens choose experts, each of a token's choices another. They are spread evenly, which a balancing loss
    trains for. With ``many`` each token chooses the first experts, but for the few that make each of the others be
    chosen once: all experts are at work, and the busiest have as much to do as is possible then.
    """
    k, dim = args[1], args[2] if len(args) > 2 else -1
    if not args[0].dim():
        return None
    options = args[0].size(dim)
    rows = out[1].numel() // max(1, k)
    if rows * k < options or not k:
        return None
    if many:
        chosen = torch.arange(k).repeat(rows, 1)
        others = torch.arange(k, options)
        chosen[torch.arange(len(others)) % rows, k - 1 - torch.arange(len(others)) // rows] = others
    else:
        chosen = (torch.arange(rows * k) % options).view(rows, k)
    first = out[1].movedim(dim, -1)
    return chosen.view(first.shape).movedim(-1, dim)


_ASSUMED = {"aten::nonzero": _first_places, "torchvision::nms": _first_boxes, "aten::topk": _choices}


def _on_host(value: Any) -> Any:
    """Return an operator's argument with the CPU in place of the GPU."""
    if isinstance(value, torch.Tensor):
        return host_view(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [_on_host(v) for v in value]
    return value
