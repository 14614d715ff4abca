"""A profile read off a memory snapshot, beside the one that observing the same run gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from child import PYTHON
from test_profile import CHECKPOINTED, LM, PLAIN

import oomproof
from oomproof.capture import read_profile
from oomproof.errors import SnapshotError
from oomproof.measure.versions import numbers
from oomproof.snapshot import trace
from oomproof.snapshot.load import load
from oomproof.snapshot.profile import profile
from oomproof.triage.source import triage

SNAPSHOTS = Path(__file__).parents[3] / "shared" / "snapshots"


@pytest.mark.parametrize("code", [PLAIN, CHECKPOINTED], ids=["plain", "checkpointed"])
def test_stacks_tell_most_of_what_observing_tells(tmp_path: Path, code: str) -> None:
    """The peaks are equal to the byte; at least 85 % of the bytes get the category that the observer gave them."""
    (tmp_path / "train.py").write_text(LM + code)
    oomproof.run([PYTHON, str(tmp_path / "train.py")], output=tmp_path / "a.oomp", snapshot=True, gpu="a100-40gb")
    observed, read = read_profile(tmp_path / "a.oomp"), profile(load(tmp_path / "a.oomp"))
    assert observed is not None
    assert (read.allocated_bytes, read.reserved_bytes) == (observed.allocated_bytes, observed.reserved_bytes)
    assert [row.step for row in read.steps] == [row.step for row in observed.steps]
    categories = {block.address: block.category for block in observed.blocks}
    same = sum(b.size_bytes for b in read.blocks if categories.get(b.address) == b.category)
    assert same >= 0.85 * read.allocated_bytes


@pytest.mark.parametrize(
    ("name", "allocated", "steps"),
    [
        ("lm4_train_100", 695_675_904, 3), ("lm_medium_train_128", 7_026_606_592, 1),
        ("lm_2.7b_full_step_128", 55_079_000_576, 1), ("lm_xl_full_step_bf16_128", 68_630_923_776, None),
        ("lm_xl_forward_2048_expandable", 22_734_989_312, 1), ("lora_8bit_old_format", 5_914_094_592, 1),
        ("cnn_small", 110_110_720, None),
    ],
)  # fmt: skip
def test_recorded_snapshots_have_their_peaks(name: str, allocated: int, steps: int | None) -> None:
    """The peaks of snapshots from real GPUs, by blocks and by points of the timeline."""
    path = SNAPSHOTS / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshot {path.name}")
    found = profile(load(path))
    assert found.allocated_bytes == allocated
    assert sum(block.size_bytes for block in found.blocks) == allocated
    assert max(sum(point.category_bytes) for point in found.points) == allocated
    assert steps is None or len(found.steps) == steps


def test_an_out_of_memory_in_a_snapshot_is_judged(tmp_path: Path) -> None:
    """The request, what was free and allocated then, and the line that asked."""
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.cuda.memory._record_memory_history()\nMIB = 1 << 20\n"
        "def block(mib):\n    return torch.empty(mib * MIB, dtype=torch.uint8, device='cuda')\n"
        "large, small = [], []\nfor _ in range(4):\n    large.append(block(300))\n    small.append(block(15))\n"
        "del large\nkept = block(250)\n"
        "try:\n    block(1800)\nexcept torch.OutOfMemoryError:\n"
        "    torch.cuda.memory._dump_snapshot('oom.pickle')\n"
    )
    options = {"memory": "2GiB", "gpu": "t4", "cwd": tmp_path}
    oomproof.run([PYTHON, str(tmp_path / "train.py")], **options)
    found = triage(str(tmp_path / "oom.pickle"))
    assert found.kind == "device-full"
    assert found.figures.requested_bytes == 1800 << 20
    assert found.ooms == 1
    assert "train.py:" in found.evidence[-1].text


TRACED = """
from torch.profiler import ProfilerActivity, profile
model = LM().cuda()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
    train(model)
profiler.export_chrome_trace("trace.json")
"""


def test_a_profiler_trace_tells_the_peak(tmp_path: Path) -> None:
    """Modules, lines and steps come from the spans around memory events; what was there before is one block."""
    (tmp_path / "train.py").write_text(LM + TRACED)
    command = [PYTHON, str(tmp_path / "train.py")]
    found = oomproof.run(command, output=tmp_path / "a.oomp", steps=None, gpu="a100-40gb", cwd=tmp_path)
    if numbers(found.torch.version) < (2, 9):
        pytest.skip(f"torch {found.torch.version} writes a trace with stacks that is not JSON")
    observed, read = read_profile(tmp_path / "a.oomp"), trace.profile(tmp_path / "trace.json")
    assert observed is not None
    assert (read.allocated_bytes, read.reserved_bytes) == (observed.allocated_bytes, observed.reserved_bytes)
    assert [row.step for row in read.steps] == [1, 2, 3]
    parameters = sum(b.size_bytes for b in observed.blocks if b.category == "parameter")
    assert next(b.size_bytes for b in read.blocks if b.name == "allocated before the trace") == parameters
    assert any(b.module and b.module.startswith("Linear_") and "train.py:" in b.stack[0] for b in read.blocks)


@pytest.mark.parametrize(
    "text", ["", "{", '{"traceEvents": 3}', '{"traceEvents": []}', "\x1f\x8b", '{"traceEvents": [{}]}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """One message with the cure."""
    (tmp_path / "trace.json").write_text(text, encoding="latin-1")
    with pytest.raises(SnapshotError, match=r"export it again|profile_memory"):
        trace.profile(tmp_path / "trace.json")
