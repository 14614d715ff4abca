"""Putting a plan's changes into a script that knows nothing of them.

Runs inside the user's process, under the phantom as on the real GPU. Techniques register callbacks; this module calls
them when the script builds an optimizer, first uses a model, makes a DataLoader or imports a library, and
records what was changed where. Python 3.9; standard library and torch.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from oomproof.inject.imports import when_imported
from oomproof.plan.repeated import find_blocks
from oomproof.plan.survey import Survey
from oomproof.plan.technique import CannotApply, Change

RECORD = "changes-{pid}.json"
EXIT_REFUSED = 65  # the record says why; the process does nothing more
_TOOL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Injection:
    """What is to happen in this process, and what has.

    ``rehearsal`` is true on the phantom. The lists of callbacks are written to by ``Technique.install``:

    - ``on_model(model)``: once for each module that is trained, before an optimizer is built of its parameters or, if
      it has none by then, before it is first called with gradients.
    - ``on_moving(module)``: a module is about to be moved or cast by ``.to()`` or ``.cuda()``, the outermost call only;
      ``moving_to`` is the type of the device then, None where it is cast alone.
    - ``on_parameters(model, groups)``: what the optimizer is given; returns what it gets instead. ``groups`` is a list
      of tensors, of (name, tensor) or of dicts.
    - ``optimizer_options(kind, kwargs)``: before one of torch's optimizers is initialised; changes ``kwargs`` in place.
    - ``other_optimizer(kind, args, kwargs)``: returns an optimizer in place of the one asked for, or None.
    - ``on_optimizer(optimizer)``: its parameter groups are there.
    - ``on_loader(loader)``: a DataLoader was made; ``on_batches(loader, iterator)`` returns what iterates instead.
    """

    def __init__(self, torch: ModuleType, config: dict[str, Any], folder: Path) -> None:
        self.torch: Any = torch
        self.folder = folder
        self.rehearsal = bool(config["phantom"])
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.changes = [Change(c["technique"], c.get("options", {})) for c in config["changes"]]
        self.on_model: list[Callable[[Any], None]] = []
        self.on_moving: list[Callable[[Any], None]] = []
        self.moving_to: str | None = None
        self.on_parameters: list[Callable[[Any, list[Any]], list[Any]]] = []
        self.optimizer_options: list[Callable[[type, dict[str, Any]], None]] = []
        self.other_optimizer: list[Callable[[type, tuple[Any, ...], dict[str, Any]], Any]] = []
        self.on_optimizer: list[Callable[[Any], None]] = []
        self.on_loader: list[Callable[[Any], None]] = []
        self.on_batches: list[Callable[[Any, Any], Any]] = []
        self._survey = Survey(torch, self._write) if config["survey"] else None
        self._survey_blocks = bool(config["survey_blocks"])
        self._blocks: dict[str, Any] | None = None
        self._said: list[dict[str, str]] = []
        self._refused: str | None = None
        self._asked: dict[int, Any] = {}  # modules whose parameters were asked for or that were moved, weakly
        self._ready: set[int] = set()  # modules that on_model has seen, with all modules in them
        self._building = threading.local()
        self._moving = threading.local()

    def install(self) -> None:
        """Install every change, then watch for what they wait for."""
        if self._survey_blocks:
            self.on_model.append(self._survey_blocks_of)  # first: before they are wrapped
        for change in self.changes:
            self.guarded(change.name, change.technique.install, self, change.options)
        self._wrap_modules()
        self._wrap_optimizers()
        self._wrap_loaders()
        if self._survey is not None:
            self._survey.install()

    # ---- for techniques ------------------------------------------------------------------------------------------

    def say(self, technique: str, what: str, where: str | None = None) -> None:
        """Record what was changed and where: a module's name, or by default the script's line that is running."""
        entry = {"technique": technique, "what": what, "where": where or script_line()}
        if entry not in self._said:
            self._said.append(entry)
            self._write()
            if not self.rehearsal and os.environ.get("RANK", "0") == "0":
                print(f"oomproof: {technique}: {what} ({entry['where']})", file=sys.stderr, flush=True)

    def when_imported(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Call back when a library has been imported; at once where it already has."""
        when_imported(name, callback)

    def guarded(self, technique: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call on behalf of a technique, and end the process where it says that it cannot be applied."""
        try:
            return call(*args)
        except CannotApply as error:
            self.refuse(technique, str(error))

    def own(self, module: Any) -> set[int]:
        """Note a module as none that the script still has to show: a technique made it around a model, say.

        Returns what is forgotten when the module goes.
        """
        ids = {id(inner) for inner in module.modules()}
        self._ready |= ids
        weakref.finalize(module, self._ready.difference_update, ids)
        return ids

    def refuse(self, technique: str, reason: str) -> None:
        """Record that a technique cannot be applied, and end the process: half a plan is none."""
        self._refused = f"{technique}: {reason}"
        self._write()
        sys.stdout.flush()
        print(f"oomproof: cannot apply {technique}: {reason}", file=sys.stderr, flush=True)
        os._exit(EXIT_REFUSED)

    # ---- how -----------------------------------------------------------------------------------------------------

    def _call(self, callbacks: list[Any], *args: Any) -> None:
        for callback in callbacks:
            self.guarded(_owner(callback), callback, *args)

    def _write(self) -> None:
        record: dict[str, Any] = {"pid": os.getpid(), "said": self._said, "refused": self._refused}
        if self._survey is not None:
            record["facts"] = self._survey.facts()
        if self._blocks is not None:
            record["blocks"] = self._blocks
        path = self.folder / RECORD.format(pid=os.getpid())
        scratch = path.with_suffix(f".{threading.get_ident()}.tmp")
        scratch.write_text(json.dumps(record))
        scratch.replace(path)

    def _survey_blocks_of(self, model: Any) -> None:
        """Watch the model's blocks, and record what the last whole step showed of them."""
        from oomproof.plan.survey_blocks import BlockSurvey

        blocks = [module for group in find_blocks(model) for module in group.modules]
        if not blocks:
            return
        survey = BlockSurvey(blocks)
        survey.__enter__()

        def stepped(*_: Any) -> None:
            try:
                self._blocks = survey.result()
            except ValueError:  # no whole pass: then nothing is known of the blocks, and nothing is recorded
                self._blocks = None
            self._write()

        importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(stepped)

    # ---- modules -------------------------------------------------------------------------------------------------

    def _wrap_modules(self) -> None:
        kind = self.torch.nn.Module
        for name in ("parameters", "named_parameters"):
            setattr(kind, name, self._noting(getattr(kind, name)))
        for name in ("to", "cuda"):
            setattr(kind, name, self._moves(getattr(kind, name)))
        call, ready = kind.__call__, self._ready
        is_compiling = self.torch.compiler.is_compiling

        @functools.wraps(call)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # torch.profiler asks the frame for "self"
            if not is_compiling() and id(self) not in ready:
                injection.model_used(self)
            return call(self, *args, **kwargs)

        injection = self
        kind.__call__ = __call__

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def asked(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(module)
            return original(module, *args, **kwargs)

        return asked

    def _note(self, module: Any) -> None:
        key = id(module)
        if key not in self._asked:
            self._asked[key] = weakref.ref(module, lambda _: self._asked.pop(key, None))

    def _moves(self, original: Any) -> Any:
        @functools.wraps(original)
        def moves(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._moving, "inside", False):
                return original(module, *args, **kwargs)
            self._moving.inside = True
            try:
                self._note(module)
                if self._survey is not None:
                    self._survey.moved(module)
                self.moving_to = self._destination(original.__name__, args, kwargs)
                self._call(self.on_moving, module)
                return original(module, *args, **kwargs)
            finally:
                self._moving.inside = False

        return moves

    def _destination(self, name: str, args: Any, kwargs: Any) -> str | None:
        if name == "cuda":
            return "cuda"
        device = self.torch._C._nn._parse_to(*args, **kwargs)[0]
        return None if device is None else str(device.type)

    def model_used(self, module: Any) -> None:
        """A module is called that has not been made ready: do it if it is a model in training."""
        if not (module.training and self.torch.is_grad_enabled()):
            return
        parameters = list(module.parameters())
        lazy = self.torch.nn.parameter.is_lazy  # a LazyLinear has none before its first call
        if any(p.requires_grad for p in parameters) and not any(map(lazy, parameters)):
            self.model_ready(module)

    def model_ready(self, model: Any) -> None:
        """Give a model to the techniques, once."""
        if id(model) in self._ready:
            return
        ids = self.own(model)
        if self._survey is not None:
            self._survey.model(model)
        self._call(self.on_model, model)
        ids |= {id(module) for module in model.modules()}  # and what the techniques put in
        self._ready |= ids

    def model_of(self, tensors: list[Any]) -> Any:
        """Return the largest module known to have any of these parameters, None where none is."""
        wanted = {id(t) for t in tensors}
        best, most = None, 0
        for reference in list(self._asked.values()):
            module = reference()
            if module is None:
                continue
            ids = {id(p) for p in module.parameters()}
            if ids & wanted and len(ids) > most:
                best, most = module, len(ids)
        return best

    def models_of(self, tensors: list[Any]) -> list[Any]:
        """Return the largest modules that have these parameters between them: one optimizer may train several."""
        found: list[Any] = []
        while tensors:
            model = self.model_of(tensors)
            if model is None:
                break
            found.append(model)
            ids = {id(p) for p in model.parameters()}
            tensors = [t for t in tensors if id(t) not in ids]
        return found

    # ---- optimizers ----------------------------------------------------------------------------------------------

    def _wrap_optimizers(self) -> None:
        optim = self.torch.optim
        base = optim.Optimizer
        original = base.__init__

        @functools.wraps(original)
        def init(optimizer: Any, params: Any, defaults: Any) -> None:
            if not isinstance(params, (self.torch.Tensor, dict)):
                params = list(params)
                flat = _tensors(params)
                model = self.model_of(flat)
                for one in self.models_of(flat):
                    self.model_ready(one)
                for callback in self.on_parameters:
                    params = self.guarded(_owner(callback), callback, model, params)
            original(optimizer, params, defaults)
            self._call(self.on_optimizer, optimizer)
            if self._survey is not None:
                self._survey.optimizer(optimizer)

        base.__init__ = init

        def new(kind: type, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self._building, "inside", False):
                self._building.inside = True
                try:
                    for callback in self.other_optimizer:
                        other = self.guarded(_owner(callback), callback, kind, args, kwargs)
                        if other is not None:
                            return other
                finally:
                    self._building.inside = False
            return object.__new__(kind)

        base.__new__ = staticmethod(new)
        for kind in {k for k in vars(optim).values() if isinstance(k, type) and issubclass(k, base) and k is not base}:
            self._wrap_options(kind)

    def _wrap_options(self, kind: Any) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._call(self.optimizer_options, type(optimizer), kwargs)
            original(optimizer, *args, **kwargs)

        kind.__init__ = init

    # ---- batches -------------------------------------------------------------------------------------------------

    def _wrap_loaders(self) -> None:
        kind = importlib.import_module("torch.utils.data").DataLoader
        init, iterate = kind.__init__, kind.__iter__

        @functools.wraps(init)
        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            init(loader, *args, **kwargs)
            self._call(self.on_loader, loader)
            if self._survey is not None:
                self._survey.loader(loader)

        @functools.wraps(iterate)
        def iterated(loader: Any) -> Any:
            iterator = iterate(loader)
            if self._survey is not None:
                self._survey.iterated(loader)
            for callback in self.on_batches:
                iterator = self.guarded(_owner(callback), callback, loader, iterator)
            return iterator

        kind.__init__ = made
        kind.__iter__ = iterated


def _owner(callback: Any) -> str:
    """Return the name of the technique that a callback was made in."""
    owner = getattr(getattr(callback, "__self__", None), "technique", None)
    if owner is not None:  # a method of what several techniques share
        return str(owner)
    module = sys.modules.get(getattr(callback, "__module__", ""))
    return str(getattr(getattr(module, "TECHNIQUE", None), "name", "a change"))


def _tensors(params: list[Any]) -> list[Any]:
    """Return the tensors of what an optimizer is given: tensors, (name, tensor) pairs, or groups of them."""
    found: list[Any] = []
    for item in params:
        if isinstance(item, dict):
            inner = item["params"]
            if not isinstance(inner, (list, tuple)):
                if not hasattr(inner, "requires_grad"):
                    inner = item["params"] = list(inner)  # a generator can be read once
                else:
                    inner = [inner]
            found += _tensors(list(inner))
        elif isinstance(item, tuple):
            found.append(item[1])
        else:
            found.append(item)
    return found


def script_line() -> str:
    """Return the innermost line that is neither this tool's nor an installed library's: "train.py:31"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_own(name):
            return f"{os.path.relpath(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


def is_own(path: str) -> bool:
    """Return whether a file is the script's: neither this tool's nor an installed library's."""
    library = f"{os.sep}site-packages{os.sep}" in path or path.startswith(os.path.dirname(os.__file__) + os.sep)
    return not (library or path.startswith((_TOOL, "<")))
