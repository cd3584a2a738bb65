"""Observing a run: what cannot be drawn costs a note, and neither ends nor changes the training."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
from models import lively, small
from processes import assert_same_run, run_to_end, tiny_arguments

import glass.heads.measure.snapshot
import glass.page.write
import train
import training.record
from config import AttentionConfig, ResolvedConfig, WandbConfig
from data.tokenizer import CharTokenizer
from glass import observer
from glass.observer import Observer
from model import GPT
from run.run_dir import RunDir
from run.start import Start
from training.activity_timer import ActivityTimer
from training.evaluate import Windows
from training.record import Record
from training.world import Stopped, World

pytestmark = pytest.mark.slow
ERRORS = [TypeError("a type"), MemoryError(), KeyError("key"), OSError("no number")]
PLACES = [  # a run reaches each of these although the ones before fail
    [(observer, "draw_attention_grid"), (observer, "save_weights"), (observer, "summarize")],
    [(wandb, "Image"), (glass.page.write, "find_embedded_model")],
]


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


def test_a_signal_interrupts_a_snapshot_and_it_is_recorded_once(
    offline_wandb, tmp_path, monkeypatch
):
    model = lively(GPT(small(block_size=32, position="rope")))
    config = ResolvedConfig(
        device="cpu",
        precision="fp32",
        max_steps=12,
        batch_size=4,
        model=model.config,
        attention=AttentionConfig(every=4),
        wandb=WandbConfig(mode="offline"),
    )
    ids, tokenizer = (
        np.random.default_rng(0).integers(0, 23, 2000),
        CharTokenizer("abcdefghijklmnopqrstuv\n"),
    )
    text = SimpleNamespace(train=ids, val=ids[:500], tokenizer=tokenizer, task=None)
    monkeypatch.setattr("glass.observer.summarize", lambda *rows: ["a < b"])

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not interrupt")

    windows = Windows(ids[:500], tokenizer, config)
    with Record(config, RunDir(tmp_path), text, Start(), ActivityTimer("cpu", {})) as record:
        observer = Observer(text, windows, record)
        with monkeypatch.context() as patch, pytest.raises(Stopped), World() as world:
            patch.setattr(training.record, "sample_text", stop)
            train.look(model, 4, observer, record, world)
        row = train.look(model, 4, observer, record, World())
        record.write(4, {"faithfulness_se/none": 0.5} | row)
        observer.draw_page(4)
    assert {path.name for path in (tmp_path / "attention").iterdir()} == {
        f"step_00000004.{suffix}" for suffix in ("npz", "png", "safetensors")
    }
    (findings,) = (tmp_path / "wandb").rglob("findings_*.html")
    assert "<p>a &lt; b</p>" in findings.read_text()
    (record,) = (tmp_path / "wandb").glob("offline-run-*")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record)]
    lines = subprocess.run(inspect, capture_output=True, check=True).stdout.splitlines()
    items = [entry["history"]["item"] for entry in map(json.loads, lines) if "history" in entry]
    assert [item["step"] for item in items] == [4] and "attention/map.path" in items[0]
    assert items[0]["faithfulness_se/none"] == 0.5
