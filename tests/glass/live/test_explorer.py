"""The explorer shows the model that the settings name, and answers one request at a time."""

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from frame_reader import decode_frames
from models import small
from pages import snapshot, write_snapshot
from run_folders import TEXT, load_run, write_run
from series_of_models import COUNTED, count_models, write_steps

from cli.explore_config import ExploreConfig
from cli.sample_config import SampleConfig
from data.tokenizer import PATTERNS, BPETokenizer, CharTokenizer
from glass.heads.measure.interventions import Interventions
from glass.live.explorer import Explorer
from glass.live.requests import MODEL_REQUESTS
from glass.live.session import EXAMPLE_PROMPT, find_prompt, load_session
from interop import find_model, save_hf
from interop.folder import HFFolder
from interop.stored import StoredRun
from run.checkpoints import MODEL_FILE
from run.row import Head
from run.run_dir import RunDir
from variants import build_model

SECONDS = 60  # that no answer of a passing test takes, on a busy machine


@pytest.fixture
def run(tmp_path) -> Path:
    """A run in runs/ with checkpoints of steps 3 and 6, of which the first is the best."""
    write_run(tmp_path / "runs" / "mine")
    return tmp_path / "runs" / "mine"


def load(**settings):
    return load_session(ExploreConfig(**settings), print)


@pytest.mark.parametrize(
    "path, checkpoint, step, is_followed",
    [
        ("", "last", 6, True),
        ("", "best", 3, True),
        ("", "3", 3, False),
        ("checkpoints/last", "last", 6, True),
        ("checkpoints/best", "last", 3, True),
        ("checkpoints/step_00000003", "last", 3, False),
    ],
)
def test_the_checkpoint_of_a_run_is_chosen(run, path, checkpoint, step, is_followed, monkeypatch):
    session = load(init_from=str(run / path), checkpoint=checkpoint)
    assert (session.title, session.step) == ("mine", step)
    expected = load_run(run, step)[0].tensors()
    tensors = session.model.tensors().items()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors)
    assert not session.is_outdated()
    monkeypatch.setattr(RunDir, "preferred_steps", lambda run_dir, which: [99])
    assert session.is_outdated() == is_followed


def test_the_model_is_that_of_sample_unless_a_checkpoint_is_named(run):
    stored = find_model(run, SampleConfig().checkpoint)
    assert isinstance(stored, StoredRun)
    assert load(run_dir=str(run)).step == stored.step == 3


def test_the_model_of_another_library_has_no_steps(tmp_path):
    save_hf(build_model(small(vocab_size=8)), tmp_path / "theirs", CharTokenizer("abcdefgh"))
    session = load(init_from=str(tmp_path / "theirs"))
    assert (session.title, session.max_steps, session.scores) == ("theirs", None, None)


def test_the_example_is_shown_if_the_model_can_read_it():
    every_byte = BPETokenizer(PATTERNS["gpt2"], [bytes([b]) for b in range(256)], 256)
    assert find_prompt(every_byte, None) == (EXAMPLE_PROMPT, ())
    assert find_prompt(CharTokenizer(TEXT), None) == ("", ())


def test_the_text_of_a_run_is_shown_in_whole_characters_and_read_by_its_ids(tmp_path):
    every_byte = BPETokenizer(PATTERNS["gpt2"], [bytes([b]) for b in range(256)], 256)
    ids = every_byte.encode("日" + "é" * 15 + "日")[1:]  # the first 32 end in a character, too
    shot = snapshot(T=len(ids)) | {"text_ids": np.array(ids)}
    write_snapshot(tmp_path, shot)
    assert find_prompt(every_byte, RunDir(tmp_path)) == ("é" * 15, tuple(ids[:32]))


@pytest.fixture
def explorer(run):
    return Explorer(ExploreConfig(run_dir=str(run), checkpoint="last"), print)


def frames(explorer, request="read", **parameters):
    body = {"request": request, "ids": [0, 1, 0], "step": 6, **parameters}
    return decode_frames(b"".join(explorer.answer(json.dumps(body).encode(), lambda: False)))


def assert_works(explorer):
    assert [kind for kind, _ in frames(explorer)] == ["answer"]


def test_an_answer_follows_its_parts(explorer):
    *parts, (kind, answer) = frames(explorer, "continue", maxTokens=3)
    assert [(kind, len(part["ids"])) for kind, part in parts] == [("part", n) for n in (4, 5, 6)]
    assert (kind, answer) == ("answer", None)


@pytest.mark.parametrize(
    "body, name",
    [
        (b'{"request": "nobody"}', "UserError"),
        (b'{"request": "read", "step": 6, "ids": [9999]}', "UserError"),
        (b'{"request": "read", "step": 5, "ids": [1]}', "StepChanged"),
        (b'{"request": ["read"]}', "UserError"),
        (b"", "UserError"),
        (b"\xff", "UserError"),
        (b"[" * 400_000, "UserError"),
        (b'{"request": "read", "ids": [' + b"9" * 5000 + b"]}", "UserError"),
    ],
    ids=range(8),
)
def test_a_wrong_request_becomes_an_error_frame(explorer, body, name, capsys):
    [(kind, error)] = decode_frames(b"".join(explorer.answer(body, lambda: False)))
    assert (kind, error["name"]) == ("error", name) and len(error["message"]) < 200
    assert "Traceback" not in capsys.readouterr().err
    assert_works(explorer)


def test_a_bug_becomes_an_error_frame_without_details(explorer, capsys, monkeypatch):
    monkeypatch.setattr(explorer.session.model, "head", None)
    [(kind, error)] = frames(explorer)
    assert (kind, error["name"]) == ("error", "InternalError")
    assert "Traceback" in capsys.readouterr().err


