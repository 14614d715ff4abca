"""The JSON that ``--json`` prints."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from measurement_samples import fitting, full, not_fitting, untouched

from oomproof.measure.measurement import Measurement
from oomproof.report.json_output import to_json_text


@pytest.mark.parametrize("measurement", [fitting(), not_fitting(), untouched(), full()])
def test_nothing_is_lost(measurement: Measurement) -> None:
    """Reading the text back gives the same Measurement, and writing that the same text."""
    text = to_json_text(measurement)
    again = Measurement.from_json(json.loads(text))
    assert again == measurement
    assert to_json_text(again) == text


def test_form() -> None:
    """Keys stand in the schema's order, indented by two; the text is ASCII and ends in one newline."""
    text = to_json_text(full())
    assert text.startswith('{\n  "schema": "oomproof.measurement/1",\n  "created": ')
    assert list(json.loads(text)) == [field.name for field in dataclasses.fields(Measurement)]
    assert text.isascii()
    assert text.endswith("}\n")


def test_a_file_name_that_is_no_unicode_survives() -> None:
    """A name that Python holds with surrogates (bytes that are no UTF-8) is written and read back."""
    measurement = fitting(command=("python", b"\xff.py".decode("utf-8", "surrogateescape")))
    text = to_json_text(measurement).encode("ascii").decode("ascii")
    assert Measurement.from_json(json.loads(text)) == measurement


def test_what_json_cannot_hold_is_refused() -> None:
    """NaN is an error where it is written, not where the file is read."""
    bad = dataclasses.replace(fitting().per_step[0], seconds=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        to_json_text(fitting(per_step=(bad,)))


@pytest.mark.parametrize("module", ["oomproof.capture", "oomproof.measure.measurement", "oomproof.report.json_output"])
def test_reading_and_writing_need_neither_torch_nor_rich(module: str) -> None:
    """Whoever only reads a measurement does not wait for torch or rich."""
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'rich'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
