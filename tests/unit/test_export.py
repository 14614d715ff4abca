"""Files for other viewers: their form, their sums, and nothing unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from profile_samples import every, measured, training, written

from oomproof.capture import write_capture
from oomproof.errors import CaptureError, UsageError
from oomproof.measure.profile import Profile
from oomproof.report.curve import allocated
from oomproof.report.export.files import export

SAMPLES = dict(every())


@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_speedscope(tmp_path: Path, profile: Profile) -> None:
    """Each profile's weights are bytes that add up to what is allocated, and its samples name frames that exist."""
    export(written(tmp_path / "a.oomp", profile), speedscope=tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    for item in data["profiles"]:
        assert (item["type"], item["unit"]) == ("sampled", "bytes")
        assert len(item["samples"]) == len(item["weights"])
        assert sum(item["weights"]) == item["endValue"] == profile.allocated_bytes
        assert {frame for sample in item["samples"] for frame in sample} <= set(range(len(data["shared"]["frames"])))
    if profile.source == "run" and profile.blocks:
        assert [item["name"] for item in data["profiles"]] == ["the peak by stack", "the peak by module"]


def test_speedscope_frames_have_their_file_and_line(tmp_path: Path) -> None:
    """A frame opens at its line; the outermost stands first."""
    export(written(tmp_path / "a.oomp"), speedscope=tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    frames = data["shared"]["frames"]
    assert frames[data["profiles"][0]["samples"][0][0]] == {
        "name": "train.py:40 <module>", "file": "train.py", "line": 40,
    }  # fmt: skip


@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_perfetto(tmp_path: Path, profile: Profile) -> None:
    """Each point is a counter of each kind; the categories add up to what is allocated, and slices lie within."""
    export(written(tmp_path / "a.oomp", profile), perfetto=tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [e["args"]["bytes"] for e in counters if e["name"] == "allocated"] == list(map(allocated, profile.points))
    assert [e["args"]["bytes"] for e in counters if e["name"] == "reserved"] == [
        point.reserved_bytes for point in profile.points
    ]
    assert [sum(e["args"].values()) for e in counters if e["name"] == "category"] == list(
        map(allocated, profile.points)
    )
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    steps = [event["name"] for event in slices if event["tid"] == 1]
    assert steps == [f"step {row.step}" for row in profile.steps]


def test_perfetto_without_times(tmp_path: Path) -> None:
    """Where times are not known, the events' numbers stand for them, and the file says so."""
    known = training()
    points = tuple(point._replace(time_us=None) for point in known.points)
    export(written(tmp_path / "a.oomp", known._replace(points=points)), perfetto=tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["otherData"]["time"] == "numbers of events"


class Trap:
    """An object that acts when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("the snapshot was unpickled",)


def test_memory_viz_is_the_snapshot_itself(tmp_path: Path) -> None:
    """PyTorch's own bytes come out as they went in, and are never unpickled."""
    snapshot = pickle.dumps({"segments": [], "trap": Trap()}, protocol=4)
    write_capture(tmp_path / "a.oomp", measured(training()), snapshot=snapshot, profile=training())
    export(tmp_path / "a.oomp", memory_viz=tmp_path / "a.pickle")
    assert (tmp_path / "a.pickle").read_bytes() == snapshot


def test_memory_viz_needs_no_profile(tmp_path: Path) -> None:
    """A capture with a snapshot alone is enough for it."""
    snapshot = pickle.dumps({}, protocol=4)
    write_capture(tmp_path / "a.oomp", measured(training()), snapshot=snapshot)
    export(tmp_path / "a.oomp", memory_viz=tmp_path / "a.pickle")
    assert (tmp_path / "a.pickle").read_bytes() == snapshot


@pytest.mark.parametrize("snapshot", [None, b"", b"\x80\x05N.", b"nonsense"])
def test_memory_viz_without_a_snapshot(tmp_path: Path, snapshot: bytes | None) -> None:
    """No snapshot, or one that memory_viz cannot read: nothing is written, and the message has the cure."""
    write_capture(tmp_path / "a.oomp", measured(training()), snapshot=snapshot, profile=training())
    with pytest.raises(CaptureError, match=r"again|anew"):
        export(tmp_path / "a.oomp", memory_viz=tmp_path / "a.pickle", speedscope=tmp_path / "a.json")
    assert not (tmp_path / "a.pickle").exists()
    assert not (tmp_path / "a.json").exists()


def test_no_export_overwrites_another(tmp_path: Path) -> None:
    """Two exports to one place, or one onto the capture, are refused before anything is written."""
    file = written(tmp_path / "a.oomp")
    before = file.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="named twice"):
        export(file, speedscope=tmp_path / "x.json", perfetto=tmp_path / "link" / "x.json")
    with pytest.raises(UsageError, match="is the file to export"):
        export(file, speedscope=file)
    assert {path.name for path in tmp_path.iterdir()} == {"a.oomp", "link"}
    assert file.read_bytes() == before
    export(file, speedscope=tmp_path / "x.json")
    export(file, speedscope=tmp_path / "x.json")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    """A folder that is there is not said to be missing."""
    with pytest.raises(UsageError, match="/proc takes no files; choose another place"):
        export(written(tmp_path / "a.oomp"), speedscope=Path("/proc/x.json"))
