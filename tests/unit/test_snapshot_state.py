"""The state at any event: undone from the end, done again from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snapshot_samples import MIB, SHARED, block, event, freed, history, segment, whole

from oomproof import snapshot
from oomproof.snapshot.calls import ASSUMED_ALLOCATION_US, ASSUMED_FREE_US, call_times
from oomproof.snapshot.segments import Extent, Extents
from oomproof.snapshot.state import History, Peak, Rounding

BASE = 0x7F0000000000


def test_from_an_empty_allocator(tmp_path: Path) -> None:
    """Blocks are born and freed at their events, and the peak is where it is first reached."""
    found = history(
        whole(
            [
                event("segment_alloc", BASE, 2 * MIB),
                event("alloc", BASE, 1000),
                event("alloc", BASE + 1024, 4096),
                *freed(BASE, 1000),
                event("alloc", BASE, 200),
            ],
            [
                segment(
                    BASE,
                    2 * MIB,
                    [block(BASE, 512, 200), block(BASE + 512, 512, 0, "inactive"), block(BASE + 1024, 4096)],
                )
            ],
        ),
        tmp_path,
    )
    assert not found.problems
    assert len(found.start_segments) == 0
    assert found.peak_allocated == Peak(size_bytes=1024 + 4096, event=2)
    assert found.peak_reserved == Peak(size_bytes=2 * MIB, event=0)
    assert [(a.born, a.free_requested, a.freed) for a in found.allocations] == [
        (1, 3, 4),
        (2, None, None),
        (5, None, None),
    ]
    assert [found.state_after(n).allocated_bytes for n in range(-1, 6)] == [0, 0, 1024, 5120, 4096, 4096, 4608]
    assert [found.state_after(n).reserved_bytes for n in (-1, 0, 5)] == [0, 2 * MIB, 2 * MIB]
    assert [block.size_bytes for block in found.live_after(2)] == [4096, 1024]


def test_the_start_is_the_end_undone(tmp_path: Path) -> None:
    """What was freed in the trace was there at its start, in segments that have gone since."""
    found = history(
        whole(
            [*freed(BASE, 5 * MIB), event("segment_free", BASE, 20 * MIB), *freed(BASE + 64 * MIB, 512)],
            [segment(BASE + 64 * MIB, 2 * MIB, [block(BASE + 64 * MIB + 512, 512)])],
        ),
        tmp_path,
    )
    start = found.state_after(-1)
    assert [extent.size_bytes for extent in start.segments] == [20 * MIB, 2 * MIB]
    assert [(b.address - BASE, b.size_bytes) for b in start.blocks] == [
        (0, 5 * MIB), (64 * MIB, 512), (64 * MIB + 512, 512),
    ]  # fmt: skip
    assert found.peak_allocated == Peak(size_bytes=5 * MIB + 1024, event=-1)
    assert found.peak_reserved == Peak(size_bytes=22 * MIB, event=-1)
    assert found.state_after(4).reserved_bytes == 2 * MIB


def test_a_rest_of_up_to_1_mib_stays_with_a_large_block(tmp_path: Path) -> None:
    """PyTorch splits a large block only if more than 1 MiB remains."""
    split = [event("segment_alloc", BASE, 20 * MIB), event("alloc", BASE, 19 * MIB - 512)]
    kept = [event("segment_alloc", BASE, 20 * MIB), event("alloc", BASE, 19 * MIB)]
    blocks = [block(BASE, 19 * MIB - 512), block(BASE + 19 * MIB - 512, MIB + 512, 0, "inactive")]
    found = history(whole(split, [segment(BASE, 20 * MIB, blocks)]), tmp_path)
    assert (found.peak_allocated.size_bytes, found.problems) == (19 * MIB - 512, [])
    found = history(whole(kept, [segment(BASE, 20 * MIB, [block(BASE, 20 * MIB, 19 * MIB)])]), tmp_path)
    assert (found.peak_allocated.size_bytes, found.problems) == (20 * MIB, [])


def test_a_start_block_ends_where_the_next_one_is_put(tmp_path: Path) -> None:
    """A block from before the trace may have a rest; a block that is put behind it shows where it ends."""
    end = [segment(BASE, 20 * MIB, [block(BASE, 20 * MIB, 0, "inactive")])]
    behind = BASE + 5 * MIB + 4096
    seen = [event("alloc", behind, 2 * MIB), *freed(behind, 2 * MIB), *freed(BASE, 5 * MIB)]
    found = history(whole(seen, end), tmp_path)
    assert found.state_after(-1).allocated_bytes == 5 * MIB + 4096
    assert found.unsure == 0
    found = history(whole(freed(BASE, 5 * MIB), end), tmp_path)
    assert found.state_after(-1).allocated_bytes == 5 * MIB
    assert found.unsure == 1, "up to 1 MiB more, and nothing says how much"


def test_a_start_block_fills_a_gap_that_is_too_small_to_be_free(tmp_path: Path) -> None:
    """Between large blocks there is no free room of 1 MiB or less."""
    end = [segment(BASE, 20 * MIB, [block(BASE, 12 * MIB, 0, "inactive"), block(BASE + 12 * MIB, 8 * MIB)])]
    found = history(whole(freed(BASE, 11 * MIB + 512), end), tmp_path)
    assert found.state_after(-1).blocks[0].size_bytes == 12 * MIB
    assert found.unsure == 0


def test_blocks_that_another_stream_still_needs(tmp_path: Path) -> None:
    """After record_stream a block is freed at once and can be used again only later."""
    found = history(
        whole(
            [
                event("segment_alloc", BASE, 2 * MIB),
                event("alloc", BASE, 512),
                event("free_requested", BASE, 512),
                event("alloc", BASE + 512, 512),
                event("free_completed", BASE, 512),
                event("free_completed", BASE + 2 * MIB, 512),
            ],
            [segment(BASE, 2 * MIB, [block(BASE + 512, 512)]), segment(BASE + 2 * MIB, 2 * MIB, [])],
        ),
        tmp_path,
    )
    state = found.state_after(3)
    assert state.allocated_bytes == 512
    assert [b.address - BASE for b in state.blocks] == [0, 512, 2 * MIB], "two of them wait for other streams"
    assert found.peak_allocated.size_bytes == 512
    assert found.peak_active == 1536
    assert [b.pending_at_start for b in found.allocations] == [True, False, False]


def test_expandable_segments(tmp_path: Path) -> None:
    """Pages that are mapped join those beside them, and holes divide them."""
    found = history(
        whole(
            [
                event("segment_map", BASE, 20 * MIB),
                event("alloc", BASE, 30 * MIB - 512),
                event("segment_map", BASE + 20 * MIB, 20 * MIB),
                event("segment_map", BASE + 40 * MIB, 20 * MIB),
                event("segment_unmap", BASE + 40 * MIB, 20 * MIB),
            ],
            [segment(BASE, 40 * MIB, [block(BASE, 30 * MIB - 512)], is_expandable=True)],
        ),
        tmp_path,
    )
    assert not found.problems
    assert [extent.size_bytes for extent in found.state_after(3).segments] == [60 * MIB]
    assert found.peak_allocated.size_bytes == 30 * MIB - 512, "expandable segments leave no rest"
    assert found.peak_reserved == Peak(size_bytes=60 * MIB, event=3)


def test_pools_of_segments_are_those_of_the_end(tmp_path: Path) -> None:
    """Formats that do not say an event's pool say that of the segments at the end; an address may change hands."""
    found = history(
        whole(
            [
                event("segment_alloc", BASE, 2 * MIB),
                event("alloc", BASE, 512),
                *freed(BASE, 512),
                event("segment_free", BASE, 2 * MIB),
                event("segment_alloc", BASE, 2 * MIB),
                event("alloc", BASE, 512),
            ],
            [segment(BASE, 2 * MIB, [block(BASE, 512)], segment_pool_id=(0, 4))],
        ),
        tmp_path,
    )
    assert [allocation.pool for allocation in found.allocations] == [(0, 0), (0, 4)]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([event("alloc", BASE, 512)], "in use by nothing later"),
        (freed(BASE + 512, 512), "still in use later"),
        ([event("segment_alloc", BASE + 4 * MIB, 2 * MIB)], "does not agree"),
        ([event("segment_free", BASE, 2 * MIB)], "does not agree"),
    ],
)
def test_contradictions_are_told(tmp_path: Path, events: list[Any], says: str) -> None:
    """When recording was switched off for a while, events and final segments do not go together."""
    found = history(whole(events, [segment(BASE, 2 * MIB, [block(BASE + 512, 512)])]), tmp_path)
    assert found.problem_count >= 1
    assert says in found.problems[0]


