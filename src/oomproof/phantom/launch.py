"""Starting a command with every Python process below it under the phantom."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import oomproof
from oomproof.errors import UsageError
from oomproof.gpus import GPUSpec
from oomproof.inject.bootstrap import CONFIG as CONFIG
from oomproof.phantom import standins, world
from oomproof.phantom.device import MOST_GPUS as MOST_GPUS

SITE = Path(oomproof.__file__).parent / "inject" / "site"

#: Host-to-device copies up to this size keep their values. 1 MiB holds the token ids of 131,072 tokens.
KEEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank of a world whose other ranks do not exist; ``folder`` has the messages between those that are run."""

    size: int
    rank: int
    local_size: int  # ranks on one machine
    folder: Path

    def to_config(self) -> dict[str, Any]:
        """Return what ``world.install`` reads."""
        return {**asdict(self), "folder": str(self.folder), "runner": os.getpid()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a command is run under the phantom."""

    gpu: GPUSpec
    gpu_count: int = 1
    gpus_given: bool = True  # False: more when a launcher turns out to start more ranks
    unlimited: bool = False  # allocations never fail; the GPU still says how much memory it has
    platform: str = "linux"  # "linux" or "wsl": how the driver orders segment addresses
    values: str = "mirror"  # "mirror" or "keep"
    unknown_counts: str = "few"  # "few" or "many": how counts of values that nobody knows are answered
    observe: bool = True
    steps: int | None = 3  # optimizer steps; None for all
    until_stable: bool = False
    snapshot: bool = False
    profile: bool = False  # observe more, for the capture
    meter: bool = False  # count what one step after the measured ones executes, for the cost of a step
    keep_bytes: int = KEEP_BYTES
    phantom: bool = True  # False: the real GPU, for what is done to the script alone
    changes: tuple[dict[str, Any], ...] = ()  # of a plan, as plan.technique.Change.to_json gives them
    survey: bool = False  # find out about the script what the planner wants to know
    survey_blocks: bool = False  # and what each of its model's repeated blocks takes
    world: World | None = None  # None: the world is the processes that the command starts
    list_modules: bool = False  # say which modules were imported, for a warm process
    preload: tuple[str, ...] = ()  # what a warm process imports beside the script's libraries

    def to_config(self) -> dict[str, Any]:
        """Return what ``inject.bootstrap`` reads."""
        return {
            "gpus": [describe(self.gpu)] * self.gpu_count,
            "gpus_given": self.gpus_given,
            "unlimited": self.unlimited,
            "rising_addresses": self.platform == "wsl",
            "keep_bytes": self.keep_bytes,
            "values": self.values,
            "unknown_counts": self.unknown_counts,
            "observe": self.observe,
            "steps": self.steps,
            "until_stable": self.until_stable,
            "snapshot": self.snapshot,
            "profile": self.profile,
            "phantom": self.phantom,
            "changes": list(self.changes),
            "survey": self.survey,
            "survey_blocks": self.survey_blocks,
            "meter": self.meter,
            "world": self.world.to_config() if self.world else None,
            "list_modules": self.list_modules,
            "preload": list(self.preload),
        }


def describe(gpu: GPUSpec) -> dict[str, Any]:
    """Return the fields of ``phantom.device.GPUStruct`` for a GPU spec."""
    return {
        "name": gpu.name,
        "memory": gpu.memory_bytes,
        "nvml_memory": max(gpu.nvml_memory_bytes or 0, gpu.memory_bytes),
        "context": gpu.context_bytes[1],
        "l2": gpu.l2_bytes,
        "shared_per_block": gpu.shared_memory_per_block_bytes,
        "shared_per_block_optin": gpu.shared_memory_per_block_optin_bytes,
        "shared_per_sm": gpu.shared_memory_per_sm_bytes,
        "shared_reserved": gpu.reserved_shared_memory_per_block_bytes,
        "major": gpu.compute_capability[0],
        "minor": gpu.compute_capability[1],
        "sm_count": gpu.sm_count,
        "threads_per_sm": gpu.max_threads_per_sm,
        "blocks_per_sm": gpu.max_blocks_per_sm,
        "registers_per_sm": gpu.registers_per_sm,
        "clock_khz": gpu.clock_khz,
        "memory_clock_khz": gpu.memory_clock_khz,
        "bus_bits": gpu.memory_bus_bits,
        "mig": int(gpu.mig),
    }


def resolve_command(command: Sequence[str], *, folder: Path | None = None) -> list[str]:
    """Return the program to start for what a person wrote after ``--``.

    ``script.py …`` and ``-m package …`` get the interpreter that has torch; anything else is taken as it is. Raises
    UsageError when nothing was written or it cannot be found.
    """
    if not command:
        raise UsageError("nothing to run; write the command after --, as in: oomproof run -- python train.py")
    first = command[0]
    if first in ("-m", "-c"):
        return [default_python(), *command]
    if first.endswith(".py"):
        folder = folder or Path.cwd()
        if not (folder / first).is_file():
            raise UsageError(f"no file {first} in {folder}; give the script's path as Python would need it")
        return [default_python(), *command]
    if shutil.which(first) is None:
        raise UsageError(f"{first!r} is no program that can be started here; check the name or give its full path")
    return list(command)


_PROCESS_OPTIONS = (
    "--nproc-per-node",
    "--nproc_per_node",
    "--num_gpus",
)
_NODE_OPTIONS = ("--nnodes", "--num_machines", "--num-machines", "--num_nodes")
_OTHER_LAUNCHERS = ("deepspeed", "mpirun", "mpiexec", "srun", "horovodrun")


def gpus_wanted(command: Sequence[str]) -> int:
    """Return how many GPUs a launcher's own options ask for on this machine; 1 when they do not say.

    Understands torchrun, accelerate launch and deepspeed, up to the script they start.
    """
    everywhere = _launcher_option(command, ("--num_processes", "--num-processes"))  # accelerate: of all machines
    return max(_launcher_option(command, _PROCESS_OPTIONS), everywhere // nodes_wanted(command))


def nodes_wanted(command: Sequence[str]) -> int:
    """Return how many machines a launcher's own options ask for; 1 when they do not say."""
    return _launcher_option(command, _NODE_OPTIONS)


def _launcher_option(command: Sequence[str], names: Sequence[str]) -> int:
    for position, word in enumerate(command):
        if word.endswith(".py"):
            break
        name, _, value = word.partition("=")
        if name in names:
            value = value or (command[position + 1] if position + 1 < len(command) else "")
            value = value.rpartition(":")[2]  # torchrun's MIN:MAX
            return int(value) if value.isdigit() and int(value) > 0 else 1
    return 1


def starts_ranks_itself(command: Sequence[str]) -> bool:
    """Return whether a command is a launcher that cannot be told to start one rank alone."""
    return Path(command[0]).name in _OTHER_LAUNCHERS


def default_python() -> str:
    """Return the interpreter for scripts: this one if it has torch, else the first ``python`` on PATH."""
    import importlib.util

    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python") or shutil.which("python3") or sys.executable


def environment(run_folder: Path, base: Mapping[str, str] | None = None, *, phantom: bool = True) -> dict[str, str]:
    """Return the environment that brings the bootstrap, and with it the phantom, to every Python process of a command.

    CUDA_VISIBLE_DEVICES is about this machine's own GPUs, so it is left out; a script may set it for itself.

    What torch.compile keeps on disk includes choices made by timing kernels. Here they mean nothing, so no run on a
    real GPU may find them; and a run that finds some skips the timing, which takes memory. So each run begins with an
    empty folder, as the first one on a new machine does. Compiled Triton kernels are the same everywhere and kept.
    """
    env = dict(os.environ if base is None else base)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(SITE), env.get("PYTHONPATH", "")) if p)
    env["OOMPROOF_RUN"] = str(run_folder)
    env["OOMPROOF_PYTHON"] = sys.executable
    if not phantom:
        return env
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env["TORCHINDUCTOR_CACHE_DIR"] = str(run_folder / "inductor")
    env["TRITON_CACHE_DIR"] = str(_kernel_cache(run_folder))
    return env


def variables(settings: Settings, run_folder: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the whole environment of a command: the phantom's, and what torchrun sets for a rank of a world."""
    env = environment(run_folder, base, phantom=settings.phantom)
    if settings.world is not None:
        place = settings.world
        env.update(world.environment(place.size, place.rank, place.local_size))
    return env


def _kernel_cache(run_folder: Path) -> Path:
    folder = standins.cache_root() / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    return folder if writable else run_folder / "triton"


def start(
    command: Sequence[str],
    settings: Settings,
    run_folder: Path,
    *,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` (already resolved) under the phantom, in a process group of its own.

    ``run_folder`` is an existing empty folder; the processes leave what they measured in it.
    """
    (run_folder / CONFIG).write_text(json.dumps(settings.to_config()))
    return subprocess.Popen(
        command,
        env=variables(settings, run_folder, env),
        stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,  # another session's terminal
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        start_new_session=True,
    )
