"""What runs in every Python process of a run before the user's script does.

Puts the process under the phantom, then waits for torch to be imported and starts the observer on it. Standard
library only, Python 3.9 or newer: this is the user's interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomproof.inject.imports import before_import, when_imported
from oomproof.phantom import standins, world
from oomproof.phantom.device import MOST_GPUS, Device

if TYPE_CHECKING:
    from oomproof.inject.warm_child import Warm

CONFIG = "config.json"
GPU_STATE = "gpus.state"
AUTOGRAD_SECONDS = 0.02


def start(run_folder: str) -> None:
    """Read the run's configuration and put this process under the phantom.

    A process without a usable torch goes on as it is; it is stopped with a message only if it imports torch.
    """
    folder = Path(run_folder)
    config = json.loads((folder / CONFIG).read_text())
    if not config["phantom"]:
        when_imported("torch", lambda module: change(module, config, folder))
        return
    try:
        torch = standins.find_torch()
        stand_ins, manifest = standins.ensure(torch)
    except (standins.NoCUDATorch, RuntimeError) as error:
        message = str(error)
        before_import("torch", lambda module: _refuse(folder, message))
        return
    device = Device(standins.load(stand_ins, manifest))
    cuda_version = manifest["cuda_version"]
    assert isinstance(cuda_version, int)
    configure(device, config, folder, cuda_version)
    warm = None
    if "warm" in config:
        from oomproof.inject.warm_child import Warm

        warm = Warm(device, config, cuda_version)
    os.environ["TRITON_LIBCUDA_PATH"] = str(stand_ins)
    when_imported("torch", lambda module: _torch_imported(module, device, config, folder, warm))
    if warm is not None:
        warm.serve()  # comes back in a fork, which goes on as a process of its own run


def configure(device: Device, config: dict[str, Any], folder: Path, cuda_version: int) -> None:
    """Describe the GPUs of a run to the device library."""
    _give_each_rank_a_gpu(config)
    device.configure(
        config["gpus"],
        state_path=str(folder / GPU_STATE),
        unlimited=config["unlimited"],
        rising_addresses=config["rising_addresses"],
        keep_bytes=config["keep_bytes"],
        driver_version=cuda_version,
    )


def _give_each_rank_a_gpu(config: dict[str, Any]) -> None:
    """Have as many GPUs as a launcher in a shell script starts ranks on this machine, unless --gpus says otherwise."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not config["gpus_given"] and ranks.isdigit() and len(config["gpus"]) < int(ranks) <= MOST_GPUS:
        config["gpus"] = config["gpus"][:1] * int(ranks)


def _refuse(folder: Path, message: str) -> None:
    (folder / f"error-{os.getpid()}.txt").write_text(message)
    sys.exit(f"oomproof: {message}")


def _torch_imported(
    torch: ModuleType, device: Device, config: dict[str, Any], folder: Path, warm: Warm | None = None
) -> None:
    # A backward pass takes no time here, so a short script can end while autograd's thread still lets go of Python
    # objects; torch 2.14 then aborts ("terminate called without an active exception").
    atexit.register(time.sleep, AUTOGRAD_SECONDS)
    # not before CUDA starts: asking torch for its architectures forbids CUDA in forked children
    torch.cuda._lazy_call(lambda: _look_at_kernels(torch, device, config))
    if is_compile_worker():
        return  # it has Triton compile kernels and allocates nothing
    layout = _set_up_world(torch, device, config, folder)
    if warm is not None:
        warm.layout = layout
    if config["observe"]:
        from oomproof.measure.observer import Observer

        observer = Observer(torch, device, config, folder, layout)
        observer.install()
        if warm is not None:
            warm.observer = observer
    else:
        from oomproof.measure.reads import fold_constants

        fold_constants(device, config)
    if warm is None:  # else in the fork: changes belong to a run
        change(torch, config, folder)


def change(torch: ModuleType, config: dict[str, Any], folder: Path) -> None:
    """Install a plan's changes, and what finds out about the script."""
    if (config["changes"] or config["survey"] or config["survey_blocks"]) and not is_compile_worker():
        from oomproof.plan.injection import Injection

        Injection(torch, config, folder).install()


def _set_up_world(torch: ModuleType, device: Device, config: dict[str, Any], folder: Path) -> world.Layout | None:
    """Prepare torch.distributed: for ranks that do not exist, or for exchanging values with those that do."""
    if config["world"] is not None:
        return world.install(torch, config["world"], device.next_split)
    device.share(str(folder / world.MESSAGES))
    distributed = torch.distributed
    return world.watch_groups(distributed, device.next_split) if distributed.is_available() else None


def is_compile_worker() -> bool:
    """Return whether this is one of Inductor's helper processes (torch 2.4 to 2.14)."""
    words = getattr(sys, "orig_argv", sys.argv)  # Python 3.10; before, sys.argv is all there is
    return any(os.path.join("_inductor", "compile_worker") in word for word in words)


def _look_at_kernels(torch: ModuleType, device: Device, config: dict[str, Any]) -> None:
    capability = config["gpus"][0]["major"] * 10 + config["gpus"][0]["minor"]
    flags = torch._C._cuda_getArchFlags() or ""
    device.set_binary_version(newest_architecture(flags, capability))
    if not has_kernels(flags, capability):
        config["no_kernels"] = True
        config["notes"] = [
            f"this torch ({torch.__version__}) has no kernels for compute capability {capability / 10:.1f}: on the "
            f"real GPU the script fails with 'no kernel image is available'; it was built for {flags}"
        ]


def newest_architecture(flags: str | None, capability: int) -> int:
    """Return the architecture of the kernels that a GPU of this capability would run, 86 of "sm_80 sm_86" on 8.9.

    A binary runs on its own major version from its minor version on; with none, kernels come from PTX and are the
    GPU's own. ``cudaFuncGetAttributes`` must say so, or CUB fails its look-up.
    """
    built = [int("".join(c for c in f[3:] if c.isdigit())) for f in (flags or "").split() if f.startswith("sm_")]
    runnable = [version for version in built if version // 10 == capability // 10 and version <= capability]
    return max(runnable, default=capability)


def has_kernels(flags: str, capability: int) -> bool:
    """Return whether torch can run on the GPU: a binary of its major version, or PTX for it or an older one."""
    built = [(f[:3], int("".join(c for c in f.partition("_")[2] if c.isdigit()))) for f in flags.split() if "_" in f]
    binaries = any(kind == "sm_" and v // 10 == capability // 10 and v <= capability for kind, v in built)
    return binaries or any(kind == "com" and v <= capability for kind, v in built)
