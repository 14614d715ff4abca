"""First thing in every Python process of a run: load oomproof's bootstrap, then the environment's own sitecustomize.

Python imports the first ``sitecustomize`` on its path; ``oomproof run`` puts this folder in front.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _own_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _bootstrap() -> None:
    # oomproof may live in another environment than the script: take it from beside this file, and nothing else of
    # that environment.
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location(
        "oomproof", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oomproof"] = module
    spec.loader.exec_module(module)
    from oomproof.inject import bootstrap

    bootstrap.start(os.environ["OOMPROOF_RUN"])


if os.environ.get("OOMPROOF_RUN"):
    _bootstrap()
_own_sitecustomize()
