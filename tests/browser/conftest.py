"""A headless Chromium, driven by Playwright; the tests are skipped with the reason where either is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))  # the samples

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A running Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    found = os.environ.get("OOMPROOF_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or its path in OOMPROOF_TEST_CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])  # root in a container
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a page with its charts; the test fails if the page complains or loads anything."""
    contexts, complaints = [], []

    def opened(file: Path, *, width: int = 1400, dark: bool = False, **more: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", **more
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: _note(request.url, file, complaints))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-charts]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def _note(url: str, file: Path, complaints: list[str]) -> None:
    if url != file.as_uri() and not url.startswith(("data:", "blob:")):
        complaints.append(f"request: {url}")
