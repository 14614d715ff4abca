"""The ledger: every block of the trace has a birth, a death, a phase and a category."""

from __future__ import annotations

from typing import Any

import pytest

from oomproof.measure.ledger import CATEGORIES, Ledger, Mark, breakdown, rounded

KIB = 1024


def alloc(time: int, address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "time_us": time, "addr": address, "size": size, "frames": []}


def free(time: int, address: int, size: int = 0) -> dict[str, Any]:
    return {"action": "free_requested", "time_us": time, "addr": address, "size": size}


def marks(*entries: tuple[int, int, str, str | None]) -> list[Mark]:
    return [Mark(*entry) for entry in entries]


STEP = marks(
    (0, 1, "init", None),
    (10, 1, "forward", "Net"),
    (20, 1, "backward", None),
    (30, 1, "optimizer", None),
    (40, 1, "other", None),
)


def shares(events: list[dict[str, Any]], labels: Any = (), at: list[Mark] | None = None) -> dict[str, int]:
    """Return the categories that hold something at the peak."""
    ledger = Ledger()
    ledger.feed(events, at or STEP, list(labels))
    assert ledger.peak is not None
    found = breakdown(ledger.peak, sum(block.size for block in ledger.peak.blocks))
    assert sum(found.values()) == sum(block.size for block in ledger.peak.blocks)
    return {name.removesuffix("_bytes"): size for name, size in found.items() if size}


@pytest.mark.parametrize(("size", "expected"), [(0, 512), (1, 512), (512, 512), (513, 1024), (10**6, 1000448)])
def test_requests_are_rounded_as_the_allocator_does(size: int, expected: int) -> None:
    """512 B at the least, and a multiple of it."""
    assert rounded(size) == expected


def test_peak_is_the_highest_total() -> None:
    """The moment of the peak has the blocks that lived then, and the mark it happened under."""
    ledger = Ledger()
    ledger.feed(
        [alloc(1, 1 * KIB, 512), alloc(11, 2 * KIB, 1024), free(12, 2 * KIB), alloc(21, 4 * KIB, 512)], STEP, []
    )
    assert ledger.peak is not None
    assert sum(block.size for block in ledger.peak.blocks) == 1536
    assert ledger.peak.mark.phase == "forward"
    assert [block.size for block in ledger.peak.blocks] == [512, 1024]


def test_kept_forward_blocks_are_activations() -> None:
    """A forward block that outlives its phase was kept for backward; one that dies in it was a temporary."""
    events = [alloc(11, 1 * KIB, 1024), alloc(12, 8 * KIB, 2048), free(13, 8 * KIB), free(25, 1 * KIB)]
    assert shares(events) == {"activation": 1024, "temporary": 2048}


def test_blocks_of_the_other_phases() -> None:
    """Backward's and the optimizer's own blocks are temporary; what nobody knows is unknown."""
    assert shares([alloc(21, 1 * KIB, 512), free(22, 1 * KIB)]) == {"temporary": 512}
    assert shares([alloc(31, 1 * KIB, 512), free(32, 1 * KIB)]) == {"temporary": 512}
    assert shares([alloc(31, 1 * KIB, 512)]) == {"unknown": 512}
    assert shares([alloc(1, 1 * KIB, 512)]) == {"unknown": 512}


def test_recomputed_blocks_are_activations() -> None:
    """What a module allocates while backward recomputes it is an activation, as in the first forward pass."""
    at = marks((0, 1, "backward", None), (10, 1, "backward", "+Layer"), (20, 1, "backward", "Layer"))
    assert shares([alloc(11, 1 * KIB, 512), alloc(21, 2 * KIB, 1024)], at=at) == {"activation": 512, "temporary": 1024}


def test_a_label_decides() -> None:
    """What the observer saw at an address wins over when the block was born."""
    labels = [(5, "parameter", [1 * KIB]), (25, "gradient", [4 * KIB]), (35, "optimizer_state", [8 * KIB])]
    events = [alloc(1, 1 * KIB, 512), alloc(21, 4 * KIB, 512), alloc(31, 8 * KIB, 512), alloc(41, 16 * KIB, 512)]
    assert shares(events, labels) == {"parameter": 512, "gradient": 512, "optimizer_state": 512, "unknown": 512}


def test_the_stronger_label_stays() -> None:
    """A parameter that is also some module's input remains a parameter, whichever was said last."""
    for order in (("parameter", "input"), ("input", "parameter")):
        labels = [(2, order[0], [1 * KIB]), (3, order[1], [1 * KIB])]
        assert shares([alloc(1, 1 * KIB, 512)], labels) == {"parameter": 512}


def test_a_label_inside_a_block_is_the_blocks() -> None:
    """A view or a shard of a flat buffer names the buffer; an address past the end names nothing."""
    assert shares([alloc(1, 1 * KIB, 2048)], [(2, "parameter", [2 * KIB])]) == {"parameter": 2048}
    assert shares([alloc(1, 1 * KIB, 2048)], [(2, "parameter", [3 * KIB, 100])]) == {"unknown": 2048}


def test_labels_hold_for_the_block_that_lived_then() -> None:
    """When an address is used again, the new block does not inherit the label."""
    events = [alloc(1, 1 * KIB, 512), free(3, 1 * KIB), alloc(11, 1 * KIB, 1024)]
    assert shares(events, [(2, "parameter", [1 * KIB])]) == {"activation": 1024}


def test_a_trace_in_pieces_is_one_trace() -> None:
    """Feeding the events in two pieces finds the same peak and the same categories."""
    events = [alloc(1, 1 * KIB, 512), alloc(11, 2 * KIB, 2048), free(12, 2 * KIB), alloc(21, 8 * KIB, 1024)]
    whole = Ledger()
    whole.feed(events, STEP, [(2, "parameter", [1 * KIB])])
    for cut in range(len(events) + 1):
        pieces = Ledger()
        pieces.feed(events[:cut], STEP, [(2, "parameter", [1 * KIB])] if cut else [])
        pieces.feed(events[cut:], STEP, [] if cut else [(2, "parameter", [1 * KIB])])
        assert pieces.peak is not None
        assert whole.peak is not None
        assert breakdown(pieces.peak, 2560) == breakdown(whole.peak, 2560), cut


def test_slack_of_unsplit_blocks_is_unknown() -> None:
    """What the allocator gave beyond the request is counted, so that the parts add up to what PyTorch says."""
    ledger = Ledger()
    ledger.feed([alloc(1, 1 * KIB, 512)], STEP, [(2, "parameter", [1 * KIB])])
    assert ledger.peak is not None
    found = breakdown(ledger.peak, 2048)
    assert set(found) == {f"{category}_bytes" for category in CATEGORIES}
    assert (found["parameter_bytes"], found["unknown_bytes"]) == (512, 1536)


def test_true_sizes_are_taken_from_the_segments() -> None:
    """A live block that was not split has its true size from then on."""
    ledger = Ledger()
    ledger.feed([alloc(1, 1 * KIB, 512)], STEP, [(2, "parameter", [1 * KIB])])
    ledger.correct_sizes([{"address": 1 * KIB, "blocks": [{"state": "active_allocated", "size": 1024}]}])
    ledger.feed([alloc(11, 8 * KIB, 512)], STEP, [])
    assert ledger.peak is not None
    assert sum(block.size for block in ledger.peak.blocks) == 1536


def test_frees_of_unknown_blocks_are_ignored() -> None:
    """A trace that starts in the middle frees blocks whose birth nobody saw."""
    assert shares([free(1, 9 * KIB), alloc(2, 1 * KIB, 512)]) == {"unknown": 512}
