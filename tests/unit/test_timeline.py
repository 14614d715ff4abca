"""The curve: thinned without losing a peak, and drawn in characters."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from profile_samples import every, training, written
from rich.console import Console

from oomproof.measure.profile import CATEGORIES, Point
from oomproof.report import timeline
from oomproof.report.curve import allocated, buckets, spans, thinned
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load


def walk(count: int, seed: int) -> list[Point]:
    """Return points whose sizes go up and down by chance, with gaps between their events."""
    chance = random.Random(seed)
    event, points = 0, []
    for _ in range(count):
        event += chance.choice((1, 1, 1, 50))
        sizes = tuple(chance.randrange(2**30) if chance.random() < 0.3 else 0 for _ in CATEGORIES)
        points.append(Point(event, None, event // 100, "forward", sum(sizes) + chance.randrange(2**20), sizes))
    return points


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 7, 60, 999])
def test_no_peak_is_lost(seed: int, count: int) -> None:
    """Thinned points are points of the curve in their order, and the highest and lowest are among them."""
    points = walk(500, seed)
    few = thinned(points, count)
    assert len(few) <= max(3, count)
    assert few == [point for point in points if point in few]
    assert max(map(allocated, few)) == max(map(allocated, points))
    assert max(point.reserved_bytes for point in few) == max(point.reserved_bytes for point in points)
    if count >= 3:
        assert min(map(allocated, few)) == min(map(allocated, points))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 66, 5000])
def test_columns_have_the_highest_of_their_part(seed: int, count: int) -> None:
    """Each column is the highest point of its part of the events, with the highest reserved."""
    points = walk(500, seed)
    columns = buckets(points, count)
    assert len(columns) == count
    found = [point for point in columns if point is not None]
    assert max(map(allocated, found)) == max(map(allocated, points))
    assert max(point.reserved_bytes for point in found) == max(point.reserved_bytes for point in points)
    assert columns[0] is not None


def test_spans_cover_the_points() -> None:
    """Steps and phases are runs of neighbours, in order, with none left out."""
    points = training().points
    found = spans(points)
    assert [(span.step, span.phase) for span in found[:4]] == [
        (1, "init"), (1, "forward"), (1, "backward"), (1, "optimizer"),
    ]  # fmt: skip
    assert found[0].first_event == points[0].event
    assert found[-1].last_event == points[-1].event


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step as a person sees it without colour: letters for categories, the line of what is reserved, phases."""
    monkeypatch.chdir(tmp_path)
    console = Console(width=60, record=True, file=io.StringIO(), color_system=None)
    source = load(written(Path("a.oomp")))
    print_sheet(timeline.body(source, 2), timeline.after(source, 2), console)
    assert console.export_text() == PICTURE


def test_each_category_has_a_letter_of_its_own() -> None:
    """Without colour the letters alone tell the categories apart."""
    assert len({timeline.LETTERS[category] for category in CATEGORIES}) == len(CATEGORIES)


def test_the_highest_column_reaches_the_top() -> None:
    """Whatever the profile, the highest point fills the chart up to the scale's end or the reserved line does."""
    for _, profile in every():
        if not profile.points:
            continue
        top = max(profile.points, key=lambda point: max(allocated(point), point.reserved_bytes))
        row_bytes = max(allocated(top), top.reserved_bytes) / timeline.HEIGHT
        assert timeline._row(top.reserved_bytes, row_bytes) == timeline.HEIGHT - 1
        for point in profile.points:
            assert len(timeline._cells(point, row_bytes)) <= timeline.HEIGHT


PICTURE = """\
Peak 1.21 GiB allocated in 48 blocks; step 2, backward; in
step 2

  1.21 GiB+                       T─────────────────────────
          | ──────────────────────T
          |                       T
  1.01 GiB+                       T
          |                       AT
          |                       AT
 826.7 MiB+                       AT
          |                      AAAA
          |                   AAAAAAAAA
 620.0 MiB+                 AAAAAAAAAAAAA
          |              AAAAAAAAAAAAAAAAAA
          |           TAAAAAAAAAAAAAAAAAAAAAA
 413.3 MiB+         TAAAAAAAAAAAAAAAAAAAAAAAAAAA
          |       AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
          |    AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
 206.7 MiB+  AAAAAAAAAAAAAAAAAAAAAAAAAAAAAOOOOOOOOOOOOOO
          | OOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOO
          | PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP
            step 2
            fwd.................. bwd.............. opt....

at the highest point
P parameter 50.0 MiB   G gradient 0 B
O optimizer state 100.0 MiB   A activation 832.0 MiB
I input 512.0 KiB   T temporary 256.0 MiB
─ reserved 1.21 GiB at most   the GPU's memory, 14.56 GiB,
lies above
from left to right: allocations and frees in their order,
not time

Next: see whether steps grow or differ:
  oomproof steps a.oomp
"""
