"""Training for real with a plan's changes, the script untouched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from oomproof import api
from oomproof.errors import PlanError, UsageError
from oomproof.measure.assemble import read_outcome
from oomproof.phantom import launch
from oomproof.plan.document import Plan
from oomproof.plan.injection import EXIT_REFUSED
from oomproof.plan.parts import Parts, command_difference
from oomproof.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What a plan is about to be applied to; None where it cannot be found out."""

    script_sha256: str | None
    torch: str | None
    gpu: str | None
    gpu_memory_bytes: int | None
    gpus: int | None


def differences(plan: Plan, command: Sequence[str], here: Here) -> tuple[list[str], list[str]]:
    """Return what makes the plan wrong here, and what only makes its proof one of something else."""
    wrong, other = [], []
    planned, given = Parts.of(plan.command), Parts.of(command)
    if plan.script_sha256 and here.script_sha256 and plan.script_sha256 != here.script_sha256:
        if planned.same_program(given):
            other.append("the script has changed since the plan was made")
        else:
            wrong.append(f"the plan was made for another script, {planned.program}; plan again for this one")
    elif not (plan.script_sha256 and here.script_sha256) and not planned.same_program(given):
        wrong.append(f"the plan was made for {planned.program}, this is {given.program}; plan again for this one")
    differs = command_difference(planned, given) if planned.same_program(given) else None
    other += [differs] if differs else []
    if here.torch is not None and here.torch.split("+")[0] != plan.torch.split("+")[0]:  # "+cu130" is in no metadata
        other.append(f"the plan was proved with torch {plan.torch}, this is {here.torch}")
    if here.gpu_memory_bytes is not None:
        if here.gpu_memory_bytes < plan.device_bytes:
            wrong.append(
                f"the plan takes {format_bytes(plan.device_bytes)}, this GPU ({here.gpu}) has "
                f"{format_bytes(here.gpu_memory_bytes)}; plan again with --gpu or --memory"
            )
        elif abs(here.gpu_memory_bytes - plan.gpu_memory_bytes) > 0.05 * plan.gpu_memory_bytes:
            other.append(f"the plan was proved for {plan.gpu}, this GPU is {here.gpu}")
    if here.gpus is not None and here.gpus < plan.gpus:
        wrong.append(f"the plan spreads the script over {plan.gpus} GPUs, here are {here.gpus}; plan again with --gpus")
    by_hand = [change.name for change in plan.changes if change.technique.proposal_only]
    if by_hand:
        wrong.append(f"{', '.join(by_hand)}: only you can make this change; `oomproof plan --emit code` shows it")
    return wrong, other


def apply(plan: Plan, command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """Run a command on the real GPUs with a plan's changes and return its exit code.

    The command has this process's terminal, and gets its signals. Raises PlanError where a change cannot be applied:
    then nothing was trained.
    """
    job = api.prepare(command, cwd=cwd, env=env, changes=plan.changes)
    folder = Path(tempfile.mkdtemp(prefix="oomproof-apply-"))
    settings = launch.Settings(gpu=job.settings.gpu, phantom=False, changes=job.settings.changes)
    try:
        (folder / launch.CONFIG).write_text(json.dumps(settings.to_config()))
        program = list(job.program) if plan.gpus == 1 else with_ranks(job.program, plan.gpus)
        process = subprocess.Popen(program, cwd=job.folder, env=launch.environment(folder, job.env, phantom=False))
        code = _wait(process)
        refused = read_outcome(folder, code).change_refused
        if refused is not None:
            raise PlanError(f"cannot apply {refused}; nothing was trained")
        if code == EXIT_REFUSED:
            raise PlanError("a change could not be applied; see above")
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_ranks(program: Sequence[str], ranks: int) -> list[str]:
    """Return the command that starts a Python program once for each GPU, by torchrun. Raises UsageError for others."""
    if not Path(program[0]).name.startswith("python"):
        raise UsageError(
            f"{program[0]} cannot be started once for each GPU; write the script itself: -- python train.py"
        )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [program[0], *launcher, *program[1:]]


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that signals reach too: Ctrl-C by the terminal, SIGTERM through this one."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the script has it too and ends as it likes
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def look(command: Sequence[str], program: Sequence[str], folder: Path, *, real: bool) -> Here:
    """Return what is here. ``real`` asks the driver for the GPUs."""
    name, memory, count = _gpus() if real else (None, None, None)
    return Here(
        script_sha256=_hash(folder / script) if (script := Parts.of(command).script) else None,
        torch=_torch(program[0]),
        gpu=name,
        gpu_memory_bytes=memory,
        gpus=count,
    )


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _torch(python: str) -> str | None:
    """Return the version of the torch that an interpreter would import, without importing it."""
    code = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _gpus() -> tuple[str | None, int | None, int | None]:
    """Return the first visible GPU's name and memory, and how many there are.

    Raises PlanError where there is none.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise PlanError(
            f"there is no NVIDIA GPU to train on here ({error}); rehearse with: oomproof apply --phantom GPU PLAN -- …"
        ) from None
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = pynvml.nvmlDeviceGetCount()
        chosen = [part.strip() for part in visible.split(",") if part.strip()] if visible else []
        if visible is not None and not chosen:
            raise PlanError("CUDA_VISIBLE_DEVICES hides all GPUs; unset it or name one")
        first = chosen[0] if chosen else "0"
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(first)
        )
        name = pynvml.nvmlDeviceGetName(handle)
        return str(name), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), len(chosen) or int(count)
    except pynvml.NVMLError as error:
        raise PlanError(f"the driver does not tell of the GPU ({error}); check nvidia-smi") from None
    finally:
        pynvml.nvmlShutdown()
