"""Parts of PyTorch where the gate and the mirror must be there, or must not be."""

from __future__ import annotations

import functools
import sys
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
    _before_compiling(lambda backend: _pause_in_contexts(gate))


def cover_constant_folding(mirror: Any) -> None:
    """Have Inductor know the constants of a graph: it makes them on the GPU, one element each, and reads them back.

    Read as zeros, a tensor of ones would not be folded away and one of -inf would. Torch 2.4 to 2.14.
    """

    def cover(backend: Any) -> None:
        if backend != "inductor":
            return
        from torch._inductor.constant_folding import ConstantFolder
        from torch._inductor.fx_passes import pad_mm
        from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

        for folder in (ConstantFolder, UniformValueConstantFolder):
            for name in ("__init__", "run"):
                method = vars(folder).get(name)
                if method is not None and not hasattr(method, "__wrapped__"):
                    setattr(folder, name, _covered(method, mirror))
        if not hasattr(pad_mm.set_cached_should_pad, "__wrapped__"):
            pad_mm.set_cached_should_pad = _noting_padding(pad_mm.set_cached_should_pad)

    _before_compiling(cover)


def _noting_padding(set_decision: Any) -> Any:
    @functools.wraps(set_decision)
    def note(*args: Any, **kwargs: Any) -> Any:
        _timed.add("padding")
        return set_decision(*args, **kwargs)

    return note


_timed: set[str] = set()


def choices_by_time() -> list[str]:
    """Return a note for each kind of choice that Inductor made by timing kernels: here all take the same time."""
    notes = []
    if _timed:
        notes.append(
            "torch.compile timed matrix products with and without padding and keeps them unpadded here; a GPU may find "
            "padding faster, which takes a padded copy of the inputs of each such product while it runs. "
            "torch._inductor.config.shape_padding = False rules it out"
        )
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["inductor"].get("select_algorithm_autotune"):
        notes.append(
            "max-autotune chose kernels by time and keeps the first of each list here, for matrix products the one of "
            "cuBLAS; a GPU may choose others, some of which need a buffer of their own"
        )
    return notes


def _before_compiling(prepare: Any) -> None:
    """Have torch.compile call ``prepare(backend)`` first; not before, since importing dynamo takes a second."""
    original = torch.compile

    @functools.wraps(original)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        prepare(kwargs.get("backend", "inductor"))
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
