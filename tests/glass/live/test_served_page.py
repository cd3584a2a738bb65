"""The page that explore.py serves, in Chromium: typed text, interventions, patching, reloading."""

import re

import numpy as np
import pytest
from explore_process import exploring
from playwright.sync_api import expect
from run_folders import load_run

pytestmark = pytest.mark.slow
TEXT, CORRUPTED = "the glass the glass", "the grass the glass"


def expect_interventions(tab, off: str, hidden: str) -> None:
    """Wait until the text was read with these heads ablated and tokens hidden."""
    tab.wait_for_selector(f'#mean-loss[data-off="{off}"][data-hidden="{hidden}"]', state="attached")


def test_a_text_is_read_changed_patched_and_kept_in_the_address(finished_run, chromium, tmp_path):
    tokenizer = load_run(finished_run)[1]
    ids = tokenizer.encode(TEXT)
    errors = []
    with exploring(tmp_path, f"run_dir={finished_run}") as explorer:
        tab = chromium.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(explorer.address)
        tab.fill("#typed", TEXT)
        expect(tab.locator("#own-text-status")).to_contain_text(f"{len(ids)} tokens,")
        expect(tab.locator("#text .token")).to_have_count(len(ids))
        assert tab.evaluate("text => glass.encode(text)", TEXT) == ids
        maps = tab.evaluate("ids => glass.maps(ids).then(x => [...x])", ids)
        assert np.isclose(np.sum(maps), 2 * 2 * len(ids), atol=1e-3)  # each row sums to 1

        tab.click("[role=radio][aria-label='layer 1, head 1']")
        tab.keyboard.press("x")
        expect_interventions(tab, "L1H1", "")  # which draws the tokens again
        tab.click("#text [aria-label^='token 2:']")
        tab.click("#hide-token")
        expect_interventions(tab, "L1H1", "2")
        tab.check("#token-effect")
        expect(tab.locator("#breakdown [data-part=lens]")).to_be_visible()

        tab.click("#patching summary")
        tab.fill("#corrupted", CORRUPTED)
        expect(tab.locator("#patching-tokens")).to_contain_text("r")
        expect(tab).to_have_url(re.compile("corrupted=the\\+grass"))
        tab.reload()
        expect_interventions(tab, "L1H1", "2")
        expect(tab.locator("#typed")).to_have_value(TEXT)
        expect(tab.locator("#corrupted")).to_have_value(CORRUPTED)
        assert errors == []
    tab.fill("#typed", "the glass")
    expect(tab.locator("#own-text-status")).to_contain_text(
        "explore.py"
    )  # it is not running any more
    tab.close()
