"""The page in a real browser: drawn, usable by pointer and keyboard, whole on a phone, and deaf to hostile names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profile_samples import bare, every, from_snapshot, hostile, large, measured, training

from oomproof.measure.profile import Profile
from oomproof.report.page.files import page
from oomproof.report.source import Source
from oomproof.units import MIB

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]
SAMPLES = dict(every())
NARROW = {"width": 390, "is_mobile": True, "has_touch": True}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Profile], Path]:
    """A function that writes a profile's page and returns its place."""

    def save(profile: Profile) -> Path:
        file = tmp_path / "report.html"
        source = Source(path="run.oomp", profile=profile, measurement=measured(profile))
        file.write_text(page(source), encoding="utf-8")
        return file

    return save


def scrolled(shown: Any) -> None:
    """Scroll through the page, so that each chart is drawn."""
    for chart in ("curve", "icicle", "treemap"):
        place = shown.locator(f"#{chart}")
        if place.is_visible():
            place.scroll_into_view_if_needed()
            shown.wait_for_selector(f"#{chart} .main-svg", state="attached")


def until(shown: Any, expression: str) -> None:
    """Wait until a JavaScript expression is true; Playwright's own way would need eval, which the page forbids."""
    for _ in range(200):
        if shown.evaluate(expression):
            return
        shown.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


@pytest.mark.parametrize("look", [{"width": 1400}, {**NARROW, "dark": True}], ids=["wide and light", "phone and dark"])
@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_every_profile_is_drawn(
    visit: Visit, saved: Callable[[Profile], Path], profile: Profile, look: dict[str, Any]
) -> None:
    """No error, nothing loaded, nothing wider than the screen, and every link in the navigation leads somewhere."""
    shown = visit(saved(profile), **look)
    scrolled(shown)
    assert shown.evaluate("document.documentElement.scrollWidth") <= look["width"]
    assert shown.locator("h1").bounding_box()["y"] < 120, "the verdict is on the first screen"
    for link in shown.locator("nav a").all():
        if link.is_visible():
            assert shown.locator(link.get_attribute("href")).is_visible()
    assert shown.screenshot(full_page=True).startswith(b"\x89PNG")


