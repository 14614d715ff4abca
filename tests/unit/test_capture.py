"""Captures: written whole or not at all, and read as if an enemy had written them."""

from __future__ import annotations

import io
import json
import os
import random
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from measurement_samples import fitting, full, not_fitting, untouched

from oomproof import capture
from oomproof.capture import read_capture, write_capture
from oomproof.errors import CaptureError, EnvironmentMissingError, OomproofError, UsageError
from oomproof.measure.measurement import Measurement
from oomproof.report.json_output import to_json_text


def zipped(*members: tuple[str, bytes]) -> bytes:
    """Return a zip of the members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


GOOD = zipped(("measurement.json", to_json_text(fitting()).encode()))


def patched(offset: int, code: str, value: int) -> bytes:
    """Return the good capture with a field of its central directory's entry overwritten."""
    data = bytearray(GOOD)
    struct.pack_into(f"<{code}", data, data.index(b"PK\x01\x02") + offset, value)
    return bytes(data)


def bomb() -> bytes:
    """Return a capture whose measurement.json inflates to one byte more than is allowed."""
    return zipped(("measurement.json", b" " * (capture.MAX_MEASUREMENT_BYTES + 1)))


def lying_bomb() -> bytes:
    """Return a bomb whose table of contents says that it is small."""
    data = bytearray(bomb())
    for signature, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        struct.pack_into("<I", data, data.index(signature) + offset, 100)
    return bytes(data)


def huge_contents() -> bytes:
    """Return a zip with 40,000 empty members, whose table of contents takes more than 1 MiB."""
    return zipped(*((f"{i:05}", b"") for i in range(40_000)))


@pytest.mark.parametrize("measurement", [fitting(), not_fitting(), untouched(), full()])
def test_what_is_written_is_read(tmp_path: Path, measurement: Measurement) -> None:
    """Reading a capture gives the Measurement that was written, and only the capture is in the folder."""
    path = tmp_path / "run.oomp"
    write_capture(path, measurement)
    assert read_capture(path) == measurement
    assert os.listdir(tmp_path) == ["run.oomp"]


def test_members(tmp_path: Path) -> None:
    """A capture is a plain zip: measurement.json, then the snapshot, given as bytes or as a file."""
    snapshot = b"\x80\x04" + bytes(range(256)) * 100
    (tmp_path / "snapshot").write_bytes(snapshot)
    write_capture(tmp_path / "a.oomp", full(), snapshot)
    write_capture(tmp_path / "b.oomp", full(), tmp_path / "snapshot")
    with zipfile.ZipFile(tmp_path / "a.oomp") as archive:
        assert archive.namelist() == ["measurement.json", "snapshot.pickle"]
        assert archive.read("snapshot.pickle") == snapshot
        assert archive.read("measurement.json").decode() == to_json_text(full())
        assert archive.testzip() is None
    assert (tmp_path / "a.oomp").read_bytes() == (tmp_path / "b.oomp").read_bytes()
    assert read_capture(tmp_path / "a.oomp") == full()


