"""Reading memory snapshots: every format of PyTorch's, nothing that runs, nothing without bounds."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from measurement_samples import fitting
from snapshot_samples import FRAME, MIB, OUTER, SHARED, block, event, freed, load, segment, whole

from oomproof import snapshot
from oomproof.capture import write_capture
from oomproof.errors import SnapshotError, UsageError
from oomproof.snapshot import Action, Frame
from oomproof.snapshot.model import HOST, NO_TIME

SAMPLE = whole(
    [
        event("segment_alloc", 0x7F0000000000, 20 * MIB, time_us=5),
        event("alloc", 0x7F0000000000, 5 * MIB, time_us=6),
        *freed(0x7F0000000000, 5 * MIB, time_us=7),
        event("oom", 123, 90 * MIB, time_us=8),
    ],
    [segment(0x7F0000000000, 20 * MIB, [block(0x7F0000000000, 20 * MIB, 5 * MIB, "inactive")])],
    allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.5},
    external_annotations=[{"stage": "START", "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": 3}],
)


def facts(found: snapshot.Snapshot) -> list[Any]:
    """Return what is in a snapshot, in values that can be compared."""
    return [
        [[list(getattr(trace, name)) for name in trace.__slots__] for trace in found.traces],
        found.segments,
        [found.stacks[number] for number in range(len(found.stacks))],
        found.settings,
        found.annotations,
    ]


def test_every_event_and_segment(tmp_path: Path) -> None:
    """Events come in columns, stacks once each, innermost frame first."""
    found = load(SAMPLE, tmp_path)
    trace = found.traces[0]
    assert list(trace.action) == [
        Action.SEGMENT_ALLOC, Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM,
    ]  # fmt: skip
    assert list(trace.address) == [0x7F0000000000] * 4 + [123]
    assert list(trace.size) == [20 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, 90 * MIB]
    assert list(trace.time_us) == [5, 6, 7, 7, 8]
    assert len(set(trace.stack)) == 1
    assert found.stacks[trace.stack[0]] == (Frame(**FRAME), Frame(**OUTER))
    assert found.stacks[found.segments[0].blocks[0].stack] == (Frame(**FRAME),)
    assert found.segments[0].blocks[0].requested_bytes is None, "what was asked for before is nothing of a free block"
    assert found.settings["garbage_collection_threshold"] == 0.5
    assert found.annotations[0].name == "Optimizer.step#AdamW.step"
    assert found.devices() == [0]


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    """The same snapshot is read from each of pickle's protocols, and with its unused references left out."""
    written = pickle.dumps(SAMPLE, protocol)
    assert facts(load(written, tmp_path)) == facts(load(SAMPLE, tmp_path))
    assert facts(load(pickletools.optimize(written), tmp_path)) == facts(load(SAMPLE, tmp_path))


def test_stacks_that_the_pickle_writes_twice_are_one(tmp_path: Path) -> None:
    """A stack has one number, whether events share it, repeat it, or share its frames only."""
    shared = [FRAME, OUTER]
    found = load(
        whole(
            [
                event("alloc", 1, 1, frames=shared),
                event("alloc", 2, 1, frames=shared),
                event("alloc", 3, 1, frames=list(shared)),
                event("alloc", 4, 1, frames=[dict(FRAME), dict(OUTER)]),
                event("alloc", 5, 1, frames=[OUTER]),
                event("alloc", 6, 1, frames=[]),
            ]
        ),
        tmp_path,
    )
    numbers = list(found.traces[0].stack)
    assert len(set(numbers[:4])) == 1
    assert found.stacks[numbers[4]] == (Frame(**OUTER),)
    assert numbers[5] == 0
    assert found.stacks[0] == ()


def test_more_events_than_one_batch(tmp_path: Path) -> None:
    """The pickler writes lists in batches of 1,000."""
    found = load(whole([event("alloc", n, n + 1) for n in range(2500)]), tmp_path)
    assert list(found.traces[0].address) == list(range(2500))


