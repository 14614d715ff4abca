"""Fixtures of the tests that need the CUDA build of torch, and no GPU."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child as child_module
import pytest
from phantom_child import in_child

import oomproof
from oomproof.measure.measurement import Measurement

HERE = Path(__file__).parent


@functools.cache
def _missing() -> str | None:
    code = (
        "import importlib.util as u, pathlib as p, sys; s = u.find_spec('torch'); "
        "sys.exit(not (s and (p.Path(s.origin).parent / 'lib' / 'libtorch_cuda.so').exists()))"
    )
    done = subprocess.run([child_module.PYTHON, "-c", code], capture_output=True)
    return None if done.returncode == 0 else f"no CUDA build of torch in {child_module.PYTHON}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.phantom)


@pytest.fixture(autouse=True)
def _torch_there() -> None:
    if _missing():
        pytest.skip(_missing() or "")


@pytest.fixture
def child(tmp_path: Path) -> child_module.Child:
    """Run a function under the phantom: ``child(body, *arguments, gpu="t4")`` returns what it returns."""
    return child_module.Child(tmp_path)


@pytest.fixture(scope="session")
def version() -> tuple[int, ...]:
    """The tested torch's version, (2, 14) for 2.14.1."""
    return child_module.torch_version()


@pytest.fixture
def transformers() -> None:
    """Skip where the tested interpreter has no transformers."""
    if not child_module.has_module("transformers"):
        pytest.skip("transformers is not installed beside the tested torch")


@pytest.fixture
def measure(child: child_module.Child) -> Callable[..., Measurement]:
    """Measure a function's source with oomproof.run: ``measure(body, *arguments, **options of run)``."""

    def run(body: Callable[..., Any], *arguments: Any, uses: Any = (), **options: Any) -> Measurement:
        script = child.script(body, *arguments, uses=uses)
        options.setdefault("gpu", "t4")
        return oomproof.run([child_module.PYTHON, str(script)], cwd=child.folder, **options)

    return run


@pytest.fixture
def lines() -> Any:
    """Run lines of Python beside a mirror, or without one."""

    def run(code: str, *, mirrored: bool = True) -> Any:
        result = in_child(code, mirrored=mirrored)
        if result is None:
            pytest.skip("no CUDA build of torch")
        return result

    return run
