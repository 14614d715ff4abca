"""Running something around a module's forward, without changing its name, its state or how it is copied. Python 3.9."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

#: Gets the module's own forward, bound, and its arguments.
Around = Callable[..., Any]


_WRAPS = "_oomproof_wraps"


def own_kind(module: Any) -> Any:
    """Return the class that a module was made of, before ``wrap_forward`` or FSDP2 gave it one of their own."""
    kind = type(module)
    while True:
        if _WRAPS in kind.__dict__:
            kind = kind.__dict__[_WRAPS]
        elif len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule":
            kind = kind.__bases__[1]
        else:
            return kind


def wrap_forward(module: Any, around: Around) -> None:
    """Have ``module.forward(*args)`` do ``around(forward, *args)``, by giving the module a subclass of its class.

    FSDP2 does the same. State dict, hooks, isinstance and the class's name stay; copies and pickles of the module are
    of its own class again. An attribute ``forward`` on the instance would be copied with a model and still run the
    first one's.
    """
    if "forward" in module.__dict__:
        _wrap_instance(module, around)
        return
    kind: Any = type(module)
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        made, args, *rest = kind.__reduce_ex__(self, protocol)
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle refuses that with a class other than the object's; this is what older protocols use
            made, args = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]
        return (made, args, *rest)

    wrapped = type(
        kind.__name__,
        (kind,),
        {
            "forward": forward,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": reduce,
            _WRAPS: kind,
        },
    )
    module.__class__ = wrapped


def _wrap_instance(module: Any, around: Around) -> None:
    """Wrap a forward that a library put on the instance: accelerate does."""
    original = module.__dict__["forward"]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    module.forward = forward
