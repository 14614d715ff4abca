"""Parts of PyTorch where the gate and the mirror must be there, or must not be."""

from __future__ import annotations

import functools
from typing import Any

import torch

from oomproof.measure import versions

#: Collectives move values inside C++, where no function mode sees them; ranks compare counts and lengths through them.
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "_verify_params_across_processes",
)  # fmt: skip


def cover_recomputation(gate: Any) -> None:
    """Have checkpointed functions see the same values when backward runs them again, on autograd's thread."""
    from torch.utils import checkpoint

    forward = checkpoint.CheckpointFunction.forward

    def reentrant(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        return forward(ctx, _covered(run_function, gate), preserve_rng_state, *args)

    checkpoint.CheckpointFunction.forward = staticmethod(reentrant)
    for name in versions.checkpoint_generators():
        setattr(checkpoint, name, _covering(getattr(checkpoint, name), gate))


def _covering(generator: Any, gate: Any) -> Any:
    @functools.wraps(generator)
    def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(_covered(fn, gate), *args, **kwargs)

    return call


def cover_collectives(mirror: Any) -> None:
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


def _covered(original: Any, mode: Any) -> Any:
    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode.on_this_thread():
            return original(*args, **kwargs)

    return call


def leave_out_of_parameter_loops(gate: Any) -> None:
    """Take the gate off where PyTorch itself goes through all parameters: each p.grad would cost a call of it."""
    for owner, name in (
        (torch.optim.Optimizer, "zero_grad"),
        (torch.nn.Module, "zero_grad"),
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    ):
        setattr(owner, name, _without(getattr(owner, name), gate))


def _without(original: Any, gate: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        asks = kwargs.get("error_if_nonfinite") or len(args) > 3  # clip_grad_norm_ then reads a number
        if asks or torch.compiler.is_compiling() or not gate.leave():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            gate.put_back()

    return call


def pause_in_compiled_code(gate: Any) -> None:
    """Take the gate off while compiled functions run: dynamo would trace it into them."""
    original = torch.compile

    @functools.wraps(original)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        _pause_in_contexts(gate)  # not before: importing dynamo takes a second
        return original(*args, **kwargs)

    torch.compile = compile_


def _pause_in_contexts(gate: Any) -> None:
    from torch._dynamo.eval_frame import OptimizeContext

    made = OptimizeContext.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.enter_exit_hooks.append(pause)

    def pause() -> Any:
        return gate.put_back if gate.leave() else _nothing

    OptimizeContext.__init__ = make


def _nothing() -> None:
    """Undo nothing."""
