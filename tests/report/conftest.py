"""Chromium, and pages in it."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not shutil.which("chromium"):
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def see(chromium):
    """see(path, width=…, **context) → the page, opened from its file without a network; an error in it fails the test."""
    from playwright.sync_api import expect

    errors, contexts = [], []

    def open_page(path: Path, width: int = 1280, **context):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, **context))
        contexts[-1].set_offline(True)
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: errors.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
        tab.goto(path.as_uri())
        expect(tab).not_to_have_title("GlassGPT")
        tab.wait_for_timeout(150)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert not errors
