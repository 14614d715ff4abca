"""What this machine has and lacks for the phantom."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from oomproof.errors import EnvironmentMissingError
from oomproof.measure import versions
from oomproof.phantom import launch, standins

ROOM_BYTES = 8 << 20  # one set of stand-ins


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing the phantom needs. ``ok`` is None for a remark that stops nothing."""

    what: str
    ok: bool | None
    found: str
    cure: str = ""


def examine() -> list[Check]:
    """Return a check for everything the phantom needs on this machine; builds the stand-ins as the last one."""
    checks = [_system(), _compiler(), _cache()]
    torch, found = _torch()
    checks += found
    if torch is not None and all(check.ok is not False for check in checks):
        checks.append(_standins(torch))
    return checks


def idle_functions() -> dict[str, list[str]]:
    """Return, for each stand-in library, the functions that only answer "success".

    Raises EnvironmentMissingError when there is no usable torch or no compiler.
    """
    torch, found = _torch()
    if torch is None:
        raise EnvironmentMissingError(f"{found[0].found}; {found[0].cure}")
    _, manifest = _ensure(torch)
    listed = manifest["idle_functions"]
    assert isinstance(listed, dict)
    return listed


def _system() -> Check:
    found = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Check(
            what="system",
            ok=False,
            found=found,
            cure="the phantom needs Linux: use a Linux machine, WSL or a container; captures can be read here",
        )
    return Check(what="system", ok=True, found=found)


def _compiler() -> Check:
    from oomproof.phantom.build import find_compiler

    try:
        command = find_compiler()
    except EnvironmentMissingError as error:
        return Check(what="C compiler", ok=False, found="none", cure=str(error))
    return Check(what="C compiler", ok=True, found=" ".join(command))


def _cache() -> Check:
    root = standins.cache_root()
    there = next(folder for folder in [root, *root.parents] if folder.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK) or free < ROOM_BYTES:
        return Check(
            what="cache folder",
            ok=False,
            found=f"{root}, {free >> 20} MiB free",
            cure="set OOMPROOF_CACHE to a folder that can be written and has 8 MiB of room",
        )
    return Check(what="cache folder", ok=True, found=str(root))


def _torch() -> tuple[Path | None, list[Check]]:
    """Return the folder of the torch that scripts will use, and what is to be said of it."""
    python = launch.default_python()
    code = (
        "import importlib.util as u, pathlib as p; s = u.find_spec('torch'); "
        "print(p.Path(next(iter(s.submodule_search_locations))) if s else '')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    folder = Path(done.stdout.strip()) if done.stdout.strip() else None
    if folder is None:
        cure = "install the CUDA build, which needs no GPU: pip install torch"
        return None, [Check(what="torch", ok=False, found=f"none in {python}", cure=cure)]
    version = _version(folder)
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        cure = "install the CUDA build over it: pip install --force-reinstall torch (from PyPI, on Linux)"
        return None, [Check(what="torch", ok=False, found=f"{version}, a build without CUDA", cure=cure)]
    checks = [Check(what="torch", ok=True, found=f"{version} in {folder}")]
    untested = versions.note(version)
    if untested is not None:
        checks.append(Check(what="torch", ok=None, found=f"{untested}; tell us if it fails"))
    return folder, checks


def _version(folder: Path) -> str:
    match = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
    return match[1] if match else "unknown"


def _ensure(torch: Path) -> tuple[Path, dict[str, object]]:
    try:
        return standins.ensure(torch)
    except RuntimeError as error:
        raise EnvironmentMissingError(str(error)) from None


def _standins(torch: Path) -> Check:
    try:
        folder, manifest = _ensure(torch)
    except EnvironmentMissingError as error:
        return Check(what="stand-in libraries", ok=False, found="not compiled", cure=str(error))
    loaded = manifest["load"]
    assert isinstance(loaded, list)
    return Check(what="stand-in libraries", ok=True, found=f"{len(loaded)} in {folder}")
