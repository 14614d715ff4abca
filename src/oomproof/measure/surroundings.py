"""Parts of PyTorch that a dispatch mode would disturb, and what keeps them as they are.

Each function names the versions that need it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def cover_recomputation(mirror: Any) -> None:
    """Have checkpointed functions see the same values when backward runs them again, on autograd's thread."""
    from torch.utils import checkpoint

    def covered(function: Any) -> Any:
        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with mirror.on_this_thread():
                return function(*args, **kwargs)

        return run

    forward = checkpoint.CheckpointFunction.forward

    def reentrant(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        return forward(ctx, covered(run_function), preserve_rng_state, *args)

    checkpoint.CheckpointFunction.forward = staticmethod(reentrant)
    for name in (
        "_checkpoint_without_reentrant_generator",
        "_checkpoint_without_reentrant_generator_impl",
    ):
        generator = getattr(checkpoint, name, None)  # the second from 2.14 on; the first calls it there
        if generator is not None:
            setattr(checkpoint, name, _covering(generator, covered))


def _covering(generator: Any, covered: Any) -> Any:
    @functools.wraps(generator)
    def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(covered(fn), *args, **kwargs)

    return call


def never_compile(modules: Iterable[Any]) -> None:
    """Keep dynamo from compiling the functions of these modules, which run in the middle of the script's own."""
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "set_code_exec_strategy"):  # 2.7
        action = eval_frame._FrameAction
        skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)

        def never(code: Any) -> None:
            eval_frame.set_code_exec_strategy(code, skip)
    else:
        never = eval_frame.skip_code  # type: ignore[attr-defined]
    for module in modules:
        for thing in list(vars(module).values()):
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            for member in (thing, *vars(thing).values()) if isinstance(thing, type) else (thing,):
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if code is not None:
                    never(code)


def pass_higher_order_operators(mode: type) -> None:
    """Let higher-order operators through, which before 2.7 refuse a mode that is not registered with each."""
    if hasattr(mode.__mro__[1], "supports_higher_order_operators"):
        return
    import torch._higher_order_ops  # they register themselves

    for operator in list(torch._ops._higher_order_ops.values()):
        if mode not in operator.python_key_table:
            operator.py_impl(mode)(functools.partial(_pass_through, operator))


def _pass_through(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def step_aside_for_compiled_code(mirror: Any) -> None:
    """Leave the mirror out of compiled functions, with a torch that has no ``ignore_compile_internals``.

    There (seen with 2.6) guards are made without the mode and checked with it, so that each call compiles anew, until
    dynamo gives up and runs the function uncompiled.
    """
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return
    original = torch.compile

    @functools.wraps(original)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        _pause_in_contexts(mirror)  # not before: importing dynamo takes a second
        return original(*args, **kwargs)

    torch.compile = compile_


def _pause_in_contexts(mirror: Any) -> None:
    from torch._dynamo.eval_frame import OptimizeContext

    made = OptimizeContext.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.enter_exit_hooks.append(pause)

    def pause() -> Any:
        mirror.pause()
        return mirror.resume

    OptimizeContext.__init__ = make
