"""plan.toml: a plan that people can read and ``oomproof apply`` applies. ``oomproof.plan/1``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

import oomproof
from oomproof.errors import PlanError, UsageError
from oomproof.gpus import GPUSpec
from oomproof.gpus.toml import parse_toml
from oomproof.plan.candidate import Trial
from oomproof.plan.facts import Facts
from oomproof.plan.technique import Change, conflict, techniques

SCHEMA = "oomproof.plan/1"
MOST_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An ordered set of changes, the measurement that proved it, and what it was made for."""

    changes: tuple[Change, ...]
    command: tuple[str, ...]
    script_sha256: str  # "" where the command is no Python script
    gpu: str
    gpu_memory_bytes: int
    capability: tuple[int, int]
    gpus: int  # processes that it takes
    torch: str
    packages: Mapping[str, str]  # that its changes rest on
    fidelity: str
    relative_time: tuple[float, float, float] | None  # low, expected, high
    device_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    steps: int
    created: str
    tool: str

    @classmethod
    def of(cls, trial: Trial, facts: Facts, gpu: GPUSpec, key: str, gpus: int) -> Plan:
        """Build the plan that a trial proved. ``key`` is the GPU's name in the catalogue."""
        measured = trial.measurement
        assert measured is not None
        needed = {need for change in trial.candidate.changes for need in change.technique.needs}
        time = trial.time
        return cls(
            changes=trial.candidate.changes,
            command=measured.command,
            script_sha256=facts.script,
            gpu=key,
            gpu_memory_bytes=gpu.memory_bytes,
            capability=gpu.compute_capability,
            gpus=gpus,
            torch=measured.torch.version,
            packages={name: version for name, version in facts.packages.items() if name.replace("-", "_") in needed},
            fidelity=trial.candidate.fidelity,
            relative_time=(time.low, time.expected, time.high) if time else None,
            device_bytes=measured.peak.device_bytes,
            allocated_bytes=measured.peak.allocated_bytes,
            reserved_bytes=measured.peak.reserved_bytes,
            steps=measured.steps,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            tool=oomproof.__version__,
        )

    def to_toml(self) -> str:
        """Return the file's text."""
        time = self.relative_time
        table: dict[str, Any] = {
            "schema": SCHEMA,
            "created": self.created,
            "oomproof": self.tool,
            "fidelity": self.fidelity,
            "changes": [_change_table(change) for change in self.changes],
            "made_for": {
                "command": list(self.command),
                "script_sha256": self.script_sha256,
                "gpu": self.gpu,
                "gpu_memory_bytes": self.gpu_memory_bytes,
                "compute_capability": list(self.capability),
                "gpus": self.gpus,
                "torch": self.torch,
                "packages": dict(self.packages),
            },
            "proved": {
                "peak_device_bytes": self.device_bytes,
                "peak_allocated_bytes": self.allocated_bytes,
                "peak_reserved_bytes": self.reserved_bytes,
                "steps": self.steps,
            },
        }
        if time is not None:
            table["relative_time"] = dict(zip(("low", "expected", "high"), time, strict=True))
        head = (
            "# A plan of oomproof: what to change so that the training fits. Apply it with\n"
            "#     oomproof apply THIS_FILE -- COMMAND\n"
            "# or rehearse it, without a GPU, with --phantom GPU. relative_time compares a step with one of the\n"
            "# script as it is.\n\n"
        )
        return head + tomli_w.dumps(table)

    @classmethod
    def from_toml(cls, text: str, where: str) -> Plan:
        """Read a plan. Raises PlanError for what is none or damaged, or names techniques that are not known."""
        try:
            table = parse_toml(text)
        except ValueError as error:
            raise PlanError(
                f"{where} is no plan: it is not TOML ({error}); write one with `oomproof plan -o`"
            ) from None
        if table.get("schema") != SCHEMA:
            raise PlanError(f"{where} has schema {table.get('schema')!r}, only {SCHEMA!r} can be read; plan again")
        of = _entry
        try:
            changes = tuple(
                Change(of(c, "technique", str), dict(of(c, "options", dict)) if "options" in c else {})
                for c in of(table, "changes", list)
            )
            made, proved = of(table, "made_for", dict), of(table, "proved", dict)
            time = of(table, "relative_time", dict) if "relative_time" in table else None
            plan = cls(
                changes=changes,
                command=tuple(map(str, of(made, "command", list))),
                script_sha256=of(made, "script_sha256", str),
                gpu=of(made, "gpu", str),
                gpu_memory_bytes=of(made, "gpu_memory_bytes", int),
                capability=_pair(of(made, "compute_capability", list)),
                gpus=of(made, "gpus", int),
                torch=of(made, "torch", str),
                packages=of(made, "packages", dict),
                fidelity=of(table, "fidelity", str),
                relative_time=_ratio(time) if time is not None else None,
                device_bytes=of(proved, "peak_device_bytes", int),
                allocated_bytes=of(proved, "peak_allocated_bytes", int),
                reserved_bytes=of(proved, "peak_reserved_bytes", int),
                steps=of(proved, "steps", int),
                created=of(table, "created", str),
                tool=of(table, "oomproof", str),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{where} is damaged: {error}; plan again") from None
        unknown = [c.name for c in changes if c.name not in techniques()]
        if unknown:
            raise PlanError(
                f"{where} has techniques that oomproof {oomproof.__version__} does not know: {', '.join(unknown)}; "
                + _cure(plan.tool)
            )
        _check_options(changes, where)
        against = conflict(changes)
        if against is not None:
            raise PlanError(f"{where} cannot be applied: {against}; take one of them out, or plan again")
        return plan


def _cure(tool: str) -> str:
    """Return what to do about a plan with techniques that are not known."""
    if tool == oomproof.__version__:
        return "correct the name, which docs/techniques.md lists, or plan again"
    return f"it was written by oomproof {tool}: install that version or plan again"


def _check_options(changes: Sequence[Change], where: str) -> None:
    """Have each technique read its options. Raises PlanError where one is missing or of another kind."""
    for change in changes:
        technique = change.technique
        wrong = technique.wrong(change.options)
        if wrong is not None:
            raise PlanError(f"{where} is damaged: {wrong}; correct it or plan again")
        try:
            technique.shown(change.options)
            technique.fidelity_of(change.options)
            technique.world_size(change.options)
            technique.environment(change.options, {})
            technique.imports(change.options)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"{where} is damaged: the options of {change.name} cannot be read "
                f"({type(error).__name__}: {error}); plan again"
            ) from None