@pytest.mark.parametrize("before", ["", "\ufeff", " \n\t"])
def test_saved_json_is_read(tmp_path: Path, before: str) -> None:
    """What ``--json`` printed into a file reads as well, also after an editor added a byte order mark."""
    path = tmp_path / "run.json"
    path.write_text(before + to_json_text(full()), encoding="utf-8")
    assert read_capture(path) == full()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "is empty; write one", id="empty"),
        pytest.param(b"\x7fELF", "not a capture; write one", id="another-format"),
        pytest.param(b"\x80\x04}.", "not a capture; write one", id="pickle"),
        pytest.param(b"[1]", "not a capture; write one", id="json-list"),
        pytest.param(b'{"a": 1}', "no schema; write one", id="other-json"),
        pytest.param(b'{"schema": "oomproof.measurement/1"', "is not JSON; write it anew", id="cut-json"),
        pytest.param(b'{"schema": "oomproof.measurement/1"}', "created is missing", id="json-without-keys"),
        pytest.param(b"{" + b" " * capture.MAX_MEASUREMENT_BYTES, "larger than any", id="large-json"),
        pytest.param(GOOD[:200], "cut short or damaged; copy it again", id="truncated"),
        pytest.param(GOOD[:-1], "cut short or damaged; copy it again", id="truncated-by-one"),
        pytest.param(b"PK\x03\x04" + bytes(100), "cut short or damaged", id="zeros-after-the-magic"),
        pytest.param(zipped(), "zip without measurement.json", id="empty-zip"),
        pytest.param(zipped(("train.py", b"")), "zip without measurement.json", id="another-zip"),
        pytest.param(zipped(("a/measurement.json", b"{}")), "zip without measurement.json", id="in-a-folder"),
        pytest.param(
            zipped(("measurement.json", b'{"schema": "oomproof.measurement/2"}')),
            "use the oomproof that wrote the file",
            id="newer-schema",
        ),
        pytest.param(zipped(("measurement.json", b"")), "is not JSON", id="empty-member"),
        pytest.param(zipped(("measurement.json", b"\xff\xfe")), "is not JSON", id="not-utf-8"),
        pytest.param(zipped(("measurement.json", b"[" * 10**6)), "is not JSON", id="deep-nesting"),
        pytest.param(zipped(("measurement.json", b"9" * 10_000)), "is not JSON", id="long-integer"),
        pytest.param(zipped(("measurement.json", b"null")), "no schema", id="null"),
        pytest.param(patched(24, "I", 2**31), "larger than any measurement", id="says-it-is-2-GiB"),
        pytest.param(patched(8, "H", 1), "no oomproof wrote this zip", id="encrypted"),
        pytest.param(patched(10, "H", 97), "cut short or damaged", id="unknown-compression"),
        pytest.param(patched(16, "I", 0), "cut short or damaged", id="wrong-checksum"),
        pytest.param(patched(42, "I", 2**32 - 2), "cut short or damaged", id="points-past-the-end"),
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes, message: str) -> None:
    """Each fault gives a CaptureError of one line that names the file and ends with the cure."""
    path = tmp_path / "run.oomp"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=message) as caught:
        read_capture(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [(bomb, "larger than any"), (lying_bomb, "damaged"), (huge_contents, "table of contents is larger")],
)
def test_hostile_sizes(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    """A file that would fill the memory is refused, whatever it says of itself."""
    path = tmp_path / "run.oomp"
    path.write_bytes(make())
    with pytest.raises(CaptureError, match=message):
        read_capture(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_measurements_in_one_zip(tmp_path: Path) -> None:
    """Which of two members of one name is meant cannot be known, so neither is read."""
    path = tmp_path / "run.oomp"
    path.write_bytes(zipped(("measurement.json", b"{}"), ("measurement.json", b"{}")))
    with pytest.raises(CaptureError, match="no oomproof wrote this zip"):
        read_capture(path)


def test_random_damage_never_escapes(tmp_path: Path) -> None:
    """Whatever bytes are changed, reading gives a Measurement or one of the tool's own errors."""
    path = tmp_path / "run.oomp"
    chance = random.Random(0)
    structure = [i for i in range(len(GOOD)) if i < 50 or i > len(GOOD) - 100]
    for trial in range(1000):
        data = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            at = chance.choice(structure) if trial % 2 else chance.randrange(len(GOOD))
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        path.write_bytes(data)
        try:
            read_capture(path)
        except CaptureError:
            continue


def test_there_is_no_file(tmp_path: Path) -> None:
    """A path without a file, or to what is no file, is the user's mistake."""
    with pytest.raises(UsageError, match=r"no\.oomp does not exist; write a capture with"):
        read_capture(tmp_path / "no.oomp")
    with pytest.raises(UsageError, match="is no regular file"):
        read_capture(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be read: Not a directory"):
        read_capture(tmp_path / "file" / "run.oomp")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/folder/run.oomp", "there is no folder .*folder; create it first"),
        (".", "is no regular file; name a file"),
        ("file/run.oomp", "cannot be written: .*; choose another place"),
        ("/dev/null", "is no regular file; name a file"),
    ],
)
def test_where_nothing_can_be_written(tmp_path: Path, path: str, message: str) -> None:
    """A place that cannot take a capture is the user's mistake, and is left as it was."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=message):
        write_capture(tmp_path / path, fitting())
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    """A folder that may not be written to is the user's mistake."""
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError, match="cannot be written: Permission denied"):
            write_capture(tmp_path / "run.oomp", fitting())
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room is not the user's mistake, and what was there before stays."""
    path = tmp_path / "run.oomp"
    write_capture(path, fitting())
    monkeypatch.setattr(capture, "open", lambda *_args: open("/dev/full", "wb"), raising=False)  # noqa: SIM115
    with pytest.raises(EnvironmentMissingError, match="no room left on the disk"):
        write_capture(path, not_fitting())
    monkeypatch.undo()
    assert read_capture(path) == fitting()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError(5, "Input/output error")])
def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | OSError
) -> None:
    """Ctrl-C or a fault while writing changes nothing and leaves no temporary file."""
    path = tmp_path / "run.oomp"
    write_capture(path, fitting())

    def fail(_descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((KeyboardInterrupt, RuntimeError, UsageError)):
        write_capture(path, not_fitting())
    assert os.listdir(tmp_path) == ["run.oomp"]
    assert read_capture(path) == fitting()


def test_a_missing_snapshot_writes_nothing(tmp_path: Path) -> None:
    """A snapshot that cannot be read is named, and no capture is made without it."""
    with pytest.raises(UsageError, match=r"the snapshot .*lost\.pickle cannot be read: No such file"):
        write_capture(tmp_path / "run.oomp", fitting(), tmp_path / "lost.pickle")
    assert os.listdir(tmp_path) == []


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    """A capture is as readable as any file that the user's programs write, unlike temporary files."""
    (tmp_path / "usual").touch()
    write_capture(tmp_path / "run.oomp", fitting())
    assert stat.S_IMODE((tmp_path / "run.oomp").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Writing to a link writes the file that it points to."""
    (tmp_path / "latest.oomp").symlink_to(tmp_path / "run.oomp")
    write_capture(tmp_path / "latest.oomp", fitting())
    assert (tmp_path / "latest.oomp").is_symlink()
    assert read_capture(tmp_path / "run.oomp") == fitting()


def test_equal_measurements_make_equal_files(tmp_path: Path) -> None:
    """Nothing of the time or place of writing is in a capture."""
    write_capture(tmp_path / "a.oomp", full())
    write_capture(tmp_path / "b.oomp", full())
    assert (tmp_path / "a.oomp").read_bytes() == (tmp_path / "b.oomp").read_bytes()


def test_a_measurement_too_large_to_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No capture is written that ``read_capture`` would refuse."""
    monkeypatch.setattr(capture, "MAX_MEASUREMENT_BYTES", 100)
    with pytest.raises(OomproofError, match="measure fewer steps with --steps"):
        write_capture(tmp_path / "run.oomp", fitting())
    assert os.listdir(tmp_path) == []


def test_the_json_in_a_capture_is_indented(tmp_path: Path) -> None:
    """A person who unzips a capture can read it."""
    write_capture(tmp_path / "run.oomp", fitting())
    with zipfile.ZipFile(tmp_path / "run.oomp") as archive:
        assert json.loads(archive.read("measurement.json")) == fitting().to_json()
