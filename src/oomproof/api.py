"""Measuring a command from Python: what ``oomproof run`` does."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from oomproof.capture import write_capture
from oomproof.errors import EnvironmentMissingError, OomproofError, ScriptError, UsageError
from oomproof.gpus import GPUSpec, default_gpu, get_gpu, with_memory
from oomproof.measure.assemble import Outcome, assemble, files, merge
from oomproof.measure.measurement import Measurement
from oomproof.measure.profile import Profile
from oomproof.measure.ranks import that_can_differ, which_were_measured
from oomproof.phantom import launch
from oomproof.plan.technique import Change, environment
from oomproof.running import Runner
from oomproof.units import parse_size

UNKNOWN_COUNTS = ("range", "few", "many")
GPUS_PER_MACHINE = 8  # of a world that does not exist, when nothing says otherwise


def run(
    command: str | os.PathLike[str] | Sequence[str],
    *,
    gpu: str | GPUSpec | None = None,
    memory: str | int | None = None,
    gpus: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    ranks: str | Sequence[int] | None = None,
    steps: int | None = 3,
    until_stable: bool = False,
    values: str = "mirror",
    unknown_counts: str = "range",
    platform: str = "linux",
    output: str | os.PathLike[str] | None = None,
    snapshot: bool = False,
    quiet: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    stdout: int | IO[Any] | None = None,
    changes: Sequence[Change] = (),
) -> Measurement:
    """Run a command on a phantom GPU and return what it showed.

    ``command`` is a script's path or a list such as ``["python", "train.py", "--lr", "1e-4"]``. ``gpu`` is a catalogue
    name or a GPUSpec (default: the catalogue's default), ``memory`` overrides its memory: bytes or "20GiB". ``gpus``
    is how many of it the machine has (default: what a launcher such as torchrun asks for, else 1). ``world_size`` runs
    the command as ``rank`` (default 0) of a world whose other ranks do not exist, ``gpus`` of them on a machine
    (default 8, or the most below that divides the world); ``ranks`` names several ranks, measured one after another, or
    is "worst" for all that can differ in memory: the worst is what the Measurement tells of, the others are in its
    ``ranks``.
    The command is stopped after ``steps`` optimizer steps (None: never), with ``until_stable`` when two in a row have
    the same peak.
    When allocations failed it is run a second time with unlimited memory, for the demand. ``values`` is "mirror" or
    "keep". ``unknown_counts`` says how counts of values that nobody knows are answered: "few", "many", or "range": few,
    and where something was sized by one the command is run once more with many. ``platform`` is "linux" or "wsl" (how
    the driver orders addresses). ``output`` names a capture to write,
    ``snapshot`` adds PyTorch's memory snapshot to it. ``quiet`` hides what the command prints. ``on_step`` is called
    with a step's peaks while the command runs (at most ten times a second): the keys of ``per_step``, and ``run``
    (counts the runs made so far), ``rank``, ``unlimited`` and ``purpose``: "gpu", "demand" or "values".
    ``changes`` are put into the script.

    Raises UsageError for a wrong request, EnvironmentMissingError when torch or a compiler is missing, ScriptError
    when nothing could be measured, KeyboardInterrupt after ending the command's processes; both it and an error about
    ``output`` carry the ``measurement``.
    """
    job = prepare(
        command,
        gpu=gpu,
        memory=memory,
        gpus=gpus,
        world_size=world_size,
        rank=rank,
        ranks=ranks,
        steps=steps,
        until_stable=until_stable,
        values=values,
        unknown_counts=unknown_counts,
        platform=platform,
        snapshot=snapshot,
        profile=output is not None,
        env=env,
        cwd=cwd,
        changes=changes,
    )
    if output is not None:
        _check_output(Path(output))
    with contextlib.closing(Runner(job.program, job.folder, job.env, quiet, on_step, stdout)) as runner:
        result = measure(job, runner)
        if output is not None:
            try:
                profile, recorded = files(result.limited, result.unlimited)
                made = _profile(profile, job.settings.gpu) if profile else None
                write_capture(output, result.measurement, recorded, made)
            except OomproofError as error:
                error.measurement = result.measurement
                raise
    if result.interrupted:
        raise Interrupted(result.measurement)
    return result.measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be measured: a command and how it is run."""

    words: tuple[str, ...]  # as a person wrote them
    program: tuple[str, ...]  # as they are started
    folder: Path  # where
    env: Mapping[str, str] | None  # None: this process's own
    settings: launch.Settings
    world_size: int | None  # of a world that does not exist
    ranks: tuple[int, ...] | None  # of it; None for all that can differ
    unknown_counts: str

    def with_changes(self, changes: Sequence[Change]) -> Job:
        """Return the same job with these changes in the script, and in its environment."""
        env = dict(os.environ if self.env is None else self.env)
        env.update(environment(changes, env))
        settings = replace(self.settings, changes=tuple(change.to_json() for change in changes))
        return replace(self, env=env, settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the runs of a job showed."""

    measurement: Measurement
    limited: Outcome  # on the GPU's own memory
    unlimited: Outcome | None  # for the demand, where it did not fit
    interrupted: bool


def prepare(
    command: str | os.PathLike[str] | Sequence[str],
    *,
    gpu: str | GPUSpec | None = None,
    memory: str | int | None = None,
    gpus: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    ranks: str | Sequence[int] | None = None,
    steps: int | None = 3,
    until_stable: bool = False,
    values: str = "mirror",
    unknown_counts: str = "range",
    platform: str = "linux",
    snapshot: bool = False,
    profile: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    changes: Sequence[Change] = (),
) -> Job:
    """Return the job that ``run`` would do with the same arguments; raises as it does, before anything is started."""
    words = [os.fspath(command)] if isinstance(command, (str, os.PathLike)) else list(command)
    size, local_size, wanted = _world(words, gpus, world_size, rank, ranks)
    settings = launch.Settings(
        gpu=resolve_gpu(gpu, memory),
        gpu_count=local_size,
        gpus_given=gpus is not None,
        values=_one_of("values", values, ("mirror", "keep")),
        unknown_counts="many" if _one_of("unknown_counts", unknown_counts, UNKNOWN_COUNTS) == "many" else "few",
        platform=_one_of("platform", platform, ("linux", "wsl")),
        steps=_positive("steps", steps),
        until_stable=until_stable,
        snapshot=snapshot,
        profile=profile,
    )
    if settings.unknown_counts == "many" and values == "keep":
        raise UsageError("unknown_counts 'many' needs values 'mirror'; with 'keep' nothing tells what a read is for")
    require_linux()
    folder = Path(cwd) if cwd is not None else Path.cwd()
    job = Job(
        words=tuple(words),
        program=tuple(launch.resolve_command(words, folder=folder)),
        folder=folder,
        env=env,
        settings=settings,
        world_size=size,
        ranks=None if wanted is None else tuple(wanted),
        unknown_counts=unknown_counts,
    )
    return job.with_changes(changes) if changes else job


def measure(job: Job, runner: Runner) -> Result:
    """Run a job: once on the GPU's memory, and again where that leaves something open."""
    settings = job.settings
    world_folder = runner.new_folder()
    if job.world_size is None:
        limited, unlimited = _measure(runner, settings)
        notes: list[str] = []
    else:
        limited, unlimited, notes = _measure_ranks(runner, settings, job.world_size, job.ranks, world_folder)
    if limited.change_refused is not None:
        raise UsageError(f"cannot apply {limited.change_refused}")
    measured = assemble(job.words, settings.gpu, limited, unlimited, job.folder, notes)
    interrupted = limited.interrupted
    if job.unknown_counts == "range" and limited.depends_on_counts and measured.verdict != "unknown":
        last = replace(settings, unlimited=True, unknown_counts="many", snapshot=False, profile=False)
        if job.world_size is not None:
            place = launch.World(
                size=job.world_size, rank=measured.world.rank, local_size=settings.gpu_count, folder=world_folder
            )
            last = replace(last, world=place)
        many = runner.go(last, "values")
        interrupted |= many.interrupted
        measured = assemble(job.words, settings.gpu, limited, unlimited, job.folder, notes, many)
    return Result(measurement=measured, limited=limited, unlimited=unlimited, interrupted=interrupted)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended the command; ``measurement`` is what was seen until then."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__()
        self.measurement = measurement


def fits(command: str | os.PathLike[str] | Sequence[str], **options: Any) -> Measurement:
    """Run a command on a phantom GPU; the result is true when it fits. Takes what ``run`` takes.

    Raises ScriptError when the command failed otherwise, so that false means "does not fit" and nothing else.
    """
    measured = run(command, **options)
    if measured.verdict == "unknown":
        raise ScriptError(f"no verdict: {'; '.join(measured.notes) or 'the script ' + measured.ended}")
    return measured


def resolve_gpu(gpu: str | GPUSpec | None, memory: str | int | None = None) -> GPUSpec:
    """Return the GPU meant, with its memory overridden when asked. Raises UsageError."""
    spec = gpu if isinstance(gpu, GPUSpec) else default_gpu() if gpu is None else get_gpu(gpu)
    if memory is None:
        return spec
    try:
        size = parse_size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(str(error)) from None
    if size <= spec.context_bytes[1]:
        raise UsageError(f"memory {memory!r} is less than the CUDA context takes; write it with its unit, like 20GiB")
    return with_memory(spec, size)


def require_linux() -> None:
    """Raise EnvironmentMissingError where the phantom cannot run."""
    if sys.platform != "linux":
        raise EnvironmentMissingError(
            f"the phantom GPU needs Linux, this is {sys.platform}; use a Linux machine, WSL or a container. Captures "
            "can be read here"
        )


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{what} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def _positive(what: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{what} is {value}; it must be at least 1, or 'all'")
    return value


def _gpu_count(asked: int | None, command: Sequence[str]) -> int:
    count = launch.gpus_wanted(command) if asked is None else asked
    if not 1 <= count <= launch.MOST_GPUS:
        raise UsageError(f"{count} GPUs asked for; one machine can have 1 to {launch.MOST_GPUS}")
    return count


def _world(
    command: Sequence[str],
    gpus: int | None,
    size: int | None,
    rank: int | None,
    ranks: str | Sequence[int] | None,
) -> tuple[int | None, int, list[int] | None]:
    """Return the size of a world that does not exist, the GPUs of a machine, and the ranks asked for.

    The size is None when the command starts all its ranks itself; the ranks are None for "worst".
    """
    nodes = launch.nodes_wanted(command) if command else 1
    if size is None and nodes > 1:  # the other machines do not exist
        size = nodes * _gpu_count(gpus, command)
    if size is None:
        if rank is not None or ranks is not None:
            raise UsageError("--rank and --ranks need --world-size: how many ranks the world has")
        return None, _gpu_count(gpus, command), None
    faults = []
    if size < 1:
        faults.append(f"a world of {size} ranks; it must have at least 1")
    if launch.starts_ranks_itself(command):
        faults.append(f"{command[0]} starts ranks that do not exist; write the script itself: -- python train.py …")
    if rank is not None and ranks is not None:
        faults.append("rank and ranks both given; give one of them")
    wanted = [0 if rank is None else rank]
    if isinstance(ranks, str) and ranks != "worst":
        try:
            wanted = [int(part) for part in ranks.split(",")]
        except ValueError:
            faults.append(f"ranks are {ranks!r}; write worst, or numbers such as 0,7,63")
    elif ranks is not None and not isinstance(ranks, str):
        wanted = list(ranks)
    if size >= 1:
        faults += [f"rank {r} is not in a world of {size}; ranks count from 0" for r in wanted if not 0 <= r < size]
    asked = gpus if gpus is not None else launch.gpus_wanted(command)
    given = asked > 1 or gpus is not None
    if given and asked >= 1 and size >= 1 and size % asked:
        faults.append(
            f"{asked} GPUs in each machine do not divide a world of {size}; give "
            f"--gpus {_divisor(size, min(asked, launch.MOST_GPUS))}, or another that does"
        )
    if faults:
        raise UsageError("; ".join(faults))
    local_size = _gpu_count(asked if given else _divisor(size, GPUS_PER_MACHINE), command)
    return size, local_size, None if ranks == "worst" else sorted(set(wanted))


def _divisor(size: int, most: int) -> int:
    """Return the largest number of ranks up to ``most`` that makes every machine of a world have as many."""
    return next(count for count in range(most, 0, -1) if size % count == 0)


def _measure(runner: Runner, settings: launch.Settings) -> tuple[Outcome, Outcome | None]:
    """Run the command on the GPU's memory and, when an allocation failed, without limit."""
    limited = runner.go(settings)
    if limited.interrupted and not limited.findings:  # the processes had to be killed: nothing to assemble
        raise KeyboardInterrupt
    if not limited.troubled or limited.interrupted:
        return limited, None
    unlimited = runner.go(replace(settings, unlimited=True), "demand")
    if unlimited.interrupted:  # half a demand is none
        raise KeyboardInterrupt
    return limited, unlimited


def _measure_ranks(
    runner: Runner, settings: launch.Settings, size: int, wanted: Sequence[int] | None, folder: Path
) -> tuple[Outcome, Outcome | None, list[str]]:
    """Measure ranks of a world that does not exist, one after another; ``wanted`` is None for all that can differ."""
    measured: dict[int, tuple[Outcome, Outcome | None]] = {}

    def measure(rank: int) -> None:
        place = launch.World(size=size, rank=rank, local_size=settings.gpu_count, folder=folder)
        measured[rank] = _measure(runner, replace(settings, world=place))

    first = 0 if wanted is None else wanted[0]
    measure(first)
    if wanted is None:
        groups: list[dict[str, Any]] = next((f["groups"] for f in measured[first][0].findings if f["groups"]), [])
        wanted = that_can_differ(groups, size, first)
    stopped = False
    for rank in wanted:
        if rank not in measured and not stopped and not _failed(measured):
            try:
                measure(rank)
            except KeyboardInterrupt:  # those before it were measured all the same
                stopped = True
    done = [measured[rank] for rank in wanted if rank in measured]
    limited = merge([outcome for outcome, _ in done])
    limited = replace(limited, interrupted=limited.interrupted or stopped)
    unlimited = merge([again or outcome for outcome, again in done]) if any(again for _, again in done) else None
    return limited, unlimited, which_were_measured(sorted(measured), wanted, size, sorted(runner.senders))


def _failed(measured: Mapping[int, tuple[Outcome, Outcome | None]]) -> bool:
    """Return whether a rank's script failed or was interrupted: the others would too."""
    outcomes = [outcome for outcome, _ in measured.values()]
    return any(o.interrupted or any(f["ended"] == "raised" for f in o.findings) for o in outcomes)


def _profile(path: Path, gpu: GPUSpec) -> Profile:
    return Profile.from_json(json.loads(path.read_text()))._replace(limit_bytes=gpu.memory_bytes)


def _check_output(path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the capture; create it first")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file such as {path / 'train.oomp'}")
