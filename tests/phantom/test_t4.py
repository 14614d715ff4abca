"""Peaks that a published script printed on a real Tesla T4 with torch 2.11.0+cu128.

Source: torch-preflight (MIT), tests/calibration/measured_peaks.json. The programs are re-created, not copied.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from child import Child

PROGRAM = Path(__file__).parent / "programs" / "t4_cases.py"
REAL = {  # allocated, reserved, parameters
    "gpt2": (2_705_153_536, 3_042_967_552, 124_439_808),
    "distilbert-base-uncased": (1_354_818_048, 1_501_560_832, 66_362_880),
    "resnet50": (1_119_203_840, 1_195_376_640, 25_557_032),
}


@pytest.mark.usefixtures("transformers")
def test_peaks_are_those_of_a_real_t4(child: Child, version: tuple[int, ...]) -> None:
    """Allocated and reserved are the T4's: to the byte with the torch it was measured with, else within 1 %."""
    ended = child.run_script(PROGRAM, gpu="t4")
    assert ended.code == 0, ended.stderr[-4000:]
    found = {case["model"]: case for case in map(json.loads, ended.stdout.splitlines())}
    assert set(found) == set(REAL)
    tolerance = 0 if version == (2, 11) else 0.01
    for name, (allocated, reserved, parameters) in REAL.items():
        assert found[name]["parameters"] == parameters
        assert found[name]["allocated_bytes"] == pytest.approx(allocated, rel=tolerance, abs=0), name
        assert found[name]["reserved_bytes"] == pytest.approx(reserved, rel=tolerance, abs=0), name
