"""What holds for every verb that explains memory: tree, table, timeline, steps, diff, export and the page."""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from measurement_samples import fitting
from profile_samples import bare, every, written
from rich.cells import cell_len

from oomproof import cli
from oomproof.capture import write_capture
from oomproof.measure.profile import Profile
from oomproof.report.json_output import to_json_text

SAMPLES = dict(every())
VERBS = (
    ("tree",),
    ("tree", "--by", "stack"),
    ("tree", "--by", "category"),
    ("tree", "--depth", "1"),
    ("table",),
    ("table", "--sort", "module", "--limit", "0"),
    ("table", "--sort", "freed"),
    ("timeline",),
    ("steps",),
)
WITH_JSON = (("tree",), ("table",), ("steps",))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["oomproof", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture(params=SAMPLES)
def profile(request: pytest.FixtureRequest) -> Profile:
    """Each kind of profile."""
    return SAMPLES[request.param]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_and_the_next_command_stands_last(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    profile: Profile,
    verb: tuple[str, ...],
    width: int,
) -> None:
    """No line is wider than the terminal, none holds a control code, and a command stands last."""
    monkeypatch.setenv("COLUMNS", str(width))
    file = written(tmp_path / "a b.oomp", profile)
    assert call(monkeypatch, verb[0], file, *verb[1:]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines.pop() == ""
    command = lines.pop()
    assert command.startswith("  ")
    assert "oomproof " in command
    assert "'" in command or "FILE.oomp" in command, "a path with a blank is quoted"
    assert any(line.startswith("Next: ") for line in lines[-2:])
    for line in lines:
        assert cell_len(line) <= width, line
        assert line.isprintable()
        assert line == line.rstrip()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_ascii_terminals(
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    profile: Profile,
    verb: tuple[str, ...],
) -> None:
    """A terminal that has ASCII alone gets ASCII alone."""
    sys.stdout.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]
    assert call(monkeypatch, verb[0], written(tmp_path / "a.oomp", profile), *verb[1:]) == 0
    assert capsysbinary.readouterr().out.isascii()


@pytest.mark.parametrize("verb", WITH_JSON, ids=" ".join)
def test_json_is_the_whole_of_standard_output(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    profile: Profile,
    verb: tuple[str, ...],
) -> None:
    """--json prints one JSON object with its schema and nothing else."""
    assert call(monkeypatch, verb[0], written(tmp_path / "a.oomp", profile), "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == f"oomproof.{verb[0]}/1"


@pytest.mark.parametrize(
    "verb",
    [
        ("tree", "FILE"),
        ("table", "FILE"),
        ("timeline", "FILE"),
        ("steps", "FILE"),
        ("diff", "GOOD", "FILE"),
        ("diff", "FILE", "GOOD"),
        ("export", "FILE", "--speedscope", "OUT"),
        ("export", "FILE", "--memory-viz", "OUT"),
        ("report", "FILE", "-o", "OUT.html"),
    ],
    ids=" ".join,
)
def test_files_without_a_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    """A capture without a profile, or saved --json output, is refused with the command that cures it; exit code 1."""
    monkeypatch.chdir(tmp_path)
    written(Path("GOOD"))
    write_capture("FILE", fitting())
    for content in (None, to_json_text(fitting())):
        if content is not None:
            Path("FILE").write_text(content)
        assert call(monkeypatch, *verb) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("oomproof: FILE has no ")
        assert "oomproof run" in captured.err
        assert not Path("OUT").exists()


def _without(data: dict[str, Any], *path: Any) -> dict[str, Any]:
    """Return a copy of ``data`` with null where ``path`` leads."""
    copy = json.loads(json.dumps(data))
    inside = copy
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = None
    return dict(copy)


PROFILE = SAMPLES["leaking"].to_json()
SIZE = PROFILE["columns"]["blocks"].index("size_bytes")


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (None, "has no schema"),
        ([], "has no schema"),
        (PROFILE | {"schema": None}, "has no schema"),
        (PROFILE | {"schema": "oomproof.profile/2"}, "use the oomproof that wrote the file"),
        ({"schema": PROFILE["schema"]}, "is damaged, in stacks"),
        *((_without(PROFILE, name), f"is damaged, in {name}") for name in ("points", "notes", "steps", "growth")),
        *((_without(PROFILE, name), f"is damaged, in {name}") for name in ("allocated_bytes", "source", "events")),
        (_without(PROFILE, "blocks", 0), "is damaged, in blocks"),
        (_without(PROFILE, "blocks", 0, SIZE), "is damaged, in blocks"),
        (_without(PROFILE, "frames"), "is damaged, in stacks"),
        (_without(PROFILE, "columns"), "is damaged, in blocks"),
        (_without(PROFILE, "steps", 0, 0), "is damaged, in steps"),
    ],
)
@pytest.mark.parametrize("verb", ["tree", "report"])
def test_malformed_profiles(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    member: object,
    said: str,
    verb: str,
) -> None:
    """What is wrong with a profile is said in words, with the cure, and never in Python's."""
    file = tmp_path / "a.oomp"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("measurement.json", to_json_text(fitting()))
        archive.writestr("profile.json", json.dumps(member))
    assert call(monkeypatch, verb, file) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"oomproof: {file}: its profile")
    assert said in captured.err
    assert "NoneType" not in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tree", "none.oomp"], "none.oomp does not exist"),
        (["tree", "a.oomp", "--by", "colour"], "module, stack, category"),
        (["tree", "a.oomp", "--depth", "0"], "depth"),
        (["table", "a.oomp", "--sort", "luck"], "size, category"),
        (["table", "a.oomp", "--json", "--csv"], "one of them"),
        (["table", "a.oomp", "--limit", "-1"], "limit"),
        (["timeline", "a.oomp", "--step", "9"], "1 to 3"),
        (["diff", "a.oomp"], "after"),
        (["diff", "a.oomp", "a.oomp", "--allow", "7"], "7MiB"),
        (["diff", "a.oomp", "a.oomp", "--allow", "-1GiB"], "not a size"),
        (["export", "a.oomp"], "--speedscope"),
        (["export", "a.oomp", "--perfetto", "no/such/x.json"], "create it first"),
        (["report", "a.oomp", "-o", "x.pdf"], "ends in .html"),
        (["report", "a.oomp", "-o", "x.html", "--json"], "one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    """Exit code 64, and a message that says what would be right."""
    monkeypatch.chdir(tmp_path)
    written(Path("a.oomp"))
    assert call(monkeypatch, *arguments) == 64
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_reports_lead_to_the_steps_that_are_at_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A capture whose profile knows a leak is reported with it, and the next command shows it."""
    monkeypatch.chdir(tmp_path)
    for name, said, verb in (("leaking", "LEAKS", "steps"), ("training", "Steps", "tree")):
        written(Path("a.oomp"), SAMPLES[name])
        assert call(monkeypatch, "report", "a.oomp") == 0
        text = capsys.readouterr().out
        assert said in text
        assert "rising" not in text
        assert text.splitlines()[-1].strip() == f"oomproof {verb} a.oomp"


def test_a_bare_profile_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A process that allocated nothing is said to have, in each view."""
    file = written(tmp_path / "a.oomp", bare())
    for verb, said in (("tree", "no block"), ("table", "no block"), ("timeline", "no event"), ("steps", "NO STEPS")):
        assert call(monkeypatch, verb, file) == 0
        assert said in capsys.readouterr().out


def snapshot(*, stacks: bool = True) -> bytes:
    """Return a memory snapshot as PyTorch writes one: a segment, and two blocks of which one was freed."""
    frames = [{"filename": "/home/ada/train.py", "line": n, "name": f} for n, f in ((7, "step"), (20, "main"))]
    events = [
        ("segment_alloc", 4096 * 1024, 0x7F0000000000),
        ("alloc", 1024 * 1024, 0x7F0000000000),
        ("alloc", 512 * 1024, 0x7F0000100000),
        ("free_requested", 512 * 1024, 0x7F0000100000),
        ("free_completed", 512 * 1024, 0x7F0000100000),
    ]
    trace = [
        {
            "action": action, "size": size, "addr": address, "stream": 0, "time_us": 1000 + n,
            "frames": frames if stacks else [],
        }
        for n, (action, size, address) in enumerate(events)
    ]  # fmt: skip
    blocks = [
        {"size": 1024 * 1024, "requested_size": 1024 * 1024, "state": "active_allocated", "address": 0x7F0000000000},
        {"size": 3072 * 1024, "requested_size": 0, "state": "inactive", "address": 0x7F0000100000},
    ]
    segment = {
        "device": 0, "address": 0x7F0000000000, "total_size": 4096 * 1024, "allocated_size": 1024 * 1024,
        "active_size": 1024 * 1024, "requested_size": 1024 * 1024, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "blocks": [block | {"frames": []} for block in blocks],
    }  # fmt: skip
    return pickle.dumps({"segments": [segment], "device_traces": [trace], "allocator_settings": {}}, protocol=4)


@pytest.mark.parametrize("stacks", [True, False])
def test_memory_snapshots_are_read_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, stacks: bool
) -> None:
    """Each verb takes a snapshot of PyTorch's and tells it by stack, as far as it has stacks."""
    file = tmp_path / "s.pickle"
    file.write_bytes(snapshot(stacks=stacks))
    for verb in ("tree", "table", "timeline", "steps"):
        assert call(monkeypatch, verb, file) == 0
        assert capsys.readouterr().out.strip()
    assert call(monkeypatch, "tree", file, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["by"], data["size_bytes"]) == ("stack", 1536 * 1024)
    assert ("main" in json.dumps(data)) is stacks
    assert call(monkeypatch, "report", file, "-o", tmp_path / "s.html") == 0
    assert call(monkeypatch, "export", file, "--memory-viz", tmp_path / "x.pickle") == 1
    assert "already" in capsys.readouterr().err
