"""The page's text: complete, escaped, within its size, and with a policy that lets nothing in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from measurement_samples import fitting, full, not_fitting, untouched
from profile_samples import HOSTILE, bare, every, hostile, large, measured, training, written

from oomproof.errors import UsageError
from oomproof.measure.measurement import Range, ValueRead
from oomproof.measure.profile import CATEGORIES, Profile
from oomproof.report.curve import allocated
from oomproof.report.page.data import COLOURS, page_data
from oomproof.report.page.files import page, write_page
from oomproof.report.source import Source, load
from oomproof.units import MIB

SAMPLES = dict(every())


def made(profile: Profile, **changes: object) -> str:
    """Return the page of a profile."""
    return page(Source(path="a b.oomp", profile=profile, measurement=measured(profile, **changes)))


class Elements(HTMLParser):
    """Collects tags, their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.policy = ""
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._inside = True
            self.scripts.append("")
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_nothing_can_be_loaded_and_only_its_scripts_run(profile: Profile) -> None:
    """The policy forbids every source and names the page's own two scripts; no element loads anything."""
    found = Elements(made(profile))
    assert "default-src 'none'" in found.policy
    assert "unsafe-eval" not in found.policy
    data, plotly, own = found.scripts
    for script in (plotly, own):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in found.policy
    json.loads(data)
    for tag, attributes in found.tags:
        assert tag not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action", "onclick", "onerror", "onload"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_hostile_text_is_text() -> None:
    """Names that try to be markup or control codes add no element, whatever place of the page they stand in."""
    changes = {
        "command": ("python", HOSTILE),
        "notes": (HOSTILE,),
        "ranges": (Range(what=HOSTILE, low_bytes=1, high_bytes=2, reason=HOSTILE),),
        "value_reads": (ValueRead(location=HOSTILE, operation=HOSTILE, count=1),),
    }
    text = made(hostile(), **changes)
    found = Elements(text)
    assert len(found.scripts) == 3
    assert not [tag for tag, attributes in found.tags if tag == "img" or "onerror" in attributes]
    assert "\x1b" not in text
    assert "onerror=&quot;" in text
    assert HOSTILE in json.loads(found.scripts[0])["blocks"]["texts"]


@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_charts_show_what_the_profile_says(profile: Profile) -> None:
    """The curve has the highest point, the trees' roots are what is allocated, the table has the blocks."""
    data = page_data(profile)
    curve = data["curve"]
    if profile.points:
        peak = curve["peak"]
        assert sum(sizes[peak] for sizes in curve["bytes"]) == max(map(allocated, profile.points))
        assert len({len(curve[name]) for name in ("x", "step", "phase", "reserved")}) == 1
        assert all(len(sizes) == len(curve["x"]) for sizes in curve["bytes"])
        assert len(curve["bytes"]) == len(CATEGORIES)
    for name, tree in data["trees"].items():
        assert name == "states" or tree["bytes"][0] == profile.allocated_bytes
        for number, parent in enumerate(tree["parents"]):
            assert parent < number
            assert sum(size for _, size in tree["categories"][number]) == tree["bytes"][number]
        below = [0] * len(tree["names"])
        for parent, size in zip(tree["parents"][1:], tree["bytes"][1:], strict=True):
            below[parent] += size
        assert all(inside <= size for inside, size in zip(below, tree["bytes"], strict=True))
    assert sum(row[0] for row in data["blocks"]["rows"]) + profile.slack_bytes == profile.allocated_bytes


def test_every_category_has_a_colour_of_its_own() -> None:
    """No two categories look the same."""
    assert set(COLOURS) == set(CATEGORIES)
    assert len(set(COLOURS.values())) == len(CATEGORIES)


def test_a_hundred_thousand_points_and_blocks() -> None:
    """The page of a large run stays under 8 MB, keeps the peak, and says what it left out."""
    profile = large()
    assert len(profile.points) == 100_000
    text = made(profile)
    assert len(text.encode()) < 8_000_000
    data = json.loads(Elements(text).scripts[0])
    assert max(map(sum, zip(*data["curve"]["bytes"], strict=True))) == max(map(allocated, profile.points))
    assert data["blocks"]["all"] == len(profile.blocks)
    assert data["blocks"]["left"] is not None


@pytest.mark.parametrize(
    "measurement", [fitting(), not_fitting(), untouched(), full()], ids=["fits", "not", "un", "full"]
)
@pytest.mark.parametrize("profile", [training(), bare()], ids=["training", "bare"])
def test_any_measurement(profile: Profile, measurement: object) -> None:
    """Whatever is beside the profile, the verdict stands first and every link leads to a section or is hidden."""
    text = page(Source(path="a.oomp", profile=profile, measurement=measurement), "a100-80gb")  # type: ignore[arg-type]
    assert text.index('<div class="verdict') < text.index("<nav") < text.index("<main>")


def test_without_a_measurement() -> None:
    """A profile alone still has its page: the peak instead of a verdict."""
    text = page(Source(path="x.pickle", profile=training(), measurement=None))
    assert "<b>PEAK</b> 1.21 GiB allocated" in text


def test_out_of_memory_and_ranks() -> None:
    """A run that does not fit says where it died and what it asked for; one of several processes has its ranks."""
    text = page(Source(path="a.oomp", profile=training(), measurement=full()), "a100-80gb")
    assert "step 1, forward, in h.7.attn (GPT2Attention), asking for 2.00 GiB" in text
    assert "Tried to allocate 2.00 GiB" in text
    assert text.index("rank 1, cuda:1") < text.index("rank 0, cuda:0"), "the worst stands first"
    assert "--gpu a100-80gb" in text


def test_leaks_and_next_commands() -> None:
    """The page names the leaking line, and commands a person can type, with the path quoted."""
    text = made(training(steps=8, leak_bytes=24 * MIB))
    assert "<b>LEAKS</b>" in text
    assert "train.py:33 log" in text
    assert "oomproof diff &#x27;a b.oomp&#x27; MENDED.oomp" in text


def test_written_whole(tmp_path: Path) -> None:
    """A page is written in one step, and a folder that is not there is named."""
    source = load(written(tmp_path / "a.oomp"))
    text = page(source)
    write_page(tmp_path / "a.html", text)
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == text
    assert re.match("<!DOCTYPE html>", text)
    with pytest.raises(UsageError, match="create it first"):
        write_page(tmp_path / "no" / "a.html", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.oomp"]


def test_the_step_with_the_peak_is_in_the_table() -> None:
    """Of many steps the first, the last and the highest are shown, wherever it is."""
    known = training(steps=3)
    row = known.steps[1]
    for top in (1, 9, 10, 50, 98, 99, 100):
        rows = tuple(row._replace(step=n, category_bytes=(*row.category_bytes[:-1], n == top)) for n in range(1, 101))
        text = made(known._replace(steps=rows))
        shown = [int(n) for n in re.findall(r'<th scope="row">step (\d+)<', text)]
        assert {1, 2, top, 99, 100} <= set(shown)
        hidden = [int(n) for n in re.findall(r">(\d+) steps? more<", text)]
        assert len(shown) + sum(hidden) == 100
