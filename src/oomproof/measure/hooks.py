"""Every place where the observer reaches into PyTorch: module, autograd and optimizer hooks.

What is specific to a torch version is here. The hooks hold no tensor and return None, so they change nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from oomproof.measure.observer import Observer

#: Gradients looked at to notice a step of an optimizer that has no hooks.
SAMPLED_GRADIENTS = 4


class Hooks:
    """Tells an Observer when modules, backward passes and optimizer steps begin and end."""

    def __init__(self, torch: ModuleType, observer: Observer) -> None:
        self.torch: Any = torch
        self.observer = observer
        self.originals: dict[str, Any] = {}
        self.handles: list[Any] = []
        self.phase = "init"
        self.stack: list[str] = []
        self.in_backward = False
        self.in_optimizer = 0
        self.names: dict[int, str] = {}
        self.roots: dict[int, Any] = {}
        self.built: dict[int, None] = {}  # optimizers that were constructed
        self.cycle: list[int] = []  # optimizers that made this step
        self.last_cycle: list[int] = []
        self.hooked_optimizer = False
        self.gradients: Optional[list[Any]] = None
        self.is_compiling = torch.compiler.is_compiling

    def install(self) -> None:
        """Register the hooks; ``remove`` takes them off again."""
        torch = self.torch
        module = torch.nn.modules.module
        optimizer = importlib.import_module("torch.optim.optimizer")
        self.handles += [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._before_step),
            optimizer.register_optimizer_step_post_hook(self._after_step),
        ]
        self._wrap_engine()
        self._wrap_optimizer_init()
        self._wrap_recording()

    def remove(self) -> None:
        """Take the hooks off; what they wrapped stays wrapped and passes through."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    # ---- forward --------------------------------------------------------------------------------------------------

    def _enter(self, module: Any, args: Any) -> None:
        if self.is_compiling():
            return
        if not self.stack and not self.in_backward:
            self._enter_root(module, args)
        name = self.names.get(id(module)) or self._name(module)
        self.stack.append(name)
        self.observer.mark(self.phase, "+" + name if self.in_backward else name)

    def _enter_root(self, module: Any, args: Any) -> None:
        if id(module) not in self.roots:
            self.roots[id(module)] = module
            for name, child in module.named_modules():
                kind = type(child).__name__
                self.names[id(child)] = f"{name} ({kind})" if name else kind
        self._label_state(module)
        caller = sys._getframe(2).f_locals  # Module._call_impl or its inner function: global hooks see no kwargs
        self.observer.label("input", self._addresses([args, caller.get("kwargs")]))
        self.phase = "forward"

    def _name(self, module: Any) -> str:
        name = type(module).__name__
        self.names[id(module)] = name
        return name

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if self.is_compiling() or not self.stack:
            return
        name = self.names.get(id(module), "")
        while self.stack:  # an exception may have skipped the ends of inner calls
            if self.stack.pop() == name:
                break
        if not self.in_backward:
            self._mark_backward(output, name)
        top = self.stack[-1] if self.stack else None
        self.observer.mark(self.phase, "+" + top if top and self.in_backward else top)
        if not self.stack and not self.in_backward:
            self.observer.end_call(name)

    def _mark_backward(self, output: Any, name: str) -> None:
        """Have the backward pass say when it reaches this module's output."""
        for tensor in _first_tensors(output, self.torch.Tensor):
            node = tensor.grad_fn
            if node is not None and "oomproof" not in node.metadata:
                node.metadata["oomproof"] = name  # an outer module with the same output does not hook it again
                node.register_prehook(functools.partial(self._reached, name))
            break

    def _reached(self, name: str, gradients: Any) -> None:
        self.observer.mark("backward", name)

    # ---- backward -----------------------------------------------------------------------------------------------------

    def _wrap_engine(self) -> None:
        """Every backward pass, .backward() or autograd.grad, goes through _engine_run_backward (torch 2.4 to 2.14)."""
        graph = self.torch.autograd.graph
        original = graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self.in_backward or self.is_compiling() or self.observer.finished:
                return original(*args, **kwargs)
            before = self._begin_backward()
            try:
                return original(*args, **kwargs)
            finally:
                self._end_backward(before)

        graph._engine_run_backward = run_backward
        self.torch.autograd._engine_run_backward = run_backward

    def _begin_backward(self) -> str:
        if self._stepped_unseen():
            self._step_done()
        before, self.phase, self.in_backward = self.phase, "backward", True
        self.observer.mark("backward", None)
        self.observer.reads.pause()
        return before

    def _end_backward(self, before: str) -> None:
        self.in_backward = False
        self.observer.reads.resume()
        self._label_gradients()
        self.phase = "optimizer" if self.in_optimizer else "other"
        self.observer.mark(self.phase, None)
        self._sample_gradients()

    # ---- optimizers ---------------------------------------------------------------------------------------------------------

    def _wrap_optimizer_init(self) -> None:
        original = self.torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.built[id(optimizer)] = None
            original(optimizer, *args, **kwargs)

        self.torch.optim.Optimizer.__init__ = init

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.in_optimizer == 0:
            self._begin_cycle(id(optimizer))
            self._label_optimizer(optimizer)
        self.in_optimizer += 1
        self.hooked_optimizer = True
        self.phase = "optimizer"
        self.observer.mark("optimizer", None)

    def _begin_cycle(self, which: int) -> None:
        if which in self.cycle:  # the same optimizer again: the step ended without being noticed
            self._step_done()
        elif not self.cycle and self.last_cycle and which not in self.last_cycle:
            self.observer.merge_last_step()  # a second optimizer of the step that was just counted
            self.cycle, self.last_cycle = self.last_cycle, []

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.in_optimizer = max(0, self.in_optimizer - 1)
        if self.in_optimizer:
            return  # a wrapper around another optimizer
        self._label_optimizer(optimizer)
        self.phase = "other"
        self.observer.mark("other", None)
        self.cycle.append(id(optimizer))
        expected = set(self.last_cycle) if self.last_cycle else set(self.built)
        if expected <= set(self.cycle):
            self._step_done()

    def _step_done(self) -> None:
        self.last_cycle, self.cycle = self.cycle, []
        self.gradients = None
        self.observer.end_step()

    # Optimizers that do not derive from torch's: a step has happened when gradients that the last backward pass left
    # are gone or were zeroed.

    def _sample_gradients(self) -> None:
        if self.hooked_optimizer:
            return
        sample = []
        for root in self.roots.values():
            for parameter in root.parameters():
                if parameter.grad is not None:
                    sample.append((parameter, parameter.grad.data_ptr(), parameter.grad._version, parameter._version))
                if len(sample) == SAMPLED_GRADIENTS:
                    break
        self.gradients = sample

    def _stepped_unseen(self) -> bool:
        if self.hooked_optimizer or not self.gradients:
            return False
        for parameter, address, version, own_version in self.gradients:
            gradient = parameter.grad
            if gradient is None or gradient.data_ptr() != address or gradient._version != version:
                return True
            if parameter._version != own_version:
                return True
        return False

    # ---- what is where ----------------------------------------------------------------------------------------------------------

    def _label_state(self, module: Any) -> None:
        self.observer.label("parameter", self._addresses(module.parameters()))
        self.observer.label("buffer", self._addresses(module.buffers()))

    def _label_gradients(self) -> None:
        gradients = [p.grad for root in self.roots.values() for p in root.parameters() if p.grad is not None]
        self.observer.label("gradient", self._addresses(gradients))

    def _label_optimizer(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.observer.label("parameter", self._addresses(parameters))
        self.observer.label("gradient", self._addresses([p.grad for p in parameters if p.grad is not None]))
        state = getattr(optimizer, "state", {})
        self.observer.label("optimizer_state", self._addresses(list(state.values()) if hasattr(state, "values") else []))

    def _addresses(self, found: Any, depth: int = 3) -> list[int]:
        """Return the addresses of the CUDA tensors in nested lists, dicts and model outputs."""
        addresses: list[int] = []
        for item in found.values() if hasattr(found, "values") else found:
            if isinstance(item, self.torch.Tensor):
                local = getattr(item, "_local_tensor", item)  # DTensor
                inner = getattr(local, "__tensor_flatten__", None)  # torchao's quantised state
                parts = [getattr(local, name) for name in inner()[0]] if inner is not None else [local]
                addresses += [p.data_ptr() for p in parts if p.is_cuda and _has_memory(p)]
            elif depth and (isinstance(item, (list, tuple)) or hasattr(item, "values")):
                addresses += self._addresses(item, depth - 1)
        return addresses

    # ---- the script's own recording ---------------------------------------------------------------------------------------------

    def _wrap_recording(self) -> None:
        """A script that records memory history gets its own recording; ours goes on with it."""
        memory = self.torch.cuda.memory
        original = memory._record_memory_history
        self.originals["record_history"] = original

        @functools.wraps(original)
        def record(*args: Any, **kwargs: Any) -> Any:
            wanted = args[0] if args else kwargs.get("enabled", "all")
            if wanted is None or not self.observer.recording:
                return None if self.observer.recording else original(*args, **kwargs)
            stacks, context = kwargs.get("stacks", "all"), kwargs.get("context", "all")
            return original(enabled="all", context=context, stacks=stacks, max_entries=self.observer.trace_entries)

        memory._record_memory_history = record


def _first_tensors(output: Any, tensor_type: Any) -> list[Any]:
    if isinstance(output, tensor_type):
        return [output]
    items = output.values() if hasattr(output, "values") else output if isinstance(output, (list, tuple)) else ()
    return [item for item in items if isinstance(item, tensor_type)]


def _has_memory(tensor: Any) -> bool:
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:  # fake, meta and functional tensors have none
        return False
