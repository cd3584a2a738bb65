"""Observing a run: what cannot be drawn costs a note, and neither ends nor changes the training."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb
from models import lively, small
from processes import assert_same_run, run_to_end, tiny_arguments

import glass.page.write
import train
import training.record
from common.terminal import Terminal
from config import AttentionConfig, ResolvedConfig, WandbConfig
from data.tokenizer import CharTokenizer
from glass import observer
from glass.heads.measure.analysis import ProbeRun, highest_induction_score
from glass.observer import Observer, spread_windows
from model import GPT
from run.checkpoints import Start
from run.row import Row
from run.run_dir import RunDir
from training.activity_timer import ActivityTimer
from training.evaluate import Windows
from training.record import Record
from training.world import Stopped, World

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuv\n")
IDS = np.random.default_rng(0).integers(0, 23, 2000)
TEXT = SimpleNamespace(train=IDS, val=IDS[:500], tokenizer=TOKENIZER, task=None)
MODEL = lively(GPT(small(block_size=32, position="rope")))
ERRORS = [TypeError("a type"), MemoryError(), KeyError("key"), OSError("no number")]
PLACES = [  # a run reaches each of these although the ones before fail
    [(observer, "draw_attention_grid"), (observer, "save_weights"), (observer, "summarize")],
    [(wandb, "Image"), (glass.page.write, "find_embedded_model")],
]


@pytest.fixture
def make_observer(tmp_path) -> Callable[..., Observer]:
    """A function that makes the `Observer` of a run of 12 steps."""

    def make(every: int = 2, batch_size: int = 4) -> Observer:
        config = ResolvedConfig(
            device="cpu",
            model=MODEL.config,
            max_steps=12,
            batch_size=batch_size,
            precision="fp32",
            attention=AttentionConfig(every=every),
        )
        record = SimpleNamespace(config=config, run_dir=RunDir(tmp_path))
        windows = Windows(TEXT.val, TOKENIZER, config, World())
        return Observer(TEXT, windows, record)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES, ids=lambda places: places[-1][1])
def test_what_cannot_be_drawn_costs_a_note(finished_run, text_file, tmp_path, monkeypatch, places):
    def fail(number, *_, **__):
        os.write(2, f"{places[number][1]} fails\n".encode())
        raise ERRORS[(number + len(places)) % len(ERRORS)]

    def fault():
        for number, (owner, name) in enumerate(places):
            setattr(owner, name, partial(fail, number))

    monkeypatch.setenv("WANDB_MODE", "offline" if (wandb, "Image") in places else "disabled")
    output = run_to_end(tmp_path, *tiny_arguments(text_file, "wandb.mode=auto"), fault=fault)
    assert all(f"{name} fails" in output for _, name in places)
    assert output.count("warning: ") >= len(places)
    assert_same_run(tmp_path / "run", finished_run)


@pytest.mark.slow
def test_a_signal_interrupts_a_snapshot_and_it_is_recorded_once(
    offline_wandb, tmp_path, monkeypatch
):
    config = ResolvedConfig(
        device="cpu",
        precision="fp32",
        max_steps=12,
        batch_size=4,
        model=MODEL.config,
        attention=AttentionConfig(every=4),
        wandb=WandbConfig(mode="offline"),
    )
    monkeypatch.setattr("glass.observer.summarize", lambda *rows: ["a < b"])

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not interrupt")

    windows = Windows(TEXT.val, TOKENIZER, config, World())
    timer = ActivityTimer("cpu", {})
    with Record(config, RunDir(tmp_path), TEXT, Start(), timer, Terminal()) as record:
        observer = Observer(TEXT, windows, record)
        with monkeypatch.context() as patch, pytest.raises(Stopped), World() as world:
            patch.setattr(training.record, "sample_text", stop)
            train.look(MODEL, 4, observer, record, timer, config, world)
        row = train.look(MODEL, 4, observer, record, timer, config, World())
        record.write(4, row)
        observer.draw_page(4)
    assert {path.name for path in (tmp_path / "attention").iterdir()} == {
        f"step_00000004.{suffix}" for suffix in ("npz", "png", "safetensors")
    }
    (record,) = (tmp_path / "wandb").glob("offline-run-*")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record)]
    lines = subprocess.run(inspect, capture_output=True, check=True).stdout.splitlines()
    entries = [json.loads(line) for line in lines]
    items = [entry["history"]["item"] for entry in entries if "history" in entry]
    assert [item["step"] for item in items] == [4] and "attention/map.path" in items[0]
    summaries = [entry["summary"]["update"] for entry in entries if "summary" in entry]
    assert [each["findings"] for each in summaries if "findings" in each] == ["a < b"]


def test_the_page_is_drawn_at_each_snapshot_and_announces_the_first_heads_once(
    tiny, train_in_process, monkeypatch, capsys
):
    score_heads = ProbeRun.score_heads
    drawn = []

    def add_induction_head(probe_run: ProbeRun) -> Row:
        induction = {"heads/induction/L1H0": 0.9, "heads/induction_se/L1H0": 0.01}
        return Row(score_heads(probe_run) | (induction if len(drawn) > 1 else {}))

    def draw_page(observer: Observer, step: int) -> None:
        drawn.append(step)
        original(observer, step)

    original = Observer.draw_page
    monkeypatch.setattr(Observer, "draw_page", draw_page)
    monkeypatch.setattr(Observer, "has_changed", lambda *_: True)
    monkeypatch.setattr(ProbeRun, "score_heads", add_induction_head)
    config = replace(tiny, attention=replace(tiny.attention, every=12, first=0, check_every=2))
    train_in_process(config, max_steps=6)
    train_in_process(config, max_steps=8, resume=True)
    assert drawn == [0, 2, 4, 6, 8]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " became " in line]
    page = RunDir(Path(tiny.run_dir)).page.absolute().as_uri()
    assert "L1H0" in line and "between steps 2 and 4" in line and f"{page}#head=L1H0" in line


@pytest.mark.parametrize(("change", "expected"), [(0.0, False), (0.04, False), (-0.06, True)])
def test_a_changed_prefix_matching_score_asks_for_a_snapshot(make_observer, change, expected):
    observer = make_observer()
    highest = highest_induction_score(MODEL, observer.probes)
    previous = Row({"heads/induction/L1H0": highest + change, "heads/induction/L0H1": -1.0})
    before = torch.random.get_rng_state()
    assert observer.has_changed(MODEL, previous) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not observer.has_changed(MODEL, Row())
    assert not observer.has_changed(MODEL, Row({"heads/sink/L0H0": 0.5}))


@pytest.mark.parametrize(
    ("windows", "tokens", "count"), [(5, 999, 5), (500, 10, 16), (500, 400, 40), (500, 9999, 128)]
)
def test_importance_is_measured_on_windows_from_the_first_to_the_last(windows, tokens, count):
    numbers = torch.arange(windows)[:, None].expand(-1, 10)
    validation = SimpleNamespace(inputs=numbers, targets=numbers, device="cpu")
    inputs, targets = spread_windows(validation, tokens)
    assert len(inputs) == len(targets) == count
    assert inputs[0, 0] == 0 and inputs[-1, 0] == windows - 1
    assert torch.equal(inputs, targets)


def test_an_extra_snapshot_measures_the_heads_but_explains_no_predictions(make_observer):
    observer = make_observer(2, batch_size=4096)
    extra, regular = (observer.measure(MODEL, step, Row()) for step in (3, 6))
    assert extra[0].keys() == regular[0].keys()
    assert ["token_effect" in arrays for _, arrays in (extra, regular)] == [False, True]
