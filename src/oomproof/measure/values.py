"""The value mirror: the small numbers that a script steers by, computed beside the phantom.

On the phantom no kernel runs, so a mask's ``all()`` or the longest of some lengths would read as zero and the script
would take the wrong branch. ``Mirror`` runs every operator as it is and then, where all inputs are known and the
result is small, computes it on the CPU and writes it into the device memory of the operator's own result. It never
allocates device memory and never keeps a tensor, so no figure of the allocator changes.

What is computed: integers and booleans up to a limit, floating point up to 4,096 elements. A float that a kernel
would have computed is taken to be finite. Numbers that stay unknown read as zero, counts of unknown values as the
smallest they can be or, in another run, the largest (``answers``); each such read is told. What then follows from such
a count, and the choices of ``topk`` among unknown values, are assumed: possible values, so that a script goes on with
numbers that agree with one another.
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
    Bounds,
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

#: Called with an operation such as "aten::nonzero (bool)", whether the number may change memory use, the bounds of a
#: count, and whether the number came from values that are assumed.
OnUnknown = Callable[[str, "bool | None", "Bounds | None", bool], None]


SCALAR_BYTES = 8


class Answers:
    """What one operator is going to read, and whether any of it was assumed."""

    __slots__ = ("assumed", "coming")

    def __init__(self, coming: Iterator[Any]) -> None:
        self.coming = coming
        self.assumed = False


class Mirror(TorchDispatchMode):  # type: ignore[misc] # torch has no types here
    """Know the small values of a script on the phantom; ``gate.Gate`` has it on for the calls that need it.

    ``limit_bytes`` is the largest integer or boolean tensor that is computed; the driver should keep copies of that
    size. ``many`` answers counts of unknown values with the largest they can be. ``on_unknown`` is called at each read
    of a number that nobody knows.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device: Device, *, limit_bytes: int = 1 << 20, many: bool = False, on_unknown: OnUnknown
    ) -> None:
        super().__init__()
        self._device = device
        self._many = many
        self._limit_bytes = limit_bytes
        self._on_unknown = on_unknown
        self.known = Known()
        self._entries = self.known.entries
        self._plans: dict[int, Plan] = {}
        self._masks = MaskedBackward()
        self._nodes = threading.local()  # .last: the node that this thread told of
        #: The code whose frames have ``func``, ``args``, ``kwargs`` and ``answered`` of a call that runs without us.
        self.gate_code: Any = None
        #: Dynamo's own, once there is one: else it would compile what is called here at its graph breaks.
        self.set_eval_frame: Any = None
        self._computer = Computer(device, self.known, limit_bytes, many)
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
        answered: list[Any] = []  # on_read finds it in this frame: Answers, then the sizes that they could not tell
        plan = self._plans.get(id(func)) or self._plan(func)
        call = plan.call
        out = call(*args, **kwargs) if kwargs else call(*args)
        try:
            if answered and answered[0].assumed:
                self._computer.assume(plan, args, out)
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
                    if plan.name == "aten::topk":
                        self._computer.assume(plan, args, out)
                    return  # computed from what nobody knows
            elif _beyond(first):
                return
        written = [t for t in plan.written_in(args, kwargs) if is_ours(t)] if plan.written else []
        known_already = set(map(id, written))  # a gather over a large world has as many tensors as ranks
        fresh = [t for t in tensors_in(out) if is_ours(t) and id(t) not in known_already]
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
        set_eval_frame = self.set_eval_frame
        compiling = set_eval_frame(None) if set_eval_frame else None
        try:
            self._read(address, size)
        except Exception:  # noqa: BLE001 - called from C, where an exception has nowhere to go
            self._device.zero(address, size)
        finally:
            if compiling is not None:
                set_eval_frame(compiling)

    def _read(self, address: int, size: int) -> None:
        frame, direct = self._frame()
        entry = self.known.at(address, size)
        if entry is not None:
            if entry.pattern is not None and size <= self._limit_bytes:
                self._put(address, entry.pattern * (size // len(entry.pattern)))
            if entry.assumed:
                operation, affects = ("copy to the host", None) if frame is None else _operation(frame)
                self._on_unknown(operation, affects, None, True)
            return
        bare = frame is None or frame.f_code is self.gate_code
        if bare and size > SCALAR_BYTES and self._device.from_host(address, size):
            return  # C++ sent it there and reads it back; a scalar's address is reused too soon to be sure
        if frame is not None:
            if direct and self._answer(frame, address, size):
                return
            if size == 1 and validates(frame):
                self._put(address, b"\1")
            else:
                self._unknown_in_operator(frame, address, size)
            return
        node = torch._C._current_autograd_node()
        count = self._masks.next_count(node) if node is not None and size in (4, 8) else None
        if count is not None:
            self._put(address, count.to_bytes(size, sys.byteorder))
            return
        if node is not None and is_check(node.name(), size, self._device.last_kernel()):
            self._put(address, b"\1")
            return
        data = None
        if node is not None:
            before, self._nodes.last = getattr(self._nodes, "last", None), node._sequence_nr()
            data = assumed_by(node, size, first=before != self._nodes.last)
        self._read_as(address, size, data)
        name, affects = _outside_operators(node)
        error_code = size == 1 and name.startswith("Linalg")
        self._on_unknown(name, False if error_code else affects, None, False)

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

    def _answer(self, frame: Any, address: int, size: int) -> bool:
        told = frame.f_locals
        answered: list[Answers] = told["answered"]
        self.known.saw_assumed = False
        try:
            with Bare():
                if not answered:
                    answered.append(Answers(self._expected(told["func"], told["args"], told["kwargs"] or {})))
                answers = answered[0]
                answer = next(answers.coming, None)
                while isinstance(answer, bytes) and len(answer) != size:
                    answer = next(answers.coming, None)
        except Exception:  # noqa: BLE001 - NotHere, or an operator that the CPU does not have
            if not answered:
                answered.append(Answers(iter(())))
            return False
        if answer is None or (isinstance(answer, Bounds) and size == 1):  # a yes or no, not a count
            return False
        if isinstance(answer, Bounds) or self.known.saw_assumed:
            answers.assumed = isinstance(answer, Bounds) and answer.follows is None
            self._on_unknown(*_operation(frame), answer if isinstance(answer, Bounds) else None, True)
        if isinstance(answer, Bounds) and size > SCALAR_BYTES:
            # nms before torchvision 0.22 reads, for each box, bits of the ones that it rules out
            self._put(address, (b"\0" if self._many else b"\xff") * size)
            return True
        number = answer.answer(self._many) if isinstance(answer, Bounds) else answer
        self._put(
            address,
            number if isinstance(number, bytes) else number.to_bytes(size, sys.byteorder, signed=True),
        )
        return True

    def _expected(self, func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        name = _name_of(func)
        expected = expected_reads(name, func, args, kwargs, self.known)
        if name in MASKED:
            counts = list(expected)
            self._masks.remember(
                args, args[0].shape, [c.answer(self._many) if isinstance(c, Bounds) else c for c in counts]
            )
            return iter(counts)
        return expected

    def _unknown_in_operator(self, frame: Any, address: int, size: int) -> None:
        told = frame.f_locals
        name, answered = _name_of(told["func"]), told["answered"]
        if is_check(name, size, self._device.last_kernel()):
            self._put(address, b"\1")
            return
        self._read_as(address, size, assumed(name, told["args"], size, first=len(answered) <= 1))
        answered.append(size)
        self._on_unknown(*_operation(frame), None, False)

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
            self._on_unknown(*_outside_operators(torch._C._current_autograd_node()), None, False)
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


def _outside_operators(node: Any) -> tuple[str, bool | None]:
    """Return the name of what reads where no operator is seen, and whether it affects memory: PyTorch's nodes do."""
    if node is None:
        return "copy to the host", None
    name = node.name()
    written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction) or name.startswith("Generated")
    return name, None if written_in_python else True


def _operation(frame: Any) -> tuple[str, bool | None]:
    """Return the name of the operator that a frame runs, with its dtype, and whether it affects memory."""
    name, args = _name_of(frame.f_locals["func"]), frame.f_locals["args"]
    dtype = next((t.dtype for t in tensors_in(list(args)[name == "aten::copy_" :])), None)
    return f"{name} ({str(dtype).partition('.')[2]})" if dtype is not None else name, affects_memory(name, dtype)


_DISPATCH_CODE = Mirror.__torch_dispatch__.__code__
_OWN_FILES = frozenset((__file__, torch._ops.__file__))
