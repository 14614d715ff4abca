"""plan.toml: a plan that people can read and ``oomproof apply`` applies. ``oomproof.plan/1``."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

import oomproof
from oomproof.errors import CaptureError, UsageError
from oomproof.gpus import GPUSpec
from oomproof.gpus.toml import parse_toml
from oomproof.plan.candidate import Trial
from oomproof.plan.facts import Facts
from oomproof.plan.technique import Change, techniques

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
        """Read a plan. Raises CaptureError for what is none, or names techniques that this version does not know."""
        try:
            table = parse_toml(text)
        except ValueError as error:
            raise CaptureError(
                f"{where} is no plan: it is not TOML ({error}); write one with `oomproof plan -o`"
            ) from None
        if table.get("schema") != SCHEMA:
            raise CaptureError(f"{where} has schema {table.get('schema')!r}, only {SCHEMA!r} can be read; plan again")
        try:
            changes = tuple(Change(c["technique"], c.get("options", {})) for c in table["changes"])
            made, proved, time = table["made_for"], table["proved"], table.get("relative_time")
            plan = cls(
                changes=changes,
                command=tuple(made["command"]),
                script_sha256=made["script_sha256"],
                gpu=made["gpu"],
                gpu_memory_bytes=made["gpu_memory_bytes"],
                capability=(made["compute_capability"][0], made["compute_capability"][1]),
                gpus=made["gpus"],
                torch=made["torch"],
                packages=made["packages"],
                fidelity=table["fidelity"],
                relative_time=(time["low"], time["expected"], time["high"]) if time else None,
                device_bytes=proved["peak_device_bytes"],
                allocated_bytes=proved["peak_allocated_bytes"],
                reserved_bytes=proved["peak_reserved_bytes"],
                steps=proved["steps"],
                created=table["created"],
                tool=table["oomproof"],
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise CaptureError(f"{where} is damaged: {error!s} is missing or of another kind; plan again") from None
        unknown = [c.name for c in changes if c.name not in techniques()]
        if unknown:
            raise CaptureError(
                f"{where} has techniques that oomproof {oomproof.__version__} does not know: {', '.join(unknown)}; "
                f"it was written by {plan.tool}: install that version or plan again"
            )
        return plan


def _change_table(change: Change) -> dict[str, Any]:
    technique = change.technique
    return {
        "technique": change.name,
        "what": technique.title,
        "fidelity": technique.fidelity_of(change.options),
        **({"options": dict(change.options)} if change.options else {}),
    }


def read_plan(path: Path) -> Plan:
    """Return the plan in a file. Raises UsageError where there is no file, CaptureError where it is no plan."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CaptureError(f"{path} is too large for a plan")
        return Plan.from_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; write a plan with `oomproof plan -o {path}`") from None
    except UnicodeDecodeError:
        raise CaptureError(f"{path} is no plan: it is not text; write one with `oomproof plan -o FILE`") from None


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan, whole or not at all. Raises UsageError where it cannot be written."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(plan.to_toml(), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
