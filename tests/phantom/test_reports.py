"""The reports that explain memory, made of real runs: they name the lines that are at fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from test_profile import LEAK, LENGTHS, PLAIN, line_of, profiled

from oomproof.capture import read_profile


def oomproof(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [sys.executable, "-m", "oomproof", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_a_leak_is_named_and_its_cure_shows_in_the_difference(tmp_path: Path) -> None:
    """``steps`` names the line of a list of losses; ``diff`` sees the peak grow by it, and shrink without it."""
    found, _ = profiled(tmp_path, LEAK)
    (tmp_path / "a.oomp").rename(tmp_path / "leaking.oomp")
    leaking = json.loads(oomproof("steps", "leaking.oomp", "--json", folder=tmp_path).stdout)
    assert leaking["states"] == ["leaks"]
    assert any(row["stack"][0].startswith(line_of(tmp_path, "loss = ")) for row in leaking["leaks"])
    grown = leaking["steps"][-1]["end_allocated_bytes"] - leaking["steps"][-2]["end_allocated_bytes"]
    assert (
        abs(leaking["leak_bytes_per_step"] - grown) <= 0.05 * grown
    )  # live blocks have their true sizes, freed ones those asked for
    mended, _ = profiled(tmp_path, LEAK.replace("losses.append(loss)", "losses.append(float(loss))"))
    assert json.loads(oomproof("steps", "a.oomp", "--json", folder=tmp_path).stdout)["states"] == ["steady"]
    change = found.peak.allocated_bytes - mended.peak.allocated_bytes
    assert change > 0
    assert oomproof("diff", "leaking.oomp", "a.oomp", folder=tmp_path).returncode == 0
    worse = oomproof("diff", "a.oomp", "leaking.oomp", "--json", folder=tmp_path)
    assert worse.returncode == 2
    assert json.loads(worse.stdout)["allocated"]["change_bytes"] == change


def test_lengths_that_vary_are_told(tmp_path: Path) -> None:
    """A run whose lengths vary is said to, and that its cache grows."""
    profiled(tmp_path, LENGTHS)
    found = json.loads(oomproof("steps", "a.oomp", "--json", folder=tmp_path).stdout)
    assert found["states"] == ["fragments", "varies"]
    assert found["reserved_growth"][0]["stack"]


def test_sums_of_a_real_run(tmp_path: Path) -> None:
    """Tree, table and page of a real run add up to what PyTorch's own counter had."""
    measured, _ = profiled(tmp_path, PLAIN)
    profile = read_profile(tmp_path / "a.oomp")
    assert profile is not None
    tree = json.loads(oomproof("tree", "a.oomp", "--json", folder=tmp_path).stdout)
    assert tree["size_bytes"] == measured.peak.allocated_bytes
    layers = next(child for child in tree["children"] if child["name"] == "layers")
    assert [child["name"] for child in sorted(layers["children"], key=lambda c: c["name"])] == ["0", "1", "2", "3"]
    table = json.loads(oomproof("table", "a.oomp", "--json", folder=tmp_path).stdout)
    total = sum(block["size_bytes"] for block in table["blocks"]) + table["rounding_bytes"]
    assert total == measured.peak.allocated_bytes
    assert oomproof("report", "a.oomp", "-o", "a.html", folder=tmp_path).returncode == 0
    assert (tmp_path / "a.html").stat().st_size < 8_000_000


def test_a_snapshot_of_pytorch_is_read(tmp_path: Path) -> None:
    """What torch.cuda.memory._dump_snapshot wrote is shown by stack."""
    code = "torch.cuda.memory._record_memory_history()\n" + PLAIN + 'torch.cuda.memory._dump_snapshot("s.pickle")\n'
    profiled(tmp_path, code)
    tree = json.loads(oomproof("tree", "s.pickle", "--json", folder=tmp_path).stdout)
    assert tree["by"] == "stack"
    assert tree["size_bytes"] > 0
    shown = oomproof("timeline", "s.pickle", folder=tmp_path)
    assert shown.returncode == 0
    assert "Next: " in shown.stdout
