"""How memory moved over a run: points, steps, segments and growth, from made traces."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_ledger import KIB, alloc, free, marks

from oomproof.errors import CaptureError
from oomproof.measure import series as series_module
from oomproof.measure.ledger import Block, Ledger, Mark, Tag
from oomproof.measure.profile import Profile
from oomproof.measure.series import Series, growth


def lines(frames: list[dict[str, Any]], module: str | None = None) -> tuple[str, ...]:
    """Make a stack of frames as the process does."""
    return tuple(f"{f['filename']}:{f['line']} {f['name']}" for f in frames)


def segment(time_us: int, action: str, size: int, line: int = 1) -> dict[str, Any]:
    """Return a trace entry of the allocator's own requests."""
    frames = [{"filename": "train.py", "line": line, "name": "main"}]
    return {"action": action, "addr": 0, "size": size, "time_us": time_us, "frames": frames}


def test_points_keep_the_peak_however_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging neighbours halves their number and never loses the highest."""
    monkeypatch.setattr(series_module, "MOST_POINTS", 16)
    draw = random.Random(3)
    series, events, live, total, top = Series(), [], [], 0, 0
    for now in range(5000):
        if live and draw.random() < 0.49:
            address, size = live.pop(draw.randrange(len(live)))
            events.append(free(now, address))
            total -= size
        else:
            size = 512 * draw.randrange(1, 100)
            live.append((1024 + now * 65536, size))
            events.append(alloc(now, *live[-1]))
            total += size
        top = max(top, total)
    ledger = Ledger(series)
    step = marks((0, 1, "forward", "Net"), (2500, 2, "forward", "Net"))
    for at in range(0, 5000, 700):
        ledger.feed(events[at : at + 700], step, [])
    points = series.points()
    assert 16 <= len(points) <= 33
    assert max(sum(p.category_bytes) for p in points) == top
    assert [p.event for p in points] == sorted({p.event for p in points})
    assert max(sum(row.category_bytes) for row in series.steps()) == top
    assert [row.step for row in series.steps()] == [1, 2]
    assert series.steps()[-1].end_allocated_bytes == total


def test_a_point_has_the_categories_of_its_moment() -> None:
    """What a block turns out to be later counts from its birth on."""
    ledger = Ledger(Series())
    events = [alloc(1, 1 * KIB, 512), alloc(11, 2 * KIB, 1024), alloc(12, 8 * KIB, 512), free(13, 8 * KIB)]
    ledger.feed(events, marks((0, 1, "init", None), (10, 1, "forward", "Net")), [(14, "parameter", [1 * KIB])])
    assert ledger.series is not None
    held = dict(zip(series_module.CATEGORIES, ledger.series.points()[2].category_bytes, strict=True))
    assert {k: v for k, v in held.items() if v} == {"parameter": 512, "activation": 1024, "temporary": 512}


def test_segments_are_told_by_step_and_line() -> None:
    """Reserved follows the allocator's requests; each place that made one is named with its step."""
    ledger = Ledger(Series())
    first = [segment(1, "segment_alloc", 2048, 7), alloc(2, 1 * KIB, 512), segment(11, "segment_alloc", 4096, 9)]
    ledger.feed([*first, alloc(12, 4 * KIB, 512)], marks((0, 1, "forward", "Net"), (10, 2, "forward", "Net")), [])
    ledger.feed([segment(20, "segment_free", 4096), free(21, 4 * KIB)], marks((0, 2, "other", None)), [])
    series = ledger.series
    assert series is not None
    assert (series.reserved, series.most_reserved) == (2048, 6144)
    assert {(s.stack, s.size_bytes) for s in series.segments(lines)} == {
        (("train.py:7 main",), 2048), (("train.py:9 main",), 4096)
    }  # fmt: skip


def made(step: int, line: int) -> Block:
    """Return a block that a step made at a line and nobody freed."""
    frames = [{"filename": "train.py", "line": line, "name": "main"}]
    return Block(line * 2**20 + step * 1024, 512, Mark(0, step, "forward", "Net"), frames, 1)


def test_growth_is_what_several_steps_leave_behind() -> None:
    """Two steps' leftovers may be a cache that fills; a third is a leak, and its line is named."""
    blocks = [*(made(step, 31) for step in range(2, 12)), made(1, 5), made(2, 5), *(made(1, 9) for _ in range(50))]
    (row,) = growth(blocks, lambda block: lines(block.stack))
    assert (row.stack, row.blocks, row.size_bytes) == (("train.py:31 main",), 10, 5120)
    assert (row.steps, row.first_step, row.last_step) == (10, 2, 11)


def test_a_tag_names_the_strongest_claim() -> None:
    """A gradient's name stays when a module's output turns out to be at the same address."""
    ledger = Ledger(Series())
    gradient, output = Tag("gradient of w", (2,), "float32", "fc (Linear)"), Tag("output of fc", (2,), "float32", None)
    ledger.feed(
        [alloc(1, 1 * KIB, 512), alloc(2, 2 * KIB, 512)],
        marks((0, 1, "backward", "other (Linear)")),
        [(3, None, [1 * KIB], [output]), (4, "gradient", [1 * KIB], [gradient]), (5, None, [2 * KIB], [output])],
    )
    first, second = ledger.live()
    assert (first.tag, first.module()) == (gradient, "fc (Linear)")
    assert (second.tag, second.module()) == (output, "other (Linear)")


def profile() -> Profile:
    """Return a small profile made from a trace."""
    ledger = Ledger(Series())
    ledger.feed([segment(1, "segment_alloc", 2048), alloc(2, 1 * KIB, 512)], marks((0, 1, "forward", "Net")), [])
    assert ledger.series is not None
    return Profile(
        source="run", device=0, events=1, peak_event=1, allocated_bytes=512, reserved_bytes=2048, limit_bytes=None,
        blocks=(), slack_bytes=0, points=ledger.series.points(), steps=ledger.series.steps(),
        growth=growth([made(step, 3) for step in (1, 2, 3)], lambda block: lines(block.stack)),
        segments=ledger.series.segments(lines), notes=("a note",),
    )  # fmt: skip


def test_a_profile_reads_back() -> None:
    """JSON and back is the same."""
    assert Profile.from_json(profile().to_json()) == profile()


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(schema="oomproof.profile/2"),
        lambda d: d.pop("points"),
        lambda d: d["growth"][0].__setitem__(0, 99),
        lambda d: d["growth"][0].__setitem__(2, "magic"),
        lambda d: d["points"][0].__setitem__(5, [1, 2]),
        lambda d: d["points"][0].__setitem__(0, "1"),
        lambda d: d["points"][0].pop(),
        lambda d: d.update(columns=[]),
    ],
)
def test_a_damaged_profile_is_refused(damage: Any) -> None:
    """Whatever is wrong with it ends in one kind of error."""
    data = profile().to_json()
    damage(data)
    with pytest.raises(CaptureError, match="profile"):
        Profile.from_json(data)
