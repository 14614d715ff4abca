"""The output of a linear layer that is computed only when something other than a cross entropy reads it.

Imported in the user's process, once torch is there. Python 3.9.

``LazyLogits`` is a tensor with the shape, dtype and device that the layer's output would have, and without memory.
Reshaping it, taking part of the tokens and widening its dtype gives another one; ``cross_entropy`` of it becomes a
function of the layer's input and weight; every other operation gets the real output, computed then, once, and with its
place in the autograd graph. What reaches operators without passing Python's functions (an autograd.Function's apply)
is handled below autograd, in ``__torch_dispatch__``, and its gradient by ``_Later``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from oomproof.plan import losses
from oomproof.plan.linear_cross_entropy import Loss

#: Computes the loss: gets hidden (N, in), weight, bias, targets (N), the loss's arguments and the loss's dtype.
LinearLoss = Callable[[Any, Any, Any, Any, Loss, Any], Any]

_HALF = (torch.float16, torch.bfloat16)
_T = torch.Tensor


class Told(NamedTuple):
    """Whom to tell what became of the logits."""

    loss: LinearLoss
    used: Callable[[], None]  # a loss was computed without the logits
    read: Callable[[str], None]  # something else reads them: its name
    refuse: Callable[[str], None]  # what would be computed now is not what the script meant


class _Head:
    """One call of the layer: what every lazy tensor made from its output has in common."""

    def __init__(self, weight: Any, bias: Any, dtype: Any, told: Told) -> None:
        self.weight = weight
        self.bias = bias
        self.dtype = dtype  # of the product
        self.told = told
        self.tensors = 0
        self.versions = self._versions()
        self.steps = steps

    def _versions(self) -> list[int]:
        return [t._version for t in (self.weight, self.bias) if t is not None]

    def check(self) -> None:
        """Refuse to compute with weights that have changed since the layer was called."""
        if self.steps != steps or self.versions != self._versions():
            self.told.refuse(
                "the script reads the logits after the optimizer has changed the weights; they would have to be "
                "computed before, which is what this avoids. Read them before optimizer.step()"
            )


#: Optimizer steps so far in this process.
steps = 0


def note_step(*_: Any) -> None:
    """Count an optimizer's step: the hook for ``register_optimizer_step_post_hook``."""
    global steps
    steps += 1


class _State:
    """What a lazy tensor stands for: ``linear(hidden, weight, bias)`` in a dtype, its classes last or second."""

    def __init__(self, hidden: Any, head: _Head, dtype: Any, classes_second: bool, attached: bool) -> None:
        self.hidden = hidden
        self.head = head
        self.dtype = dtype
        self.classes_second = classes_second
        self.attached = attached  # to the autograd graph
        self.version = hidden._version
        self.real: Any = None
        self.plain: Any = None
        head.tensors += 1

    def compute(self) -> Any:
        """Return the real logits."""
        self.head.check()
        if self.hidden._version != self.version:
            self.head.told.refuse(
                "the script changes the input of the vocabulary's layer in place before it reads the logits"
            )
        product = self.head.dtype
        weight, bias = self.head.weight, self.head.bias
        if not self.attached:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = F.linear(self.hidden, weight.to(product), None if bias is None else bias.to(product))
            logits = logits.to(self.dtype)
        return logits.movedim(-1, 1) if self.classes_second else logits


