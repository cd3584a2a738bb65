"""The page of a sweep: its figures against the files', how much of the maps it holds, what a
person sees of it in Chromium."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from urllib.parse import unquote

import numpy as np
import pytest
from pages import (
    HOSTILE,
    aside,
    causal,
    check_maps,
    exactly,
    expect_text,
    pixels,
    read_back,
    read_tip,
    snapshot,
    unpack,
    write_snapshot,
)
from safetensors.numpy import save_file

from config import Config, GPTConfig, TokenizerConfig, config_yaml
from report import encode, page, sweep_page
from report.sweep import read_sweep
from sweeps import begin_job, end_job, job_name, write_note

STEPS = (0, 10, 20)
TYPED = [text for text in HOSTILE if text != "\ud800"]  # what can be typed
STRONGEST = ("previous_token", "duplicate_token", "induction", "sink")


# A sweep's folder, made up

def job(folder: Path, settings: dict, final: float | None = 2.0, *, L=2, H=4, groups=2, T=16,
        steps=STEPS, words=None, vocab=65, speed=1000,
        size=500, maps=True) -> Path:
    """A job with these settings whose validation loss falls from 4 to `final`; None: it never had
    one."""
    run = folder / job_name(settings)
    begin_job(run, {"max_steps": "20", **settings}, list(settings))
    if final is None:
        return run
    model = GPTConfig(vocab_size=vocab, n_layer=L, n_head=H, n_kv_head=groups, block_size=T,
                      n_embd=8 * H)
    config = Config(model=model, max_steps=20, seed=int(settings.get("seed", 1)), precision="fp32",
                    tokenizer=TokenizerConfig(name="char"))
    (run / "config.yaml").write_text(config_yaml(config))
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    save_file({"w": np.zeros(size, np.float32)},
              run / "checkpoints" / "step_00000020" / "model.safetensors")
    rng = np.random.default_rng(len(settings))
    with (run / "metrics.jsonl").open("w") as f:
        for step in range(0, steps[-1] + 1, 5):
            loss = 4 + (final - 4) * step / steps[-1]
            row = {"step": step, "tokens": 100 * step, "train_seconds": 100 * step / speed,
                   "train/loss": loss - 0.1}
            if step in steps:
                row |= {"val/loss": loss, "val/bits_per_byte": loss * 1.5}
                row |= {f"heads/{score}/L{layer}H{head}": float(rng.random())
                        for score in (*STRONGEST, "entropy")
                        for layer in range(L) for head in range(H)}
            if step == 20:
                row |= {"births/induction/L0H1": 10, "births/induction/L1H0": 20}
            f.write(json.dumps(row) + "\n")
    (run / "report.html").write_text("the run's page")
    for step in steps if maps else ():
        write_snapshot(run, snapshot(L, H, T, step, seed=int(1000 * final), words=words))
    return run


def write(folder: Path) -> Path:
    return sweep_page.write_sweep_page(folder, read_sweep(folder))


def content_of(folder: Path) -> dict:
    return read_back(write(folder))[0]


@pytest.fixture
def grouped(tmp_path) -> Path:
    """Three settings of three seeds each."""
    for heads, final in (("1", 2.6), ("2", 2.3), ("4", 2.2)):
        for seed in ("1", "2", "3"):
            job(tmp_path / "sweep", {"model.n_kv_head": heads, "seed": seed},
                final + 0.01 * int(seed) ** 2, groups=int(heads),
                speed=500 * int(heads), size=100 * int(heads))
    return tmp_path / "sweep"


# What it holds

def test_its_figures_are_those_of_the_files(grouped):
    path = write(grouped)
    assert path == grouped / "sweep.html" and path.read_bytes() == write(grouped).read_bytes()
    assert {p.name for p in grouped.iterdir()} == {"sweep.html", *(
        f"model.n_kv_head={g},seed={s}" for g in (1, 2, 4) for s in (1, 2, 3))}
    content, _ = read_back(path)
    assert content["metric"] == "val/loss"
    assert content["command"] == "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert content["keys"] == [{"name": "model.n_kv_head", "values": ["1", "2", "4"], "axis": "log",
                                "at": [1, 2, 4]}]
    finals = [2.21, 2.24, 2.29]
    best = content["settings"][0]["figures"]
    assert best["n"] == 3 and best["metric"] == pytest.approx(fmean(finals), rel=1e-5)
    assert best["error"] == pytest.approx(stdev(finals) / 3 ** 0.5, rel=1e-5)
    assert best["parameters"] == 400 and best["tokens_per_second"] == 2000
    assert best["train_seconds"] == 1
    assert [s["figures"]["kv_cache_bytes"]
            for s in content["settings"]] == [2 * 2 * g * 16 * 8 * 4 for g in (4, 2, 1)]
    assert content["settings"][0]["births"] == {"induction": {"runs": 3, "step": 10}}
    for run in content["runs"]:
        rows = [json.loads(line)
                for line in (grouped / run["name"] / "metrics.jsonl").read_text().splitlines()]
        losses = [row["val/loss"] for row in rows if "val/loss" in row]
        assert run["curves"]["val"] == {"steps": [0, 10, 20],
                                        "values": pytest.approx(losses, rel=1e-5), "of": 3}
        assert run["curves"]["train"]["steps"] == [0, 5, 10, 15, 20]
        assert run["page"].endswith("/report.html") and run["births"] == {"induction": 10}
        last = {key: value for key, value in rows[-1].items() if key.startswith("heads/")}
        for score, combine in (("induction", max), ("entropy", fmean)):
            of = {key: value for key, value in last.items() if f"/{score}/" in key}
            assert run["heads"][score]["values"][-1] == pytest.approx(
                combine(of.values()), rel=1e-4)
        of = {key: value for key, value in last.items() if "/induction/" in key}
        assert f"heads/induction/L{run['head'][0]}H{run['head'][1]}" == max(of, key=of.get)


def test_maps_of_every_run_are_embedded_exactly_where_they_fit(grouped):
    content, blobs = read_back(write(grouped))
    for run, maps in zip(content["runs"], content["maps"]):
        held = np.load(grouped / run["name"] / "attention" / "step_00000020.npz")
        assert maps["steps"] == [0, 10, 20] and maps["kind"] == "float16"
        assert maps["tokens"] == [f" w{i}" for i in range(16)]
        assert (unpack(blobs[maps["maps"][-1][0]], "float16", 2, 4, 16)[0] == held["text"]).all()
    assert all(name == "text" for maps in content["maps"] for name in [maps["name"]])


@pytest.mark.slow
def test_a_large_sweep_stays_within_its_budget_and_says_what_is_left_out(tmp_path, monkeypatch):
    for k in range(6):
        job(tmp_path, {"seed": str(k)}, 2 + k / 10, T=80, steps=tuple(range(0, 21, 5)))
    whole = write(tmp_path).stat().st_size
    assert whole < page.BUDGET
    bare = len(page.template("sweep.html")) + 100_000 + len(
        page.safe_json({**content_of(tmp_path), "maps": []}))
    for maps, kind in ((1_200_000, "bytes"), (400_000, "blocks"), (40_000, None)):
        monkeypatch.setattr(page, "BUDGET", bare + maps)
        path = write(tmp_path)
        content, blobs = read_back(path)
        assert path.stat().st_size <= page.BUDGET
        held = [m for m in content["maps"] if m]
        assert 0 < len(held) <= 6 and all(m["of"] == 5 for m in held)
        if kind:
            assert {m["kind"] for m in held} == {kind}
            m, b = held[0], held[0]["block"]
            captured = np.load(tmp_path / content["runs"][content["maps"].index(
                m)]["name"] / "attention" / "step_00000020.npz")["text"]
            check_maps(unpack(blobs[m["maps"][-1][0]], kind, 2, 4, -(-80 // b))[0],
                       encode.in_blocks(captured, b) if b > 1 else captured)
        else:
            assert any(len(m["steps"]) < 5 for m in held) or len(held) < 6
    monkeypatch.setattr(page, "BUDGET", 1000)
    assert content_of(tmp_path)["maps"] == [None] * 6


def test_of_many_snapshots_a_run_keeps_some_evenly(tmp_path):
    run = job(tmp_path, {"seed": "1"})
    for step in range(1, 30):
        write_snapshot(run, snapshot(step=step))
    maps = content_of(tmp_path)["maps"][0]
    assert len(maps["steps"]) == sweep_page.MOST_SNAPSHOTS and maps["steps"][0] == 0
    assert maps["steps"][-1] == 29 and maps["of"] == 30


@pytest.mark.parametrize(("typed", "axis", "order"), [
    ("1e-3 1e-4 1e-2", "log", "1e-4 1e-3 1e-2"), ("3 1 2", "linear", "1 2 3"),
    ("64 32", "linear", "32 64"), ("0.1 0.001", "log", "0.001 0.1"),
    ("0 0.1 0.2", "linear", "0 0.1 0.2"), ("1 2 4 8", "log", "1 2 4 8"), ("7", "linear", "7"),
    ("1 1.0 10", "linear", "1 1.0 10"),
    ("rope learned", "names", "rope learned"), ("null 1 2", "names", "null 1 2"),
    ("nan 1", "names", "nan 1"), ("true false", "names", "true false")])
def test_values_are_put_in_order_and_on_a_fitting_axis(typed, axis, order):
    values = sweep_page.in_order(typed.split())
    assert values == order.split() and sweep_page.axis(values)["axis"] == axis


def test_runs_that_failed_or_never_finished_are_part_of_it(tmp_path):
    job(tmp_path, {"model.n_head": "4"})
    end_job(job(tmp_path, {"model.n_head": "3"}, None),
            "model.n_embd=32 is not a multiple of model.n_head=3")
    end_job(job(tmp_path, {"model.n_head": "2"}, 1.0, steps=(0, 10)), "the loss is NaN at step 12")
    job(tmp_path, {"model.n_head": "8"}, 3.0, steps=(0, 10))
    content = content_of(tmp_path)
    by = {run["name"]: run for run in content["runs"]}
    assert by["model.n_head=4"]["setting"] == 0 and content["settings"][0]["figures"]["n"] == 1
    assert by["model.n_head=3"] | {"status": "failed", "page": None, "seed": "",
                                   "metric": None} == by["model.n_head=3"]
    assert by["model.n_head=3"]["reason"] == "model.n_embd=32 is not a multiple of model.n_head=3"
    assert by["model.n_head=2"]["status"] == "failed"
    assert by["model.n_head=2"]["curves"]["val"]["steps"] == [0, 10]
    assert by["model.n_head=8"]["status"] == "unfinished"
    assert content["settings"][by["model.n_head=8"]["setting"]]["figures"]["metric"] is None


def test_nothing_at_all_and_broken_maps_make_a_page(tmp_path):
    assert read_back(sweep_page.write_sweep_page(tmp_path, []))[0]["runs"] == []
    run = job(tmp_path, {"seed": "1"}, maps=False)
    (run / "attention").mkdir()
    (run / "attention" / "step_00000000.npz").write_bytes(b"PK half a file")
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"step": 20, "val/loss": NaN, "val/bits_per_byte": NaN, "tokens": 1, '
                '"train_seconds": 0, "heads/induction/L0H0": NaN}\n')
    assert content_of(tmp_path)["maps"] == [None]


def test_data_cannot_leave_its_element(tmp_path):
    for k, value in enumerate(TYPED):
        end_job(job(tmp_path / "<b>&sweep<!--", {HOSTILE[0]: value}, 2 + k / 10, T=len(HOSTILE),
                    words=HOSTILE), value)
    text = write(tmp_path / "<b>&sweep<!--").read_bytes()
    content, blobs = read_back(tmp_path / "<b>&sweep<!--" / "sweep.html")
    data = re.search(rb'id="data">(.*?)</script>', text, re.S)[1]
    assert text.count(b"<script") == 2 + len(blobs) and data.isascii() and not re.search(
        rb"[<>&\0]", data)
    assert content["keys"][0]["name"] == HOSTILE[0]
    assert max(map(len, content["keys"][0]["values"])) <= 500


# In a browser

@pytest.mark.slow
def test_the_best_setting_is_shown_with_its_command(see, grouped):
    tab = see(write(grouped))
    assert tab.inner_text("h1") == "sweep"
    assert tab.inner_text("#summary") == "n_kv_head (3) · 3 settings · 9 runs"
    figures = tab.inner_text("#figures")
    assert "2.247 ± 0.023" in figures and "mean ± standard error of 3 seeds" in figures
    assert "8.19 kB" in figures and "2,000" in figures
    assert tab.inner_text(
        "#best-command") == "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#copy")
    expect_text(tab, "#copy", "copied")
    assert tab.evaluate(
        "navigator.clipboard.readText()") == "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert tab.locator("#troubles").is_hidden() and tab.locator("#as-good").is_hidden()


@pytest.mark.slow
def test_a_setting_within_the_error_of_the_best_is_named(see, grouped):
    job(grouped, {"model.n_kv_head": "2", "seed": "4"}, 1.9)
    tab = see(write(grouped))
    expect_text(tab, "#as-good", "But n_kv_head=4 is within the error: it may be as good.")


@pytest.mark.slow
def test_the_table_has_every_setting_and_sorts(see, grouped):
    tab = see(write(grouped))

    def column(name: str) -> list[str]:
        head = tab.locator("#settings th").all_inner_texts()
        k = next(k for k, text in enumerate(head) if text.strip(" ▲▼") == name)
        return tab.locator(f"#settings tbody td:nth-child({k + 1})").all_inner_texts()

    assert column("n_kv_head") == ["4", "2", "1"]
    assert column("nats per token") == ["2.247 ± 0.023", "2.347 ± 0.023", "2.647 ± 0.023"]
    assert column("parameters") == ["400", "200", "100"]
    assert column("KV cache") == ["8.19 kB", "4.1 kB", "2.05 kB"]
    assert column("tokens per second") == ["2,000", "1,000", "500"]
    assert column("runs") == ["3", "3", "3"]
    for press, order in (("Enter", ["1", "2", "4"]), ("Enter", ["4", "2", "1"]),
                         ("Enter", ["4", "2", "1"])):
        tab.locator("#settings th button").first.focus()
        tab.keyboard.press(press)
        assert column("n_kv_head") == order
    ends = tab.locator("#heads-ends")
    assert "born 10" in ends.inner_text() and "induction" in ends.locator("th").all_inner_texts()
    tab.click("#runs summary")
    assert tab.locator("#runs tbody tr").count() == 9
    link = tab.locator("#runs a").first.evaluate("a => a.href")
    assert unquote(link) == f"file://{grouped}/model.n_kv_head=4,seed=1/report.html"


@pytest.mark.slow
def test_curves_are_means_with_each_run_behind_them_and_read_by_keyboard(see, grouped):
    tab = see(write(grouped))
    lines = tab.locator("#curve-0 .line")
    assert tab.locator("#curve-0 .line.faint").count() == 9
    assert tab.locator("#curve-0 .line.bold").count() == 3
    assert lines.count() == 9 + 3 + 3  # and what leads to the names
    assert sorted(tab.locator("#curve-0 text[data-group]").all_text_contents(
        )) == ["n_kv_head 1", "n_kv_head 2", "n_kv_head 4 ★"]
    aside(tab)
    tab.focus("#curve-0 svg")
    tab.keyboard.press("End")
    assert tab.inner_text("#tip").split("\n") == ["n_kv_head 4 ★", "2.247 nats per token",
                                                  "step 20, mean of 3 runs"]
    assert tab.locator("#curve-0 .line.bold.lit").count() == 1  # the others fade
    tab.keyboard.press("ArrowUp")
    assert "n_kv_head 2" in tab.inner_text("#tip") and "2.347" in tab.inner_text("#live")
    tab.keyboard.press("ArrowLeft")
    assert "step 10" in tab.inner_text("#tip") and "3.173" in tab.inner_text("#tip")
    tab.keyboard.press("Escape")
    assert tab.locator("#tip").is_hidden() and not tab.evaluate(
        "document.body.classList.contains('single')")
    assert tab.eval_on_selector("#curve-0 svg",
                                "svg => svg.viewBox.baseVal.width === svg.clientWidth")
    end = tab.locator("#curve-0 .line.bold").last.bounding_box()
    tab.mouse.move(end["x"] + end["width"] - 1, end["y"] + end["height"] - 1)
    assert "n_kv_head 4" in tab.inner_text("#tip")
    assert tab.locator("#head-induction circle").count() == 9  # births
    assert "the first such head is born" in tab.inner_text("#heads-note")


@pytest.mark.slow
def test_a_setting_is_singled_out_and_let_go(see, grouped):
    tab = see(write(grouped))
    chips = tab.locator(".chip")
    assert chips.all_inner_texts() == ["1", "2", "4 ★"]
    opacity = "mark => getComputedStyle(mark).strokeOpacity"
    other = tab.locator("#curve-0 .line.bold[data-group='2']")
    chips.nth(2).hover()
    assert float(other.evaluate(opacity)) < 0.2
    aside(tab)
    assert float(other.evaluate(opacity)) == 1
    chips.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert chips.nth(1).get_attribute("aria-pressed") == "true"
    tab.evaluate("document.activeElement.blur()")
    assert float(other.evaluate(opacity)) < 0.2
    assert tab.locator("#settings tr.lit").inner_text().split()[0] == "2"
    tab.click("#all")
    assert tab.locator("#all").is_hidden() and chips.nth(1).get_attribute("aria-pressed") == "false"
    tab.locator("#settings tbody tr").nth(2).click()
    assert chips.nth(0).get_attribute("aria-pressed") == "true"
    tab.keyboard.press("Escape")
    assert chips.nth(0).get_attribute("aria-pressed") == "false"


@pytest.mark.slow
def test_the_loss_stands_against_what_was_swept_and_its_price(see, grouped):
    tab = see(write(grouped))
    assert tab.locator("#against h3").all_inner_texts() == [
        f"Validation loss against {name}" for name in (
        "n_kv_head", "parameters", "KV cache", "tokens per second", "training time")]
    assert tab.locator("#against-0 .dot").count() == 9 + 3
    assert tab.locator("#against-0 .ring").count() == 1
    aside(tab)
    tab.focus("#against-0 .dot[tabindex='0']")
    assert tab.inner_text("#tip").split("\n") == ["n_kv_head 4 ★", "2.247 ± 0.023 nats per token",
                                                  "mean of 3 runs"]
    tab.keyboard.press("Home")
    assert "n_kv_head 1, seed" in tab.inner_text("#tip")
    places = [tab.locator(
        f"#against-0 .dot[data-group='{g}'] circle:not(.small)").first.bounding_box()["x"]
              for g in (2, 1, 0)]
    # 1, 2, 4: even on a logarithmic axis
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=6)
    assert "logarithmic" in tab.text_content("#against-0 svg")
    assert "2.05 kB" in tab.text_content("#cost-kv_cache_bytes svg")
    tab.locator("#cost-parameters .dot").first.click()
    assert tab.locator("#all").is_visible()


@pytest.mark.slow
def test_two_runs_are_seen_side_by_side_over_one_slider(see, tmp_path):
    job(tmp_path, {"model.n_layer": "2"}, 2.0, T=80)
    job(tmp_path, {"model.n_layer": "3"}, 3.0, T=80, L=3, steps=(0, 15, 20))
    job(tmp_path, {"model.n_layer": "1"}, 2.5, T=40, L=1)
    tab = see(write(tmp_path), width=1000)
    seen = {step: np.load(
        tmp_path / "model.n_layer=2" / "attention" / f"step_{step:08d}.npz")["text"]
            for step in STEPS}
    seen_right = np.load(tmp_path / "model.n_layer=3" / "attention" / "step_00000000.npz")["text"]
    sides = tab.locator(".side")
    assert sides.count() == 2 and tab.locator(".side select").nth(0).input_value() == "0"
    assert tab.locator(".side select").nth(1).input_value() == "2"
    for side in (0, 1):
        sides.nth(side).locator("[aria-label='layer 1, head 2']").click()
    tab.focus("#step")
    for press, text, left, right in (("Home", "step 0", 0, 0), ("ArrowRight", "step 10", 10, 0),
                                     ("ArrowRight", "step 15", 10, 15),
                                     ("Home", "step 0", 0, 0), ("ArrowRight", "step 10", 10, 0)):
        tab.keyboard.press(press)
        expect_text(tab, "#step-now", text)
        expect_text(sides.nth(0), "h3", f"L1H2 after {left} steps")
        expect_text(sides.nth(1), "h3", f"L1H2 after {right} steps")
    assert "its last snapshot before step 10" in sides.nth(1).inner_text()

    aside(tab)
    left, right = (sides.nth(k).locator(".map canvas") for k in (0, 1))
    left.focus()
    tab.keyboard.press("Escape")
    for press in ["ArrowRight"] * 3 + ["ArrowUp"] * 2:
        tab.keyboard.press(press)
    query, key, value = read_tip(tab)
    assert (query, key) == (77, 3) and exactly(value) == seen[10][1, 2, 77, 3]
    assert f"the other map there: {float(seen_right[1, 2, 77, 3]):.4g}"[:27] in value
    assert sides.nth(1).locator(".mark.cell").is_visible()
    tab.keyboard.press("Escape")
    assert sides.nth(1).locator(".mark.cell").is_hidden()

    before = pixels(tab, ".side:nth-child(2) .map canvas")
    tab.locator(".side select").nth(1).select_option(label="n_layer 1 · 2.500")
    expect_text(sides.nth(1), "h3", "after 10 steps")
    assert sides.nth(1).locator("[role=radio]").count() == 4
    assert pixels(tab, ".side:nth-child(2) .map canvas") != before
    left.focus()
    tab.keyboard.press("ArrowRight")
    assert "the other map" not in tab.inner_text("#tip")  # other tokens
    tab.check("#average")
    expect_text(sides.nth(0), "h3", "the average of its 4 heads")
    tab.click("#play")
    expect_text(tab, "#step-now", "step 20", timeout=8000)


@pytest.mark.slow
def test_failed_and_unfinished_runs_are_shown_as_such(see, tmp_path):
    job(tmp_path, {"model.n_head": "4"})
    end_job(job(tmp_path, {"model.n_head": "3"}, None),
            "model.n_embd=32 is not a multiple of model.n_head=3")
    end_job(job(tmp_path, {"model.n_head": "2"}, 1.0, steps=(0, 10)), "NaN")
    job(tmp_path, {"model.n_head": "8"}, 3.0, steps=(0, 10))
    tab = see(write(tmp_path))
    assert tab.inner_text("#troubles h3") == "2 runs failed, 1 run unfinished"
    assert sorted(tab.locator("#troubles li").all_inner_texts()) == [
        "n_head 2 failed after 10 of 20 steps: NaN",
        "n_head 3 failed before its first step: "
        "model.n_embd=32 is not a multiple of model.n_head=3",
        "n_head 8 unfinished after 10 of 20 steps"]
    dashes = tab.locator("#curve-0 .line").evaluate_all("all => all.map(line => "
                                                        "line.style.strokeDasharray)")
    assert sum(dash == "3, 3" for dash in dashes) == 2
    assert "Dashed: a run that has not finished" in tab.inner_text("#curves-note")
    assert tab.locator(".side select >> nth=0").locator("option").all_inner_texts(
        ) == ["★ n_head 4 · 2.000", "n_head 2 · 1.000", "n_head 8 · 3.000"]


@pytest.mark.slow
def test_an_interrupted_sweep_shows_what_it_has_and_what_never_began(see, tmp_path):
    job(tmp_path, {"model.n_head": "2"}, 3.0, steps=(0, 10))
    jobs = [{"model.n_head": heads} for heads in ("2", "4", "8")]
    write_note(tmp_path / "sweep.json",
               {"jobs": {job_name(settings): settings for settings in jobs}})
    tab = see(write(tmp_path))
    assert "No run has finished yet" in tab.inner_text("main")
    assert "loss yet" not in tab.inner_text("main")
    assert tab.locator("#curve-0 .line").count() > 0
    assert tab.inner_text("#troubles h3") == "1 run unfinished, 2 runs not begun"
    assert tab.locator("#troubles li").all_inner_texts() == [
        "n_head 2 unfinished after 10 of 20 steps", "not begun: n_head 4, n_head 8"]
    tab.click("#runs summary")
    assert tab.locator("#runs tbody tr").count() == 3


@pytest.mark.slow
def test_of_a_run_whose_settings_changed_the_page_says_so(see, tmp_path):
    run = job(tmp_path, {"model.n_head": "2"})
    end_job(run, "")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("max_steps: 20", "max_steps: 19"))
    tab = see(write(tmp_path))
    assert tab.inner_text("#again") == (
        "It was started by this command, which alone does not give it again:")
    assert tab.inner_text("#changes") == "after 20 steps it went on with max_steps=19"


@pytest.mark.slow
def test_where_the_vocabulary_changes_bits_per_byte_compare(see, tmp_path):
    for size in (512, 1024):
        job(tmp_path, {"tokenizer.vocab_size": str(size)}, 3 - size / 1000, vocab=size)
    tab = see(write(tmp_path))
    assert tab.locator("#curves h3").all_inner_texts() == ["Validation loss, bits per byte"]
    assert "Training losses are left out" in tab.inner_text("#curves-note")
    assert "bits per byte compare across it" in tab.inner_text("#table-note")
    assert "2.964" in tab.inner_text("#figures") and "bits per byte" in tab.inner_text(
        "#figures") and "nats" not in tab.inner_text("main")


@pytest.mark.slow
def test_two_keys_give_the_colours_in_turn(see, tmp_path):
    for lr, final in (("1e-4", 3), ("1e-3", 2.5), ("1e-2", 2.2)):
        for position in ("learned", "rope"):
            job(tmp_path, {"optim.lr": lr, "model.position": position},
                final - (position == "rope") / 10)
    tab = see(write(tmp_path))
    assert tab.locator("#colour option").all_inner_texts() == ["lr", "position"]
    assert tab.locator(".chip").all_inner_texts() == ["1e-4", "1e-3", "1e-2 ★"]
    tone = "getComputedStyle(document.querySelector(\"#curve-0 .bold[data-group='{}']\")).stroke"
    assert tab.evaluate(tone.format(0)) == tab.evaluate(tone.format(1)) != tab.evaluate(
        tone.format(2))
    tab.select_option("#colour", label="position")
    assert tab.locator(".chip").all_inner_texts() == ["learned", "rope ★"]
    assert tab.evaluate(tone.format(0)) == tab.evaluate(tone.format(2)) != tab.evaluate(
        tone.format(1))
    assert tab.locator("#against-0 .joined").count() == 2
    assert tab.locator("#against-1 .joined").count() == 0
    assert sorted(
        tab.locator("#against-0 text[data-group]").all_text_contents()) == ["learned", "rope"]
    assert tab.locator("#curve-0 text[data-group]").first.text_content() == "lr 1e-4, learned"


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 60])
def test_one_run_and_sixty_read_sensibly(see, tmp_path, n):
    for k in range(n):
        job(tmp_path, {"optim.lr": f"{1e-4 * 1.1 ** k:.3e}"}, 2 + abs(k - 20) / 20, L=1, H=2, T=8)
    tab = see(write(tmp_path))
    assert tab.locator("#settings tbody tr").count() == n
    assert tab.locator(".side").count() == min(n, 2)
    assert tab.locator("#legend").is_visible() == (n > 1)
    if n == 60:
        assert tab.locator("#chips").bounding_box()["height"] < 80
        assert tab.locator("#settings").locator("..").bounding_box()["height"] < 470
        # too many names for the ends of the lines: the tip has them
        assert tab.locator("#curve-0 text[data-group]").count() == 0
        tab.locator(".chip").nth(50).click()
        assert tab.locator("#curve-0 .bold.lit").count() == 1


@pytest.mark.slow
def test_an_empty_sweep_and_one_of_seeds_alone_open(see, tmp_path):
    tab = see(sweep_page.write_sweep_page(tmp_path, []))
    assert "No run has finished yet" in tab.inner_text("main")
    assert tab.locator("#looking").is_hidden()
    for seed in range(3):
        job(tmp_path / "seeds", {"seed": str(seed)}, 2 + seed / 10)
    tab = see(write(tmp_path / "seeds"))
    assert "2.100 ± 0.058" in tab.inner_text("#figures")
    assert tab.locator("#against-0 .dot").count() == 3
    assert tab.locator(".side select option").all_inner_texts()[0] == "★ seed 0 · 2.000"


@pytest.mark.slow
def test_hostile_text_is_shown_and_not_run(see, tmp_path):
    name = "<img src=x onerror=window.hacked=1>"
    for k, value in enumerate(TYPED):
        run = job(tmp_path / name, {"model.x": value, HOSTILE[0]: "1"}, 2 + k / 10, T=len(HOSTILE),
                  words=HOSTILE)
        if k % 3 == 0:
            end_job(run, value)
    tab = see(write(tmp_path / name))
    tab.click("#runs summary")
    for chip in tab.locator(".chip").all()[:4]:
        chip.hover()
    tab.focus("#curve-0 svg")
    tab.keyboard.press("Home")
    tab.locator("#against-0 .dot circle").first.hover(force=True)
    tab.locator(".map canvas").first.hover()
    assert tab.evaluate("window.hacked") is None and tab.locator("img").count() == 0
    assert tab.inner_text("h1") == name and "</script><script>" in tab.inner_text("#settings")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.slow
def test_the_keyboard_reaches_everything(see, grouped):
    tab, found = see(write(grouped)), []
    for _ in range(60):
        tab.keyboard.press("Tab")
        found.append(
            tab.evaluate(
                """(e => (e.id || e.closest("[id]")?.id || "")
                + " " + e.tagName)(document.activeElement)"""))
        assert tab.evaluate(
            "getComputedStyle(document.activeElement).outlineStyle"
        ) != "none" or found[-1].endswith(" BODY")
    order = ["theme BUTTON", "best-command PRE", "copy BUTTON", "table DIV", "settings BUTTON",
             "runs SUMMARY", "chips BUTTON",
             "curve-0 svg", "curve-1 svg", "against-0 g", "cost-parameters g", "head-induction svg",
             "heads-ends DIV",
             "play BUTTON", "step INPUT", "raw INPUT", "average INPUT", "sides SELECT",
             "sides BUTTON", "sides CANVAS"]
    places = [found.index(name) for name in order]
    assert places == sorted(places)


@pytest.mark.slow
def test_light_and_dark(see, grouped):
    path = write(grouped)
    tab = see(path, color_scheme="dark")
    look = ("[getComputedStyle(document.documentElement).backgroundColor, "
            "getComputedStyle(document.querySelector('#curve-0 .bold')).stroke]")
    dark, picture = tab.evaluate(look), pixels(tab, ".map canvas >> nth=0")
    tab.click("#theme")
    light = tab.evaluate(look)
    assert all(a != b for a, b in zip(light, dark))
    assert pixels(tab, ".map canvas >> nth=0") != picture


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 2560])
def test_it_fits_the_window(see, tmp_path, width):
    for layers in (1, 4):
        for name in ("a", "a-rather-long-value-of-a-setting-that-goes-on-and-on"):
            job(tmp_path, {"model.n_layer": str(layers), "model.something": name}, 2 + layers / 10,
                L=layers, H=8, T=48)
    tab = see(write(tmp_path), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for selector in (".map canvas >> nth=1", "#curve-0 svg", "#against-0 svg", "#step",
                     ".side select >> nth=1", "#best-command"):
        box = tab.locator(selector).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector


@pytest.mark.slow
def test_a_long_context_is_shown_in_blocks(see, tmp_path, monkeypatch):
    for k in range(2):
        run = job(tmp_path, {"seed": str(k)}, 2 + k, maps=False)
        rng = np.random.default_rng(k)
        write_snapshot(run, {"step": 20, "text": causal(rng, 2, 4, 160),
                             "text_tokens": np.array([f" t{i}" for i in range(160)])})
    monkeypatch.setattr(page, "BUDGET", len(page.template("sweep.html")) + 160_000)
    tab = see(write(tmp_path))
    assert "in blocks of 4 × 4" in tab.inner_text("#sides")
    assert tab.locator("#weighting").is_hidden() and tab.locator("#steps").is_hidden()