def test_no_events(tmp_path: Path) -> None:
    """Without events the start is the end."""
    found = history(whole([], [segment(BASE, 2 * MIB, [block(BASE, 512)])]), tmp_path)
    assert found.peak_allocated == Peak(size_bytes=512, event=-1)
    assert found.state_after(-1).reserved_bytes == 2 * MIB


def test_rounding() -> None:
    """Requests are rounded to 512 B, or to steps between powers of two."""
    plain = Rounding({})
    assert [plain(size) for size in (0, 1, 512, 513, 1_200_000)] == [512, 512, 512, 1024, 1_200_128]
    quarters = Rounding({"roundup_power2_divisions": {str(1 << n): 4 for n in range(16)}})
    assert [quarters(size) for size in (512, 2048, 2049, 1 << 20, 1200 << 10)] == [512, 2048, 2560, 1 << 20, 1280 << 10]


def test_extents() -> None:
    """A segment goes as a whole or not at all; nothing overlaps."""
    one = Extent(address=BASE, size_bytes=2 * MIB, stream=0, pool=(0, 0), expandable=False)
    found = Extents([one])
    assert found.at(BASE + 2 * MIB - 1) == one
    assert found.at(BASE + 2 * MIB) is None
    assert found.at(BASE - 1) is None
    assert not found.add(one)
    assert not found.remove(BASE, MIB)
    assert found.remove(BASE, 2 * MIB)
    assert (len(found), found.total_bytes) == (0, 0)


