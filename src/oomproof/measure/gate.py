"""The gate before the value mirror: only calls about small known numbers run under its dispatch mode.

While any TorchDispatchMode is active, ATen takes every tensor for a subclass (isTensorSubclassLike), and linear, matmul
and others allocate differently. So the mirror cannot simply stay on. A TorchFunctionMode changes nothing in ATen: this
one sees each call that the script makes on torch, lets those that compute with large or unknown tensors pass bare, and
runs the others under the mirror. It also costs half of what a dispatch mode does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _get_current_function_mode_stack

from oomproof.measure import surroundings
from oomproof.measure.known import FLOATS, TINY
from oomproof.measure.values import Mirror

#: Functions that hand a number to the host, or whose result's size depends on one.
_READS = frozenset(
    (
        "item", "tolist", "cpu", "numpy", "equal", "is_nonzero", "allclose", "nonzero", "argwhere", "masked_select",
        "unique", "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount", "repeat_interleave", "one_hot",
        "multinomial", "histc", "coalesce", "_coalesce", "to_sparse", "to_sparse_csr", "nms", "__bool__", "__int__",
        "__float__", "__index__", "__complex__", "__contains__", "__format__", "__repr__", "__array__",
    )
)  # fmt: skip
#: Functions whose answer for floats that nobody knows is taken from their being finite.
#: Functions whose choice among floats that nobody knows is assumed.
_CHOOSES = frozenset(("topk",))
_FINITE = frozenset(("isfinite", "isnan", "isinf", "isposinf", "isneginf"))
#: Comparisons of such floats with themselves or infinity: other ways to ask whether they are finite.
_COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"))
#: Functions that never touch a value, and Python properties.
_LOOKS = frozenset(
    (
        "__get__", "__set__", "__len__", "__hash__", "size", "dim", "stride", "numel", "nelement", "element_size",
        "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "data_ptr", "get_device", "ndimension",
        "untyped_storage", "requires_grad_", "register_hook", "backward", "retain_grad", "record_stream",
    )
)  # fmt: skip
_MASKABLE = frozenset(
    ("__getitem__", "__setitem__", "index_put", "index_put_", "masked_scatter", "masked_scatter_", "where")
)
_MOVING = frozenset(("to", "cuda", "type", "copy_"))

#: What a function can have to do with known numbers.
_BARE, _ALWAYS, _COMPUTES, _WRITES, _MOVES, _BY_MASK, _COMPARES = range(7)
_COMMON = (_COMPUTES, _WRITES)
_DEPTH = 2  # lists of tensors, and lists of those


class Gate(TorchFunctionMode):  # type: ignore[misc] # torch has no types here
    """Runs a call under the mirror when all its CUDA tensors are small and known, or when it reads a number."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__()
        self.mirror = mirror
        self._entries = mirror.known.entries
        self._kinds: dict[Any, int] = {}
        mirror.gate_code = Gate.__torch_function__.__code__
        #: How many threads are in compiled code, where the gate is off.
        self.paused = 0

    def __enter__(self) -> Gate:
        surroundings.pause_in_compiled_code(self)
        surroundings.cover_constant_folding(self.mirror)
        surroundings.cover_collectives(self.mirror)
        surroundings.cover_copies_between_gpus(self.mirror)
        surroundings.cover_recomputation(self)
        surroundings.cover_custom_backward(self)
        surroundings.cover_nested_tensors(self)
        surroundings.cover_threads(self)
        surroundings.leave_out_of_parameter_loops(self)
        super().__enter__()
        return self

    def leave(self) -> bool:
        """Take the gate off this thread if it is the innermost mode; return whether it was."""
        if _get_current_function_mode() is not self:
            return False
        torch._C._pop_torch_function_stack()
        return True

    def put_back(self) -> None:
        """Undo a ``leave`` that took the gate off."""
        torch._C._push_on_torch_function_stack(self)

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Have the gate among this thread's modes, putting it there if it is not."""
        if any(mode is self for mode in _get_current_function_mode_stack()):
            yield
            return
        self.put_back()
        try:
            yield
        finally:
            self.leave()

    def forget(self, tensors: Iterable[Any]) -> None:
        """Say that nobody knows any more what these tensors hold."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.layout is torch.strided:
                self._entries.pop(tensor.untyped_storage()._cdata, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, under the mirror where its numbers can be known."""
        answered: list[Any] = []  # noqa: F841 - for Mirror.on_read, which finds it in this frame
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(getattr(func, "__name__", ""))
        if kind == _BARE:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind in _COMMON:
            first = args[0] if args else None
            bare = (
                isinstance(first, torch.Tensor)
                and first.is_cuda
                and (first.requires_grad or (first.is_floating_point() and first.numel() > TINY))
            )
        else:
            bare = False
        if not bare and self._concerns(kind, func, args, kwargs):
            with self.mirror.on_this_thread():
                return func(*args, **kwargs) if kwargs else func(*args)
        if kind >= _WRITES and args and _writes(func.__name__):
            first = args[0]
            self.forget(first if isinstance(first, (list, tuple)) else (first,))
        return func(*args, **kwargs) if kwargs else func(*args)

    def _concerns(self, kind: int, func: Any, args: Any, kwargs: Any) -> bool:
        if kind == _ALWAYS:  # up to 2.6 a mode cannot pass on an unsigned 64-bit number
            return not (args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.uint64)
        known = self._all_known(args, 0)
        if kwargs and known is not False:
            inside = self._all_known(kwargs.values(), 0)
            known = inside if inside is False or known is None else known
        if known is None:  # no CUDA tensor goes in: does one come out?
            return kind == _MOVES or (kwargs is not None and kwargs.get("device") is not None)
        if known:
            return True
        if kind == _MOVES:
            return _crosses(func.__name__, args, kwargs)
        if kind == _BY_MASK:
            return any(_has_mask(value) for value in (args if func.__name__ == "where" else args[1:]))
        return kind == _COMPARES and len(args) > 1 and (args[0] is args[1] or _is_infinite(args[1]))

    def _all_known(self, values: Any, depth: int) -> bool | None:
        """Return whether the values of all CUDA tensors among these are known; None when there are none."""
        found: bool | None = None
        for value in values:
            if isinstance(value, torch.Tensor):
                if not value.is_cuda:
                    continue
                if value.dtype in FLOATS and (value.numel() > TINY or value.requires_grad):
                    return False  # what learns steers nothing
                try:
                    if value.untyped_storage()._cdata not in self._entries:
                        return False
                except (RuntimeError, NotImplementedError):  # no storage: sparse, or inside vmap, which the mirror sees
                    if value.dtype in FLOATS:
                        return False
                found = True
            elif isinstance(value, (list, tuple)) and depth < _DEPTH:
                inside = self._all_known(value, depth + 1)
                if inside is False:
                    return False
                found = found or inside
        return found


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _kind(name: str) -> int:
    """Return what functions of this name are to the gate."""
    if name in _LOOKS:
        return _BARE
    if (
        name in _READS
        or name in _FINITE
        or name in _CHOOSES
        or name.startswith(("_amp_", "new_"))
        or name.endswith("_like")
    ):
        return _ALWAYS  # new_* and *_like look at a tensor's shape only: their results are known
    for names, kind in ((_MOVING, _MOVES), (_MASKABLE, _BY_MASK), (_COMPARING, _COMPARES)):
        if name in names:
            return kind
    return _WRITES if _writes(name) else _COMPUTES


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return name.endswith("_")


def _crosses(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a move of tensors goes between host and device; a change of dtype alone does not concern us."""
    if name == "copy_":
        return any(isinstance(a, torch.Tensor) and not a.is_cuda for a in args[:2])
    for value in (*args[1:], *(kwargs or {}).values()):
        if isinstance(value, torch.device) and value.type == "cpu":
            return True
        if isinstance(value, str) and (value.startswith("cpu") or (value[:6] == "torch." and ".cuda." not in value)):
            return True  # .to("cpu"), .type("torch.FloatTensor")
    return False


def _has_mask(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda and value.dtype in (torch.bool, torch.uint8)
    return isinstance(value, (list, tuple)) and any(_has_mask(item) for item in value)
