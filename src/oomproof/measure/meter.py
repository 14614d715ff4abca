"""What one optimizer step executes: operators with their FLOPs and bytes, copies to and from the host, collectives.

The observer has this on for one step after the last measured one, whose peaks nobody looks at: while a dispatch mode is
active ATen allocates differently, and so does compiled code that sees one. Each row of the result stands for calls that
are equal in operator, phase, dtype, FLOPs and bytes, so that a roofline over the rows is one over the calls.

FLOPs come from ``torch.utils.flop_counter``'s formulas (torch 2.4 to 2.14), completed by the ones that it lacks; those
of elementwise operators and reductions are left out, since memory bounds these. Bytes are those of an operator's inputs
and outputs as its schema tells them. What runs where no operator is seen is listed as uncounted.

Runs inside the user's process. Python 3.9.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from oomproof.measure import versions
from oomproof.measure.known import PLAIN, tensors_in
from oomproof.measure.operators import COLLECTIVES, EMPTY, UNTOUCHED

VERSION = 1

#: Names of dtypes in the catalogue's ``flops``; others go by torch's own name.
DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8",
    torch.complex64: "fp32", torch.complex128: "fp64",
}  # fmt: skip

#: Operators that read only the rows which their indices choose: of the first tensor as much as comes out.
_GATHERS = frozenset(
    "aten::" + n
    for n in (
        "embedding",
        "index",
        "index_select",
        "gather",
        "take",
        "_unsafe_index",
        "take_along_dim",
        "masked_select",
    )
)
#: And those that write only where their indices say: as much as they are given.
_SCATTERS = frozenset(
    "aten::" + n
    for n in (
        "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_",
        "scatter_reduce_", "masked_scatter_", "_unsafe_index_put", "embedding_renorm_",
    )
)  # fmt: skip
#: They write and do not look at what was there.
_OVERWRITES = frozenset(
    "aten::" + n
    for n in (
        "copy_", "fill_", "zero_", "_foreach_zero_", "_foreach_copy_", "normal_", "uniform_", "bernoulli_", "random_",
        "exponential_", "log_normal_", "cauchy_", "geometric_",
    )
)  # fmt: skip
_SAVES_NOTHING = (
    EMPTY | UNTOUCHED | frozenset(("aten::lift_fresh", "aten::lift", "aten::is_pinned", "aten::pin_memory"))
)

#: Collectives by the names of c10d's and functional collectives' operators; bytes are those of the whole result
#: (all-gather, broadcast), input (reduce-scatter, all-to-all) or tensor (all-reduce).
_KINDS = (
    ("allgather", "all_gather"), ("all_gather", "all_gather"), ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"), ("alltoall", "all_to_all"), ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"), ("reduce", "reduce"), ("gather", "gather"), ("scatter", "scatter"), ("send", "send"),
    ("recv", "recv"), ("barrier", "barrier"),
)  # fmt: skip

#: Operators that multiply matrices without a formula here: their FLOPs are uncounted, and said to be.
_HEAVY = (
    "gemm", "gemv", "matmul", "_mm", "bmm", "linear", "conv", "attention", "attn", "rnn", "lstm", "gru", "linalg_",
    "transformer", "cholesky",
)  # fmt: skip
_NOT_HEAVY = ("optimizer", "quantize", "convert", "_cell", "vector_norm", "upsample")


class Meter(TorchDispatchMode):  # type: ignore[misc] # torch has no types here
    """Counts what runs while it is on. ``phase`` is asked for the part of the step that the script is in."""

    supports_higher_order_operators = True

    def __init__(self, device: Any, phase: Callable[[], str]) -> None:
        super().__init__()
        self._ranks_on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or max(1, torch.cuda.device_count())
        self._device = device
        self._phase = phase
        self._plans: dict[int, Plan] = {}
        self._lock = threading.Lock()  # DataParallel's replicas run on threads of their own
        self._undo: list[Callable[[], None]] = []
        self.on = False
        versions.pass_higher_order_operators(Meter)
        self._tf32 = _tf32()
        self._clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return "torch._dynamo" in sys.modules  # the wrapper that it makes would import dynamo: a second

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # from 2.9 on; what was compiled stays compiled

    def _clear(self) -> None:
        self._rows: dict[Any, list[int]] = {}
        self._copies: dict[Any, list[int]] = {}
        self._collectives: dict[Any, list[int]] = {}
        self._uncounted: dict[str, int] = {}
        self._triton = 0
        self._seen_launches = 0
        self._compilations = _compilations()
        self._launches = self._device.launches()
        self._graphs = self._device.graph_launches()

    # ---- on and off ------------------------------------------------------------------------------------------------

    def start(self) -> str | None:
        """Begin on this thread, and on those that it starts; return why not where another mode is active."""
        if _get_current_dispatch_mode() is not None:
            return "the script has a TorchDispatchMode of its own active around its steps"
        self._watch_triton()
        self._watch_threads()
        self._clear()
        self.on = True
        # not by __enter__: up to 2.8 that sets a flag for which dynamo leaves new code uncompiled
        torch._C._push_on_torch_dispatch_stack(self)
        return None

    def restart(self) -> None:
        """Forget what was counted: the step turned out to go on."""
        self._clear()

    def compiled(self) -> bool:
        """Return whether something was compiled meanwhile, which runs and launches what a later step does not.

        Up to 2.8 compiled code is compiled anew when a mode comes on: it is among the dispatch keys of each tensor.
        """
        return _compilations() > self._compilations

    def stop(self) -> None:
        """End; what was patched is put back."""
        self.on = False
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if _get_current_dispatch_mode() is self:
            torch._C._pop_torch_dispatch_stack(None)

    def _watch_threads(self) -> None:
        run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined] # whatever a class makes of run()
        meter = self

        def bootstrap(thread: threading.Thread) -> None:
            if meter.on:
                torch._C._push_on_torch_dispatch_stack(meter)
            run(thread)

        self._patch(threading.Thread, "_bootstrap_inner", bootstrap)

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        before = owner.__dict__[name]
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, before))

    # ---- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        if not self.on:
            return func(*args, **kwargs)
        names = [kind.__module__ for kind in types if kind.__torch_dispatch__ is not PLAIN]
        if names:  # fake tensors belong to the modes below; a DTensor unfolds and comes back with plain ones
            fake = any(name.startswith(("torch._subclasses.", "torch.fx.")) for name in names)
            return func(*args, **kwargs) if fake else NotImplemented
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = Plan(func)
        before = self._device.launches()
        out = func(*args, **kwargs)
        launched = self._device.launches() - before
        if plan.skipped:
            with self._lock:
                self._seen_launches += launched
            return out
        with self._lock:
            self._seen_launches += launched
            try:
                self._count(plan, args, kwargs, out, launched)
            except Exception as error:  # noqa: BLE001 - the script goes on, and the record says what it lacks
                self._uncounted_one(f"{plan.name} ({type(error).__name__} while it was counted)")
        return out

    def _count(self, plan: Plan, args: Any, kwargs: Any, out: Any, launched: int) -> None:
        if plan.higher_order:
            self._uncounted_one(f"FLOPs and bytes of {plan.name}")
            return
        given = plan.inputs(args, kwargs)
        read = [t for t, _, _ in given]
        made = list(tensors_in(out))
        on_gpu = any(t.is_cuda for t in read) or any(t.is_cuda for t in made)
        if plan.collective is not None:
            self._count_collective(plan, args, kwargs, made)
            return
        if any(t.layout is not torch.strided for t in itertools.chain(read, made)):
            self._uncounted_one(f"FLOPs and bytes of {plan.name} on sparse tensors")
            return
        if self._crosses(plan, args, kwargs, made):
            return
        phase = self._phase()
        size = plan.bytes(given, made) + plan.hidden_bytes(args)
        flops = plan.flops(args, kwargs, out)
        if flops is None:
            flops = 0
            self._uncounted_one(f"FLOPs of {plan.name}")
        if not size and not flops:
            return
        device = "cuda" if on_gpu else "cpu"
        dtype = self._dtype(plan, read or made, bool(flops), device)
        kernels = max(launched, 1) if on_gpu else 0
        self._add(self._rows, (plan.name, phase, device, dtype, flops, size), kernels)

    def _add(self, table: dict[Any, list[int]], key: Any, extra: int = 0) -> None:
        row = table.setdefault(key, [0, 0])
        row[0] += 1
        row[1] += extra

    def _uncounted_one(self, what: str) -> None:
        self._uncounted[what] = self._uncounted.get(what, 0) + 1

    def _dtype(self, plan: Plan, tensors: list[Any], multiplies: bool, device: str) -> str:
        """Return the dtype that decides the speed: of a product's inputs the smallest."""
        kinds = [t.dtype for t in tensors]
        numbers = [k for k in kinds if k.is_floating_point or k.is_complex or k is torch.int8] or kinds
        kind = min(numbers, key=lambda k: k.itemsize) if multiplies else numbers[0]
        name = DTYPES.get(kind) or str(kind).partition(".")[2]
        if name.startswith("float8"):
            return "fp8"
        if name == "fp32" and multiplies and device == "cuda":
            return "tf32" if self._tf32["conv" in plan.name] else "fp32"
        return name

    # ---- copies between host and device ----------------------------------------------------------------------------

    def _crosses(self, plan: Plan, args: Any, kwargs: Any, made: list[Any]) -> bool:
        """Count an operator that moves something between host and device; False for any other."""
        name = plan.name
        if name == "aten::_local_scalar_dense":
            if args[0].is_cuda:
                self._copy("d2h", False, True, args[0].element_size())
            return True
        if name == "aten::_to_copy":
            pairs = [(made[0], args[0])]
        elif name == "aten::copy_":
            pairs = [(args[0], args[1])]
        elif name == "aten::_foreach_copy_":
            pairs = list(zip(args[0], args[1]))  # Python 3.9 has no strict=
        else:
            return False
        if all(into.is_cuda == source.is_cuda for into, source in pairs):
            return False
        waits = not plan.asynchronous(args, kwargs)
        for into, source in pairs:
            # "meta" is the host's, where a rehearsal must not need the host memory that training needs
            host = source if into.is_cuda else into
            direction = "h2d" if into.is_cuda else "d2h"
            size = into.numel() * min(into.element_size(), source.element_size())
            self._copy(direction, host.is_meta or host.is_pinned(), waits, size)
        return True

    def _copy(self, direction: str, pinned: bool, blocking: bool, size: int) -> None:
        row = self._copies.setdefault((direction, self._phase(), pinned, blocking), [0, 0])
        row[0] += 1
        row[1] += size

    # ---- collectives -----------------------------------------------------------------------------------------------

    def _count_collective(self, plan: Plan, args: Any, kwargs: Any, made: list[Any]) -> None:
        kind = plan.collective
        values = [*args, *kwargs.values()]
        ranks = _ranks(values)
        size = max(_listed(values, made), default=0)
        if kind in (None, "barrier") or ranks is None or len(ranks) < 2:
            return
        if kind in ("send", "recv", "all_reduce", "broadcast", "reduce"):
            size = max((_whole(v) for v in values), default=0)
        self._add(self._collectives, (kind, self._phase(), size, ranks))

    # ---- Triton ----------------------------------------------------------------------------------------------------

    def _watch_triton(self) -> None:
        """Count launches of Triton kernels, Inductor's and others', which are no operators."""
        heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
        if heuristics is not None:
            self._watch_launcher(heuristics.CachingAutotuner, _of_inductor)
        jit = sys.modules.get("triton.runtime.jit")
        if jit is not None:
            self._watch_launcher(jit.JITFunction, _of_triton)

    def _watch_launcher(self, owner: Any, describe: Callable[..., tuple[str, int, bool]]) -> None:
        original = owner.__dict__["run"]
        meter = self

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            before = meter._device.launches()
            result = original(kernel, *args, **kwargs)
            launched = meter._device.launches() - before
            if meter.on and launched:
                name, size, heavy = describe(kernel, args, kwargs)
                with meter._lock:
                    meter._seen_launches += launched
                    meter._triton += 1
                    meter._add(meter._rows, (f"triton::{name}", meter._phase(), "cuda", "", 0, size), launched)
                    if heavy:
                        meter._uncounted_one(f"FLOPs of the Triton kernel {name}")
            return result

        self._patch(owner, "run", run)

    # ---- the result ------------------------------------------------------------------------------------------------

    def record(self, optimizers: Iterable[tuple[str, int]], managed_bytes: int) -> dict[str, Any]:
        """Return what was counted, as JSON; ``optimizers`` are names, and bytes of parameters that have gradients."""
        uncounted = [what if n == 1 else f"{what}, {n} x" for what, n in sorted(self._uncounted.items())]
        unseen = self._device.launches() - self._launches - self._seen_launches
        if unseen > 0:
            why = (
                " (code was compiled in that step, which launches some that later steps do not)"
                if self.compiled()
                else ""
            )
            uncounted.append(f"{unseen} kernels that were launched outside of PyTorch's operators and Triton{why}")
        replayed = self._device.graph_launches() - self._graphs
        if replayed:
            uncounted.append(f"what is in {replayed} CUDA graphs that were replayed")
        if managed_bytes:
            uncounted.append("what the driver moves of managed memory (paged optimizers)")
        touched = sum(key[5] * row[0] for key, row in self._rows.items() if key[1] == "optimizer")
        touched += sum(row[1] for key, row in self._copies.items() if key[1] == "optimizer")
        for name, size in optimizers:
            if touched < size:
                uncounted.append(f"the step of {name}: its operators touched less than its parameters")
        estimated = []
        if self._triton:
            estimated.append(
                f"bytes of {self._triton} launches of Triton kernels: the sizes of the tensors that they were given, "
                "of which a kernel may read a part"
            )
        return {
            "version": VERSION,
            "rows": [
                {"operator": name, "phase": phase, "device": device, "dtype": dtype, "flops": flops, "bytes": size,
                 "calls": calls, "kernels": kernels}
                for (name, phase, device, dtype, flops, size), (calls, kernels) in self._rows.items()
            ],
            "copies": [
                {"direction": direction, "phase": phase, "pinned": pinned, "blocking": blocking, "count": count,
                 "bytes": size}
                for (direction, phase, pinned, blocking), (count, size) in self._copies.items()
            ],
            "collectives": [
                {"kind": kind, "phase": phase, "bytes": size, "ranks": len(ranks),
                 "nodes": len({rank // self._ranks_on_node for rank in ranks}), "calls": calls}
                for (kind, phase, size, ranks), (calls, _) in self._collectives.items()
            ],
            "uncounted": uncounted,
            "estimated": estimated,
        }  # fmt: skip


class Plan:
    """What one operator's schema says of the memory that it touches, worked out once."""

    __slots__ = ("collective", "func", "gathers", "heavy", "higher_order", "name", "non_blocking", "overwrites",
                 "scatters", "skipped", "views", "written")  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.func = func  # keeps the id, by which plans are found, from being given to another operator
        schema = getattr(func, "_schema", None)
        self.higher_order = schema is None
        self.name: str = schema.name if schema is not None else str(func)
        namespace, _, short = self.name.partition("::")
        self.collective = _kind(short) if namespace in COLLECTIVES else None
        self.skipped = self.name in _SAVES_NOTHING or namespace in ("prim", "profiler")
        self.skipped |= namespace in COLLECTIVES and self.collective is None
        self.written: dict[Any, bool] = {}
        self.views = False
        self.non_blocking: int | None = None
        if schema is None:
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written[position] = self.written[argument.name] = bool(argument.is_out)
            if argument.name == "non_blocking":
                self.non_blocking = position
        self.gathers = self.name in _GATHERS
        self.scatters = self.name in _SCATTERS
        self.overwrites = self.name in _OVERWRITES
        self.views = not self.written and any(r.alias_info is not None for r in schema.returns)
        self.skipped |= self.views
        lower = short.lower()
        self.heavy = (
            any(word in lower for word in _HEAVY)
            and not any(word in lower for word in _NOT_HEAVY)
            and namespace not in ("c10d", "_c10d_functional", "fsdp")
        )

    def asynchronous(self, args: Any, kwargs: Any) -> bool:
        """Return whether a copy was asked not to wait."""
        at = self.non_blocking
        return bool(kwargs.get("non_blocking", at is not None and at < len(args) and args[at]))

    def inputs(self, args: Any, kwargs: Any) -> list[tuple[Any, bool, bool]]:
        """Return the tensors given, each with whether it is written, and whether written only (``out=``)."""
        found: list[tuple[Any, bool, bool]] = []
        fused = self.name.startswith("aten::_fused_")
        for key, value in itertools.chain(enumerate(args), kwargs.items()):
            out = self.written.get(key)
            if fused and key == 1 and kwargs.get("grad_scale") is None:
                out = None  # their schema says that gradients are written: only where they are unscaled
            found += [(tensor, out is not None, bool(out)) for tensor in tensors_in(value)]
        return found

    def bytes(self, given: list[tuple[Any, bool, bool]], made: list[Any]) -> int:
        """Return the bytes read and written."""
        if self.scatters:
            touched = sum(_size(t) for t, _, _ in given[1:])
            return touched + max((_size(t) for t, _, _ in given[1:]), default=0) * (2 if self.written else 1)
        total, storages = 0, set()
        for position, (tensor, written, only) in enumerate(given):
            storages.add(tensor.untyped_storage()._cdata)
            size = _size(tensor)
            if self.gathers and position == 0:
                continue  # what comes out was read
            total += 2 * size if written and not only and not self.overwrites else size
        fresh = [t for t in made if t.untyped_storage()._cdata not in storages]
        if not fresh and not self.written:
            return 0  # a view after all: _unsafe_view, a reshape, a _to_copy that had nothing to do
        produced = sum(map(_size, fresh))
        return total + produced * (2 if self.gathers else 1)

    def hidden_bytes(self, args: Any) -> int:
        """Return what an operator reads and writes of what it makes and drops itself."""
        return _chunked_loss_bytes(args) if self.name == "torch_nn::_linear_cross_entropy_batch_chunked" else 0

    def flops(self, args: Any, kwargs: Any, out: Any) -> int | None:
        """Return the FLOPs of a call: 0 for what multiplies no matrices, None where it does and how is not known."""
        formula = _OWN.get(self.name)
        if formula is not None:
            return int(formula(args, kwargs, out))
        packet = getattr(self.func, "_overloadpacket", None)
        counted = flop_registry.get(packet)
        if counted is None:
            return None if self.heavy and any(t.is_floating_point() for t in tensors_in(out)) else 0
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        flops = int(counted(*args, **kwargs, out_val=out))
        return flops // 2 if self._causal(args, kwargs) else flops

    def _causal(self, args: Any, kwargs: Any) -> bool:
        """Return whether attention skips what lies above the diagonal: torch's formulas count it as if it did not."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == "is_causal":
                return bool(args[position] if position < len(args) else kwargs.get("is_causal", False))
        return False


def _size(tensor: Any) -> int:
    """Return the bytes of memory under a tensor; an expanded one has less than its shape says."""
    size: int = tensor.numel() * tensor.element_size()
    if 0 in tensor.stride():
        size = min(size, tensor.untyped_storage().nbytes())
    return size


def _compilations() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0


def _tf32() -> tuple[bool, bool]:
    """Return whether fp32 matrix products, and convolutions, may run in TF32."""
    found = []
    for ask in (torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32):
        try:
            found.append(bool(ask()))
        except RuntimeError:  # from 2.9 on, where the script used the newer settings: ask those
            backend = torch.backends.cuda.matmul if not found else torch.backends.cudnn.conv
            found.append(backend.fp32_precision == "tf32")
    return found[0], found[1]


# ---- FLOPs that torch has no formula for, in some version or all ----------------------------------------------------


def _product(args: Any, kwargs: Any, out: Any) -> int:
    (m, k), n = args[0].shape[-2:], args[1].shape[-1]
    return int(2 * m * k * n)


def _grouped(args: Any, kwargs: Any, out: Any) -> int:
    """Rows are spread over the groups, whichever way: each row meets one matrix."""
    a, b = args[0], args[1]
    if a.dim() == 2 and b.dim() == 2:  # the gradient of weights: the groups lie along the inner dimension
        return int(2 * a.shape[0] * a.shape[1] * b.shape[1])
    if a.dim() == 3 and b.dim() == 2:
        return int(2 * a.shape[1] * a.shape[2] * b.shape[1])
    groups = a.shape[0] if a.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _attention(args: Any, kwargs: Any, out: Any) -> int:
    q, k, v = args[:3]
    return int(2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3]))


def _cudnn_attention(args: Any, kwargs: Any, out: Any) -> int:
    causal = len(args) > 6 and bool(args[6])  # q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal
    return _attention(args, kwargs, out) // (2 if causal else 1)


def _cudnn_attention_backward(args: Any, kwargs: Any, out: Any) -> int:
    """Five products for the forward pass's two."""
    q, k, v = args[1:4]
    flops = int(2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3]))
    causal = any(
        bool(value)
        for value, argument in zip(
            args, torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema.arguments
        )
        if argument.name == "is_causal"
    )
    return flops // (2 if causal else 1)


def _recurrent(args: Any, kwargs: Any, out: Any) -> int:
    """Each weight meets each element of the sequence in one multiplication and one addition."""
    x, weights = args[0], args[1]
    places = x.numel() // x.shape[-1]
    return int(2 * places * sum(w.numel() for w in weights if w.dim() > 1))


def _recurrent_backward(args: Any, kwargs: Any, out: Any) -> int:
    return 2 * _recurrent(args, kwargs, out)


def _chunked_loss(args: Any, kwargs: Any, out: Any) -> int:
    """torch 2.14's linear_cross_entropy: the logits, and from them the gradients of input and weight."""
    x, weight, input_gradient, weight_gradient = args[0], args[1], bool(args[12]), bool(args[13])
    return int(2 * x.numel() * weight.shape[0] * (1 + input_gradient + weight_gradient))


def _chunked_loss_bytes(args: Any) -> int:
    """Seven passes over its logits: written, exponentiated in place, cast, read by two products (torch 2.14)."""
    x, weight = args[0], args[1]
    return int(7 * (x.numel() // x.shape[-1]) * weight.shape[0] * 4)


_OWN: dict[str, Callable[[Any, Any, Any], int]] = {
    "aten::_addmm_activation": lambda args, kwargs, out: _product(args[1:], kwargs, out),
    "aten::addbmm": lambda args, kwargs, out: int(args[1].shape[0]) * _product(args[1:], kwargs, out),
    "aten::_int_mm": _product,
    "aten::_scaled_mm": _product,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "torch_nn::_linear_cross_entropy_batch_chunked": _chunked_loss,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
}


# ---- collectives ---------------------------------------------------------------------------------------------------


def _kind(short: str) -> str | None:
    if short in ("wait_tensor", "_wrap_tensor_autograd"):
        return None
    return next((kind for word, kind in _KINDS if word in short), None)


def _ranks(values: Iterable[Any]) -> tuple[int, ...] | None:
    """Return the global ranks of the process group among an operator's arguments."""
    from torch import distributed

    c10d: Any = distributed.distributed_c10d
    for value in values:
        group = None
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = distributed.ProcessGroup.unbox(value)
        elif isinstance(value, distributed.ProcessGroup):
            group = value
        elif isinstance(value, str):
            try:
                group = c10d._resolve_process_group(value)
            except (RuntimeError, LookupError, ValueError):  # a string of another meaning: "sum"
                continue
        if group is not None:
            return tuple(sorted(distributed.get_process_group_ranks(group)))
    return None


def _listed(values: Iterable[Any], made: list[Any]) -> Iterator[int]:
    for value in itertools.chain(values, made):
        yield _whole(value)


def _whole(value: Any) -> int:
    return sum(_size(t) for t in tensors_in(value) if t.layout is torch.strided)


# ---- Triton --------------------------------------------------------------------------------------------------------


def _of_inductor(kernel: Any, args: Any, kwargs: Any) -> tuple[str, int, bool]:
    """Return a kernel's name, the bytes of the tensors that it is given, and whether it multiplies matrices."""
    name = str((getattr(kernel, "inductor_meta", None) or {}).get("kernel_name") or kernel.fn.__name__)
    names = list(kernel.fn.arg_names)
    mutated = set(getattr(kernel, "mutated_arg_names", ()) or ())
    total = 0
    for key, value in itertools.chain(zip(names, args), kwargs.items()):  # Python 3.9 has no strict=
        if isinstance(value, torch.Tensor):
            both = key.startswith("in_out_ptr") or (key in mutated and not key.startswith("out_ptr"))
            total += _size(value) * (2 if both else 1)
    return name, total, "tem_" in name


def _of_triton(kernel: Any, args: Any, kwargs: Any) -> tuple[str, int, bool]:
    tensors = {id(v): v for v in itertools.chain(args, kwargs.values()) if isinstance(v, torch.Tensor)}
    source = getattr(kernel, "src", "") or ""
    return str(kernel.__name__), sum(map(_size, tensors.values())), "tl.dot" in str(source)