def test_several_devices_and_streams(tmp_path: Path) -> None:
    """Each device has its trace; devices without events have an empty one."""
    data = {
        "segments": [segment(1 << 30, 2 * MIB, [], device=3)],
        "device_traces": [[], [event("alloc", 1, 2, stream=94_710_391_576_240)], []],
    }
    found = load(data, tmp_path)
    assert [len(trace) for trace in found.traces] == [0, 1, 0]
    assert found.traces[1].stream[0] == 94_710_391_576_240
    assert found.devices() == [1, 3]
    assert len(found.events(7)) == 0


def test_no_events_at_all(tmp_path: Path) -> None:
    """A snapshot without a history has segments only."""
    found = load(whole([], [segment(1 << 30, 2 * MIB, [block(1 << 30, 512)])]), tmp_path)
    assert found.segments[0].small
    assert len(found.traces[0]) == 0


def test_pinned_memory_pools_and_annotations_of_newer_versions(tmp_path: Path) -> None:
    """torch 2.14 says pools, graph frames and user's words of each event, and has the host's memory too."""
    more = {"compile_context": "N/A", "user_metadata": "step 3", "pool_id": (0, 1)}
    host = event("alloc", 5, 6, compile_context="", user_metadata="", pool_id=(0, 0))
    data = whole(
        [event("alloc", 1, 2, **more)],
        host_segments=[segment(5, MIB, [block(5, MIB)], device=-1)],
        host_traces=[host],
    )
    found = load(data, tmp_path)
    assert found.pools[found.traces[0].pool[0]] == (0, 1)
    assert found.texts[found.traces[0].metadata[0]] == "step 3"
    assert found.traces[0].context[0] == 0
    assert found.host_segments[0].device == HOST
    assert len(found.host_trace) == 1
    assert found.pools_recorded


def test_the_format_of_torch_2_0(tmp_path: Path) -> None:
    """Events without a time; blocks without an address, their request and stack in a history."""
    last = {"addr": 1 << 30, "real_size": 700, "frames": [FRAME]}
    old = {
        "device": 0, "address": 1 << 30, "total_size": 2 * MIB, "segment_type": "small", "stream": 0,
        "blocks": [
            {"size": 1024, "state": "active_allocated", "history": [last]},
            {"size": 512, "state": "active_awaiting_free"},
            {"size": 2 * MIB - 1536, "state": "inactive"},
        ],
    }  # fmt: skip
    first = event("alloc", 1 << 30, 700)
    del first["time_us"]
    found = load(whole([first], [old]), tmp_path)
    blocks = found.segments[0].blocks
    assert [b.address - (1 << 30) for b in blocks] == [0, 1024, 1536]
    assert blocks[0].requested_bytes == 700
    assert found.stacks[blocks[0].stack] == (Frame(**FRAME),)
    assert [b.state for b in blocks] == ["active_allocated", "active_pending_free", "inactive"]
    assert found.traces[0].time_us[0] == NO_TIME


def test_a_list_of_segments(tmp_path: Path) -> None:
    """torch.cuda.memory_snapshot() is a list; the reader says that it has no events."""
    found = load([segment(1 << 30, 2 * MIB, [])], tmp_path)
    assert len(found.segments) == 1
    assert "no events" in found.notes[0]


def test_events_of_a_later_pytorch(tmp_path: Path) -> None:
    """An unknown kind of event is kept in its place and told."""
    found = load(whole([event("alloc", 1, 2), event("teleport", 1, 2)]), tmp_path)
    assert list(found.traces[0].action) == [Action.ALLOC, Action.OTHER]
    assert "teleport" in found.notes[0]


def test_overflow_is_told(tmp_path: Path) -> None:
    """trace_alloc_overflowed says that the oldest events are gone."""
    assert load(whole(trace_alloc_overflowed=[False, True]), tmp_path).overflowed
    assert not load(whole(), tmp_path).overflowed


# ---- hostile and damaged files ---------------------------------------------------------------------------------------


