"""The value mirror: the small numbers that a script steers by, computed beside the phantom.

On the phantom no kernel runs, so a mask's ``all()`` or the longest of some lengths would read as zero and the script
would take the wrong branch. ``Mirror`` runs every operator as it is and then, where all inputs are known and the
result is small, computes it on the CPU and writes it into the device memory of the operator's own result. It never
allocates device memory and never keeps a tensor, so no figure of the allocator changes.

What is computed: integers and booleans up to a limit, floating point up to 1,024 elements. A float that a kernel
would have computed is taken to be finite. Numbers that stay unknown read as zero, and each such read is told.

Torch 2.4 to 2.14; the parts that differ by version name it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from oomproof.measure import answers as answers_module
from oomproof.measure import known as known_module
from oomproof.measure.answers import CHECKED, affects_memory, expected_reads
from oomproof.measure.known import FLOATS, TINY, Known, NotHere, covers_storage, host_view, tensors_in
from oomproof.phantom.device import Device

#: Called with an operation such as "aten::nonzero (bool)" and whether the number may change memory use.
OnUnknown = Callable[[str, "bool | None"], None]

# Kinds of operators, cheapest first.
_NOTHING, _FRESH, _TO_COPY, _IN_PLACE, _COPY_INTO, _SEVERAL, _GENERAL = range(7)

#: A list of more tensors than this is an optimizer's; it is not worth computing.
_LONG_LIST = 64
#: Above this many elements a constant is noted instead of being written.
_NOTED = 1 << 16

#: Nothing of a tensor's values changes.
_UNTOUCHED = frozenset(("aten::record_stream", "aten::set_data", "aten::requires_grad_", "aten::set_", "aten::resize_"))
_EMPTY = frozenset(
    "aten::" + n for n in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_dtensor"))
#: Collectives that leave the tensors they are given as they are on a phantom rank.
_UNCHANGED = frozenset(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send", "barrier"))
_COMPUTED = frozenset(("aten", "prims", "torchvision"))

#: Elementwise operators and reductions that give one value when their inputs have one value throughout.
_KEEPS_UNIFORM = frozenset(
    "aten::" + n
    for n in (
        "mul", "logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or",
        "bitwise_xor", "eq", "ne", "all", "any", "amax", "amin", "clone", "_to_copy", "contiguous", "sum",
        "count_nonzero", "__and__", "__or__", "__xor__",
    )
)  # fmt: skip
_COUNTS = frozenset(("aten::sum", "aten::count_nonzero"))
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FULL = {"full": 1, "full_like": 1, "new_full": 2}

#: What a comparison of a finite float with plus and minus infinity gives.
_AGAINST_INFINITY = {
    "eq": (False, False), "ne": (True, True), "lt": (True, False), "le": (True, False),
    "gt": (False, True), "ge": (False, True),
}  # fmt: skip
_OF_FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}

_PLAIN = torch._C._disabled_torch_dispatch_impl


class Plan:
    """What to do after one operator, worked out from its schema once."""

    __slots__ = ("call", "finite", "func", "kind", "name", "namespace", "needs_first", "overwrites", "random",
                 "shape_only", "written")  # fmt: skip

    def __init__(self, func: Any) -> None:
        #: An OpOverload's own __call__ only passes on; without it an operator costs 0.1 µs less.
        self.call = func._op if type(func) is torch._ops.OpOverload else func
        self.func = func  # keeps the id, by which plans are found, from being given to another operator
        self.written: list[tuple[int, str]] = []
        self.overwrites = self.random = self.shape_only = self.needs_first = False
        self.finite: str | None = None
        schema = getattr(func, "_schema", None)
        self.name: str = schema.name if schema is not None else ""
        self.namespace, _, short = self.name.partition("::")
        if schema is None:  # a higher-order operator
            self.kind = _NOTHING
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append((position, argument.name))
        self.random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.shape_only = short.endswith("_like") or short.startswith("new_")
        self.overwrites = (
            any(a.is_out for a in schema.arguments)
            or short in ("copy_", "fill_", "zero_")
            or (self.random and short.endswith("_") and short != "bernoulli_")
        )
        if short in _OF_FINITE or short in _AGAINST_INFINITY:
            self.finite = short
        self.kind = self._kind(schema, short)
        self.needs_first = (
            not self.written and self.finite is None and not self.shape_only
            and self.kind in (_FRESH, _GENERAL) and short != "lift_fresh" and self.namespace not in _COLLECTIVES
        )  # fmt: skip

    def _kind(self, schema: Any, short: str) -> int:
        kinds = [str(r.type) for r in schema.returns]
        first = str(schema.arguments[0].type) if schema.arguments else ""
        if self.name in _UNTOUCHED:
            return _NOTHING
        if self.namespace in _COLLECTIVES:
            return _GENERAL
        if not self.written:
            if not any("Tensor" in k for k in kinds) or all(
                r.alias_info is not None or "Tensor" not in k for r, k in zip(schema.returns, kinds)
            ):
                return {"to": _TO_COPY, "lift_fresh": _FRESH}.get(short, _NOTHING)
            if self.name in ("aten::_to_copy", "aten::to"):
                return _TO_COPY
            return _FRESH if kinds == ["Tensor"] else _GENERAL
        if self.name == "aten::copy_":
            return _COPY_INTO
        if self.written == [(0, schema.arguments[0].name)] and first == "Tensor":
            return _IN_PLACE
        return _SEVERAL

    def written_in(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the CUDA tensors that a call wrote into."""
        found: list[Any] = []
        for position, name in self.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            found += tensors_in(value)
        return found