class Client:
    """Asks for an answer, by default a long one, in a thread, and can go away."""

    def __init__(self, explorer, request="continue", step=6):
        self.request, self.step, self.is_gone = request, step, False
        self.started = threading.Event()
        self.thread = threading.Thread(target=self.read, args=(explorer,), daemon=True)
        self.thread.start()

    def read(self, explorer):
        request = {"request": self.request, "ids": [0, 1], "step": self.step, "maxTokens": 1000}
        for _ in explorer.answer(json.dumps(request).encode(), lambda: self.is_gone):
            self.started.set()

    def has_ended(self):
        self.thread.join(SECONDS)
        return not self.thread.is_alive()


def test_a_request_waits_for_the_one_before_and_ends_when_its_client_is_gone(explorer):
    first, second = Client(explorer), Client(explorer)
    assert first.started.wait(SECONDS) or second.started.wait(SECONDS)
    assert frames(explorer, "encode", text="ab") == [("answer", [0, 1])]  # needs no model
    first.is_gone = second.is_gone = True
    assert first.has_ended() and second.has_ended()
    assert_works(explorer)


def test_measuring_heads_gives_way_to_other_requests(explorer, monkeypatch):
    def measure_forever(session, parameters, text_pass):
        while True:
            session.model(torch.tensor([parameters.ids]))
            yield "a stage"

    monkeypatch.setitem(MODEL_REQUESTS, "measureHeads", measure_forever)
    measuring = Client(explorer, "measureHeads")
    assert measuring.started.wait(SECONDS)
    assert Client(explorer, "read").has_ended()
    assert measuring.thread.is_alive()
    measuring.is_gone = True
    assert measuring.has_ended()
    assert_works(explorer)


def page_data(explorer) -> dict:
    return json.loads(explorer.page().split('id="data">')[1].split("</script>")[0])


def shown_step(explorer) -> int:
    return page_data(explorer)["step"]


@pytest.mark.parametrize(("checkpoint", "before", "after"), [("last", 3, 6), ("best", 6, 3)])
def test_the_page_shows_the_newest_or_best_checkpoint_of_the_moment(
    run, tmp_path, checkpoint, before, after
):
    aside = RunDir(run).checkpoint_folder(after).rename(tmp_path / "aside")
    explorer = Explorer(ExploreConfig(run_dir=str(run), checkpoint=checkpoint), print)
    session = explorer.session
    assert shown_step(explorer) == before and explorer.session is session
    shutil.copytree(aside, RunDir(run).checkpoint_folder(after))
    assert shown_step(explorer) == after
    expected = load_run(run, after)[0].tensors()
    tensors = explorer.session.model.tensors().items()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors)
    [(_, error)] = frames(explorer, step=before)
    assert error["name"] == "StepChanged"
    assert [kind for kind, _ in frames(explorer, step=after)] == ["answer"]


def damage(run: Path) -> None:
    path = RunDir(run).checkpoint_folder(6) / MODEL_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


@pytest.mark.parametrize("harm", [damage, shutil.rmtree])
def test_a_checkpoint_that_cannot_be_read_is_reported_and_the_one_before_shown(run, tmp_path, harm):
    later = RunDir(run).checkpoint_folder(6).rename(tmp_path / "later")
    lines = []
    explorer = Explorer(ExploreConfig(run_dir=str(run), checkpoint="last"), lines.append)
    lines.clear()
    shutil.copytree(later, RunDir(run).checkpoint_folder(6))
    harm(run)
    assert shown_step(explorer) == 3
    assert str(run) in "".join(lines)
    assert [kind for kind, _ in frames(explorer, step=3)] == ["answer"]


@pytest.fixture
def series(tmp_path) -> Explorer:
    """An explorer of four steps, of which two have equal weights."""
    folder = write_steps(tmp_path / "out")
    return Explorer(ExploreConfig(init_from=str(folder), steps="all"), print)


def test_a_step_of_a_series_answers_as_its_model_does_and_equal_ones_count_once(
    series, tmp_path, monkeypatch
):
    counts = count_models(monkeypatch)
    content = page_data(series)
    assert (content["step"], content["steps"]) == (20, COUNTED)
    assert len(content["repeats"]) == 1 and content["title"] == "out"
    for step in (5, 10, 5, 20, 10):
        assert frames(series, "loadStep", step=step) == [("answer", None)]
        [(_, answer)] = frames(series, "logits", step=step, off=["L0H1"], hidden=[0])
        text = series.session.read([0, 1, 0], Interventions((Head(0, 1),), (0,)))
        assert torch.equal(torch.tensor(answer), text.logits().flatten())
        expected = find_model(tmp_path / "out" / f"checkpoint-{step}").read_tensors()
        ours = series.session.model.tensors()
        assert all(torch.equal(ours[name], tensor) for name, tensor in expected)
    assert counts == [1, 2, 2, 2]  # after the one that was loaded before
    [(_, error)] = frames(series, step=0)
    assert error["name"] == "StepChanged"


def test_a_step_is_not_loaded_further_when_its_client_is_gone(series, monkeypatch):
    read_tensors = HFFolder.read_tensors
    allowed = threading.Semaphore(2)  # tensors of the first step

    def read_slowly(stored):
        for named in read_tensors(stored):
            assert allowed.acquire(timeout=SECONDS)
            yield named

    monkeypatch.setattr(HFFolder, "read_tensors", read_slowly)
    client = Client(series, "loadStep", step=5)
    while allowed.acquire(blocking=False):
        allowed.release()
        time.sleep(0.01)
    client.is_gone = True
    allowed.release()
    assert client.has_ended() and not client.started.is_set() and series.session.step == 20
    for _ in range(100):
        allowed.release()
    assert frames(series, "loadStep", step=10) == [("answer", None)]
    assert series.session.step == 10