def test_call_times_are_the_traces_own_where_it_has_them(tmp_path: Path) -> None:
    """A trace with ten driver calls says what one takes; another is told what is assumed."""
    calls = [
        item
        for n in range(12)
        for item in (
            event("snapshot", 0, 0, time_us=1000 * n),
            event("segment_alloc", BASE + n * 2 * MIB, 2 * MIB, time_us=1000 * n + 130),
        )
    ]
    segments = [segment(BASE + n * 2 * MIB, 2 * MIB, []) for n in range(12)]
    found = call_times(history(whole(calls, segments), tmp_path).events)
    assert (found.allocation_us, found.allocation_recorded) == (130, True)
    assert (found.free_us, found.free_recorded) == (ASSUMED_FREE_US, False)
    assert found.seconds(1000, 10) == pytest.approx(0.131)
    data = whole([{**item, "time_us": item["time_us"] // 10} for item in calls], segments)
    assert not call_times(history(data, tmp_path).events).allocation_recorded, "13 us are the phantom's"
    few = call_times(history(whole(calls[:4], segments[:2]), tmp_path).events)
    assert (few.allocation_us, few.allocation_recorded) == (ASSUMED_ALLOCATION_US, False)


@pytest.mark.parametrize(
    ("name", "allocated", "reserved"),
    [
        ("cnn_small", 110_110_720, 134_217_728),
        ("lm4_train_100", 695_675_904, 786_432_000),
        ("lm_2.7b_full_step_128", 55_079_000_576, 61_111_009_280),
        ("lm_large_bf16_midrun", 8_923_670_528, 8_969_519_104),
        ("lm_medium_train_128", 7_026_606_592, 7_235_174_400),
        ("lm_xl_forward_2048_expandable", 22_734_989_312, 22_821_208_064),
        ("lm_xl_full_step_bf16_128", 68_630_923_776, 74_134_323_200),
        ("lora_8bit_old_format", 5_914_094_592, 6_471_811_072),
    ],
)
def test_peaks_of_recorded_runs(name: str, allocated: int, reserved: int) -> None:
    """Real GPUs' runs have the peaks that PyTorch's own allocator gives in a replay, and end as they ended."""
    path = SHARED / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshot {path.name}")
    recorded = snapshot.load(path)
    found = History(recorded, 0)
    assert found.problem_count == 0
    assert (found.peak_allocated.size_bytes, found.peak_reserved.size_bytes) == (allocated, reserved)
    assert found.state_after(found.peak_allocated.event).allocated_bytes == allocated
    assert found.state_after(found.peak_reserved.event).reserved_bytes == reserved
    end = found.state_after(len(found.events) - 1)
    active = sorted((b.address, b.size_bytes) for s in recorded.segments for b in s.blocks if b.active)
    assert [(b.address, b.size_bytes) for b in end.blocks] == active
    assert end.reserved_bytes == sum(s.size_bytes for s in recorded.segments)
