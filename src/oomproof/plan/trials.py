"""Running candidates on the phantom: without limit first, and on the GPU's memory where that could still do.

What takes no more than the GPU has runs there as it does without limit, to the byte.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from oomproof.api import Job
from oomproof.bench import Bench, Done, Request
from oomproof.errors import OomproofError
from oomproof.gpus import GPUSpec
from oomproof.measure.assemble import Outcome, assemble
from oomproof.measure.measurement import Measurement
from oomproof.phantom import launch
from oomproof.plan.block_surveys import Survey
from oomproof.plan.candidate import Candidate, Trial
from oomproof.plan.cost import Ratio, relative_time
from oomproof.plan.facts import Facts
from oomproof.plan.injection import EXIT_REFUSED
from oomproof.plan.technique import environment, world_size
from oomproof.plan.work import Copy, Work

#: A candidate that takes so much longer than the script as it is hangs, or computes on the CPU what it should not.
PATIENCE = 20
LEAST_SECONDS = 120.0


#: Where a script ends before the step after the measured ones, in which work is counted, so many runs of fewer
#: measured steps are made for it: compiled code needs a step of its own before that.
RECOUNTS = 2


class Tag(NamedTuple):
    """Which run of which candidate an answer is of, and what that run is for."""

    candidate: Candidate
    purpose: Literal["demand", "work", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one candidate's runs showed."""

    trial: Trial
    facts: Facts | None = None
    work: Work | None = None
    blocks: Survey | None = None


