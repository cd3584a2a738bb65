"""The steps of a series are measured on the same probes, and what was measured is kept."""

import itertools
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from frame_reader import decode_frames
from models import induction_model
from run_folders import load_run
from series_of_models import count_models, write_steps

import glass.observer
from cli.explore_config import ExploreConfig
from config import AttentionConfig, CheckpointConfig
from data.tokenizer import CharTokenizer
from glass.heads.measure.analysis import ProbeRun
from glass.live import steps as module
from glass.live.explorer import Explorer
from interop import Series, save_hf
from run.run_dir import RunDir
from training.stored_model import StoredModel

SECONDS = 60  # that no answer of a passing test takes, on a busy machine


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))


def explore(path, log=print, **settings) -> Explorer:
    return Explorer(ExploreConfig(init_from=str(path), steps="all", **settings), log)


def frames(explorer, request="measureStep", is_canceled=lambda: False, **parameters):
    body = json.dumps({"request": request, **parameters}).encode()
    return decode_frames(b"".join(explorer.answer(body, is_canceled)))


def measure_all(explorer) -> list[int]:
    """Measure as the page does; return how many steps were left after each request."""
    left = []
    while not left or left[-1]:
        *parts, (kind, answer) = frames(explorer)
        assert (kind, answer) == ("answer", None)
        left.append(parts[-1][1]["unmeasured"])
    return left


class StoredInMemory(StoredModel):
    """An induction model whose heads attend with some strength."""

    path = "memory"
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz012345")

    def __init__(self, strength: float) -> None:
        self.model = induction_model(self.tokenizer.vocab_size, 32)
        self.config = self.model.config
        for block in self.model.blocks:
            block.attention.W_Q.weight.data.mul_(strength)
        self.model.requires_grad_(False)

    def read_tensors(self):
        yield from self.model.tensors().items()

    def read_tokenizer(self):
        return self.tokenizer


@pytest.mark.parametrize(
    ("strengths", "date"),
    [
        ({0: 0.001, 500: 0.002, 1000: 1, 2000: 0.9}, "between steps 500 and 1,000"),
        ({500: 1, 1000: 0.9}, None),  # nobody knows when it emerged
    ],
)
def test_heads_emerge_by_the_rule_of_a_run(strengths, date, monkeypatch):
    openers = {step: [lambda s=s: StoredInMemory(s)] for step, s in strengths.items()}
    series = Series("memory", [*strengths], print, openers)
    monkeypatch.setattr(module, "find_series", lambda *arguments: series)
    lines = []
    explorer = explore("memory", lines.append, prompt="abcdefgh12345abcdefgh12345")
    assert measure_all(explorer) == [*reversed(range(len(strengths)))]
    shown = explorer._steps.describe()
    emerged = shown["scored"]["columns"]["emerged/induction/L1H1"]
    text = " ".join(finding["text"] for finding in shown["findings"])
    assert "L1H1" in text and shown["scored"]["steps"] == [*strengths]
    if date is None:
        assert emerged == [None, 0] and "emerged" not in text.lower()
    else:
        assert emerged == [None, None, None, 1000] and f"Emerged {date}." in text
        assert shown["emergenceIntervals"]["emerged/induction/L1H1"] == date
        assert any(f"L1H1 became an induction head {date}" in line for line in lines)


def test_exported_steps_have_the_scores_of_the_runs_rows_on_its_probes(
    tiny, train_in_process, tmp_path, monkeypatch
):
    made = []
    make_probes = glass.observer.make_probes

    def make_and_keep(*arguments):
        made.append(make_probes(*arguments))
        return made[-1]

    monkeypatch.setattr(glass.observer, "make_probes", make_and_keep)
    train_in_process(
        tiny,
        model=replace(tiny.model, n_kv_head=2),
        attention=AttentionConfig(every=4, tokens=16),
        checkpoint=CheckpointConfig(every=4, keep=9),
    )
    run = RunDir(Path(tiny.run_dir))
    for step in (4, 8, 12):
        model, tokenizer, _ = load_run(run.path, step)
        save_hf(model, tmp_path / "out" / f"checkpoint-{step}", tokenizer)
    explorer = explore(tmp_path / "out", prompt="the glass the glass")
    steps = explorer._steps
    steps.probes = made[0]
    measure_all(explorer)
    of_run = [row for row in run.rows() if row.is_scored and row["step"] > 0]
    for ours, theirs in zip(steps._dated_rows(), of_run, strict=True):
        measured = theirs.keys() & ours.keys()
        assert measured >= {"step", "heads/induction/L1H1", "heads/induction_se/L1H1"}
        assert {key: ours[key] for key in measured} == {
            key: pytest.approx(theirs[key], abs=1e-4) for key in measured
        }


