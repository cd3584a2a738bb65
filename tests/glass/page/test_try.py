"""The reader's own text, in Chromium: read as it is typed, with interventions, continued, kept in
the address."""

import re
import shutil

import numpy as np
import pytest
import torch
from conftest import wait_until
from models import lively
from pages import expect_map, expect_text, focus_map_cell, read_back
from playwright.sync_api import expect
from run_folders import load_run
from safetensors.torch import load_file, save_file

from config import GPTConfig
from data.tokenizer import decode_characters, train_bpe
from glass.heads.measure.analysis import analyze
from glass.heads.measure.snapshot_files import float16_weights, save_weights
from glass.page import write as page
from glass.page.html import write_html
from glass.page.prompt import format_analysis
from run.run_dir import RunDir
from variants import build_model

HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture
def own(finished_run, tmp_path):
    """A run's folder, of weights as large as trained ones, and its model and tokenizer."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    model, tokenizer, _ = load_run(run)
    for step in (0, 6, 12):
        lively(model, step)
        save_file(float16_weights(model), run / "attention" / f"step_{step:08d}.safetensors")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half())
    return run, model, tokenizer


def page_logits(tab, ids, **interventions) -> np.ndarray:
    logits = tab.evaluate(
        "([ids, changes]) => glass.logits(ids, changes).then(x => [...x])", [ids, interventions]
    )
    return np.array(logits).reshape(len(ids), -1)


def expect_interventions(tab, off: str, hidden: str) -> None:
    """Wait until the text was read with these heads ablated and tokens hidden."""
    tab.wait_for_selector(f'#mean-loss[data-off="{off}"][data-hidden="{hidden}"]', state="attached")


@pytest.mark.slow
def test_a_typed_text_is_read_with_interventions_and_continued(own, open_page):
    run, model, tokenizer = own
    tab, text = open_page(page.write_page(RunDir(run))), "the glass the glass"
    ids = tokenizer.encode(text)
    tab.fill("#typed", "the glass " * 5)  # longer than the block, whose last tokens are read
    expect_text(tab, "#own-text-status", "32 tokens, the last of 50")
    tab.fill("#typed", text)
    expect_text(tab, "#own-text-status", f"{len(ids)} tokens,")
    expect(tab.locator("#text .token")).to_have_count(len(ids))
    assert tab.evaluate("text => glass.encode(text)", text) == ids
    assert tab.evaluate("ids => glass.decode(ids)", ids) == text
    for step in (0, 6, 12):
        weights = load_file(run / "attention" / f"step_{step:08d}.safetensors")
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0][0].numpy()
        assert page_logits(tab, ids, step=step) == pytest.approx(logits, abs=1e-3)
    found = tab.evaluate("ids => glass.maps(ids).then(x => [...x])", ids)
    maps = model.attention_maps(torch.tensor([ids]))[:, 0].detach().numpy()
    assert np.reshape(found, maps.shape) == pytest.approx(maps, abs=1e-3)

    tab.click("[role=radio][aria-label='layer 1, head 1']")
    tab.keyboard.press("x")
    expect_interventions(tab, "L1H1", "")
    expect(tab.locator("#text small.was").first).to_be_visible()
    tab.click("#text [aria-label^='token 2:']")
    tab.click("#hide-token")
    expect_interventions(tab, "L1H1", "2")
    wait_until(tab, "location.hash.includes('off=L1H1&hidden=2')")
    changed = page_logits(tab, ids, off=["L1H1"], hidden=[2])
    assert np.abs(changed - logits).max() > 0.01
    tab.click("#text [aria-label^='token 5:']")
    before, now = (np.exp(row) / np.exp(row).sum() for row in (logits[5], changed[5]))
    listed = {*np.argsort(before)[-5:], *np.argsort(now)[-5:], ids[6]}
    expected = sorted(listed, key=lambda id: -abs(now[id] - before[id]))
    rows = tab.locator("#expected .chance b").all_inner_texts()
    found = [[float(chance) for chance in row.split(" → ")] for row in rows]
    assert np.array(found) == pytest.approx(np.array([before, now]).T[expected], abs=2e-3)
    expect(tab.locator("#expected .real")).to_have_count(1)
    again = open_page(run / "report.html")
    again.goto(tab.url)
    again.reload()
    expect_interventions(again, "L1H1", "2")
    tab.fill("#typed", text + " " * 15)  # the token stays hidden where the text is cut
    expect_interventions(tab, "L1H1", "0")
    expect(tab.locator("#text [aria-label^='token 0:']")).to_have_class(re.compile("hidden-token"))
    tab.fill("#typed", text + " " * 16)
    expect_interventions(tab, "L1H1", "")
    tab.fill("#typed", text)
    expect_interventions(tab, "L1H1", "2")
    tab.click("#text [aria-label^='token 2:']")
    tab.click("#reset")
    expect_interventions(tab, "", "")

    tab.check("#token-effect")
    expect_map(tab, kind="token-effect")
    expect(tab.locator("#breakdown [data-part=lens]")).to_be_visible()
    tab.fill("#temperature", "0")
    tab.click("#continue")
    greedy = model.generate(torch.tensor([ids]), 20, temperature=0)[0].tolist()
    expect(tab.locator("#typed")).to_have_value(tokenizer.decode(greedy))
    expect_text(tab, "#continue", "Continue")


@pytest.mark.slow
def test_a_text_is_read_by_its_ids_and_shown_in_whole_characters_until_it_is_edited(
    open_page, tmp_path
):
    tokenizer = train_bpe([], 257)  # each token is a byte
    _, *ids = tokenizer.encode("日" + "مرحبا" + "😀")[:-1]
    model = lively(build_model(GPTConfig(257, n_layer=2, n_head=2, n_embd=16, block_size=64)))
    facts = {"title": "cut", "promptTokens": 1, "tokenCount": len(ids)}
    parts = format_analysis(facts, model, tokenizer, analyze(model, tokenizer, ids))
    tab = open_page(write_html(tmp_path / "page.html", parts))

    def expect_read(tab, text: str, ids: list[int]) -> None:
        expect_text(tab, "#own-text-status", f"{len(ids)} tokens,")
        expect(tab.locator("#typed")).to_have_value(text)
        kept = "%2C".join(map(str, ids))
        wait_until(tab, f"`${{location.hash}}&`.includes('ids={kept}&')")

    tab.click("[role=radio][aria-label='layer 1, head 1']")
    tab.keyboard.press("x")
    expect_read(tab, "مرحبا", ids)
    tab.keyboard.press("x")
    expect_interventions(tab, "", "")
    tab.fill("#temperature", "0")
    tab.click("#continue")
    weights = {name: tensor.half().float() for name, tensor in model.tensors().items()}
    model.load_state_dict(weights, strict=False)
    greedy = model.generate(torch.tensor([ids]), 20, temperature=0)[0].tolist()
    expect_read(tab, decode_characters(tokenizer, greedy), greedy)
    again = open_page(tmp_path / "page.html")
    again.goto(tab.url)
    again.reload()
    expect_read(again, decode_characters(tokenizer, greedy), greedy)

    edited = decode_characters(tokenizer, greedy) + "a"
    again.fill("#typed", edited)
    expect_text(again, "#own-text-status", f"{len(edited.encode())} tokens,")
    wait_until(again, "!location.hash.includes('ids=')")


# Delays what the page asks of the worker, and notes in each frame which steps the page shows.
SLOW_WORKER = """
const Original = Worker;
window.Worker = class extends Original {
  postMessage(message) {
    window.posted += 1;
    setTimeout(() => super.postMessage(message), window.delay ?? 0);
  }
};
window.posted = 0;
window.shown = new Set();
const textOf = id => document.getElementById(id)?.textContent ?? "";
const watch = () => {
  const [slider, ...parts] = ["step-now", "map-title", "map-caption", "scored-at", "mean-loss"];
  const index = document.getElementById("step")?.value;
  shown.add(JSON.stringify([index, textOf(slider), ...parts.map(textOf)]));
  requestAnimationFrame(watch);
};
watch();
"""


@pytest.mark.slow
def test_the_slider_stops_where_the_page_has_weights_and_no_view_shows_another_step_or_text(
    own, open_page
):
    run, model, tokenizer = own
    save_weights(run / "attention" / "step_00000006.safetensors", 12, model)  # of another step
    text = "the glass the glass"
    tab = open_page(page.write_page(RunDir(run)))
    tab.add_init_script(SLOW_WORKER)
    tab.reload()
    expect(tab.locator("#loading")).to_have_count(0)  # before, nothing can be focused
    tab.focus("#step")
    tab.keyboard.press("ArrowLeft")
    expect_text(tab, "#step-now", "step 6")  # stored maps are shown at every step
    tab.fill("#typed", text)
    tab.wait_for_selector("#large[data-probe='your text']")
    assert tab.inner_text("#step-now") == "step 0" and tab.input_value("#step") == "0"
    for kind, marked in (("has-weights", ["0", "12"]), ("maps-only", ["6"])):
        marks = tab.locator(f"#ticks .{kind}")
        assert [mark.get_attribute("data-step") for mark in marks.all()] == marked
        expect(tab.locator(f"#step-legend .{kind}")).to_be_visible()
    expect_text(tab, "#stops", "those of 1 are damaged")

    tab.evaluate("shown.clear(); delay = 400")
    for typed in ("the", "the glass", text):
        tab.evaluate("posted = 0")
        tab.fill("#typed", typed)
        wait_until(tab, "posted > 0")
    tab.focus("#step")
    for key, step in (("ArrowRight", 12), ("ArrowLeft", 0), ("End", 12)):
        tab.keyboard.press(key)
        expect_text(tab, "#step-now", f"step {step}")
    tab.evaluate("posted = 0")
    tab.keyboard.press("ArrowLeft")
    wait_until(tab, "posted > 0")
    tab.keyboard.press("ArrowRight")  # before the answer
    ids = tokenizer.encode(text)
    for _ in range(2):  # a text takes two requests; answers come in their order
        tab.evaluate("ids => glass.logits(ids).then(() => null)", ids)
    expect_text(tab, "#step-now", "step 12")
    shown = tab.evaluate("[...shown].map(JSON.parse)")
    assert len({tuple(parts) for parts in shown}) == 2
    for index, slider, title, caption, scores, loss in shown:
        step = 6 * int(index)
        assert slider == f"step {step}" and f"after {step} steps" in title
        assert f"of step {step}." in caption and scores == f"at step {step}"
        weights = load_file(run / "attention" / f"step_{step:08d}.safetensors")
        model.load_state_dict(weights, strict=False)
        ids = torch.tensor([tokenizer.encode(text)])
        expected = model(ids[:, :-1], ids[:, 1:])[1].item()
        assert float(re.search(r"[\d.]+\d", loss)[0]) == pytest.approx(expected, rel=2e-3)
    assert tab.inner_text("#step-now") == "step 12"


@pytest.mark.slow
def test_keys_intervene_before_anything_is_typed_and_wherever_the_focus_is(own, open_page):
    tab = open_page(page.write_page(RunDir(own[0])))
    stored = tab.locator("#text .token").all_inner_texts()
    assert not tab.input_value("#typed").startswith("\n")
    tab.click("[role=radio][aria-label='layer 1, head 1']")
    tab.focus("#text [aria-label^='token 2:']")
    tab.keyboard.press("h")
    expect_interventions(tab, "", "2")
    assert [text.split("\n")[0] for text in tab.locator("#text .token").all_inner_texts()] == stored
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("token 2:")
    for place in ("#step", "#probe", "#theme", "#map canvas"):
        tab.focus(place)
        tab.keyboard.press("x")
        expect_interventions(tab, "L1H1", "2")
        expect_text(tab, "#pinned-token-text", "before")
        tab.click("#ablate-head")
        expect_interventions(tab, "", "2")
    typed = tab.input_value("#typed")
    tab.click("#typed")
    tab.keyboard.press("x")  # a letter of the text
    assert len(tab.input_value("#typed")) == len(typed) + 1
    tab.keyboard.press("Backspace")
    expect_interventions(tab, "", "2")


@pytest.mark.slow
def test_no_head_is_ablated_before_one_is_chosen_if_none_has_scores(own, open_page):
    run, *_ = own
    (run / "metrics.jsonl").write_text("")
    tab = open_page(page.write_page(RunDir(run)))
    expect(tab.locator("#ablate-head")).to_be_disabled()
    tab.keyboard.press("x")
    tab.focus("#text [aria-label^='token 2:']")
    tab.keyboard.press("h")
    expect_interventions(tab, "", "2")
    wait_until(tab, "location.hash.includes('hidden=2')")
    assert "head=" not in tab.url
    tab.click("[role=radio][aria-label='layer 1, head 1']")
    tab.click("#ablate-head")
    expect_interventions(tab, "L1H1", "2")


@pytest.mark.slow
def test_hostile_text_is_inert_and_damaged_weights_leave_the_stored_maps(own, open_page):
    run, *_ = own
    tab = open_page(page.write_page(RunDir(run)))
    url = tab.url.partition("#")[0]
    tab.goto("about:blank")  # an address that only changes its hash is rewritten before a reload
    tab.goto(f"{url}#text={HOSTILE}&off=L9H9,{HOSTILE}&hidden=99999")
    wait_until(tab, "document.getElementById('own-text-status').textContent !== ''")
    assert not tab.evaluate("window.hacked") and not tab.locator("img").count()
    blobs = (run / "report.html").read_text().split('class="blob">')
    for place in read_back(run / "report.html")[0]["weights"]["blobs"].values():
        blobs[place + 1] = "AAAA" + blobs[place + 1][4:]
    (run / "report.html").write_text('class="blob">'.join(blobs))
    tab = open_page(run / "report.html")
    tab.fill("#typed", "the glass")
    wait_until(tab, "document.getElementById('own-text-status').textContent !== ''")
    assert tab.locator("#map canvas").is_visible()


@pytest.mark.slow
def test_a_page_whose_worker_is_refused_says_that_it_shows_what_was_recorded(own, chromium):
    path = page.write_page(RunDir(own[0]))
    policy = {"Content-Security-Policy": "default-src 'unsafe-inline'"}  # as of a wiki or a forge
    tab = chromium.new_page()
    tab.route("http://pages.test/**", lambda route: route.fulfill(path=path, headers=policy))
    for address in ("", "#text=the"):
        tab.goto("about:blank")
        tab.goto(f"http://pages.test/{address}")
        expect(tab.locator("#loading")).to_have_count(0)
        expect_text(tab, "#own-text-status", "stored values are shown")
    tab.click("[role=radio][aria-label='layer 1, head 1']")
    expect_map(tab, heads="L1H1")
    for text in ("the", "the glass"):
        tab.evaluate("document.getElementById('own-text-status').textContent = 'reading …'")
        tab.fill("#typed", text)
        expect_text(tab, "#own-text-status", "stored values are shown")
    tab.evaluate("document.getElementById('own-text-status').textContent = 'reading …'")
    tab.click("#continue")
    expect_text(tab, "#own-text-status", "stored values are shown")
    expect_text(tab, "#continue", "Continue")
    focus_map_cell(tab, 12, 4, 16)
    tab.keyboard.press("Enter")
    expect_text(tab, "#score-attribution", "stored values are shown")
    tab.close()
