"""What can be done with the activations of a module: keep, compute again, save some, move to the host.

Techniques choose for which modules. Runs in the user's process; Python 3.9, torch only inside functions.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oomproof.plan.repeated import find_blocks
from oomproof.plan.technique import CannotApply
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection
    from oomproof.plan.technique import Options

KEEP, RECOMPUTE, SELECTIVE, OFFLOAD, RECOMPUTE_OFFLOAD = ACTIONS = (
    "keep", "recompute", "selective", "offload", "recompute-offload",
)  # fmt: skip

#: What selective checkpointing can save: names as torch's dispatcher has them.
OPERATIONS = {
    "matmul": frozenset(
        f"aten::{name}"
        for name in (
            "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
            "convolution", "_convolution", "cudnn_convolution", "miopen_convolution", "mkldnn_convolution",
        )
    ),
    "attention": frozenset((
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward", "flex_attention",
        "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
    )),
}  # fmt: skip

SMALLEST = 1 << 20  # bytes; below, a transfer costs its latency and saves nothing
_SHARE = 16  # a tensor that is less than this part of its storage does not take the storage along


def unfit_blocks(facts: Facts) -> str | None:
    """Return why a script's blocks cannot be treated, None where they can."""
    if not facts.blocks:
        return "the model has no repeated blocks (two or more modules of one class in a ModuleList or Sequential)"
    return unfit_activations(facts)


def unfit_activations(facts: Facts) -> str | None:
    """Return why a script's activations cannot be treated, None where they can."""
    if "checkpoint" in facts.uses:
        return "the script checkpoints by itself"
    return None


def unfit_compiled(facts: Facts) -> str | None:
    """Return why a compiled script's activations cannot be treated by what happens while eager code runs."""
    if "compile" in facts.uses:
        return "the script compiles its model: Inductor decides what is saved (compile-budget tells it how much)"
    return None


def refuse_compiled(model: Any) -> None:
    """Raise CannotApply for a model that torch.compile has already."""
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise CannotApply("the model is compiled: Inductor decides what is saved")


def chooser(options: Options, action: str) -> Callable[[str], str]:
    """Return what chooses an action for the blocks that the option ``blocks`` names, for all where it is missing."""
    wanted = options.get("blocks")
    return lambda name: action if wanted is None or name in wanted else KEEP


class KeepStatistics:
    """While inside, batch norms normalise as ever and leave their running statistics alone.

    A recomputed forward pass is no new batch; with plain checkpointing each batch counts twice.
    """

    def __init__(self, norms: list[Any]) -> None:
        self._norms = norms
        self._before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        for norm in self._norms:
            self._before.append((norm.momentum, norm.num_batches_tracked))
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, count) in zip(self._norms, self._before):
            norm.momentum, norm.num_batches_tracked = momentum, count
        self._before = []


