"""The page that explore.py serves, in Chromium: typed text, interventions, patching, reloading."""

import re
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
from explore_process import exploring
from playwright.sync_api import expect
from run_folders import load_run
from series_of_models import COUNTED, count_models, write_steps

import glass
from cli.explore_config import ExploreConfig
from glass.heads.measure.analysis import ProbeRun
from glass.live.explorer import Explorer
from glass.live.server import Server
from interop.folder import HFFolder

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


@contextmanager
def serving(**settings):
    """Serve the page in this process; yield the explorer and its address."""
    with closing(Explorer(ExploreConfig(**settings), print)) as explorer:
        server = Server(port=0)
        arguments = (explorer.page, explorer.answer)
        thread = threading.Thread(target=server.serve, args=arguments, daemon=True)
        thread.start()
        yield explorer, server.address
        server.shutdown()
        thread.join()


def move_slider(tab, index: int) -> None:
    tab.evaluate(
        "k => { $step = document.getElementById('step'); $step.value = k; $step.oninput(); }", index
    )


def test_the_slider_moves_while_a_step_is_loaded_and_nothing_typed_is_lost(
    chromium, tmp_path, monkeypatch
):
    counts, errors = count_models(monkeypatch), []
    read_tensors = HFFolder.read_tensors

    def read_slowly(stored):
        for named in read_tensors(stored):
            time.sleep(0.02)
            yield named

    folder = str(write_steps(tmp_path / "out"))
    with serving(init_from=folder, steps="all", prompt="abcabc") as (explorer, address):
        tab = chromium.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(address)
        expect(tab.locator("#own-text-status")).to_contain_text("6 tokens,")
        expect(tab.locator("#step-now")).to_have_text("step 20")
        expect(tab.locator("#repeats")).to_contain_text("step 0")
        tab.click("[role=radio][aria-label='layer 1, head 1']")
        tab.keyboard.press("x")
        expect_interventions(tab, "L1H1", "")

        monkeypatch.setattr(HFFolder, "read_tensors", read_slowly)
        for index in (0, 1, 0, 2, 1, 0):
            move_slider(tab, index)
            time.sleep(0.1)
        tab.locator("#typed").press_sequentially("def", delay=50)
        expect(tab.locator("#own-text-status")).to_contain_text("9 tokens,")
        expect(tab.locator("#step-now")).to_have_text(f"step {COUNTED[0]}")
        expect_interventions(tab, "L1H1", "")
        assert explorer.session.step == COUNTED[0]
        assert counts == [1, 2]  # no other step was loaded to its end
        direct = glass.open(f"{folder}/checkpoint-{COUNTED[0]}")
        loss = direct.loss("abcabcdef", off="L1H1").values.mean()
        expect(tab.locator("#mean-loss")).to_contain_text(f"Mean loss {loss:.2f}")
        tab.close()
    assert errors == []


def test_all_steps_are_measured_stopped_and_continued(chromium, tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))

    measure_in_stages = ProbeRun.measure_in_stages

    def measure_slowly(run, row):
        for stage in measure_in_stages(run, row):
            time.sleep(0.3)  # so that there is time to stop
            yield stage

    monkeypatch.setattr(ProbeRun, "measure_in_stages", measure_slowly)
    errors = []
    folder = str(write_steps(tmp_path / "out"))
    settings = {"init_from": folder, "steps": "all", "prompt": "abcabc"}
    with serving(**settings) as (explorer, address):
        tab = chromium.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(address)
        measure = tab.get_by_role("button", name="Measure all steps")
        measure.click()
        tab.get_by_role("button", name="Stop").click()
        expect(measure).to_be_visible()
        assert explorer._steps.unmeasured
        measure.click()  # at once: the stage that was stopped may not have ended
        expect(tab.locator("#measuring")).to_be_hidden()  # after the page has reloaded itself
        assert explorer._steps.unmeasured == []
        expect(tab.locator("#trajectory svg")).to_be_visible()
        expect(tab.locator("#scored-at")).to_contain_text("step 20")
        move_slider(tab, 0)
        expect(tab.locator("#scored-at")).to_contain_text("step 5")
    with serving(**settings) as (_, address):  # what was measured is there at once
        tab.goto(address)
        expect(tab.locator("#trajectory svg")).to_be_visible()
        tab.close()
    assert errors == []
