"""Being told when a module has been imported. Python 3.9, standard library only."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

Told = Callable[[ModuleType], None]


def when_imported(name: str, callback: Told) -> None:
    """Call back once, when the module's code has run; at once where it has already."""
    module = sys.modules.get(name)
    if module is not None and not _is_loading(module):
        callback(module)
    else:
        sys.meta_path.insert(0, _Watcher(name, callback, before=False))


def before_import(name: str, callback: Told) -> None:
    """Call back once, before the module's code runs."""
    sys.meta_path.insert(0, _Watcher(name, callback, before=True))


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Watcher(importlib.abc.MetaPathFinder):
    """Calls back once when a module is imported: before its code runs, or after."""

    def __init__(self, name: str, callback: Told, before: bool) -> None:
        self._name = name
        self._callback = callback
        self._before = before
        self._searching = threading.local()

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or getattr(self._searching, "inside", False):
            return None  # another that waits for this module asks: it has been asked itself by this one
        self._searching.inside = True
        try:
            for finder in list(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    self._wrap(spec.loader)
                    return spec
            return None
        finally:
            self._searching.inside = False

    def _wrap(self, loader: Any) -> None:
        """Wrap what runs the module's code; libraries also look for a module without importing it."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            first = self in sys.meta_path
            if first:
                sys.meta_path.remove(self)
            if self._before and first:
                self._callback(module)
            execute(module)
            if first and not self._before:
                self._callback(module)

        loader.exec_module = exec_module
