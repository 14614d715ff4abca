"""The value mirror: the small numbers that a script steers by, computed beside the phantom.

On the phantom no kernel runs, so a mask's ``all()`` or the longest of some lengths would read as zero and the script
would take the wrong branch. ``Mirror`` runs every operator as it is and then, where all inputs are known and the
result is small, computes it on the CPU and writes it into the device memory of the operator's own result. It never
allocates device memory and never keeps a tensor, so no figure of the allocator changes.

What is computed: integers and booleans up to a limit, floating point up to 4,096 elements. A float that a kernel
would have computed is taken to be finite. Numbers that stay unknown read as zero, and each such read is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from oomproof.measure import versions
from oomproof.measure.answers import (
    MASKED,
    SCATTERED,
    MaskedBackward,
    affects_memory,
    assumed,
    assumed_by,
    expected_reads,
    is_check,
    selected_by,
    validates,
)
from oomproof.measure.compute import Bare, Computer
from oomproof.measure.known import FLOATS, PLAIN, TINY, Known, NotHere, is_ours, tensors_in
from oomproof.measure.operators import (
    COLLECTIVES,
    COPY_INTO,
    FRESH,
    IN_PLACE,
    LONG_LIST,
    NOTHING,
    SEVERAL,
    TO_COPY,
    Plan,
)
from oomproof.phantom.device import Device

#: Called with an operation such as "aten::nonzero (bool)" and whether the number may change memory use.
OnUnknown = Callable[[str, "bool | None"], None]


SCALAR_BYTES = 8


class Mirror(TorchDispatchMode):  # type: ignore[misc] # torch has no types here
    """Know the small values of a script on the phantom; ``gate.Gate`` has it on for the calls that need it.

    ``limit_bytes`` is the largest integer or boolean tensor that is computed; the driver should keep copies of that
    size. ``on_unknown(operation, affects_memory)`` is called at each read of a number that nobody knows.
    """

    supports_higher_order_operators = True

    def __init__(self, device: Device, *, limit_bytes: int = 1 << 20, on_unknown: OnUnknown) -> None:
        super().__init__()
        self._device = device
        self._limit_bytes = limit_bytes
        self._on_unknown = on_unknown
        self.known = Known()
        self._entries = self.known.entries
        self._plans: dict[int, Plan] = {}
        self._masks = MaskedBackward()
        self._nodes = threading.local()  # .last: the node that this thread told of
        #: The code whose frames have ``func``, ``args``, ``kwargs`` and ``answered`` of a call that runs without us.
        self.gate_code: Any = None
        self._computer = Computer(device, self.known, limit_bytes)
        versions.pass_higher_order_operators(Mirror)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps each call, which costs time and hides from on_read which operator is reading

    # ---- after each operator ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then compute its result where that is possible."""
        if types:
            route = _route(types)
            if route is not None:
                return func(*args, **(kwargs or {})) if route else NotImplemented
        answered: list[Any] = []  # noqa: F841 - on_read finds it in this frame: an iterator, then what it could not say
        plan = self._plans.get(id(func)) or self._plan(func)
        call = plan.call
        out = call(*args, **kwargs) if kwargs else call(*args)
        try:
            kind = plan.kind
            if kind == NOTHING or (out is None and kind != SEVERAL):
                return out
            if kind == FRESH:
                if (out.numel() > TINY and out.dtype in FLOATS) or not out.is_cuda:
                    return out
            elif kind == TO_COPY:
                if not out.is_cuda or (out.numel() > TINY and out.dtype in FLOATS and args[0].is_cuda):
                    return out
            elif kind in (IN_PLACE, COPY_INTO):
                into = args[0]
                if not into.is_cuda:
                    return out
                if into.numel() > TINY and into.dtype in FLOATS and (kind == IN_PLACE or args[1].is_cuda):
                    self._entries.pop(into.untyped_storage()._cdata, None)
                    return out
            elif kind == SEVERAL and self._forgot_many(plan, args):
                return out
            self._after(plan, args, kwargs or {}, out)
        except Exception:  # noqa: BLE001 - whatever goes wrong here is not the script's fault: not known, then
            for tensor in tensors_in([list(args), list((kwargs or {}).values())]):
                with contextlib.suppress(Exception):
                    self.known.forget(tensor)
        return out

    def _plan(self, func: Any) -> Plan:
        plan = self._plans[id(func)] = Plan(func)
        if plan.namespace in COLLECTIVES:
            plan.call = self._computer.collective(plan.call)
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
        if plan.name in SCATTERED:
            with contextlib.suppress(NotHere), Bare():
                self._masks.remember(args, out.shape, [selected_by(args[1], out.shape, self.known)])
        if plan.needs_first and args:
            first = args[0]
            if isinstance(first, torch.Tensor) and first.is_cuda:
                if first.untyped_storage()._cdata not in self._entries:
                    return  # computed from what nobody knows
            elif _beyond(first):
                return
        written = [t for t in plan.written_in(args, kwargs) if is_ours(t)] if plan.written else []
        fresh = [t for t in tensors_in(out) if is_ours(t) and not any(t is w for w in written)]
        if not written and not fresh:
            return
        with Bare():
            if not self._computer.compute(plan, args, kwargs, out, fresh, written):
                for tensor in written:
                    self.known.forget(tensor)

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
        frame, direct = self._frame()
        entry = self.known.at(address, size)
        if entry is not None:
            if entry.pattern is not None and size <= self._limit_bytes:
                self._put(address, entry.pattern * (size // len(entry.pattern)))
            return
        bare = frame is None or frame.f_code is self.gate_code
        if bare and size > SCALAR_BYTES and self._device.from_host(address, size):
            return  # C++ sent it there and reads it back; a scalar's address is reused too soon to be sure
        if frame is not None:
            told = frame.f_locals
            func, args, kwargs = told["func"], told["args"], told["kwargs"]
            if direct and self._answer(told["answered"], func, args, kwargs, address, size):
                return
            if size == 1 and validates(frame):
                self._put(address, b"\1")
            else:
                self._unknown_in_operator(func, args, told["answered"], address, size)
            return
        node = torch._C._current_autograd_node()
        count = self._masks.next_count(node) if node is not None and size in (4, 8) else None
        if count is not None:
            self._put(address, count.to_bytes(size, sys.byteorder))
            return
        if node is None:
            self._device.zero(address, size)
            self._on_unknown("copy to the host", None)
            return
        if is_check(node.name(), size, self._device.last_kernel()):
            self._put(address, b"\1")
            return
        before, self._nodes.last = getattr(self._nodes, "last", None), node._sequence_nr()
        self._read_as(address, size, assumed_by(node, size, first=before != self._nodes.last))
        self._on_unknown(node.name(), not (size == 1 and node.name().startswith("Linalg")))  # error codes

    def _read_as(self, address: int, size: int, data: bytes | None) -> None:
        if data is not None and len(data) == size:
            self._put(address, data)
        else:
            self._device.zero(address, size)

    def _frame(self) -> tuple[Any, bool]:
        """Return the frame of the operator this thread is in, and whether the operator itself is reading.

        It is not when a custom operator written in Python runs others, which the mode does not see. Where the mode is
        not on, the frame is the gate's, of the function that it let pass.
        """
        frame: Any = sys._getframe(1)
        direct = True
        for _ in range(64):
            if frame is None:
                break
            code = frame.f_code
            if code is _DISPATCH_CODE and frame.f_locals.get("self") is self:
                return frame, direct
            if code is self.gate_code and direct:
                return frame, True
            if code.co_filename not in _OWN_FILES:
                direct = False
            frame = frame.f_back
        return None, False

    def _answer(self, answered: list[Any], func: Any, args: Any, kwargs: Any, address: int, size: int) -> bool:
        try:
            with Bare():
                if not answered:
                    answered.append(self._expected(func, args, kwargs or {}))
                answer = next(answered[0], None)
                while isinstance(answer, bytes) and len(answer) != size:
                    answer = next(answered[0], None)
        except Exception:  # noqa: BLE001 - NotHere, or an operator that the CPU does not have
            if not answered:
                answered.append(iter(()))
            return False
        if answer is None:
            return False
        self._put(
            address,
            answer if isinstance(answer, bytes) else answer.to_bytes(size, sys.byteorder, signed=True),
        )
        return True

    def _expected(self, func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        name = _name_of(func)
        expected = expected_reads(name, func, args, kwargs, self.known)
        if name in MASKED:
            counts = list(expected)
            self._masks.remember(args, args[0].shape, counts)
            return iter(counts)
        return expected

    def _unknown_in_operator(self, func: Any, args: Any, answered: list[Any], address: int, size: int) -> None:
        name = _name_of(func)
        if is_check(name, size, self._device.last_kernel()):
            self._put(address, b"\1")
            return
        self._read_as(address, size, assumed(name, args, size, first=len(answered) <= 1))
        answered.append(size)
        place = 1 if name == "aten::copy_" else 0
        dtype = next((t.dtype for t in tensors_in(list(args)[place:])), None)
        operation = f"{name} ({str(dtype).partition('.')[2]})" if dtype is not None else name
        self._on_unknown(operation, affects_memory(name, dtype))

    def _put(self, address: int, data: bytes) -> None:
        if self.known.reachable(address):
            ctypes.memmove(address, data, len(data))

    # ---- threads ---------------------------------------------------------------------------------------------------

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


def _name_of(func: Any) -> str:
    """Return "aten::nonzero" for an operator, and for the function of torch's that the gate saw."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return str(schema.name)
    name = getattr(func, "__name__", "")
    return f"aten::{name}" if name else str(func)


def _route(types: Any) -> bool | None:
    """Say what to do with an operator on tensor subclasses; None when they are plain tensors after all.

    True passes it on to the modes below, which is where FakeTensorMode and its like wait for their own tensors. False
    leaves it to the subclass: a DTensor unfolds and comes back with plain tensors.
    """
    names = [kind.__module__ for kind in types if kind.__torch_dispatch__ is not PLAIN]
    if not names:
        return None
    return any(name.startswith(("torch._subclasses.", "torch.fx.")) for name in names)


def _beyond(value: Any) -> bool:
    """Return whether a first argument makes computing hopeless: many floats, or many tensors."""
    if isinstance(value, (list, tuple)):
        if len(value) > LONG_LIST:
            return True
        value = value[0] if value else None
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS and value.numel() > TINY


_DISPATCH_CODE = Mirror.__torch_dispatch__.__code__
_OWN_FILES = frozenset((__file__, torch._ops.__file__))
