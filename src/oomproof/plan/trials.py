"""Running candidates on the phantom: on the GPU's memory first and, where that is too little, without limit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from oomproof.api import Job
from oomproof.bench import Bench, Done, Request
from oomproof.errors import OomproofError
from oomproof.measure.assemble import Outcome, assemble
from oomproof.measure.measurement import Measurement
from oomproof.phantom import launch
from oomproof.plan.candidate import Candidate, Trial, Verdict
from oomproof.plan.cost import Ratio, relative_time
from oomproof.plan.facts import Facts
from oomproof.plan.injection import EXIT_REFUSED
from oomproof.plan.work import Work

#: A candidate that takes so much longer than the script as it is hangs, or computes on the CPU what it should not.
PATIENCE = 20
LEAST_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one candidate's runs left, before it is judged."""

    trial: Trial
    facts: Facts | None
    work: Work | None
    blocks: Any = None  # a survey of its blocks, where one was asked for


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
        self._seconds = 0.0
        self._world_folder = tempfile.TemporaryDirectory(prefix="oomproof-world-")

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bench.close()
        self._world_folder.cleanup()

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
        trial = replace(ran.trial, time=Ratio(low=1.0, expected=1.0, high=1.0))
        if self._told is not None:
            self._told(trial)
        return trial, ran.facts

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[Trial]:
        """Run candidates and yield what each showed, as it comes."""
        for ran in self._run(candidates):
            if self._told is not None:
                self._told(ran.trial)
            yield ran.trial

    def survey_blocks(self, candidates: Sequence[Candidate]) -> Iterator[Ran]:
        """Run candidates without limit and yield what each showed, with what its blocks took."""
        yield from self._run(candidates, blocks=True)

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _run(self, candidates: Sequence[Candidate], *, survey: bool = False, blocks: bool = False) -> Iterator[Ran]:
        limited: dict[str, Done] = {}
        for candidate in candidates:
            self._submit(candidate, unlimited=blocks, survey=survey, blocks=blocks)
        for done in self._bench.results():
            candidate, unlimited = done.request.tag
            first = limited.get(candidate.key)
            if done.outcome is not None and done.outcome.troubled and not unlimited:
                limited[candidate.key] = done
                self._submit(candidate, unlimited=True, survey=survey, blocks=blocks)
                continue
            yield self._judge(candidate, first or done, done if first else None)

    def _submit(self, candidate: Candidate, *, unlimited: bool, survey: bool, blocks: bool) -> None:
        settings = replace(
            self._job.settings,
            changes=tuple(change.to_json() for change in candidate.changes),
            unlimited=unlimited,
            survey=survey,
            meter=True,
        )
        size = world_size(candidate) or self._job.world_size
        if size is not None:
            local = min(size, self._job.settings.gpu_count if self._job.world_size else 8)
            place = launch.World(size=size, rank=0, local_size=local, folder=Path(self._world_folder.name))
            settings = replace(settings, world=place, gpu_count=local)
        env: dict[str, str] = {}
        for change in candidate.changes:
            env.update(change.technique.environment(change.options, {**(self._job.env or {}), **env}))
        limit = max(LEAST_SECONDS, PATIENCE * self._seconds) if self._seconds else None
        self._bench.submit(Request(settings=settings, tag=(candidate, unlimited), env=env, timeout_seconds=limit))

    def _judge(self, candidate: Candidate, done: Done, again: Done | None) -> Ran:
        self._seconds = self._seconds or done.seconds
        outcome = done.outcome
        if outcome is None or (again is not None and again.outcome is None):
            reason = done.error if outcome is None else again.error if again else None
            return Ran(trial=_failed(candidate, reason or "it left nothing"), facts=None, work=None)
        refused = next((c["refused"] for c in outcome.changes if c["refused"]), None)
        if refused is not None or outcome.exit_code == EXIT_REFUSED:
            trial = Trial(candidate=candidate, verdict="cannot-apply", reason=refused or "a technique refused")
            return Ran(trial=trial, facts=None, work=None)
        try:
            measured = assemble(
                self._job.words, self._job.settings.gpu, outcome, again.outcome if again else None, self._job.folder
            )
        except OomproofError as error:
            return Ran(trial=_failed(candidate, str(error)), facts=None, work=None)
        if measured.verdict == "unknown" or measured.ended in ("raised", "exited") or measured.steps == 0:
            return Ran(trial=_failed(candidate, _why(measured, done), measured), facts=None, work=None)
        shown = again.outcome if again is not None and again.outcome is not None else outcome
        work, reason = _work(shown)
        time = None
        if work is not None and self._baseline is not None:
            retries = measured.allocator.retries if measured.fits else 0
            time = relative_time(
                work, self._baseline, self._job.settings.gpu, retries=-(-retries // max(1, measured.steps))
            )
        trial = Trial(
            candidate=candidate,
            verdict=_verdict(measured),
            measurement=measured,
            time=time,
            time_reason=reason,
            said=tuple(entry for record in outcome.changes for entry in record["said"]),
        )
        facts = next((c["facts"] for c in shown.changes if c.get("facts")), None)
        return Ran(
            trial=trial,
            facts=Facts.from_json(facts) if facts else None,
            work=work,
            blocks=next((f.get("blocks") for f in shown.findings if f.get("blocks")), None),
        )


def world_size(candidate: Candidate) -> int | None:
    """Return the ranks that a candidate's changes spread the script over, None for one process as it is."""
    sizes = [change.technique.world_size(change.options) for change in candidate.changes]
    return max((size for size in sizes if size is not None), default=None)


def _verdict(measured: Measurement) -> Verdict:
    return "fits" if measured.fits else "does-not-fit"


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
