"""Planning for a command: from its baseline run to a plan that a run of its own has proved."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import oomproof
from oomproof import api
from oomproof.errors import OomproofError, UsageError
from oomproof.gpus import GPUSpec, all_gpus
from oomproof.phantom import launch
from oomproof.plan.candidate import LEVELS, Trial, best
from oomproof.plan.document import Plan
from oomproof.plan.facts import Facts
from oomproof.plan.refine import NAME, BlockChoice
from oomproof.plan.search import AT_ONCE, Budget, Evaluate, Found, Search, applicable
from oomproof.plan.state import State
from oomproof.plan.technique import Change, techniques, world_size
from oomproof.plan.trials import Trials
from oomproof.running import Runner

#: Builds (model, batch, loss, optimizer).
Workload = Callable[[], tuple[Any, Any, Any, Any]]

#: Trains what a workload builds.
SCRIPT = Path(oomproof.__file__).parent / "inject" / "workload" / "train_workload.py"

CANDIDATES = 80
SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What planning came to."""

    command: tuple[str, ...]
    gpu: GPUSpec
    gpus: int  # that the plan may use
    facts: Facts
    found: Found
    plan: Plan | None  # None where nothing fits, or nothing needs to change
    smallest: GPUSpec | None  # that the script fits as it is; None where none of the catalogue does
    smallest_with_plan: GPUSpec | None

    @property
    def fits_as_it_is(self) -> bool:
        """True where no change is needed."""
        return self.found.baseline.fits