Kind = TypeVar("Kind")


def _entry(table: Any, key: str, kind: type[Kind]) -> Kind:
    """Return an entry of a table. Raises TypeError where there is none of that kind."""
    if not isinstance(table, dict) or key not in table:
        raise TypeError(f"{key} is missing")
    value = table[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{key} is {value!r}, which is not what stands there")
    return value


def _ratio(table: dict[str, Any]) -> tuple[float, float, float]:
    low, expected, high = (
        float(_entry(table, key, float if isinstance(table.get(key), float) else int))
        for key in ("low", "expected", "high")
    )
    return low, expected, high


def _pair(numbers: list[Any]) -> tuple[int, int]:
    if len(numbers) != 2 or not all(type(n) is int for n in numbers):
        raise TypeError(f"compute_capability is {numbers!r}, which are not two numbers")
    return numbers[0], numbers[1]


def _change_table(change: Change) -> dict[str, Any]:
    technique = change.technique
    return {
        "technique": change.name,
        "what": technique.title,
        "fidelity": technique.fidelity_of(change.options),
        **({"options": dict(change.options)} if change.options else {}),
    }


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in a file. Raises UsageError where there is no file, PlanError where it is no plan."""
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"{path} is too large for a plan")
        return Plan.from_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; write a plan with `oomproof plan -o {path}`") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is no plan: it is not text; write one with `oomproof plan -o FILE`") from None


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write a plan, whole or not at all. Raises UsageError where it cannot be written."""
    path = Path(path)
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(plan.to_toml(), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
