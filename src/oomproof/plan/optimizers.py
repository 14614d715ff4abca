"""What the optimizer techniques share: another optimizer in place of the script's, and steps over part of one.

Runs in the user's process as well as in the planner. Python 3.9; torch only where a function is called.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.injection import is_own
from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: Techniques that decide what an optimizer keeps, or where it keeps it: one of them at a time.
STATES = frozenset(
    ("optimizer-8bit", "optimizer-paged", "offload-optimizer", "optimizer-bf16-states", "adafactor", "lion", "sgd")
)

#: Optimizers of torch.optim that treat each element for itself and evaluate a closure once, before anything else.
#: Adagrad and Rprop are not among them: the one makes its states when it is built, the other seldom trains on batches.
ELEMENTWISE = frozenset(("Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta"))

#: Switches of torch's optimizers that no replacement has.
_SWITCHES = ("amsgrad", "maximize", "capturable", "differentiable", "nesterov")

CHECKPOINTS = (
    "Optimizer checkpoints hold other states than the script's optimizer would have written: neither kind resumes from "
    "the other's."
)


def is_torch(module: str) -> bool:
    """Return whether a class of this module is one of PyTorch's own optimizers."""
    return module == "torch.optim" or module.startswith("torch.optim.")


def kinds(facts: Facts) -> str:
    """Return what the script's optimizers are: "AdamW (torch.optim.adamw)"."""
    return ", ".join(sorted({f"{o.kind} ({o.module})" for o in facts.optimizers}))


def unfit_kinds(facts: Facts, fit: frozenset[str], what: str) -> str | None:
    """Return why no optimizer of the script is one of torch's kinds in ``fit``; ``what`` says what these get."""
    if facts.framework == "deepspeed":
        return "DeepSpeed builds the optimizer that steps; change its configuration instead"
    if not facts.optimizers:
        return "the script builds no optimizer of PyTorch's"
    if not any(is_torch(o.module) and o.kind in fit for o in facts.optimizers):
        return f"the script's optimizer is {kinds(facts)}; {what} {', '.join(sorted(fit))} of torch.optim only"
    return None


def chosen(injection: Injection, technique: str, optimizer: Any, fit: frozenset[str]) -> bool:
    """Return whether an optimizer that was built is one of torch's in ``fit``; say so where it is not."""
    kind = type(optimizer)
    if is_torch(kind.__module__) and kind.__name__ in fit:
        return True
    injection.say(technique, f"{kind.__name__} is left as it is: not one of torch.optim's {', '.join(sorted(fit))}")
    return False


