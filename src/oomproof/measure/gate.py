"""The gate before the value mirror: only calls about small known numbers run under its dispatch mode.

While any TorchDispatchMode is active, ATen takes every tensor for a subclass (isTensorSubclassLike), and linear, matmul
and others allocate differently. So the mirror cannot simply stay on. A TorchFunctionMode changes nothing in ATen: this
one sees each call that the script makes on torch, lets those that compute with large or unknown tensors pass bare, and
runs the others under the mirror. It also costs half of what a dispatch mode does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from oomproof.measure.known import FLOATS, TINY
from oomproof.measure.values import Mirror

#: Functions that hand a number to the host, or whose result's size depends on one.
_READS = frozenset(
    (
        "item", "tolist", "cpu", "numpy", "equal", "is_nonzero", "allclose", "nonzero", "argwhere", "masked_select",
        "unique", "unique_consecutive", "bincount", "repeat_interleave", "multinomial", "histc", "__bool__", "__int__",
        "__float__", "__index__", "__complex__", "__contains__", "__format__", "__repr__", "__array__",
    )
)  # fmt: skip
#: Functions whose answer for floats that nobody knows is taken from their being finite.
_FINITE = frozenset(("isfinite", "isnan", "isinf", "isposinf", "isneginf"))
#: Functions that never touch a value, and Python properties.
_LOOKS = frozenset(
    (
        "__get__", "__set__", "__len__", "__hash__", "size", "dim", "stride", "numel", "nelement", "element_size",
        "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "data_ptr", "get_device", "ndimension",
        "untyped_storage", "requires_grad_", "register_hook", "backward", "retain_grad", "record_stream",
    )
)  # fmt: skip
_BY_MASK = frozenset(
    ("__getitem__", "__setitem__", "index_put", "index_put_", "masked_scatter", "masked_scatter_", "where")
)
_MOVES = frozenset(("to", "cuda", "type", "copy_"))
#: Collectives move values inside C++, where no function mode sees them; ranks compare counts and lengths through them.
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "_verify_params_across_processes",
)  # fmt: skip
_DEPTH = 2  # lists of tensors, and lists of those


class Gate(TorchFunctionMode):  # type: ignore[misc] # torch has no types here
    """Runs a call under the mirror when all its CUDA tensors are small and known, or when it reads a number."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__()
        self._mirror = mirror
        self._entries = mirror.known.entries
        self._names: dict[Any, str] = {}

    def __enter__(self) -> Gate:
        _pause_in_compiled_code(self)
        _cover_collectives(self._mirror)
        super().__enter__()
        return self

    def leave(self) -> None:
        """Take the gate off this thread if it is the innermost mode."""
        if _get_current_function_mode() is self:
            torch._C._pop_torch_function_stack()

    def forget(self, tensors: Iterable[Any]) -> None:
        """Say that nobody knows any more what these tensors hold."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.layout is torch.strided:
                self._entries.pop(tensor.untyped_storage()._cdata, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, under the mirror where its numbers can be known."""
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = getattr(func, "__name__", "")
        if name not in _LOOKS:
            if self._concerns(name, args, kwargs):
                with self._mirror.on_this_thread():
                    return func(*args, **kwargs) if kwargs else func(*args)
            if args and _writes(name):
                first = args[0]
                self.forget(first if isinstance(first, (list, tuple)) else (first,))
        return func(*args, **kwargs) if kwargs else func(*args)

    def _concerns(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in _READS or name in _FINITE or name.startswith(("_amp_", "new_")) or name.endswith("_like"):
            return True  # new_* and *_like look at a tensor's shape only: their results are known
        known = self._all_known(args, 0)
        if kwargs and known is not False:
            inside = self._all_known(kwargs.values(), 0)
            known = inside if inside is False or known is None else known
        if known is None:  # no CUDA tensor goes in: does one come out?
            return name in _MOVES or (kwargs is not None and kwargs.get("device") is not None)
        if known or name in _MOVES:
            return known or _crosses(name, args, kwargs)
        if name in _BY_MASK:
            return any(_has_mask(value) for value in args[1:])
        return name in ("ne", "__ne__", "eq", "__eq__") and len(args) > 1 and args[0] is args[1]

    def _all_known(self, values: Any, depth: int) -> bool | None:
        """Return whether the values of all CUDA tensors among these are known; None when there are none."""
        found: bool | None = None
        for value in values:
            if isinstance(value, torch.Tensor):
                if not value.is_cuda:
                    continue
                if value.dtype in FLOATS and value.numel() > TINY:
                    return False
                try:
                    if value.untyped_storage()._cdata not in self._entries:
                        return False
                except (RuntimeError, NotImplementedError):  # sparse and other tensors have no storage
                    return False
                found = True
            elif isinstance(value, (list, tuple)) and depth < _DEPTH:
                inside = self._all_known(value, depth + 1)
                if inside is False:
                    return False
                found = found or inside
        return found


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _crosses(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a move of tensors goes between host and device; a change of dtype alone does not concern us."""
    if name == "copy_":
        return any(isinstance(a, torch.Tensor) and not a.is_cuda for a in args[:2])
    for value in (*args[1:], *(kwargs or {}).values()):
        if isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu":
            return True
    return False


def _has_mask(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda and value.dtype in (torch.bool, torch.uint8)
    return isinstance(value, (list, tuple)) and any(_has_mask(item) for item in value)


def _cover_collectives(mirror: Mirror) -> None:
    """Run torch.distributed's collectives under the mirror; they allocate nothing that it could change."""
    from torch import distributed

    if not distributed.is_available():
        return
    for name in _COLLECTIVES:
        original = getattr(distributed, name, None)
        if original is None:
            continue
        covered = _covered(original, mirror)
        for module in (distributed, distributed.distributed_c10d):
            if getattr(module, name, None) is original:
                setattr(module, name, covered)
    reducer = distributed.Reducer  # DDP's: ranks agree on its buckets by broadcasting their sizes
    reducer._rebuild_buckets = _covered(reducer._rebuild_buckets, mirror)


def _covered(original: Any, mirror: Mirror) -> Any:
    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with mirror.on_this_thread():
            return original(*args, **kwargs)

    return call


def _pause_in_compiled_code(gate: Gate) -> None:
    """Take the gate off while compiled functions run: dynamo would trace it into them."""
    original = torch.compile

    @functools.wraps(original)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        _pause_in_contexts(gate)  # not before: importing dynamo takes a second
        return original(*args, **kwargs)

    torch.compile = compile_


def _pause_in_contexts(gate: Gate) -> None:
    from torch._dynamo.eval_frame import OptimizeContext

    made = OptimizeContext.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.enter_exit_hooks.append(pause)

    def pause() -> Any:
        if _get_current_function_mode() is not gate:
            return lambda: None
        torch._C._pop_torch_function_stack()
        return lambda: torch._C._push_on_torch_function_stack(gate)

    OptimizeContext.__init__ = make
