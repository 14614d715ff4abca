"""The trials of a search on disk, one JSON line each, so that a search that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oomproof.api import Job
from oomproof.errors import CaptureError, UsageError
from oomproof.gpus import GPUSpec
from oomproof.measure.measurement import Measurement
from oomproof.plan.candidate import Candidate, Trial
from oomproof.plan.cost import Ratio
from oomproof.plan.facts import Facts
from oomproof.plan.search import Evaluate

SCHEMA = "oomproof.trials/1"


class State:
    """A file of trials; its first line says what they are of."""

    def __init__(self, path: Path, known: dict[str, dict[str, Any]]) -> None:
        self._path = path
        self._known = known

    @classmethod
    def open(cls, path: Path, job: Job, facts: Facts, gpu: GPUSpec) -> State:
        """Read the file, or begin it. Raises UsageError where it is of another search, CaptureError where damaged."""
        about = {
            "schema": SCHEMA,
            "command": list(job.words),
            "script": facts.script,
            "torch": facts.torch,
            "gpu": gpu.key,
            "memory_bytes": gpu.memory_bytes,
            "steps": job.settings.steps,
        }
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if not lines:
                path.write_text(json.dumps(about) + "\n", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot use {path} to resume: {error}; name another file") from None
        known = {}
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
            except ValueError:
                if number == len(lines) - 1 and number > 0:  # the search was killed while it wrote
                    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
                    break
                raise CaptureError(f"{path}, line {number + 1} is damaged; remove the file to begin anew") from None
            if number == 0:
                other = [key for key, value in about.items() if record.get(key) != value]
                if other:
                    raise UsageError(f"{path} is of another search: {', '.join(other)} differ; name another file")
            else:
                known[record["key"]] = record
        return cls(path, known)

    def around(self, evaluate: Evaluate, told: Callable[[Trial], None] | None) -> Evaluate:
        """Return an evaluation that runs only what the file does not know, and writes what it ran."""

        def resumed(candidates: Sequence[Candidate]) -> Iterator[Trial]:
            fresh = []
            for candidate in candidates:
                record = self._known.get(candidate.key)
                if record is None:
                    fresh.append(candidate)
                    continue
                trial = _read(record, candidate)
                if told is not None:
                    told(trial)
                yield trial
            for trial in evaluate(fresh):
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(_record(trial)) + "\n")
                yield trial

        return resumed


def _record(trial: Trial) -> dict[str, Any]:
    return {
        "key": trial.candidate.key,
        "verdict": trial.verdict,
        "reason": trial.reason,
        "measurement": trial.measurement.to_json() if trial.measurement is not None else None,
        "time": asdict(trial.time) if trial.time is not None else None,
        "time_reason": trial.time_reason,
        "said": [dict(entry) for entry in trial.said],
    }


def _read(record: dict[str, Any], candidate: Candidate) -> Trial:
    measured, time = record["measurement"], record["time"]
    return Trial(
        candidate=candidate,
        verdict=record["verdict"],
        reason=record["reason"],
        measurement=Measurement.from_json(measured) if measured is not None else None,
        time=Ratio(**{**time, "unknown": tuple(time["unknown"])}) if time is not None else None,
        time_reason=record["time_reason"],
        said=tuple(record["said"]),
    )