class Evil:
    """Runs a command when it is unpickled by anything that runs things."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_pickle_runs(tmp_path: Path, protocol: int) -> None:
    """A pickle that would run a command is refused, and the command is not run."""
    mark = tmp_path / "ran"
    written = pickle.dumps(whole([Evil(mark)]), protocol)
    pickle.loads(written)
    assert mark.exists(), "the pickle is really hostile"
    mark.unlink()
    with pytest.raises(SnapshotError, match="run code"):
        load(written, tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b")R", b"}b", b"(ios\nsystem\n", b"(o", b"))\x81",
        b"))}\x92", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"Pid\n", b"NQ",
    ],
)  # fmt: skip
def test_each_opcode_that_builds_objects_is_refused(tmp_path: Path, opcodes: bytes) -> None:
    """Importing, calling, building, extensions and persistent ids are all no part of a snapshot."""
    with pytest.raises(SnapshotError, match="run code"):
        load(b"\x80\x04" + opcodes + b".", tmp_path)


def test_a_file_cut_short_anywhere(tmp_path: Path) -> None:
    """However much of it is missing, the reader says so."""
    written = pickle.dumps(SAMPLE, 4)
    for size in range(len(written)):
        with pytest.raises(SnapshotError):
            load(written[:size], tmp_path)


def test_a_byte_changed_anywhere(tmp_path: Path) -> None:
    """A damaged file is read or refused; nothing else happens."""
    written = bytearray(pickle.dumps(SAMPLE, 4))
    refused = 0
    for place in range(len(written)):
        damaged = bytearray(written)
        damaged[place] ^= 0x55
        try:
            load(bytes(damaged), tmp_path)
        except SnapshotError:
            refused += 1
    assert refused > len(written) // 2


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


BOMBS = {
    "lists in lists": b"]" * 3_000_000,
    "marks": b"(" * 3_000_000,
    "texts": b"".join(text(f"{n}") for n in range(300_000)),
    "references": b"N\x94" + b"h\x00" * 3_000_000,
    "memo": b"N" + b"\x94" * 3_000_000,
    "a memo place far away": b"Nr\xff\xff\xff\x7f",
    "dicts": b"}" * 1_000_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_has_a_limit(tmp_path: Path, name: str) -> None:
    """A file that asks for more memory than is allowed is refused."""
    path = tmp_path / "bomb.pickle"
    path.write_bytes(b"\x80\x04" + BOMBS[name] + b".")
    with pytest.raises(SnapshotError, match=r"MiB of memory|damaged"):
        snapshot.load(path, limit_bytes=16 * MIB)


def test_a_tower_of_tuples_takes_no_time(tmp_path: Path) -> None:
    """Tuples of one tuple twice, 200 deep, as a key: hashing or showing it would never end."""
    tower = b")" + b"2\x86" * 200
    for data in (b"}" + tower + b"Ns.", b"}" + text("segments") + tower + b"s.", b"}(" + tower + b"Nu."):
        with pytest.raises(SnapshotError):
            load(b"\x80\x04" + data, tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": 1}, "no memory snapshot"),
        (12, "no memory snapshot"),
        (whole([event("alloc", "here", 1)]), "addr is a str"),
        (whole([event("alloc", 1, None)]), "size is missing"),
        (whole([event("alloc", 1, 2**70)]), "size is outside 64 bits"),
        (whole([event("alloc", 1, 1, frames=[1])]), "something else than frames"),
        (whole([event("alloc", 1, 1, frames=3)]), "no list of frames"),
        (whole([event("alloc", 1, 1, pool_id=(1,))]), "pool"),
        (whole([event("alloc", 1, 1), 5]), "something else stands between"),
        (whole([5]), "no list of events"),
        (whole([], [segment(1, 2 * MIB, [block(1, 3 * MIB)])]), "larger than it"),
        (whole([], [segment(1, 2 * MIB, [block(1, 512, state="odd")])]), "'odd'"),
        (whole([], [segment(1, 2 * MIB, [7])]), "something else than blocks"),  # type: ignore[list-item]
        ({"segments": [1], "device_traces": []}, "no list of segments"),
        ({"segments": [], "device_traces": 7}, "no list"),
    ],
)
def test_wrong_types_are_one_message(tmp_path: Path, data: Any, says: str) -> None:
    """A pickle of something else says what is wrong with it."""
    with pytest.raises(SnapshotError, match=says):
        load(data, tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\x1f\x8b\x08\x00", "gunzip"),
        (b"<!DOCTYPE html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"hello, world\n", "no pickle"),
        (b"\x80\x04hello, world", "damaged|no memory snapshot"),
        (b"\x80\x09N.", "protocol 9"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, data: bytes, says: str) -> None:
    """What people give by mistake is named, with the cure."""
    with pytest.raises(SnapshotError, match=says):
        load(data, tmp_path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    """No file, or none that can be read, is the user's mistake."""
    with pytest.raises(UsageError, match="does not exist"):
        snapshot.load(tmp_path / "none.pickle")
    with pytest.raises(UsageError, match="no regular file"):
        snapshot.load(tmp_path)