class _Later(torch.autograd.Function):  # type: ignore[misc]
    """Gives a lazy tensor its place in the graph, for what uses it without asking Python's functions."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, state: _State) -> Any:
        ctx.state = state
        return _empty(state)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        state = ctx.state
        state.head.check()
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (state.hidden, state.head.weight)]
            bias = state.head.bias
            inputs += [] if bias is None else [bias.detach().requires_grad_()]
            head = _Head(inputs[1], None if bias is None else inputs[2], state.head.dtype, state.head.told)
            logits = _State(inputs[0], head, state.dtype, state.classes_second, True).compute()
        grads = torch.autograd.grad(logits, inputs, grad)
        return (*grads, *([None] if bias is None else []), None)


class LazyLogits(torch.Tensor):  # type: ignore[misc]
    """See the module."""

    _lazy: _State

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return _quietly(func, *args, **kwargs)
        one = args[0] if args and isinstance(args[0], cls) else kwargs.get("input")
        if isinstance(one, cls) and one._lazy.real is None:
            handler = _STAYS.get(func)
            done = handler(one, *args[1:], **kwargs) if handler is not None else NotImplemented
            if done is not NotImplemented:
                return done
        name = getattr(func, "__name__", str(func))
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or kwargs.get("out") is not None:
            _check_in_place(args, kwargs)
        read = lambda tensor: _read(tensor, name)  # noqa: E731
        args, kwargs = tree_map_only(cls, read, args), tree_map_only(cls, read, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        data = lambda tensor: _data(tensor, str(func))  # noqa: E731
        args, kwargs = tree_map_only(cls, data, args), tree_map_only(cls, data, kwargs or {})
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return repr(_read(self, "repr"))

    def __deepcopy__(self, memo: Any) -> Any:
        return _read(self, "deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self, "pickle").__reduce_ex__(protocol)


def lazy_linear(hidden: Any, weight: Any, bias: Any, dtype: Any, told: Told) -> Any:
    """Return the lazy output of a linear layer whose product is made in ``dtype``."""
    return _new(_State(hidden.to(dtype), _Head(weight, bias, dtype, told), dtype, False, True))


def is_lazy(value: Any) -> bool:
    """Return whether this is a lazy tensor that nothing has read yet."""
    return isinstance(value, LazyLogits) and value._lazy.real is None


def _quietly(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _new(state: _State) -> Any:
    head = state.head
    if state.attached and torch.is_grad_enabled():
        made = _Later.apply(state.hidden, head.weight, head.bias, state)
    else:
        made = _empty(state)
    made._lazy = state
    return made


def _empty(state: _State) -> Any:
    shape = [*state.hidden.shape[:-1], state.head.weight.shape[0]]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if state.classes_second:
        for items in (shape, strides):
            items.insert(1, items.pop())
    made = torch.Tensor._make_wrapper_subclass(
        LazyLogits, shape, strides=strides, dtype=state.dtype, device=state.hidden.device
    )
    made._lazy = state
    return made


def _read(tensor: Any, name: str) -> Any:
    """Return the real logits in a lazy tensor's place, computed once."""
    state = tensor._lazy
    if state.real is None:
        state.head.told.read(name)
        state.real = state.compute()
    return state.real


def _data(tensor: Any, name: str) -> Any:
    state = tensor._lazy
    if state.real is not None:
        return state.real.detach()
    if state.plain is None:
        state.head.told.read(name)
        with torch.no_grad():
            state.plain = state.compute()
    return state.plain


def _check_in_place(args: Any, kwargs: Any) -> None:
    """Refuse to change one of several tensors in place that stand for the same logits: the others would not follow."""

    def check(tensor: Any) -> Any:
        if tensor._lazy.head.tensors > 1:
            tensor._lazy.head.told.refuse("the script changes the logits in place through one of several views of them")
        return tensor

    tree_map_only(LazyLogits, check, (args, kwargs))


# ---- what stays lazy -------------------------------------------------------------------------------------------------


def _derived(one: Any, hidden: Any, classes_second: bool = False) -> Any:
    state = one._lazy
    return _new(_State(hidden, state.head, state.dtype, classes_second, state.attached))


def _cast(one: Any, dtype: Any) -> Any:
    state = one._lazy
    if dtype == state.dtype:
        return one
    if torch.promote_types(dtype, state.dtype) != dtype:
        return NotImplemented  # rounding has its place in the computation
    return _new(_State(state.hidden, state.head, dtype, state.classes_second, state.attached))


