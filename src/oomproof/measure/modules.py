"""Which modules a script has imported: libraries' that another process may import beforehand, and its own.

Runs inside the user's process. Python 3.9, standard library only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any

#: Folders of libraries wherever they lie in a path; a venv may take packages from another one.
_LIBRARY_PARTS = frozenset(("site-packages", "dist-packages"))


def imported() -> dict[str, Any]:
    """Return the names of the imported libraries' modules, in the order of their import, and of all others."""
    main = _package_of_main()
    libraries, own = [], []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.startswith("__") or name.partition(".")[0] in ("oomproof", "sitecustomize", "usercustomize"):
            continue
        if spec is None or getattr(spec, "name", None) != name or not isinstance(spec.origin, str):
            continue  # made by another module's code; it will make it again
        if name.partition(".")[0] != main and is_library(spec.origin):
            libraries.append(name)
        elif spec.origin not in ("built-in", "frozen"):
            own.append(name)
    return {"libraries": libraries, "own": own}


def is_library(origin: str) -> bool:
    """Return whether a module's file is an installed library's, or Python's own."""
    if origin in ("built-in", "frozen"):
        return False
    if _LIBRARY_PARTS.intersection(origin.split(os.sep)):
        return True
    return any(origin.startswith(folder + os.sep) for folder in _python_folders())


def _python_folders() -> list[str]:
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]


def _package_of_main() -> str | None:
    """Return the package that ``python -m`` runs: it's the user's, wherever it lies."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.partition(".")[0] if spec is not None else None
