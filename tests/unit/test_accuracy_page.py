"""The accuracy page shows what its data file holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RENDER = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "render.py"


def test_the_page_is_rendered_from_its_data() -> None:
    """Nobody types a figure into docs/accuracy.md: rendering it again changes nothing."""
    done = subprocess.run([sys.executable, str(RENDER), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
