"""The Measurement's JSON: lossless, and strict about what it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from measurement_samples import fitting, full, not_fitting, untouched

from oomproof.errors import CaptureError
from oomproof.measure.measurement import Measurement


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return a whole measurement as JSON with ``value`` at ``path``, or nothing there when it is ``...``."""
    data: dict[str, Any] = full().to_json()
    *outer, last = path.split(".")
    inside: Any = data
    for key in outer:
        inside = inside[int(key)] if key.isdigit() else inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return data


@pytest.mark.parametrize("measurement", [fitting(), not_fitting(), untouched(), full()])
def test_json_is_lossless(measurement: Measurement) -> None:
    """``from_json`` undoes ``to_json``, which gives nothing but what JSON itself gives back."""
    data = measurement.to_json()
    assert json.loads(json.dumps(data)) == data
    assert Measurement.from_json(data) == measurement


@pytest.mark.parametrize("verdict", ["fits", "does-not-fit", "unknown"])
def test_fits_is_the_verdict(verdict: Any) -> None:
    """``fits`` is true for one verdict only; what is unknown does not fit."""
    assert fitting(verdict=verdict).fits is (verdict == "fits")


def test_the_sample_breakdown_adds_up() -> None:
    """``total_bytes`` is the sum of every category."""
    measurement = fitting()
    assert measurement.breakdown is not None
    assert measurement.breakdown.total_bytes() == measurement.peak.allocated_bytes


def test_keys_of_later_versions_are_ignored() -> None:
    """A key that this version does not know changes nothing, at any depth."""
    data = changed("peak.moon_phase", "full")
    data["weather"] = {"rain": True}
    assert Measurement.from_json(data) == full()


def test_keys_with_defaults_may_be_missing() -> None:
    """What has a default may be left out."""
    data = fitting().to_json()
    for key in ("value_reads", "oom", "ranks", "notes", "calls"):
        del data[key]
    assert Measurement.from_json(data) == fitting()


def test_a_whole_number_is_a_float_too() -> None:
    """JSON writers of other languages write 1.0 as 1."""
    data = changed("per_step.0.seconds", 1)
    assert type(Measurement.from_json(data).per_step[0].seconds) is float


@pytest.mark.parametrize("data", [None, [], "x", 1, {}, {"schema": 1}, {"schema": None}])
def test_what_is_no_measurement(data: object) -> None:
    """Data without a schema is named as such, with the cure."""
    with pytest.raises(CaptureError, match=r"no schema; write one with `oomproof run -o FILE`"):
        Measurement.from_json(data)


@pytest.mark.parametrize("schema", ["oomproof.measurement/2", "oomproof.plan/1", "", "x" * 10**6])
def test_other_schemas(schema: str) -> None:
    """Another schema is refused before anything else is looked at, in one short message."""
    with pytest.raises(CaptureError, match=r"cannot be read.*use the oomproof that wrote the file") as caught:
        Measurement.from_json({"schema": schema})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("created", ..., "measurement.created is missing"),
        ("created", None, "measurement.created should be str, not NoneType"),
        ("command", "train.py", "measurement.command should be a list, not str"),
        ("command", [1], r"measurement.command\[0\] should be str, not int"),
        ("cwd_git", [], "measurement.cwd_git should be an object, not list"),
        ("cwd_git.dirty", 0, "measurement.cwd_git.dirty should be bool, not int"),
        ("gpu", None, "measurement.gpu should be an object, not NoneType"),
        ("gpu.memory_bytes", ..., "measurement.gpu.memory_bytes is missing"),
        ("gpu.memory_bytes", -1, "measurement.gpu.memory_bytes is below zero"),
        ("gpu.memory_bytes", 2**63, "measurement.gpu.memory_bytes is out of range"),
        ("gpu.memory_bytes", 1.0, "measurement.gpu.memory_bytes should be int, not float"),
        ("gpu.memory_bytes", True, "measurement.gpu.memory_bytes should be int, not bool"),
        ("gpu.memory_bytes", "1", "measurement.gpu.memory_bytes should be int, not str"),
        ("steps", None, "measurement.steps should be int, not NoneType"),
        ("steps", 10**400, "measurement.steps is out of range"),
        ("verdict", "maybe", "measurement.verdict is 'maybe', not one of fits, does-not-fit, unknown"),
        ("verdict", ["fits"], "measurement.verdict is .*, not one of fits"),
        ("verdict", "x" * 10**6, "measurement.verdict is 'xxx"),
        ("peak.phase", "lunch", "measurement.peak.phase is 'lunch', not one of init, forward"),
        ("peak.step", "1", "measurement.peak.step should be int, not str"),
        ("per_step", {}, "measurement.per_step should be a list, not dict"),
        ("per_step.0.seconds", "1", r"measurement.per_step\[0\].seconds should be float, not str"),
        ("per_step.0.seconds", float("nan"), r"measurement.per_step\[0\].seconds is nan"),
        ("per_step.0.seconds", float("inf"), r"measurement.per_step\[0\].seconds is inf"),
        ("per_step.0.seconds", 10**400, r"measurement.per_step\[0\].seconds is out of range"),
        ("oom.caught", None, "measurement.oom.caught should be bool, not NoneType"),
        ("ranks.1.peak.device_bytes", -1, r"measurement.ranks\[1\].peak.device_bytes is below zero"),
        ("notes", [["a"]], r"measurement.notes\[0\] should be str, not list"),
    ],
)
def test_malformed_values(path: str, value: Any, message: str) -> None:
    """Each malformed value is named by its place, in one short message that says the file is damaged."""
    with pytest.raises(CaptureError, match=f"^{message}.*; the file is damaged$") as caught:
        Measurement.from_json(changed(path, value))
    assert len(str(caught.value)) < 200