def test_hostile_names_do_nothing(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """Markup in names shows as it is written, in the table, the list and the charts; nothing comes of it."""
    shown = visit(saved(hostile()))
    scrolled(shown)
    shown.click("[data-by=stack]")
    shown.click("[data-as=list]")
    assert shown.locator("img").count() == 0
    assert shown.title() != "1"
    assert "</script><img src=x" in shown.inner_text("#rows")
    assert "</script><img src=x" in shown.inner_text("#list")


def test_hover_reads_the_curve(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """The legend shows the peak, then what is under the pointer, then the peak again."""
    shown = visit(saved(training()))
    readout = shown.locator("#timeline .readout")
    assert readout.inner_text() == "At the peak: 1.21 GiB allocated, step 2, backward"
    scrolled(shown)
    shown.locator("#curve").scroll_into_view_if_needed()
    box = shown.locator("#curve").bounding_box()
    shown.mouse.move(box["x"] + 200, box["y"] + 150)
    shown.mouse.move(box["x"] + 210, box["y"] + 200)
    until(shown, "document.querySelector('#timeline .readout').textContent.startsWith('Here')")
    assert "step 1" in readout.inner_text()
    shown.mouse.move(2, 2)
    until(shown, "document.querySelector('#timeline .readout').textContent.startsWith('At the peak')")


def test_steps_zoom_and_categories_toggle(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """A step's button shows that step alone; a category's button takes it out of the stack. Both work by keyboard."""
    shown = visit(saved(training()))
    scrolled(shown)
    step = shown.locator(".zoom button", has_text="Step 2")
    step.focus()
    shown.keyboard.press("Enter")
    assert step.get_attribute("aria-pressed") == "true"
    first, last = shown.evaluate("document.getElementById('curve').layout.xaxis.range")
    everything = shown.evaluate("JSON.parse(document.getElementById('data').textContent).curve.x")
    assert everything[0] < first < last < everything[-1]
    before = shown.evaluate("document.getElementById('curve').data.length")
    button = shown.locator(".legend button", has_text="activation")
    button.focus()
    shown.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert shown.evaluate("document.getElementById('curve').data.length") == before - 1


def test_boxes_open_by_click(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """A click on a box fills the chart with it, the bar above leads back, and the switch shows the stacks."""
    shown = visit(saved(training()))
    scrolled(shown)
    shown.locator("#icicle").scroll_into_view_if_needed()
    shown.locator("#icicle .slice", has_text="transformer").first.click()
    until(shown, "document.getElementById('icicle').data[0].level !== ''")
    shown.wait_for_selector("#icicle .pathbar")
    shown.click("[data-by=stack]")
    until(shown, "document.getElementById('icicle').data[0].labels.includes('model.py:39 forward')")
    assert shown.evaluate("document.getElementById('icicle').data[0].level") == ""


def test_list_opens_by_keyboard(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """What the boxes show is also a list that opens branch by branch with the keyboard."""
    shown = visit(saved(training()))
    scrolled(shown)
    shown.click("[data-as=list]")
    branch = shown.locator("#list summary", has_text="transformer")
    assert shown.locator("#list summary", has_text="656.0 MiB").count() == 0
    branch.focus()
    shown.keyboard.press("Enter")
    shown.locator("#list summary", has_text="656.0 MiB").wait_for(state="visible")


def test_search_and_order(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """The search keeps the blocks that hold every word, and a heading orders them, once up and once down."""
    shown = visit(saved(training()))
    shown.fill("#search", "exp_avg_sq MLP")
    assert shown.inner_text("#found").startswith("4 blocks, 32.0 MiB")
    rows = shown.locator("#rows tbody tr")
    assert rows.count() == 4
    assert "exp_avg_sq of transformer.h" in rows.first.inner_text()
    shown.fill("#search", "no such block")
    assert rows.count() == 0
    shown.fill("#search", "")
    heading = shown.locator("#rows th", has_text="size")
    assert heading.get_attribute("aria-sort") == "descending"
    heading.locator("button").click()
    assert shown.locator("#rows th", has_text="size").get_attribute("aria-sort") == "ascending"
    assert "512.0 KiB" in rows.first.inner_text()


def test_a_snapshot_has_its_stacks(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """Where modules and steps are not known, what is not known is left out and the stacks are shown."""
    shown = visit(saved(from_snapshot()))
    scrolled(shown)
    assert shown.locator("#by button").all_inner_texts() == ["By stack"]
    assert not shown.locator("#states").is_visible()
    assert shown.locator("#steps").count() == 0
    assert shown.locator("#rows th").all_inner_texts() == ["size ↓", "line"]


def test_a_large_run_is_thinned_and_whole(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """Of 100,000 points and blocks the page draws some, says so, and has the peak."""
    shown = visit(saved(large()))
    scrolled(shown)
    assert "of 100,000 points are drawn" in shown.inner_text("#thinned")
    assert "are not in this page" in shown.inner_text("#found")
    assert shown.inner_text("#timeline .readout").startswith("At the peak: 4.61 GiB")
    assert shown.locator("#rows tbody tr").count() <= 50


def test_paper(visit: Visit, saved: Callable[[Profile], Path], tmp_path: Path) -> None:
    """Printed from a dark screen, the page is dark on white, without what needs a pointer."""
    shown = visit(saved(training(steps=8, leak_bytes=24 * MIB)), dark=True)
    scrolled(shown)
    shown.emulate_media(media="print")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(27, 35, 48)"
    assert not shown.locator("nav").is_visible()
    assert shown.pdf().startswith(b"%PDF")


def test_without_scripts(browser: Any, saved: Callable[[Profile], Path]) -> None:
    """The verdict, the figures, the steps and the next commands need no JavaScript."""
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(saved(training()).as_uri())
    assert "FITS" in shown.inner_text("header")
    assert "need JavaScript" in shown.inner_text("noscript")
    assert "oomproof table run.oomp --csv" in shown.inner_text("#next")
    context.close()


def test_nothing_to_show(visit: Visit, saved: Callable[[Profile], Path]) -> None:
    """A process that allocated nothing has a page without empty charts."""
    shown = visit(saved(bare()))
    for section in ("timeline", "states", "blocks"):
        assert not shown.locator(f"#{section}").is_visible()