def imported(name: str, package: str) -> Any:
    """Import a library that a technique rests on. Raises CannotApply where that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotApply(f"{package} cannot be imported ({error}); pip install {package}") from error


# ---- another optimizer in place of the script's --------------------------------------------------------------------


class ReplaceOptimizer(Technique):
    """Builds another optimizer where the script builds one of PyTorch's ``replaces``; others are left alone."""

    lowers = ("optimizer_state",)
    replaces = frozenset(("AdamW", "Adam"))

    def unfit(self, facts: Facts) -> str | None:
        reason = unfit_kinds(facts, self.replaces, "it replaces")
        if reason is None and not any(True for _ in self.variants(facts)):
            reason = self.missing()
        return reason

    def missing(self) -> str:
        """Return what to install."""
        return f"{' or '.join(self.needs)} is not beside the script's torch; pip install {self.extra}"

    def build(self, injection: Injection, kind: str, params: Any, given: dict[str, Any], options: Options) -> Any:
        """Return the optimizer to take; ``given`` are the arguments of torch's, defaults included."""
        raise NotImplementedError

    def caution(self, facts: Facts, options: Options) -> str | None:
        return CHECKPOINTS

    def install(self, injection: Injection, options: Options) -> None:
        base: Any = injection.torch.optim.Optimizer

        def other(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not (is_torch(kind.__module__) and kind.__name__ in self.replaces):
                if kind.__init__ is not base.__init__ and "params" in inspect.signature(kind.__init__).parameters:
                    injection.say(self.name, f"{kind.__name__} is left as it is: {self.title} is not for it")
                return None
            bound = inspect.signature(kind.__init__).bind(None, *args, **kwargs)
            bound.apply_defaults()
            given = dict(list(bound.arguments.items())[1:])
            for name in _SWITCHES:
                if given.get(name):
                    raise CannotApply(f"{kind.__name__}({name}=True) has no such form; leave {name} out")
            optimizer = self.build(injection, kind.__name__, given.pop("params"), given, options)
            what = f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
            injection.say(self.name, f"{what} in place of {kind.__name__}")
            pretend(optimizer, kind)
            return optimizer

        other.__module__ = type(self).__module__  # whose it is, in messages
        injection.other_optimizer.append(other)


def pretend(optimizer: Any, kind: Any, **methods: Any) -> None:
    """Have ``isinstance(optimizer, kind)`` hold, as for the optimizer that the script asked for.

    A subclass of both would initialise both. ``isinstance`` also looks at ``__class__``, after the real class. Copies
    and pickles are of the optimizer's own class.
    """
    base = type(optimizer)
    own = getattr(base, "own_class", base)

    def reduce(self: Any, protocol: Any) -> Any:
        return copyreg.__newobj__, (own,), self.__getstate__()  # type: ignore[attr-defined]

    space = {
        "__class__": property(lambda self: kind),
        "__reduce_ex__": reduce,
        "__module__": own.__module__,
        "own_class": own,
        **methods,
    }
    real_class: Any = vars(object)["__class__"]  # a property may hide it already
    real_class.__set__(optimizer, type(base.__name__, (base,), space))


def keep_embeddings(injection: Injection, optimizer: Any, technique: str) -> None:
    """Keep the states of embeddings in 32 bits in one of bitsandbytes' optimizers of 8, as HF's Trainer does."""
    manager = imported("bitsandbytes.optim", "bitsandbytes").GlobalOptimManager.get_instance()
    model = injection.model_of(parameters_of(optimizer))
    modules = model.modules() if model is not None else ()
    weights = {id(m.weight): m.weight for m in modules if isinstance(m, injection.torch.nn.Embedding)}
    if not weights:
        return
    manager.override_config(list(weights.values()), "optim_bits", 32)
    for place, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in weights and optimizer.get_config(place, index, group)["optim_bits"] != 32:
                raise CannotApply(
                    "this bitsandbytes does not keep embeddings' states in 32 bits; install 0.50 or newer"
                )
    injection.say(technique, f"{len(weights)} embeddings keep states of 32 bits", type(model).__name__)


# ---- steps over part of an optimizer --------------------------------------------------------------------------------


def bare_step(optimizer: Any) -> Callable[[Any], Any]:
    """Return the optimizer's ``step`` without its hooks, to be called with the optimizer."""
    step = type(optimizer).step
    bare: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


def call_closure(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Evaluate the closure among a step's arguments now; return arguments whose closure gives what it gave.

    For hooks before a step that look at gradients: Lightning computes them in the closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}


@contextlib.contextmanager
def no_parameters(optimizer: Any) -> Iterator[list[list[Any]]]:
    """While inside, the optimizer's groups are empty; gives what they had."""
    lists = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    try:
        yield lists
    finally:
        for group, params in zip(optimizer.param_groups, lists):
            group["params"] = params


# ---- who looks at gradients -----------------------------------------------------------------------------------------


def gradients_needed(facts: Facts) -> str | None:
    """Return what of a script needs its gradients between the backward pass and the step, None where nothing does."""
    if facts.framework == "deepspeed":
        return "DeepSpeed takes the gradients itself"
    for use, what in (
        ("clip-grad-norm", "clips the norm of all gradients"),
        ("clip-grad-value", "clips gradients"),
        ("grad-scaler", "unscales and checks gradients (GradScaler)"),
        ("ddp", "exchanges gradients between ranks after they are there"),
        ("fsdp", "exchanges gradients between ranks after they are there"),
    ):
        if use in facts.uses:
            return f"the script {what}"
    if facts.backwards_per_step > 1:
        return f"a step takes the gradients of {facts.backwards_per_step} backward passes"
    if len(facts.optimizers) > 1:
        return "the script has several optimizers, and one's backward pass gives gradients to another's parameters"
    return None


def forbid_gradient_readers(injection: Injection, technique: str) -> None:
    """Refuse as soon as the script clips or scales gradients: they are not there any more."""
    torch = injection.torch
    clip: Any = importlib.import_module("torch.nn.utils.clip_grad")

    def forbidden(original: Any, what: str) -> Any:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            if getattr(args[0], "is_enabled", lambda: True)():  # a GradScaler can be off
                injection.refuse(technique, f"the script calls {what}, when gradients are gone already")
            return original(*args, **kwargs)

        return called

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapped = forbidden(getattr(clip, name), name)
        for place in (clip, torch.nn.utils):
            setattr(place, name, wrapped)
    torch.amp.GradScaler.scale = forbidden(torch.amp.GradScaler.scale, "GradScaler.scale")


def line_that_reads_gradients() -> str | None:
    """Return a line of the script's own files, imported by now, that reads ``.grad``: "train.py:31"."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py") or not is_own(path):
            continue
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError):  # made by a program, or removed since: nobody reads .grad in it that we can see
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                if owner != "autograd":  # torch.autograd.grad is a function
                    return f"{os.path.relpath(path)}:{node.lineno}"
    return None


def on_zero_grad(torch: Any, callback: Callable[[list[Any]], None]) -> None:
    """Call back with the parameters whose gradients a script clears, by the optimizer or by the model."""
    optimizer, module = torch.optim.Optimizer, torch.nn.Module

    def told(original: Any, parameters: Callable[[Any], list[Any]]) -> Any:
        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            callback(parameters(self))
            return original(self, *args, **kwargs)

        return zero_grad

    optimizer.zero_grad = told(optimizer.zero_grad, parameters_of)
    module.zero_grad = told(module.zero_grad, lambda model: list(model.parameters()))


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