class Mirror(TorchDispatchMode):
    """Know the small values of a script on the phantom; enter it as a context manager.

    ``limit_bytes`` is the largest integer or boolean tensor that is computed; the driver should keep copies of that
    size. ``on_unknown(operation, affects_memory)`` is called at each read of a number that nobody knows.
    """

    # Compiled code is compiled as without the mirror: 2.9 and later ask ignore_compile_internals, earlier ones
    # is_infra_mode. Without _should_skip_dynamo each operator would pay for a wrapper; see _never_compile().
    supports_higher_order_operators = True

    def __init__(self, device: Device, *, limit_bytes: int = 1 << 20, on_unknown: OnUnknown) -> None:
        super().__init__()
        self._device = device
        self._limit_bytes = limit_bytes
        self._on_unknown = on_unknown
        self._known = Known()
        self._entries = self._known.entries
        self._plans: dict[int, Plan] = {}
        self._paused = threading.local()
        self._backward_reads = False
        self._generator = torch.Generator()
        _never_compile()
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            _pass_higher_order_operators()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch.compile before 2.9 to compile although a mode is active."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile from 2.9 on to compile although a mode is active."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # ---- after each operator ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then compute its result where that is possible."""
        if types:
            route = _route(types)
            if route is not None:
                return func(*args, **(kwargs or {})) if route else NotImplemented
        answers: list[Any] = []  # noqa: F841 - for on_read, which finds it in this frame
        plan = self._plans.get(id(func)) or self._plan(func)
        call = plan.call
        out = call(*args, **kwargs) if kwargs else call(*args)
        kind = plan.kind
        if kind == _NOTHING or out is None and kind != _SEVERAL:
            return out
        if kind == _FRESH:
            if out.numel() > TINY and out.dtype in FLOATS or not out.is_cuda:
                return out
        elif kind == _TO_COPY:
            if not out.is_cuda or out.numel() > TINY and out.dtype in FLOATS and args[0].is_cuda:
                return out
        elif kind == _IN_PLACE or kind == _COPY_INTO:
            into = args[0]
            if not into.is_cuda:
                return out
            if into.numel() > TINY and into.dtype in FLOATS and (kind == _IN_PLACE or args[1].is_cuda):
                self._entries.pop(into.untyped_storage()._cdata, None)
                return out
        elif kind == _SEVERAL and self._forgot_many(plan, args):
            return out
        self._after(plan, args, kwargs or {}, out)
        return out

    def _plan(self, func: Any) -> Plan:
        plan = self._plans[id(func)] = Plan(func)
        return plan

    def _forgot_many(self, plan: Plan, args: Any) -> bool:
        """Handle an optimizer's operators over lists: whatever was known of what they write is forgotten."""
        if not args or not _beyond(args[0]) or plan.name.startswith("aten::_amp_"):
            return False
        pop = self._entries.pop
        for position, _ in plan.written:
            value = args[position] if position < len(args) else ()
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if tensor is not None:
                    pop(tensor.untyped_storage()._cdata, None)
        return len(plan.written) == 1 or plan.written[-1][0] < len(args)

    def _after(self, plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
        if plan.needs_first and args:
            first = args[0]
            if isinstance(first, torch.Tensor) and first.is_cuda:
                if first.untyped_storage()._cdata not in self._entries:
                    return  # computed from what nobody knows
            elif _beyond(first):
                return
        try:
            written = [t for t in plan.written_in(args, kwargs) if _is_ours(t)] if plan.written else []
            fresh = [t for t in tensors_in(out) if _is_ours(t) and not any(t is w for w in written)]
            if not written and not fresh:
                return
            with _Bare():
                if not self._compute(plan, args, kwargs, out, fresh, written):
                    for tensor in written:
                        self._known.forget(tensor)
        except Exception:  # noqa: BLE001 - whatever goes wrong here is not the script's fault: not known, then
            for tensor in tensors_in([list(args), list(kwargs.values())]):
                with contextlib.suppress(Exception):
                    self._known.forget(tensor)

    def _compute(self, plan: Plan, args: Any, kwargs: Any, out: Any, fresh: list[Any], written: list[Any]) -> bool:
        """Make the results known; return False where they are not, and what was written must be forgotten."""
        known = self._known
        if not known.reachable((fresh or written)[0].data_ptr()) or torch._C._cuda_isCurrentStreamCapturing():
            return False
        if plan.namespace in _COLLECTIVES:
            return self._collective(plan, args, fresh)
        if plan.namespace not in _COMPUTED:
            return False
        if plan.name == "aten::lift_fresh":  # torch.tensor(3, device="cuda"): copied without an operator
            if fresh[0].numel() * fresh[0].element_size() <= self._limit_bytes and known.entry(fresh[0]) is None:
                known.add(fresh[0])
            return True
        if plan.name in _EMPTY:
            return self._empty(fresh)
        if plan.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            for tensor in args[0]:
                known.forget(tensor)
            return True  # found_inf stays as it was: gradients are taken to be finite
        if plan.kind in (_TO_COPY, _COPY_INTO) and not args[plan.kind == _COPY_INTO].is_cuda:
            return self._from_host(args[1] if written else args[0], (written or fresh)[0])
        small = all(self._is_small(t) for t in fresh) and all(self._is_small(t) for t in written)
        if small and self._inputs_known(plan, args, kwargs):
            return self._evaluate(plan, args, kwargs, out, fresh, written)
        if plan.finite and self._finite(plan.finite, args, fresh):
            return True
        return self._uniform(plan, args, kwargs, fresh)

    def _is_small(self, tensor: Any) -> bool:
        if tensor.dtype in FLOATS:
            return bool(tensor.numel() <= TINY)
        return bool(tensor.numel() * tensor.element_size() <= self._limit_bytes)

    def _inputs_known(self, plan: Plan, args: Any, kwargs: Any) -> bool:
        if plan.shape_only and plan.name not in ("aten::full_like", "aten::new_full"):
            return True
        skip = {id(t) for t in plan.written_in(args, kwargs)} if plan.overwrites else ()
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
            if entry is None or entry.pattern is not None:
                return False
        return True

    def _evaluate(self, plan: Plan, args: Any, kwargs: Any, out: Any, fresh: list[Any], written: list[Any]) -> bool:
        """Run the operator on CPU tensors over the device memory, and copy its results into the real ones."""
        func = plan.func
        host_args = [_on_host(a) for a in args]
        host_kwargs = {k: _on_host(v) for k, v in kwargs.items() if k != "pin_memory"}
        if plan.random:
            if any(t.dtype in FLOATS and t.numel() != 1 for t in (*fresh, *written)):
                return False
            result = self._sample(func, host_args, host_kwargs, (fresh or written)[0])
        else:
            result = func(*host_args, **host_kwargs)
        for target, value in zip(tensors_in(out), tensors_in(result)) if fresh else ():
            if target.shape != value.shape or target.dtype != value.dtype or not any(target is t for t in fresh):
                continue  # the CPU's _unique2 gives other shapes for results that were not asked for
            view = host_view(target)
            if view.data_ptr() != value.data_ptr():  # _unsafe_view gives its input's memory
                view.copy_(value)
            self._known.add(target)
        for target in written:
            if self._known.entry(target) is not None:
                continue
            if covers_storage(target):
                self._known.add(target)
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
        names = [a.name for a in func._schema.arguments]
        if "generator" not in names:
            packet, overload = func.overloadpacket, func._overloadname
            seeded = "generator" if overload == "default" else overload + "_generator"
            if seeded not in packet.overloads():  # randint_like before 2.8
                default = torch.default_generator
                state = default.get_state()
                default.manual_seed(seed)
                try:
                    return func(*args, **kwargs)
                finally:
                    default.set_state(state)
            func = getattr(packet, seeded)
        self._generator.manual_seed(seed)
        args = [None if isinstance(a, torch.Generator) else a for a in args]
        return func(*args, generator=self._generator, **kwargs)

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

    def _collective(self, plan: Plan, args: Any, fresh: list[Any]) -> bool:
        """Take every rank to hold what this one holds, as the NCCL stand-in does."""
        short = plan.name.partition("::")[2]
        if plan.namespace == "c10d":
            if short in _UNCHANGED:
                return True
            outputs, inputs = ([t for t in tensors_in(a) if _is_ours(t)] for a in (*args, (), ())[:2])
        else:
            outputs, inputs = fresh, list(tensors_in(args[0]))
        same_count = len(inputs) == len(outputs)
        for place, into in enumerate(outputs):
            source = inputs[place if same_count else 0] if inputs else None
            if not self._repeat(source, into):
                self._known.forget(into)
        return True

    def _repeat(self, source: Any, into: Any) -> bool:
        """Fill a gathered tensor with its only known part; return False where that part is not known."""
        if source is None or not self._is_small(into) or not source.numel() or into.numel() % source.numel():
            return False
        entry = self._known.entry(source)
        if entry is None or entry.pattern is not None or not into.is_contiguous():
            return False
        part = host_view(source).contiguous().reshape(-1)
        host_view(into).view(-1).copy_(part.repeat(into.numel() // part.numel()))
        if covers_storage(into):
            self._known.add(into)
        return self._known.entry(into) is not None

    # ---- constants ---------------------------------------------------------------------------------------------

    def _finite(self, name: str, args: Any, fresh: list[Any]) -> bool:
        """Answer tests for infinity and NaN of a float that a kernel would have computed."""
        value = args[0]
        if len(fresh) != 1 or not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
            return False
        verdict = _OF_FINITE.get(name)
        if verdict is None:
            other = args[1]
            if other is value:
                verdict = name in ("eq", "le", "ge")
            elif isinstance(other, float) and math.isinf(other):
                verdict = _AGAINST_INFINITY[name][other < 0]
            else:
                return False
        return self._constant(fresh[0], bytes((verdict,)))

    def _constant(self, tensor: Any, pattern: bytes) -> bool:
        if tensor.numel() <= _NOTED and self._is_small(tensor):
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
        if short in _CONSTANTS or short in _FULL:
            value = _CONSTANTS[short] if short in _CONSTANTS else args[_FULL[short]]
            result = torch.tensor([value], dtype=into.dtype)
        elif plan.name in _KEEPS_UNIFORM:
            result = plan.func(
                *(self._one_value(a) for a in args),
                **{k: _on_host(v) for k, v in kwargs.items() if k not in ("memory_format", "pin_memory")},
            )
            if plan.name in _COUNTS:
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

    # ---- reads from the device -----------------------------------------------------------------------------------

    def on_read(self, address: int, size: int) -> None:
        """Make sure that a copy from the device to the host reads the right bytes, or zeros; tell unknown reads.

        The driver calls this on the thread that copies. Never raises.
        """
        try:
            self._read(address, size)
        except Exception:  # noqa: BLE001 - called from C, where an exception has nowhere to go
            self._device.zero(address, size)

    def _read(self, address: int, size: int) -> None:
        frame, direct = _dispatch_frame(self)
        entry = self._known.at(address, size)
        if entry is not None:
            if entry.pattern is not None and size <= self._limit_bytes:
                self._put(address, entry.pattern * (size // len(entry.pattern)))
            return
        if frame is not None:
            told = frame.f_locals
            func, args, kwargs = told["func"], told["args"], told["kwargs"]
            if direct and self._answer(told["answers"], func, args, kwargs, address, size):
                return
            self._unknown_in_operator(func, args, address, size)
            return
        node = torch._C._current_autograd_node()
        self._device.zero(address, size)
        self._on_unknown(node.name() if node is not None else "copy to the host", node is not None or None)

    def _answer(self, answers: list[Any], func: Any, args: Any, kwargs: Any, address: int, size: int) -> bool:
        if not answers:
            answers.append(expected_reads(func, args, kwargs, self._known))
        try:
            with _Bare():
                answer = next(answers[0], None)
                while isinstance(answer, bytes) and len(answer) != size:
                    answer = next(answers[0], None)
        except Exception:  # noqa: BLE001 - NotHere, or an operator that the CPU does not have
            return False
        if answer is None:
            return False
        if "index" in func._schema.name and any(t.requires_grad for t in tensors_in(args)):
            self._backward_reads = True
        self._put(address, answer if isinstance(answer, bytes) else answer.to_bytes(size, sys.byteorder, signed=True))
        return True

    def _unknown_in_operator(self, func: Any, args: Any, address: int, size: int) -> None:
        schema = getattr(func, "_schema", None)
        name = schema.name if schema is not None else str(func)
        if size == 1 and name in CHECKED:
            self._put(address, b"\1")
            return
        self._device.zero(address, size)
        place = 1 if name == "aten::copy_" else 0
        dtype = next((t.dtype for t in tensors_in(list(args)[place:])), None)
        operation = f"{name} ({str(dtype).partition('.')[2]})" if dtype is not None else name
        self._on_unknown(operation, affects_memory(name, dtype))

    def _put(self, address: int, data: bytes) -> None:
        if self._known.reachable(address):
            ctypes.memmove(address, data, len(data))

    # ---- threads ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Take the mirror off this thread's modes for a backward pass, if it is the topmost; pair with ``resume``.

        It stays where ``x[mask]`` was in the forward pass: its backward reads the number of elements again.
        """
        stack = self._paused.__dict__.setdefault("stack", [])
        on_top = not self._backward_reads and _get_current_dispatch_mode() is self
        if on_top:
            torch._C._pop_torch_dispatch_stack(None)
        stack.append(on_top)

    def resume(self) -> None:
        """Undo the last ``pause`` of this thread."""
        stack = self._paused.__dict__.get("stack")
        if stack and stack.pop():
            torch._C._push_on_torch_dispatch_stack(self)

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Have the mirror among this thread's modes, putting it there if it is not."""
        modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
        if any(mode is self for mode in modes):
            yield
            return
        torch._C._push_on_torch_dispatch_stack(self)
        try:
            yield
        finally:
            if _get_current_dispatch_mode() is self:
                torch._C._pop_torch_dispatch_stack(None)

    def cover_recomputation(self) -> None:
        """Have checkpointed functions see the same values when backward runs them again.

        Call once, before the script: it replaces two functions of torch.utils.checkpoint.
        """
        from torch.utils import checkpoint

        def covered(function: Any) -> Any:
            @functools.wraps(function, updated=())
            def run(*args: Any, **kwargs: Any) -> Any:
                with self.on_this_thread():
                    return function(*args, **kwargs)

            return run

        forward = checkpoint.CheckpointFunction.forward

        def reentrant(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
            return forward(ctx, covered(run_function), preserve_rng_state, *args)

        checkpoint.CheckpointFunction.forward = staticmethod(reentrant)
        for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):
            generator = getattr(checkpoint, name, None)  # the second from 2.14 on; the first calls it there
            if generator is not None:
                setattr(checkpoint, name, _covering(generator, covered))


def _covering(generator: Any, covered: Any) -> Any:
    @functools.wraps(generator)
    def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(covered(fn), *args, **kwargs)

    return call


class KeptValues:
    """Leave the phantom's memory as it is, so that a read gives the bytes last copied there, and tell every read."""

    def __init__(self, on_unknown: OnUnknown) -> None:
        self._on_unknown = on_unknown

    def on_read(self, address: int, size: int) -> None:
        """Tell a copy from the device to the host. Never raises."""
        try:
            node = torch._C._current_autograd_node()
            self._on_unknown(node.name() if node is not None else "copy to the host", node is not None or None)
        except Exception:  # noqa: BLE001 - called from C, where an exception has nowhere to go
            return


class _Bare:
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


def _is_ours(tensor: Any) -> bool:
    return tensor.is_cuda and type(tensor).__torch_dispatch__ is _PLAIN and tensor.layout is torch.strided


def _route(types: Any) -> bool | None:
    """Say what to do with an operator on tensor subclasses; None when they are plain tensors after all.

    True passes it on to the modes below, which is where FakeTensorMode and its like wait for their own tensors. False
    leaves it to the subclass: a DTensor unfolds and comes back with plain tensors.
    """
    names = [kind.__module__ for kind in types if kind.__torch_dispatch__ is not _PLAIN]
    if not names:
        return None
    return any(name.startswith(("torch._subclasses.", "torch.fx.")) for name in names)


def _beyond(value: Any) -> bool:
    """Return whether a first argument makes computing hopeless: many floats, or many tensors."""
    if isinstance(value, (list, tuple)):
        if len(value) > _LONG_LIST:
            return True
        value = value[0] if value else None
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS and value.numel() > TINY


def _on_host(value: Any) -> Any:
    """Return an operator's argument with the CPU in place of the GPU."""
    if isinstance(value, torch.Tensor):
        return host_view(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [_on_host(v) for v in value]
    return value


def _dispatch_frame(mirror: Mirror) -> tuple[Any, bool]:
    """Return the frame of the operator this thread is in, and whether the operator itself is reading.

    It is not when a custom operator written in Python runs others, which the mode does not see.
    """
    frame: Any = sys._getframe(1)
    direct = True
    for _ in range(64):
        if frame is None:
            break
        code = frame.f_code
        if code is _DISPATCH_CODE and frame.f_locals.get("self") is mirror:
            return frame, direct
        if code.co_filename not in _OWN_FILES:
            direct = False
        frame = frame.f_back
    return None, False


_DISPATCH_CODE = Mirror.__torch_dispatch__.__code__
_OWN_FILES = frozenset((__file__, torch._ops.__file__))


def _never_compile() -> None:
    """Keep dynamo from compiling this package's own functions."""
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "set_code_exec_strategy"):  # 2.7
        action = eval_frame._FrameAction
        skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)

        def never(code: Any) -> None:
            eval_frame.set_code_exec_strategy(code, skip)
    else:
        never = eval_frame.skip_code
    for module in (sys.modules[__name__], answers_module, known_module):
        for thing in list(vars(module).values()):
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            for member in (thing, *vars(thing).values()) if isinstance(thing, type) else (thing,):
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if code is not None:
                    never(code)


def _pass_higher_order_operators() -> None:
    """Register the mirror with each higher-order operator, which refuse unknown modes before 2.7."""
    import torch._higher_order_ops  # noqa: F401 - they register themselves

    for operator in list(torch._ops._higher_order_ops.values()):
        if Mirror not in operator.python_key_table:
            operator.py_impl(Mirror)(functools.partial(_pass_through, operator))


def _pass_through(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)