def _to(one: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
        return _cast(one, args[0])
    if len(args) == 1 and not kwargs and isinstance(args[0], (torch.device, str)):
        wanted = torch.device(args[0])
        here = one._lazy.hidden.device
        if wanted == here or (wanted.type == here.type and wanted.index is None):
            return one
    if not args and set(kwargs) == {"dtype"}:
        return _cast(one, kwargs["dtype"])
    return NotImplemented


def _view(one: Any, *shape: Any) -> Any:
    state = one._lazy
    if len(shape) == 1 and not isinstance(shape[0], int):
        if isinstance(shape[0], torch.dtype):
            return NotImplemented
        shape = tuple(shape[0])
    classes = state.head.weight.shape[0]
    if state.classes_second or len(shape) < 2 or any(not isinstance(n, int) for n in shape):
        return NotImplemented
    *leading, last = shape
    tokens = state.hidden.numel() // state.hidden.shape[-1] if state.hidden.shape[-1] else 0
    if last == -1 and -1 not in leading and math.prod(leading) == tokens:
        last = classes
    if last != classes or (-1 not in leading and math.prod(leading) != tokens):
        return NotImplemented
    return _derived(one, state.hidden.reshape(*leading, state.hidden.shape[-1]))


def _reshape(one: Any, *shape: Any, **kwargs: Any) -> Any:
    return _view(one, *shape, **kwargs) if not kwargs else _view(one, *shape, kwargs["shape"])


def _flatten(one: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    state = one._lazy
    dims = state.hidden.dim()
    if state.classes_second or end_dim % dims == dims - 1:
        return NotImplemented
    return _derived(one, state.hidden.flatten(start_dim, end_dim))


def _contiguous(one: Any, **kwargs: Any) -> Any:
    if kwargs or one._lazy.classes_second:
        return NotImplemented
    return one


def _getitem(one: Any, index: Any) -> Any:
    state = one._lazy
    if state.classes_second or not _spares_the_last(index, state.hidden.dim()):
        return NotImplemented
    return _derived(one, state.hidden[index])


def _spares_the_last(index: Any, dims: int) -> bool:
    """Return whether an index leaves the last dimension whole and in its place."""
    items = index if isinstance(index, tuple) else (index,)
    taken = 0
    for item in items:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            taken += item.dim()
        elif (isinstance(item, (int, slice)) and not isinstance(item, bool)) or isinstance(item, torch.Tensor):
            taken += 1
        elif item is not None and item is not Ellipsis:
            return False
    whole = isinstance(items[-1], slice) and items[-1] == slice(None)
    if any(item is Ellipsis for item in items):
        return items[-1] is Ellipsis or whole
    return taken < dims or (whole and taken == dims)


def _transpose(one: Any, first: Any, second: Any) -> Any:
    state = one._lazy
    if state.hidden.dim() != 3 or not all(isinstance(d, int) for d in (first, second)):
        return NotImplemented
    if {first % 3, second % 3} != {1, 2}:
        return NotImplemented
    return _derived(one, state.hidden, not state.classes_second)


def _permute(one: Any, *dims: Any) -> Any:
    dims = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if one._lazy.hidden.dim() != 3 or tuple(d % 3 for d in dims) != (0, 2, 1):
        return NotImplemented
    return _derived(one, one._lazy.hidden, not one._lazy.classes_second)


def _detach(one: Any) -> Any:
    state = one._lazy
    return _new(_State(state.hidden.detach(), state.head, state.dtype, state.classes_second, False))


def _cross_entropy(
    one: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> Any:
    state = one._lazy
    kwargs.pop("input", None)
    shape = state.hidden.shape[:-1]
    plain = (
        not kwargs
        and size_average is None
        and reduce is None
        and isinstance(target, torch.Tensor)
        and not isinstance(target, LazyLogits)
        and target.dtype == torch.int64
        and target.shape == shape
        and (state.classes_second or len(shape) == 1)
        and state.attached
        and torch.is_grad_enabled()
        and reduction in ("none", "mean", "sum")
        and not (isinstance(weight, torch.Tensor) and weight.requires_grad)
    )
    if not plain:
        return NotImplemented
    head = state.head
    head.check()
    dtype = state.dtype
    kind = state.hidden.device.type
    if dtype in _HALF and torch.is_autocast_enabled(kind):
        dtype = torch.float32  # autocast makes this loss in float32
    with torch.autocast(kind, enabled=False):
        loss = head.told.loss(
            state.hidden.flatten(0, -2) if len(shape) != 1 else state.hidden,
            head.weight,
            head.bias,
            target.flatten(),
            Loss(weight, ignore_index, reduction, label_smoothing),
            dtype,
        )
    head.told.used()
    if reduction == "mean":
        scores = (*shape, len(head.weight))
        losses.mark_cross_entropy(torch, loss, scores, target, weight, ignore_index, label_smoothing)
    return loss.view(shape) if reduction == "none" else loss


_STAYS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    _T.float: lambda one: _cast(one, torch.float32),
    _T.double: lambda one: _cast(one, torch.float64),
    _T.to: _to,
    _T.view: _view,
    _T.reshape: _reshape,
    torch.reshape: lambda one, shape: _view(one, shape),
    _T.flatten: _flatten,
    torch.flatten: _flatten,
    _T.contiguous: _contiguous,
    _T.__getitem__: _getitem,
    _T.transpose: _transpose,
    torch.transpose: _transpose,
    _T.permute: _permute,
    torch.permute: lambda one, dims: _permute(one, dims),
    _T.mT.__get__: lambda one: _transpose(one, 1, 2),
    _T.detach: _detach,
}

_METADATA = frozenset(
    [_T.size, _T.dim, _T.numel, _T.element_size, _T.stride, _T.is_floating_point, _T.is_complex, _T.ndimension]
    + [_T.__len__, _T.get_device, _T.nelement, torch.is_floating_point, torch.is_complex, torch.numel, _T.is_contiguous]
    + [
        getattr(_T, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda")
    ]
    + [getattr(_T, name).__get__ for name in ("is_cpu", "is_sparse", "is_quantized", "is_meta", "itemsize")]
)
