"""Finding the stand-in libraries for an installed torch, and loading them into this process.

Runs inside the user's interpreter before torch is imported, so it uses the standard library only. Whatever needs
more (reading symbol tables, compiling) happens in ``oomproof.phantom.build``, started as a separate process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).with_name("driver")
DEVICE_LIBRARY = "liboomproof_device.so"
MANIFEST = "manifest.json"

#: Stems of the replaced libraries, in loading order: a library comes after those it asks for functions.
STEMS = (
    "libcuda", "libnvidia-ml", "libcudart", "libcublasLt", "libcublas",
    "libcudnn", "libcufft", "libcusparse", "libcusparseLt", "libcusolver", "libnccl",
)  # fmt: skip


class NoCUDATorch(Exception):
    """There is no torch here, or it is not a CUDA build; the message says which and how to get one."""


def find_torch() -> Path:
    """Return the folder of the torch that ``import torch`` would take, without importing it.

    Raises NoCUDATorch when there is none or it has no CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise NoCUDATorch(
            f"no torch in {sys.executable}; install the CUDA build: pip install torch (on Linux it is the default)"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise NoCUDATorch(
            f"the torch in {folder} is a CPU-only build; install the CUDA build, which needs no GPU: "
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        )
    return folder


def library_folders(torch: Path) -> list[Path]:
    """Return the folders that torch's libraries search for NVIDIA's, the wheels' own first."""
    site = torch.parent
    folders = [*sorted(site.glob("nvidia/*/lib")), site / "cusparselt" / "lib", torch / "lib"]
    folders += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    folders += [Path("/usr/local/cuda/lib64"), Path(sys.prefix) / "lib"]
    return [folder for folder in folders if folder.is_dir()]


def cache_root() -> Path:
    """Return the folder for compiled stand-ins: ``$OOMPROOF_CACHE``, else ``$XDG_CACHE_HOME/oomproof``."""
    own = os.environ.get("OOMPROOF_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oomproof"


def fingerprint(torch: Path) -> str:
    """Return a name for the stand-ins of this torch: it changes when torch, NVIDIA's libraries or the driver do."""
    digest = hashlib.sha256()
    for source in sorted(
        [*DRIVER.rglob("*.[ch]"), *Path(__file__).parent.glob("build*.py"), Path(__file__).with_name("prototypes.py")]
    ):
        digest.update(source.read_bytes())
    libraries = [torch / "lib" / "libtorch_cuda.so"]
    for folder in library_folders(torch):
        libraries += sorted(p for stem in STEMS for p in (*folder.glob(f"{stem}.so*"), *folder.glob(f"{stem}-*.so*")))
    for library in libraries:
        status = library.stat()
        digest.update(f"{library}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:20]


def read_manifest(folder: Path) -> dict[str, object] | None:
    """Return the manifest of a complete set of stand-ins, None when it is missing, cut short or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def ensure(torch: Path) -> tuple[Path, dict[str, object]]:
    """Return the folder of stand-ins for this torch and its manifest, compiling them first when needed.

    Raises RuntimeError with the builder's message when that fails.
    """
    folder = cache_root() / "standins" / fingerprint(torch)
    manifest = read_manifest(folder)
    if manifest is None:
        python = os.environ.get("OOMPROOF_PYTHON", sys.executable)
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        command = [python, "-m", "oomproof.phantom.build", str(torch), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        manifest = read_manifest(folder)
        if done.returncode or manifest is None:
            raise RuntimeError(done.stderr.strip() or f"the stand-ins in {folder} are not whole; remove that folder")
    return folder, manifest


def load(folder: Path, manifest: dict[str, object]) -> ctypes.CDLL:
    """Load every stand-in of ``folder`` into this process and return the device library.

    torch's libraries carry an RPATH to the real ones, but the loader takes a library that is already loaded under
    the wanted SONAME. Must run before anything loads a real NVIDIA library.
    """
    mode = ctypes.RTLD_GLOBAL
    device = ctypes.CDLL(str(folder / DEVICE_LIBRARY), mode=mode)
    for name in manifest["load"]:  # type: ignore[attr-defined]
        ctypes.CDLL(str(folder / name), mode=mode)
    return device