class Trials:
    """Evaluates candidates of one job; a context manager, since the processes behind it stay.

    ``told`` is called with every trial as it comes.
    """

    def __init__(
        self,
        job: Job,
        *,
        executor: str = "local",
        workers: int | None = None,
        warm: bool = True,
        told: Callable[[Trial], None] | None = None,
    ) -> None:
        self._job = job
        self._bench = Bench(job.program, cwd=job.folder, env=job.env, executor=executor, workers=workers, warm=warm)
        self._told = told
        self._baseline: Work | None = None
        self._unknown: tuple[str, ...] = ()  # what is not counted of the script as it is
        self._seconds = 0.0
        self._world_folder = tempfile.TemporaryDirectory(prefix="oomproof-world-")

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bench.close()
        self._world_folder.cleanup()

    @property
    def workers(self) -> int:
        """How many runs there are at once."""
        return self._bench.workers

    def baseline(self) -> tuple[Trial, Facts]:
        """Run the script as it is and find out about it. Raises OomproofError where it does not run at all."""
        ran = next(self._run([Candidate(changes=())], survey=True))
        if ran.trial.verdict == "failed":
            raise OomproofError(
                f"the script does not run as it is, so there is nothing to plan for: {ran.trial.reason}"
            )
        if ran.facts is None:
            raise OomproofError("the script never imported torch; write the training command after --")
        self._baseline = ran.work
        if ran.work is not None:
            self._unknown = relative_time(ran.work, ran.work, self._job.settings.gpu).unknown
        trial = replace(ran.trial, time=Ratio(low=1.0, expected=1.0, high=1.0, unknown=self._unknown))
        if self._told is not None:
            self._told(trial)
        return trial, ran.facts

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[Trial]:
        """Run candidates and yield what each showed, as it comes."""
        for ran in self._run(candidates):
            if self._told is not None:
                self._told(ran.trial)
            yield ran.trial

    def fit(self, candidate: Candidate, specs: Sequence[GPUSpec]) -> list[bool]:
        """Return whether a candidate runs on the memory of each of these GPUs."""
        fits = dict.fromkeys(range(len(specs)), False)
        for place, spec in enumerate(specs):
            self._request(candidate, replace(self._job.settings, gpu=spec), place)
        for done in self._bench.results():
            if done.outcome is not None and isinstance(done.request.tag, int):
                ended = [f["ended"] for f in done.outcome.findings if f["used_gpu"]]
                fits[done.request.tag] = bool(ended) and all(e in ("steps-reached", "finished") for e in ended)
        return [fits[place] for place in range(len(specs))]

    def survey_blocks(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Trial, Survey | None]]:
        """Run candidates without limit and yield what each showed, with what its blocks took where that is known."""
        for ran in self._run(candidates, blocks=True):
            yield ran.trial, ran.blocks

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _run(self, candidates: Sequence[Candidate], *, survey: bool = False, blocks: bool = False) -> Iterator[Ran]:
        """Run each without limit; on the GPU's memory too where giving back the cache could make it fit."""
        first: dict[str, Ran] = {}
        for candidate in candidates:
            self._submit(Tag(candidate, "demand"), survey=survey, blocks=blocks)
        for done in self._bench.results():
            assert isinstance(done.request.tag, Tag)
            candidate, purpose = done.request.tag
            if purpose == "memory":
                yield self._on_own_memory(first.pop(candidate.key), done)
                continue
            if purpose == "demand":
                ran = self._judge(candidate, done)
            else:
                ran = self._with_work(first.pop(candidate.key), done)
            fewer = self._steps_before_the_last(ran, done.request.settings.steps)
            if fewer:
                first[candidate.key] = ran
                self._submit(Tag(candidate, "work"), steps=fewer)
            elif self._could_fit(ran.trial) and not blocks:
                first[candidate.key] = ran
                self._submit(Tag(candidate, "memory"))
            else:
                yield ran

    def _steps_before_the_last(self, ran: Ran, steps: int | None) -> int:
        """Return how many steps to measure so that one is left in which work can be counted; 0 for no such run."""
        measured = ran.trial.measurement
        if ran.work is not None or measured is None or ran.trial.verdict not in ("fits", "does-not-fit"):
            return 0
        fewer = min(steps or measured.steps, measured.steps) - 1
        return fewer if fewer >= measured.steps - RECOUNTS else 0

    def _could_fit(self, trial: Trial) -> bool:
        """Return whether a run that would take too much could still go on by giving back what is cached."""
        measured = trial.measurement
        if trial.verdict != "does-not-fit" or measured is None:
            return False
        needed = measured.demand.device_bytes - measured.demand.reserved_bytes + measured.demand.allocated_bytes
        return needed <= measured.gpu.memory_bytes

    def _submit(self, tag: Tag, *, survey: bool = False, blocks: bool = False, steps: int | None = None) -> None:
        settings = replace(
            self._job.settings,
            unlimited=tag.purpose != "memory",
            survey=survey,
            survey_blocks=blocks,
            steps=steps or self._job.settings.steps,
            meter=tag.purpose != "memory",
        )
        self._request(tag.candidate, settings, tag)

    def _request(self, candidate: Candidate, settings: launch.Settings, tag: Tag | int) -> None:
        settings = replace(
            settings,
            changes=tuple(change.to_json() for change in candidate.changes),
            preload=tuple(
                sorted({p for change in candidate.changes for p in change.technique.imports(change.options)})
            ),
        )
        size = world_size(candidate.changes) or self._job.world_size
        if size is not None:
            local = self._job.settings.gpu_count if self._job.world_size else size
            place = launch.World(size=size, rank=0, local_size=local, folder=Path(self._world_folder.name))
            settings = replace(settings, world=place, gpu_count=local)
        env = environment(candidate.changes, os.environ if self._job.env is None else self._job.env)
        limit = max(LEAST_SECONDS, PATIENCE * self._seconds) if self._seconds else None
        self._bench.submit(Request(settings=settings, tag=tag, env=env, timeout_seconds=limit))

    def _judge(self, candidate: Candidate, done: Done) -> Ran:
        """Return what a run without limit showed."""
        self._seconds = self._seconds or done.seconds
        outcome = done.outcome
        if outcome is None:
            return Ran(trial=_failed(candidate, done.error or "it left nothing"))
        refused = outcome.change_refused
        if refused is not None or outcome.exit_code == EXIT_REFUSED:
            return Ran(
                trial=Trial(candidate=candidate, verdict="cannot-apply", reason=refused or "a technique refused")
            )
        try:
            measured = assemble(self._job.words, self._job.settings.gpu, outcome, None, self._job.folder)
        except OomproofError as error:
            return Ran(trial=_failed(candidate, str(error)))
        if measured.verdict == "unknown" or measured.ended in ("raised", "exited") or measured.steps == 0:
            return Ran(trial=_failed(candidate, _why(measured, done), measured))
        if measured.demand.device_bytes > measured.gpu.memory_bytes:
            measured = replace(measured, verdict="does-not-fit")
        trial = Trial(
            candidate=candidate,
            verdict="fits" if measured.fits else "does-not-fit",
            measurement=measured,
            said=tuple(entry for record in outcome.changes for entry in record["said"]),
        )
        facts = next((c["facts"] for c in outcome.changes if c.get("facts")), None)
        blocks = next((c["blocks"] for c in outcome.changes if c.get("blocks")), None)
        ran = Ran(
            trial=trial,
            facts=Facts.from_json(facts) if facts else None,
            blocks=Survey.from_dict(blocks) if blocks else None,
        )
        return self._with_work(ran, done)

    def _with_work(self, ran: Ran, done: Done) -> Ran:
        """Return a run without limit with the work that it, or another of fewer measured steps, counted."""
        measured = ran.trial.measurement
        assert measured is not None
        if done.outcome is None:
            return ran
        work, reason = _work(done.outcome)
        if work is not None:
            work = with_paging(work, measured, max((f["managed_bytes"] for f in done.outcome.findings), default=0))
        return replace(ran, work=work, trial=replace(ran.trial, time=self._time(work, 0), time_reason=reason))

    def _on_own_memory(self, ran: Ran, done: Done) -> Ran:
        """Return what a run on the GPU's memory adds to one without limit: whether it fits, and how often it tried."""
        if done.outcome is None or not any(f["steps"] for f in done.outcome.findings):
            return ran
        demand = ran.trial.measurement
        assert demand is not None
        measured = assemble(self._job.words, self._job.settings.gpu, done.outcome, None, self._job.folder)
        if not measured.fits:
            return ran
        measured = replace(measured, demand=demand.demand)
        retries = -(-measured.allocator.retries // max(1, measured.steps))
        trial = replace(ran.trial, verdict="fits", measurement=measured, time=self._time(ran.work, retries))
        return replace(ran, trial=trial)

    def _time(self, work: Work | None, retries: int) -> Ratio | None:
        if work is None or self._baseline is None:
            return None
        ratio = relative_time(work, self._baseline, self._job.settings.gpu, retries=retries)
        return replace(ratio, unknown=tuple(what for what in ratio.unknown if what not in self._unknown))


def with_paging(work: Work, measured: Measurement, managed_bytes: int) -> Work:
    """Return the work with the pages that move each step where managed memory does not fit beside the rest.

    What the allocator reserved stays on the device; managed memory has the room that is left, and the rest of it goes
    to the host and back between two optimizer steps. The driver moves it by pages, so it counts as not pinned.
    """
    room = max(0, measured.gpu.memory_bytes - measured.demand.device_bytes)
    moved = managed_bytes - room
    if moved <= 0:
        return work
    pages = [
        Copy(direction=way, phase="optimizer", pinned=False, blocking=True, count=1, bytes=moved)
        for way in ("h2d", "d2h")
    ]
    return replace(work, copies=(*work.copies, *pages))


def _failed(candidate: Candidate, reason: str, measured: Measurement | None = None) -> Trial:
    return Trial(candidate=candidate, verdict="failed", reason=reason, measurement=measured)


def _why(measured: Measurement, done: Done) -> str:
    if measured.steps == 0 and measured.ended not in ("raised", "exited"):
        return "it made no optimizer step, so there is no training step to plan for"
    last = [line for line in done.output.splitlines() if line.strip()][-1:]
    return last[0].strip()[:300] if last else f"the script {measured.ended}"


def _work(outcome: Outcome) -> tuple[Work | None, str]:
    """Return what a run counted of a step, or why it has not."""
    records: list[Mapping[str, Any]] = [f["work"] for f in outcome.findings if f.get("work")]
    if not records:
        return None, next((f["no_work"] for f in outcome.findings if f.get("no_work")), "nothing was counted")
    return Work.from_json(records[0]), ""