# ---- captures --------------------------------------------------------------------------------------------------------


def test_the_snapshot_in_a_capture(tmp_path: Path) -> None:
    """A capture's snapshot is the same as the pickle itself."""
    path = tmp_path / "run.oomp"
    write_capture(path, fitting(), pickle.dumps(SAMPLE, 4))
    assert facts(snapshot.load(path)) == facts(load(SAMPLE, tmp_path))


def test_a_capture_without_one(tmp_path: Path) -> None:
    """The message names the option that adds it."""
    path = tmp_path / "run.oomp"
    write_capture(path, fitting())
    with pytest.raises(SnapshotError, match="--snapshot"):
        snapshot.load(path)


def test_a_capture_that_unpacks_to_more_than_it_says(tmp_path: Path) -> None:
    """A zip bomb is refused before it is unpacked, and while."""
    path = tmp_path / "bomb.oomp"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("snapshot.pickle", pickle.dumps(SAMPLE, 4) + b"\0" * 50 * MIB)
    packed = path.read_bytes()
    size = len(pickle.dumps(SAMPLE, 4)) + 50 * MIB
    path.write_bytes(packed.replace(struct.pack("<I", size), struct.pack("<I", 1000)))
    with pytest.raises(SnapshotError, match="damaged"):
        snapshot.load(path)
    path.write_bytes(packed.replace(struct.pack("<I", size), struct.pack("<I", 2**32 - 2)))
    with pytest.raises(SnapshotError, match="no oomproof wrote this"):
        snapshot.load(path)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(SnapshotError, match="damaged"):
        snapshot.load(path)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """Progress is told in bytes, forwards."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(whole([event("alloc", n, 1) for n in range(5000)]), 4))
    told: list[tuple[int, int]] = []
    snapshot.load(path, progress=lambda done, size: told.append((done, size)))
    assert len(told) > 5
    assert told == sorted(told)
    assert {size for _, size in told} == {path.stat().st_size}


@pytest.mark.parametrize(
    ("name", "events", "segments"),
    [
        ("cnn_small", 5803, 10),
        ("lm4_train_100", 11300, 65),
        ("lm_2.7b_full_step_128", 19770, 1010),
        ("lm_large_bf16_midrun", 7905, 644),
        ("lm_medium_train_128", 19136, 377),
        ("lm_xl_forward_2048_expandable", 5112, 2),
        ("lm_xl_full_step_bf16_128", 18474, 1396),
        ("lora_8bit_old_format", 10307, 215),
    ],
)
def test_recorded_snapshots(name: str, events: int, segments: int) -> None:
    """Snapshots of real GPUs are read whole, each stack as Python's unpickler has it."""
    path = SHARED / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshot {path.name}")
    found = snapshot.load(path)
    trace = found.traces[0]
    assert (len(trace), len(found.segments)) == (events, segments)
    with path.open("rb") as file:
        plain = pickle.load(file)  # one of our own files
    for index, item in enumerate(plain["device_traces"][0]):
        frames = tuple((f["name"], f["filename"], f["line"]) for f in item.get("frames", ()))
        assert (item["addr"], item["size"]) == (trace.address[index], trace.size[index])
        assert tuple((f.name, f.filename, f.line) for f in found.stacks[trace.stack[index]]) == frames