class Activations:
    """Treats modules' activations: ``treat(module, action)`` once for each.

    ``save`` is for selective checkpointing: keys of OPERATIONS, joined by "+". ``smallest`` is for offloading: bytes.
    """

    def __init__(
        self, injection: Injection, technique: str, save: str = "matmul+attention", smallest: int = SMALLEST
    ) -> None:
        from torch.utils.checkpoint import checkpoint

        self._injection = injection
        self._torch: Any = injection.torch
        self._checkpoint_function = checkpoint  # torch's own: the survey wraps it, to see a script's use of it
        self._technique = technique
        self._saved = frozenset().union(*(OPERATIONS[kind] for kind in save.split("+")))
        self._smallest = smallest
        self._stored: Any = weakref.WeakValueDictionary()
        self._dropout_argument = functools.lru_cache(None)(_dropout_argument)

    def treat(self, module: Any, action: str) -> None:
        """Wrap a module's forward; "keep" only has it take part in a model whose other blocks are treated."""
        run = getattr(self, "_" + action.replace("-", "_"))
        wrap_forward(module, functools.partial(self._around, module, run))

    def treat_blocks(self, model: Any, choose: Callable[[str], str], words: Callable[[list[str], str], str]) -> None:
        """Treat the repeated blocks of a model as ``choose(name)`` says.

        ``words(actions, kind)`` is how what was done with a list of blocks of one class is told.
        """
        for group in find_blocks(model):
            actions = [choose(name) for name in group.names]
            if set(actions) == {KEEP}:
                continue
            for module, action in zip(group.modules, actions):
                self.treat(module, action)
            where = group.container or type(model).__name__
            self._injection.say(self._technique, words(actions, group.kind), where)

    def _around(self, module: Any, run: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._torch.is_grad_enabled():
            return forward(*args, **kwargs)
        twice = run not in (self._keep, self._offload)
        args = tuple(self._without_cache(value, twice) for value in args)
        kwargs = {name: self._without_cache(value, twice) for name, value in kwargs.items()}
        return run(module, forward, *args, **kwargs)

    def _without_cache(self, value: Any, twice: bool) -> Any:
        """Return None for an empty key-value cache of transformers.

        A forward pass that runs twice would add its keys twice. Nothing reads a cache in training unless it came
        with a prefix in it.
        """
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if value.get_seq_length() == 0:
            return None
        if twice:
            reason = "the blocks are given a key-value cache with a prefix in it, to which they would add twice"
            self._injection.refuse(self._technique, reason)
        return value

    def recomputed(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a module's forward gives, to be computed again in the backward pass."""
        return self._recompute(module, forward, *args, **kwargs)

    # ---- the actions ---------------------------------------------------------------------------------------------

    def _keep(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def _recompute(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        return self._checkpoint(module, contextlib.nullcontext, forward, *args, **kwargs)

    def _selective(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        return self._checkpoint(module, None, forward, *args, **kwargs)

    def _offload(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with self._on_host(module):
            return forward(*args, **kwargs)

    def _recompute_offload(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        names = list(kwargs)
        count = len(args)

        def positional(*values: Any) -> Any:  # checkpoint offers only positional arguments to hooks
            return forward(*values[:count], **dict(zip(names, values[count:])))

        with self._on_host(module):
            return self._recompute(module, positional, *args, *kwargs.values())

    # ---- checkpointing -------------------------------------------------------------------------------------------

    def _checkpoint(self, module: Any, plain: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import noop_context_fn

        norms = [m for m in module.modules() if isinstance(m, self._torch.nn.modules.batchnorm._BatchNorm)]
        contexts = noop_context_fn if plain and not norms else functools.partial(self._contexts, plain, norms)
        return self._checkpoint_function(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _contexts(self, plain: Any, norms: list[Any]) -> tuple[Any, Any]:
        if plain:
            return plain(), KeepStatistics(norms)
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        forward, recompute = create_selective_checkpoint_contexts(self._policy)
        return forward, _Both(KeepStatistics(norms), recompute) if norms else recompute

    def _policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy

        if operation.name().partition(".")[0] not in self._saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = self._dropout_argument(operation)
        if place is not None and (args[place[0]] if len(args) > place[0] else kwargs.get(place[1], 0.0)) > 0:
            # It draws random numbers. Not run again, it would leave those to the next dropout that is.
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    # ---- offloading ----------------------------------------------------------------------------------------------

    def _on_host(self, module: Any) -> Any:
        """Return saved-tensor hooks that keep activations on the host.

        Not ``torch.autograd.graph.save_on_cpu``: it moves parameters too (a Linear saves its weight), copies a tensor
        once for each operation that saves it, and brings it back contiguous, so other kernels may run on it.
        """
        plain = self._torch.Tensor
        own = {
            tensor.untyped_storage()._cdata
            for tensors in (module.parameters(), module.buffers())
            for tensor in tensors
            if type(tensor) in (plain, self._torch.nn.Parameter)
        }

        def pack(tensor: Any) -> Any:
            if (
                type(tensor) is not plain  # parameters, DTensors, fake tensors
                or tensor.layout != self._torch.strided
                or tensor.nbytes < self._smallest
                or tensor.is_conj()
                or tensor.is_neg()
                or isinstance(tensor._base, self._torch.nn.Parameter)
            ):
                return tensor.detach()
            storage = tensor.untyped_storage()
            if storage._cdata in own:
                return tensor.detach()
            key = storage._cdata, tensor._version
            stored = self._stored.get(key)
            if stored is None:
                if tensor.nbytes * _SHARE < storage.nbytes():
                    return tensor.detach()
                stored = self._stored[key] = Stored(self._torch, tensor)
            stored.users += 1
            return stored, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

        def unpack(packed: Any) -> Any:
            if isinstance(packed, tuple):
                return packed[0].view(*packed[1:])
            return packed

        return self._torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Stored:
    """One storage's content on the host, for all tensors that are views of it.

    On the GPU again it stays until every tensor that was saved has been asked for, as without offloading.
    """

    def __init__(self, torch: Any, tensor: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self._torch = torch
        self._device = tensor.device
        # While this exists, no other storage gets the same _cdata.
        self._original = StorageWeakRef(storage)
        self._pinned = tensor.is_cuda
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._host = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=self._pinned)
        self._host.copy_(content, non_blocking=self._pinned)
        self.users = 0  # saved tensors that have not been asked for
        self._back: Any = None

    def view(self, dtype: Any, offset: int, size: Any, stride: Any) -> Any:
        """Return one of the tensors, on the device where it was."""
        if self._back is None:
            back = self._torch.empty(self._host.numel(), dtype=self._torch.uint8, device=self._device)
            self._back = back.copy_(self._host, non_blocking=self._pinned).untyped_storage()
        found = self._torch.empty(0, dtype=dtype, device=self._device).set_(self._back, offset, size, stride)
        self.users -= 1
        if self.users <= 0:  # below where a graph is walked twice: then each brings it back for itself
            self._back = None
        return found


class _Both:
    """Two context managers in one."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def _dropout_argument(operation: Any) -> tuple[int, str] | None:
    """Return which argument of an operation is its dropout probability."""
    arguments = getattr(getattr(operation, "_schema", None), "arguments", ())
    return next(((i, a.name) for i, a in enumerate(arguments) if a.name in ("dropout_p", "p_dropout")), None)
