"""The cheapest change that makes a script fit, proved by running it.

``oomproof.plan(...)`` is ``planning.plan``: the package itself is called, since importing any part of it binds this
name in ``oomproof``. Python 3.9, since techniques run in the user's process.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """See ``oomproof.plan.planning.plan``."""
        from oomproof.plan.planning import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _Package