def test_what_was_measured_is_kept_by_weights_and_probes(tmp_path):
    folder = write_steps(tmp_path / "out")
    first = explore(folder, prompt="abcabc")

    frames(first)
    checks = itertools.count()
    frames(first, is_canceled=lambda: next(checks) > 30)
    assert [*first._steps.rows] == [5]
    again = explore(folder, prompt="abcabc")
    assert again._steps.unmeasured == [10, 20] and again._steps.rows == first._steps.rows
    assert measure_all(again) == [1, 0]

    session = again.session
    session.model.head.weight.data[0, 0] += 1
    shutil.rmtree(folder / "checkpoint-10")
    save_hf(session.model, folder / "checkpoint-10", session.tokenizer)
    assert explore(folder, prompt="abcabc")._steps.unmeasured == [10]
    assert len(explore(folder, prompt="abcabd")._steps.unmeasured) == 3
    for kept in (tmp_path / "cache" / "scores").iterdir():
        kept.write_text(kept.read_text().replace("0.1", "0.2"))  # which their hash reveals
    assert len(explore(folder, prompt="abcabc")._steps.unmeasured) == 3


def test_measuring_makes_room_for_the_step_that_the_reader_wants(tmp_path, monkeypatch):
    counts = count_models(monkeypatch)
    explorer = explore(write_steps(tmp_path / "out"), prompt="abcabc")
    started = threading.Event()

    def measure_forever(run, row):
        yield "a stage"
        started.set()
        while True:
            run.model(torch.tensor([[0, 1]]))

    parts = []
    with monkeypatch.context() as patch:
        patch.setattr(ProbeRun, "measure_in_stages", measure_forever)
        thread = threading.Thread(target=lambda: parts.extend(frames(explorer, step=20)))
        thread.start()
        assert started.wait(SECONDS)
        assert [kind for kind, _ in frames(explorer, "read", ids=[0], step=20)] == ["answer"]
        assert frames(explorer, "loadStep", step=10) == [("answer", None)]
        thread.join(SECONDS)
    assert parts[-2:] == [("part", {"unmeasured": 3}), ("answer", None)]
    assert max(counts) == 2 and explorer.session.step == 10
    assert measure_all(explorer) == [2, 1, 0] and max(counts) == 2
    assert explorer.session.step == 10  # that of the page


def test_a_measurement_waits_for_another_and_goes_on_after_it_was_stopped(tmp_path, monkeypatch):
    explorer = explore(write_steps(tmp_path / "out"), prompt="abcabc")
    started, stopped = threading.Event(), threading.Event()

    def measure_until_stopped(run, row):
        started.set()
        while True:
            run.model(torch.tensor([[0, 1]]))
        yield "a stage"

    monkeypatch.setattr(ProbeRun, "measure_in_stages", measure_until_stopped)
    first = threading.Thread(target=lambda: frames(explorer, is_canceled=stopped.is_set))
    first.start()
    assert started.wait(SECONDS)
    monkeypatch.undo()
    second = threading.Thread(target=lambda: frames(explorer))
    second.start()
    assert [kind for kind, _ in frames(explorer, "read", ids=[0], step=20)] == ["answer"]
    assert first.is_alive() and second.is_alive() and not explorer._steps.rows
    stopped.set()
    first.join(SECONDS)
    second.join(SECONDS)
    assert [*explorer._steps.rows] == [5]


def test_a_request_is_answered_while_a_step_is_loaded_for_its_measurement(tmp_path, monkeypatch):
    explorer = explore(write_steps(tmp_path / "out"), prompt="abcabc")
    load, loading, answered = explorer._steps.load, threading.Event(), threading.Event()

    def load_slowly(session, step):
        loading.set()
        while not answered.wait(0.01):
            session.check_canceled()
        return load(session, step)

    monkeypatch.setattr(explorer._steps, "load", load_slowly)
    measuring = threading.Thread(target=lambda: frames(explorer))
    measuring.start()
    assert loading.wait(SECONDS)
    assert [kind for kind, _ in frames(explorer, "read", ids=[0], step=20)] == ["answer"]
    answered.set()
    measuring.join(SECONDS)
    assert [*explorer._steps.rows] == [5] and explorer.session.step == 20
