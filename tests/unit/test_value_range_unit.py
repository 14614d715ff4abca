"""What is said of counts that nobody knows, from the peaks with the smallest and the largest of them."""

from __future__ import annotations

from typing import Any

import pytest

from oomproof.measure import value_range
from oomproof.measure.measurement import Demand

MIB = 1 << 20


def demand(allocated_mib: int) -> Demand:
    """Return peaks that lie 20 and 120 MiB above what is allocated."""
    return Demand(
        allocated_bytes=allocated_mib * MIB,
        reserved_bytes=(allocated_mib + 20) * MIB,
        device_bytes=(allocated_mib + 120) * MIB,
    )


def read(line: int, **changes: Any) -> dict[str, Any]:
    """Return a read of a count between 0 and 5,000."""
    return {
        "location": f"train.py:{line}", "operation": "aten::nonzero (bool)", "count": 3, "affects_memory": True,
        "least": 0, "most": 5000, "taken": "least",
    } | changes  # fmt: skip


def test_peaks_that_differ_are_the_ends_of_a_range() -> None:
    """Its reason gives both allocated peaks, the lines and the bounds of the widest counts."""
    reads = [read(1, most=7), read(2), read(3, most=6000), read(4, most=8), read(5, affects_memory=None, most=None)]
    (span,) = value_range.ranges(reads, demand(100), demand(150))
    assert (span.what, span.low_bytes, span.high_bytes) == ("values", 220 * MIB, 270 * MIB)
    assert span.reason.endswith(
        f"allocated 100.0 MiB and 150.0 MiB; {value_range.EACH_FOR_ITSELF}one may be counted at none of them in the "
        "former and at several in the latter: train.py:3 (aten::nonzero (bool), 0 to 6,000), train.py:2 (aten::nonzero "
        "(bool), 0 to 5,000), train.py:4 (aten::nonzero (bool), 0 to 8) and 1 more"
    )


@pytest.mark.parametrize(
    ("operation", "taken", "told"),
    [
        ("aten::index (float32)", "least", True),
        ("aten::masked_select (float32)", "least", True),
        ("torchvision::nms (float32)", "least", False),  # boxes that one call keeps are no other's
        ("aten::unique_consecutive (int64)", "least", False),
        ("aten::nonzero (bool)", "assumed", False),  # a router's choices: all tokens are shared out
    ],
)
def test_what_masks_share_out_may_count_several_times(operation: str, taken: str, told: bool) -> None:
    """The counts of several masks do not go together at either end, so the range says so, where it is of masks."""
    (span,) = value_range.ranges([read(1, operation=operation, taken=taken)], demand(100), demand(150))
    assert (value_range.EACH_FOR_ITSELF in span.reason) == told


def test_which_way_the_figures_count() -> None:
    """The note has the way, the option for the other one and, without a range that names them, the lines."""
    (few,) = value_range.counted([read(7)], demand(100), None, "steps-reached")
    assert "as the least it can be; --unknown-counts many takes the most. Each mask is counted for itself" in few
    assert "one may be counted at none of them: train.py:7" in few
    assert few.endswith(": train.py:7 (aten::nonzero (bool), 0 to 5,000)")
    (ranged,) = value_range.counted([read(7)], demand(100), demand(150), "steps-reached")
    assert ranged.endswith("--unknown-counts many takes the most")
    (many,) = value_range.counted([read(7, taken="most")], demand(150), None, "steps-reached")
    assert "as the most it can be; --unknown-counts few takes the least. Each mask is counted for itself" in many
    assert "one may be counted at several of them: train.py:7" in many
    (boxes,) = value_range.counted(
        [read(7, taken="most", operation="torchvision::nms (float32)")], demand(150), None, "finished"
    )
    assert "for itself" not in boxes


def test_no_way_is_told_where_there_is_only_one() -> None:
    """Not where both ends have the same peak, nothing is bounded, values are assumed, or the script raised."""
    assert value_range.counted([read(7)], demand(100), demand(100), "finished") == []
    assert value_range.counted([read(7, most=None)], demand(100), None, "finished") == []
    assert value_range.counted([read(7, taken="assumed")], demand(100), None, "finished") == []
    assert value_range.counted([read(7)], demand(100), None, "raised") == []


def test_a_peak_may_be_lower_with_more() -> None:
    """The ends of the range are in order, whichever run they come from."""
    (span,) = value_range.ranges([read(1)], demand(150), demand(100))
    assert (span.low_bytes, span.high_bytes) == (220 * MIB, 270 * MIB)


def test_without_figures_or_a_difference_there_is_no_range() -> None:
    """No run with the largest counts, or the same peaks: then a note says at most that nothing changes."""
    assert value_range.ranges([read(1)], demand(100), None) == ()
    assert value_range.ranges([read(1)], demand(100), demand(100)) == ()
    assert value_range.notes([read(1)], demand(100), None) == []
    (note,) = value_range.notes([read(1)], demand(100), demand(100))
    assert "do not change the peak" in note


def test_counts_without_a_largest_are_told() -> None:
    """A size that no shape bounds is a note with its line, whether there was a further run or not."""
    unbounded = read(9, operation="aten::bincount (int64)", most=None)
    for many in (None, demand(150)):
        (note,) = value_range.notes([read(1), unbounded], demand(100), many)
        assert note.endswith(": train.py:9 (aten::bincount (int64))")


def test_a_further_run_that_failed_is_told() -> None:
    """The note has the error's first line and where the counts were read, or that a person ended it."""
    failed = {"error": "ValueError: more rows\nthan there are", "ended": "raised"}
    assert not value_range.got_as_far(failed)
    (note,) = value_range.failure([read(7)], failed, interrupted=False)
    assert "(ValueError: more rows)" in note
    assert note.endswith("train.py:7 (aten::nonzero (bool), 0 to 5,000)")
    (note,) = value_range.failure([read(7)], None, interrupted=True)
    assert "interrupted" in note


def test_a_script_that_fails_on_empty_results_gets_a_hint() -> None:
    """Only where it raised, and something was sized by the least that an unknown count can be."""
    assert value_range.hint([read(7)], "finished") == []
    assert value_range.hint([read(7, most=0)], "raised") == []
    (note,) = value_range.hint([read(7)], "raised")
    assert "--unknown-counts many: train.py:7" in note