def plan(
    command: str | os.PathLike[str] | Sequence[str] | Workload,
    *,
    gpu: str | GPUSpec | None = None,
    memory: str | int | None = None,
    gpus: int = 1,
    allow: str = "approximate",
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    candidates: int | None = CANDIDATES,
    seconds: float | None = SECONDS,
    explore: bool = False,
    steps: int = 3,
    executor: str = "local",
    workers: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    told: Callable[[Trial], None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Planned:
    """Find the cheapest changes that make a command fit, each candidate run on the phantom.

    In place of a command it takes a function of a module that builds (model, batch, loss, optimizer), where
    ``loss(model, batch)`` is the loss and the tensors of ``batch`` have their samples along the first dimension.
    ``command``, ``gpu``, ``memory``, ``cwd`` and ``env`` are as for ``run``. ``gpus`` is how many of them the plan
    may spread the script over. ``allow`` is the worst fidelity that a plan may have: "exact", "equal", "approximate" or
    "changes-model"; ``only`` and ``without`` name techniques. At most ``candidates`` are run, and none is begun after
    ``seconds``; with ``explore`` the search goes on to the end of these after the answer is known, for a fuller
    frontier. ``executor`` is "local", "ray" or "slurm", ``workers`` how many runs there are at once. ``resume``
    names a file that keeps every trial; those in it are not run again. ``told`` is called with each trial as it comes.

    Raises UsageError for a wrong request, OomproofError where the script does not run as it is.
    """
    _check(allow, only, without, gpus)
    command = _command_of(command) if callable(command) else command
    job = api.prepare(command, gpu=gpu, memory=memory, steps=steps, cwd=cwd, env=env)
    spec = job.settings.gpu
    with Trials(job, executor=executor, workers=workers, told=told) as trials:
        baseline, facts = trials.baseline()
        facts = facts._replace(gpus=gpus, capability=spec.compute_capability)
        evaluate: Evaluate = trials.evaluate
        if resume is not None:
            evaluate = State.open(Path(resume), job, facts, spec).around(evaluate, told)
        moves, unfit = applicable(facts, allow, baseline, only=only, without=without)
        search = Search(
            baseline=baseline,
            memory_bytes=spec.memory_bytes,
            evaluate=evaluate,
            moves=moves,
            allow=allow,
            budget=Budget(candidates=candidates, seconds=seconds),
            explore=explore,
            at_once=max(AT_ONCE, 2 * trials.workers),
            by_hand=lambda change: change.technique.only_proposed(facts, change.options),
            refine=BlockChoice(trials, facts, spec.memory_bytes) if _may_refine(only, without) else None,
        )
        found, proof = _prove(job, replace(search.run(), unfit=tuple(unfit)))
        changed = proof is not None and bool(proof.candidate.changes)
        smallest = smallest_gpu(trials, baseline)
        smallest_with_plan = smallest_gpu(trials, proof) if proof is not None and changed else None
    made = None
    if proof is not None and changed:
        made = Plan.of(
            proof, facts, spec, gpu if isinstance(gpu, str) else spec.key, world_size(proof.candidate.changes) or 1
        )
    return Planned(
        command=job.words,
        gpu=spec,
        gpus=gpus,
        facts=facts,
        found=found,
        plan=made,
        smallest=smallest,
        smallest_with_plan=smallest_with_plan,
    )


def _command_of(workload: Workload) -> list[str]:
    """Return the command that trains what a function builds. Raises UsageError where another process cannot find it."""
    file, name = inspect.getsourcefile(workload), getattr(workload, "__qualname__", "")
    if file is None or not name or "<" in name:
        raise UsageError("the workload must be a function of a file, that a process of its own can import: no lambda")
    return [launch.default_python(), str(SCRIPT), file, name]


def _may_refine(only: Sequence[str], without: Sequence[str]) -> bool:
    return NAME not in without and (not only or NAME in only)


def _check(allow: str, only: Sequence[str], without: Sequence[str], gpus: int) -> None:
    faults = []
    if allow not in LEVELS:
        faults.append(f"allow is {allow!r}; it must be one of {', '.join(LEVELS)}")
    unknown = [name for name in (*only, *without) if name not in techniques()]
    if unknown:
        faults.append(f"no technique is called {', '.join(unknown)}; there are {', '.join(sorted(techniques()))}")
    if not 1 <= gpus <= launch.MOST_GPUS:
        faults.append(f"{gpus} GPUs; a plan can use 1 to {launch.MOST_GPUS} in one machine")
    if faults:
        raise UsageError("; ".join(faults))


def _prove(job: api.Job, found: Found) -> tuple[Found, Trial | None]:
    """Run the winner in a process of its own, on the GPU's memory, as ``apply`` will; the next best where it fails."""
    while found.winner is not None:
        winner = found.winner
        if not winner.candidate.changes:
            return found, winner
        try:
            measured = rehearse(job, winner.candidate.changes).measurement
        except OomproofError as error:
            lost = replace(winner, verdict="failed", measurement=None, reason=f"in a process of its own: {error}")
        else:
            if measured.fits:
                proof = replace(winner, measurement=measured)
                trials = tuple(proof if t is winner else t for t in found.trials)
                return replace(found, trials=trials, winner=proof), proof
            lost = replace(winner, verdict="does-not-fit", measurement=measured)
        trials = tuple(lost if t is winner else t for t in found.trials)
        found = replace(found, trials=trials, winner=best([found.baseline, *trials]))
    return found, None


def rehearse(
    job: api.Job,
    changes: Sequence[Change],
    *,
    quiet: bool = True,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    stdout: int | IO[Any] | None = None,
) -> api.Result:
    """Return what the phantom shows of a job with these changes, on the GPU's memory, in a fresh process.

    Raises UsageError where a change cannot be applied, and what ``run`` raises.
    """
    job = in_world(job, world_size(tuple(changes))).with_changes(changes)
    with contextlib.closing(Runner(job.program, job.folder, job.env, quiet, on_step, stdout)) as runner:
        return api.measure(job, runner)


def in_world(job: api.Job, size: int | None) -> api.Job:
    """Return a job as rank 0 of a world of that many ranks on one machine; as it is for None."""
    if size is None:
        return job
    return replace(job, world_size=size, ranks=(0,), settings=replace(job.settings, gpu_count=size))


def smallest_gpu(trials: Trials, trial: Trial) -> GPUSpec | None:
    """Return the smallest GPU of the catalogue that a candidate was run on and fitted; None where none is.

    Another GPU has other kernels and workspaces, so those that should do are asked by a run each.
    """
    demand, measured = trial.peak_bytes, trial.measurement
    if demand is None or measured is None:
        return None
    generation = (8, 0) if float(measured.gpu.compute_capability) >= 8 else (7, 5)  # bf16 or not
    enough = [g for g in all_gpus() if g.memory_bytes >= demand and g.compute_capability >= generation]
    nearest = sorted(enough, key=lambda g: g.memory_bytes)[:TRIES]
    if nearest and nearest[0].name == measured.gpu.name and trial.fits:
        return nearest[0]
    return next((spec for spec, fits in zip(nearest, trials.fit(trial.candidate, nearest), strict=True) if fits), None)


#: Catalogue GPUs that are asked for the smallest that does.
TRIES = 2
