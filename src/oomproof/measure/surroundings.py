"""Parts of PyTorch where the gate and the mirror must be there, or must not be."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from oomproof.measure import versions

_HANDLERS = ("__torch_function__", "__torch_dispatch__")

#: Collectives move values inside C++, where no function mode sees them; ranks compare counts and lengths through them.
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "_verify_params_across_processes", "send", "recv",
    "isend", "irecv",
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


def cover_copies_between_gpus(mirror: Any) -> None:
    """Run what DataParallel spreads its inputs with under the mirror; it too works inside C++."""
    from torch.nn.parallel import comm

    for name in ("scatter", "gather"):
        setattr(comm, name, _covered(getattr(comm, name), mirror))


def cover_nested_tensors(gate: Any) -> None:
    """Have the gate inside the handlers of jagged nested tensors, which read lengths off their offsets."""
    for name in _HANDLERS:
        covered = _covered(getattr(NestedTensor, name), gate)
        setattr(NestedTensor, name, staticmethod(covered))


def _uncover_nested_tensors() -> None:
    """Give back the handlers: dynamo traces through them, and would meet the gate there."""
    for name in _HANDLERS:
        handler = NestedTensor.__dict__[name].__func__
        if isinstance(NestedTensor.__dict__[name], staticmethod):
            setattr(NestedTensor, name, classmethod(handler.__wrapped__.__func__))


def cover_threads(gate: Any) -> None:
    """Have the gate in every thread: modes belong to one, and DataParallel calls its replicas from several."""
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined] # what runs whatever a class makes of run()
    threading.Thread._bootstrap_inner = _covered(run, gate)  # type: ignore[attr-defined]


def cover_custom_backward(gate: Any) -> None:
    """Have the gate in backward passes that are written in Python, which autograd calls on its own threads.

    Those of torch itself are left alone: compiled code has one, and would have the gate traced into it.
    """
    function = torch.autograd.function.BackwardCFunction
    original = function.apply
    covered = _covered(original, gate)

    def apply(self: Any, *args: Any) -> Any:
        own = type(self)._forward_cls.__module__.startswith("torch.")
        return (original if own else covered)(self, *args)

    function.apply = apply


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
    """Take the gate off while compiled functions run: dynamo would trace it into them.

    It comes back in functions that are left out of compiling with all that they call.
    """

    def pause(backend: Any) -> None:
        _pause_in_contexts(gate)
        _uncover_nested_tensors()

    _before_compiling(pause)
    disable = torch.compiler.disable

    @functools.wraps(disable)
    def disable_with_gate(fn: Any = None, recursive: bool = True, **kwargs: Any) -> Any:
        if fn is None:
            return functools.partial(disable_with_gate, recursive=recursive, **kwargs)
        if recursive and callable(fn) and not isinstance(fn, (type, torch.nn.Module)):
            fn = _covered(fn, gate)
        return disable(fn, recursive, **kwargs)

    torch.compiler.disable = disable_with_gate


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
        if not hasattr(UniformValueConstantFolder, "_deduce_value"):
            _follow_constants(UniformValueConstantFolder, mirror.known)
        if not hasattr(pad_mm.set_cached_should_pad, "__wrapped__"):
            pad_mm.set_cached_should_pad = _noting_padding(pad_mm.set_cached_should_pad)

    _before_compiling(cover)


def _follow_constants(folder: Any, known: Any) -> None:
    """Torch 2.4 makes constants at full size, of which no values are kept: follow them, one element each on the CPU."""
    from torch.fx.node import map_arg

    run_node, check = folder.run_node, folder.insertable_tensor_check
    if hasattr(check, "__wrapped__"):
        return
    aten = torch.ops.aten
    views = (
        aten.alias, aten.expand, aten.permute, aten.slice, aten.squeeze, aten.t, aten.unsqueeze, aten.view,
    )  # fmt: skip

    def element_of(node: Any, elements: dict[Any, Any]) -> Any:
        inputs = node.all_input_nodes
        if node.op != "call_function" or any(elements.get(n) is None for n in inputs):
            return None
        if node.target == aten.full.default:
            return None if inputs else torch.full([1], node.args[1], dtype=node.kwargs.get("dtype"))
        if getattr(node.target, "overloadpacket", None) in views:
            return elements[node.args[0]]
        if inputs and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            given = {name: value for name, value in node.kwargs.items() if name != "device"}
            args, kwargs = map_arg((node.args, given), elements.get)
            with contextlib.suppress(RuntimeError):  # the CPU lacks some operators for some types
                return node.target(*args, **kwargs)
        return None

    def run(self: Any, node: Any) -> Any:
        elements = vars(self).setdefault("elements", {})
        self.element = elements[node] = element_of(node, elements)
        return run_node(self, node)

    @functools.wraps(check)
    def insertable(self: Any, tensor: Any) -> bool:
        element = self.element
        if element is None or element.dtype != tensor.dtype or not tensor.numel() or not tensor.is_contiguous():
            return bool(check(self, tensor))
        (tensor == tensor.flatten()[0]).all()  # what the check allocates, without its read
        tensor[(0,) * tensor.dim()].copy_(element[0])  # the folder reads this one
        known.add(tensor, bytes(element.view(torch.uint8).tolist()))
        return bool(torch._C._has_storage(tensor)) and tensor.layout == torch.strided

    folder.run_node, folder.insertable_tensor_check = run, insertable


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
    from torch._dynamo.eval_frame import OptimizeContext, skip_code

    made = OptimizeContext.__init__
    if hasattr(made, "__wrapped__"):
        return
    skip_code(gate.mirror.on_read.__func__.__code__)
    gate.mirror.set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.enter_exit_hooks.append(pause)

    def pause() -> Any:
        if not gate.leave():
            return _nothing
        gate.paused += 1
        return come_back

    def come_back() -> None:
        gate.paused -= 1
        gate.put_back()

    OptimizeContext.__init__ = make


def _nothing() -> None:
    """Undo nothing."""
