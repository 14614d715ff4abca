"""Every place where the observer reaches into PyTorch: module, autograd and optimizer hooks.

What is specific to a torch version is here. The hooks hold no tensor and return None, so they change nothing.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomproof.measure.ledger import Tag

if TYPE_CHECKING:
    from oomproof.measure.observer import Observer

#: Gradients looked at to notice a step of an optimizer that has no hooks.
SAMPLED_GRADIENTS = 4


#: Addresses, and a tag for each where a profile is wanted.
Labelled = tuple["list[int]", "list[Tag]"]

#: An optimizer and the parameters that one call of its step() had.
Call = tuple[int, int]


class Hooks:
    """Tells an Observer when modules, backward passes and optimizer steps begin and end."""

    def __init__(self, torch: ModuleType, observer: Observer) -> None:
        self.torch: Any = torch
        self.observer = observer
        self.originals: dict[str, Any] = {}
        self.handles: list[Any] = []
        self.phase = "init"
        self.local = threading.local()  # .stack: the modules this thread is in; DataParallel calls them from several
        self.in_backward = False
        self.in_optimizer = 0
        self.left_gate = False
        self.active = True
        self.names: dict[int, str] = {}
        self.shown: dict[str, str] = {}  # the same by qualified name
        self.parameter_names: dict[int, str] = {}
        self.reached: dict[str, Any] = {}
        self.last_output = 0
        self.labelled: set[tuple[int, ...]] = set()
        self.roots: Any = weakref.WeakValueDictionary()  # a model that the script drops must go
        self.built: dict[int, tuple[Any, int]] = {}  # optimizers that were constructed, weakly, with their groups then
        self.stepped: set[int] = (
            set()
        )  # parameters that were given to an optimizer's step, before a whole step is known
        self.call: Call = (0, 0)  # the one that is running
        self.cycle: list[Call] = []  # calls of optimizers that made this step
        self.last_cycle: list[Call] = []
        self.worked = False  # a module or a backward pass ran
        self.backward_since = False  # a backward pass began after the last optimizer call
        self.hooked_optimizer = False
        self.gradients: list[Any] | None = None

    def install(self) -> None:
        """Register the hooks; ``remove`` takes them off again."""
        optimizer = importlib.import_module("torch.optim.optimizer")
        self.handles += [
            optimizer.register_optimizer_step_pre_hook(self._before_step),
            optimizer.register_optimizer_step_post_hook(self._after_step),
        ]
        self._wrap_call()
        self._wrap_engine()
        self._wrap_optimizer_init()
        self._wrap_recording()

    def remove(self) -> None:
        """Take the hooks off; what they wrapped stays wrapped and passes through."""
        self.active = False
        for handle in self.handles:
            handle.remove()
        self.handles = []

    # ---- forward ---------------------------------------------------------------------------------------------------

    def _wrap_call(self) -> None:
        """Module.__call__ is wrapped, not hooked: global hooks see no keyword arguments and cost ten times as much.

        Under torch.compile the wrapper is traced with is_compiling() true, so nothing of it is compiled in.
        """
        module_type = self.torch.nn.Module
        original = module_type.__call__
        is_compiling = self.torch.compiler.is_compiling
        local, enter, leave = self.local, self._enter, self._leave

        hooks = self

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # torch.profiler asks the frame for "self"
            if is_compiling() or not hooks.active:
                return original(self, *args, **kwargs)
            try:
                stack = local.stack
            except AttributeError:  # the first module that this thread calls
                stack = local.stack = []
            depth = len(stack)
            enter(stack, self, args, kwargs)
            try:
                output = original(self, *args, **kwargs)
            except BaseException:
                del stack[depth:]
                raise
            leave(stack, depth, output)
            return output

        module_type.__call__ = __call__

    def _enter(self, stack: list[str], module: Any, args: Any, kwargs: Any) -> None:
        in_backward = self.in_backward
        if not in_backward and not stack:
            self._enter_root(module, args, kwargs)
        name = self.names.get(id(module)) or self._name(module)
        stack.append(name)
        self.observer.mark(self.phase, "+" + name if in_backward else name)

    def _leave(self, stack: list[str], depth: int, output: Any) -> None:
        name = stack[depth]
        del stack[depth:]
        if self.in_backward:
            self.observer.mark("backward", "+" + stack[-1] if stack else None)
            return
        if id(output) != self.last_output:  # else an inner module had the same output and is hooked already
            self.last_output = id(output)
            self._hook_backward(output, name)
        self.observer.mark(self.phase, stack[-1] if stack else None)
        if self.observer.profiling:
            tensors = (output,) if isinstance(output, self.torch.Tensor) else self._tensors([output], 1)
            self.observer.label(None, *self._described(f"output of {name.partition(' ')[0]}", tensors))
        if not stack:
            self.observer.end_call(name)

    def _enter_root(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.roots.get(id(module)) is not module:
            self.roots[id(module)] = module
            self.labelled -= {(id(module), step) for step in (1, 2)}  # of a module that is gone
            for name, child in module.named_modules():
                kind = type(child).__name__
                self.names[id(child)] = self.shown[name] = f"{name} ({kind})" if name else kind
        step = self.observer.step  # later steps keep what the first two have; walking all modules costs time
        if step <= 2 and (id(module), step) not in self.labelled:
            self.labelled.add((id(module), step))
            self.observer.label("parameter", *self._named(module.named_parameters()))
            self.observer.label("buffer", *self._named(module.named_buffers()))
        self.observer.label("input", *self._described("input", self._tensors([args, kwargs])))
        self.phase = "forward"
        if not self.worked:
            self._work_begins()

    def _name(self, module: Any) -> str:
        name = type(module).__name__
        self.names[id(module)] = name
        return name

    def _hook_backward(self, output: Any, name: str) -> None:
        """Have the backward pass say when it reaches this module's output."""
        tensor = output if isinstance(output, self.torch.Tensor) else _first_tensor(output, self.torch.Tensor)
        node = None if tensor is None else tensor.grad_fn
        if node is not None:
            reached = self.reached.get(name)
            if reached is None:
                mark = self.observer.mark

                def reached(gradients: Any) -> None:
                    mark("backward", name)

                self.reached[name] = reached
            node.register_prehook(reached)

    # ---- backward --------------------------------------------------------------------------------------------------

    def _wrap_engine(self) -> None:
        """Every backward pass, .backward() or autograd.grad, goes through _engine_run_backward."""
        graph = self.torch.autograd.graph
        original = graph._engine_run_backward
        is_compiling = self.torch.compiler.is_compiling

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self.in_backward or not self.active or is_compiling():
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
        if not self.worked:
            self._work_begins()
        self.backward_since = True
        before, self.phase, self.in_backward = self.phase, "backward", True
        self.observer.mark("backward", None)
        return before

    def _end_backward(self, before: str) -> None:
        self.in_backward = False
        if not self.hooked_optimizer or self.in_optimizer:
            self._label_gradients()
        stack = getattr(self.local, "stack", None)  # a gradient within forward; torch 2.4 traces one when it compiles
        self.phase = "optimizer" if self.in_optimizer else before if stack else "other"
        self.observer.mark(self.phase, stack[-1] if stack else None)
        self._sample_gradients()
        self.observer.start_metering()

    # ---- optimizers ------------------------------------------------------------------------------------------------

    def _wrap_optimizer_init(self) -> None:
        original = self.torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.built[id(optimizer)] = weakref.ref(optimizer), 1
            original(optimizer, *args, **kwargs)
            self.built[id(optimizer)] = weakref.ref(optimizer), len(optimizer.param_groups)

        self.torch.optim.Optimizer.__init__ = init

    # One training step can call an optimizer several times: DeepSpeed's ZeRO gives it one part of the parameters after
    # another. So what counts as "the same again" is an optimizer with the same parameters, or after a backward pass.

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.in_optimizer == 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.call = id(optimizer), hash(tuple(map(id, parameters)))
            if not self.last_cycle:
                self.stepped.update(map(id, parameters))
            self._begin_cycle(self.call)
            self.observer.label("gradient", *self._gradients(parameters))
            if (*self.call, 0) not in self.labelled:
                self.labelled.add((*self.call, 0))
                self.observer.label("parameter", *self._named((self._name_of(p), p) for p in parameters))
                self.observer.reads.written(parameters)
        self.in_optimizer += 1
        closure = any(callable(value) for value in (*args[1:], *kwargs.values()))  # it runs the whole model
        if not closure and not self.left_gate:
            self.left_gate = self.observer.reads.leave()
        self.hooked_optimizer = True
        self.phase = "optimizer"
        self.observer.mark("optimizer", type(optimizer).__name__)

    def _begin_cycle(self, call: Call) -> None:
        if call in self.cycle or (self.backward_since and _calls_of(call[0], self.cycle)):
            self.worked = True  # if it had not: a loop that computes its gradients without modules and autograd
            self._step_done()  # the same again: the step ended without being noticed
        elif not self.cycle and self.last_cycle:
            known = call in self.last_cycle if not self.backward_since else _calls_of(call[0], self.last_cycle)
            if not known and self.worked:
                self.observer.merge_last_step()  # another optimizer or part of the step that was just counted
                self.cycle, self.last_cycle = self.last_cycle, []
        self.backward_since = False

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.in_optimizer = max(0, self.in_optimizer - 1)
        state = getattr(optimizer, "state", None)
        if isinstance(state, Mapping):
            self.observer.label("optimizer_state", *self._states(state))
        if self.in_optimizer:
            return  # within a wrapper or a container of optimizers
        self.leave_optimizer()
        self.phase = "other"
        self.observer.mark("other", None)
        self.cycle.append(self.call)
        if self.worked and self._is_round(len(optimizer.param_groups)):
            self._step_done()

    def _is_round(self, groups: int) -> bool:
        """Return whether every optimizer was called as often as in a whole step."""
        calls, last = self.cycle, self.last_cycle
        if last:
            return all(_calls_of(which, calls) >= _calls_of(which, last) for which, _ in last)
        # The first step: DeepSpeed's ZeRO-1 and 2 show an optimizer one of its groups at each call.
        for which, (reference, built) in self.built.items():
            optimizer = reference()
            made = _calls_of(which, calls)
            if optimizer is None or made * groups >= (built if which == self.call[0] else 1):
                continue
            # a container of optimizers, or one in such a container, has had its turn with the others
            if made or not all(id(p) in self.stepped for group in optimizer.param_groups for p in group["params"]):
                return False
        return True

    def _work_begins(self) -> None:
        """Forget the steps before the first forward or backward pass: they only made the optimizer's states.

        DeepSpeed's ZeRO-3 and torch.distributed.checkpoint do so. How many calls they made is worth knowing.
        """
        self.worked = True
        if self.cycle:
            self.last_cycle, self.cycle = self.cycle, []

    def settle(self) -> None:
        """Count the step of a script that ended with neither a module nor a backward pass."""
        if self.cycle and not self.worked:
            self._step_done()

    def leave_optimizer(self) -> None:
        """Note that no optimizer is stepping: after its step, or when an out-of-memory error ends it."""
        self.in_optimizer = 0
        if self.left_gate:
            self.left_gate = False
            self.observer.reads.come_back()

    def _step_done(self) -> None:
        self.last_cycle, self.cycle = self.cycle, []
        self.gradients = None
        self.observer.end_step()

    def stepping(self) -> list[tuple[str, int]]:
        """Return each optimizer's name, and the bytes of this rank's parts of its parameters that have gradients."""
        found = []
        for reference, _ in self.built.values():
            optimizer = reference()
            if optimizer is None:
                continue
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            parts = [part for p in parameters for part in _parts(p, self.torch.Tensor)]
            found.append((type(optimizer).__name__, sum(p.numel() * p.element_size() for p in parts)))
        return found

    # Where no optimizer of torch's was built, a step has happened when the gradients that the last backward pass left
    # are gone or were written to, or parameters were. Clipping writes to gradients too, so this is a last resort.

    def _sample_gradients(self) -> None:
        if self.built:
            return
        sample = []
        for root in list(self.roots.values()):
            for parameter in root.parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad
                    kept = (
                        weakref.ref(parameter),
                        _address(gradient),
                        gradient._version,
                        parameter._version,
                    )
                    sample.append(kept)
                if len(sample) == SAMPLED_GRADIENTS:
                    break
        self.gradients = sample

    def _stepped_unseen(self) -> bool:
        if self.built or not self.gradients:
            return False
        for reference, address, version, own_version in self.gradients:
            parameter = reference()
            if parameter is None:
                continue
            gradient = parameter.grad
            if gradient is None or _address(gradient) != address or gradient._version != version:
                return True
            if parameter._version != own_version:
                return True
        return False

    # ---- what is where ---------------------------------------------------------------------------------------------

    # Labels carry names, shapes and dtypes only where a profile is wanted: they cost as much as the rest of a hook.

    def _label_gradients(self) -> None:
        parameters = [p for root in list(self.roots.values()) for p in root.parameters()]
        self.observer.label("gradient", *self._gradients(parameters))

    def _gradients(self, parameters: list[Any]) -> Labelled:
        found: Labelled = [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                name = self._name_of(parameter)
                self._describe(found, f"gradient of {name}", [gradient], self._owner(name))
        return found

    def _named(self, items: Iterable[tuple[str, Any]]) -> Labelled:
        """Label parameters and buffers with their qualified names, and remember these."""
        found: Labelled = [], []
        for name, tensor in items:
            self.parameter_names[id(tensor)] = name
            self._describe(found, name, [tensor], self._owner(name))
        return found

    def _states(self, state: Mapping[Any, Any]) -> Labelled:
        found: Labelled = [], []
        for parameter, values in state.items():
            name = self._name_of(parameter)
            owner = self._owner(name)
            for key, value in values.items() if isinstance(values, Mapping) else [("state", values)]:
                self._describe(found, f"{key} of {name}", self._tensors([value]), owner)
        return found

    def _name_of(self, parameter: Any) -> str:
        return self.parameter_names.get(id(parameter), "a parameter")

    def _owner(self, name: str) -> str | None:
        return self.shown.get(name.rpartition(".")[0]) if name != "a parameter" else None

    def _described(self, name: str, tensors: Iterable[Any]) -> Labelled:
        found: Labelled = [], []
        self._describe(found, name, tensors, None)
        return found

    def _describe(self, found: Labelled, name: str, tensors: Iterable[Any], owner: str | None) -> None:
        addresses, tags = found
        profiling = self.observer.profiling
        for tensor in tensors:
            for part in _parts(tensor, self.torch.Tensor):
                at = _address(part) if part.is_cuda else []
                addresses += at
                if at and profiling:
                    tags.append(Tag(name, tuple(part.shape), str(part.dtype).partition(".")[2], owner))

    def _tensors(self, found: Any, depth: int = 3) -> Iterator[Any]:
        """Yield the tensors in nested lists, dicts and model outputs."""
        tensor_type = self.torch.Tensor
        for item in found.values() if isinstance(found, Mapping) else found:
            if isinstance(item, tensor_type):
                yield item
            elif depth and isinstance(item, (list, tuple, Mapping)):
                yield from self._tensors(item, depth - 1)

    # ---- the script's own recording --------------------------------------------------------------------------------

    def _wrap_recording(self) -> None:
        """A script that records memory history gets its own recording; ours goes on with it."""
        memory = self.torch.cuda.memory
        original = memory._record_memory_history
        self.originals["record_history"] = original

        @functools.wraps(original)
        def record(*args: Any, **kwargs: Any) -> Any:
            wanted = args[0] if args else kwargs.get("enabled", "all")
            if wanted is not None and not self.observer.counters.ready:
                self.torch.cuda.init()  # as recording would; ours begins there, and the script's must not cut it short
            if wanted is None or not self.observer.recording:
                return None if self.observer.recording else original(*args, **kwargs)
            stacks, context = kwargs.get("stacks", "all"), kwargs.get("context", "all")
            return original(enabled="all", context=context, stacks=stacks, max_entries=self.observer.trace_entries)

        memory._record_memory_history = record


def _calls_of(optimizer: int, calls: list[Call]) -> int:
    return sum(which == optimizer for which, _ in calls)


def _first_tensor(output: Any, tensor_type: Any) -> Any:
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return next((item for item in items if isinstance(item, tensor_type)), None)


def _parts(tensor: Any, tensor_type: Any) -> list[Any]:
    """Return a tensor, or the plain ones inside a subclass: DTensor's shard, torchao's quantised state."""
    if type(tensor) is tensor_type:
        return [tensor]
    local = getattr(tensor, "_local_tensor", tensor)
    flatten = getattr(local, "__tensor_flatten__", None)
    return [getattr(local, name) for name in flatten()[0]] if flatten is not None else [local]


def _address(tensor: Any) -> list[int]:
    """Return the tensor's address, nothing for one that has none: sparse, fake, functional, inside vmap."""
    try:
        return [tensor.data_ptr()]
    except RuntimeError:
        return []
