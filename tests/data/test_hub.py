"""Datasets: a folder of parquet is read by the library itself; what came is kept, gone on with,
and never read half."""

import builtins
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from filelock import FileLock

import data.hub
from config import DataConfig, TokenizerConfig, UserError
from data.corpus import open_corpus
from data.tokens import prepare

STORIES = [f"Story {n}: “once” upon a time\nthere were {n} cats.\r\n\u2028" for n in range(250)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path / "cache"


@pytest.fixture
def dataset(tmp_path):
    """A folder as the hub's datasets have it: two parquet files of a training split, one of a
    validation split."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for name, texts in (("train-0", STORIES[:150]), ("train-1", STORIES[150:]),
                        ("validation", ["the other split"])):
        pyarrow.parquet.write_table(pyarrow.table({"number": range(len(texts)), "story": texts}),
                                    folder / f"{name}.parquet")
    return folder


def documents(folder, say=lambda line: None, **more) -> list[str]:
    corpus = open_corpus(DataConfig(source="hf", name=str(folder), **{"field": "story", **more}),
                         say)
    found = []
    for text, begins in corpus.pieces():
        found += [text] if begins else []
        found[-1] += "" if begins else text
    return found


def refused(folder, **more) -> str:
    with pytest.raises(UserError) as error:
        documents(folder, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_texts_of_a_dataset_come_whole_and_in_order_and_its_other_splits_by_name(dataset):
    assert documents(dataset) == STORIES
    assert documents(dataset, split="validation") == ["the other split"]


def test_it_is_read_once_with_the_same_bytes_and_again_when_it_changes(dataset, cache, monkeypatch):
    said = []
    documents(dataset, said.append)
    kept = {path.name: path.read_bytes() for path in cache.rglob("*.jsonl.gz")}
    monkeypatch.setattr(data.hub, "fetch", None)
    assert documents(dataset, said.append) == STORIES and len(said) == 1
    monkeypatch.undo()
    os.environ["GLASSGPT_CACHE"] = str(cache)
    next(cache.glob("hf_*/complete")).unlink()
    for path in cache.rglob("*.jsonl.gz"):
        path.unlink()
    assert documents(dataset) == STORIES
    assert {path.name: path.read_bytes() for path in cache.rglob("*.jsonl.gz")} == kept
    pyarrow.parquet.write_table(pyarrow.table({"number": [0], "story": ["new"]}),
                                dataset / "train-1.parquet")
    assert documents(dataset) == [*STORIES[:150], "new"]


def test_an_interrupted_download_keeps_what_came_and_goes_on_there(dataset, cache, monkeypatch):
    monkeypatch.setattr(data.hub, "DOCUMENTS", 40)
    line, calls = data.hub.line, iter(range(130))

    def broken(*args):
        if next(calls, None) is None:
            raise ConnectionResetError("the connection was cut")
        return line(*args)

    monkeypatch.setattr(data.hub, "line", broken)
    assert "the connection was cut" in refused(dataset)
    assert len(list(cache.rglob("*.jsonl.gz"))) == 3 and not list(
        cache.rglob("*.part")) and not list(cache.rglob("complete"))
    monkeypatch.setattr(data.hub, "line", line)
    said = []
    assert documents(dataset, said.append) == STORIES and "going on after 120 documents" in said[0]


def test_a_stop_after_the_last_document_is_gone_on_with_too(dataset, cache):
    documents(dataset)
    next(cache.rglob("complete")).unlink()
    assert documents(dataset) == STORIES


@pytest.mark.parametrize("more, words", [({"field": "text"},
                                          "no text in data.field=text (fields with text: story)"),
                                         ({"field": "number"}, "no text in data.field=number"),
                                         ({"split": "test"}, "test"),
                                         ({"subset": "german"}, "german")])
def test_a_field_a_split_or_a_subset_that_is_not_there_is_named(dataset, cache, more, words):
    assert words in refused(dataset, **more)
    assert not list(cache.rglob("*.jsonl.gz"))


def test_without_the_library_it_is_named(dataset, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install datasets" in refused(dataset)


def test_tokens_are_made_of_it_with_whole_documents_to_validate(dataset):
    tokens = prepare(DataConfig(source="hf", name=str(dataset), field="story"),
                     TokenizerConfig(name="bpe", vocab_size=300), lambda line: None)
    assert (tokens.documents, tokens.val_documents) == (250, 25)
    assert str(dataset) in tokens.summary()[0]


def test_what_is_kept_is_read_like_any_file(dataset, cache):
    documents(dataset)
    lines = b"".join(gzip.decompress(path.read_bytes())
                     for path in sorted(cache.rglob("*.jsonl.gz"))).split(b"\n")
    assert [json.loads(line) for line in lines if line] == [{"text": story} for story in STORIES]


def test_a_field_within_objects_and_lists_is_taken(tmp_path):
    folder = tmp_path / "talks"
    folder.mkdir()
    talk = [{"role": "user", "content": "Why?"}, {"role": "model", "content": "Well."}]
    table = pyarrow.table({"messages": [talk], "meta": [{"title": "A talk"}]})
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    assert documents(folder, field="messages.content") == ["Why?\n\nWell."]
    assert documents(folder, field="meta.title") == ["A talk"]
    known = "(fields with text: messages.role, messages.content, meta.title)"
    assert known in refused(folder, field="messages")


@pytest.mark.slow
def test_a_killed_download_leaves_nothing_that_stays(dataset, cache, monkeypatch):
    code = """if True:
        import os, sys
        from pathlib import Path
        import data.hub as hub
        from config import DataConfig

        hub.DOCUMENTS, line, calls = 40, hub.line, iter(range(130))
        hub.line = lambda *a: os.kill(os.getpid(), 9) if next(calls, None) is None else line(*a)
        settings = DataConfig(source="hf", name=sys.argv[1], field="story")
        hub.hub_files(settings, Path(sys.argv[2]), print)"""
    cache.mkdir()
    done = subprocess.run([sys.executable, "-c", code, dataset, cache], cwd=ROOT,
                          stdout=subprocess.DEVNULL)
    assert done.returncode == -9
    assert len(list(cache.rglob("*.jsonl.gz"))) == 3 and len(list(cache.rglob("*.part"))) == 1
    monkeypatch.setattr(data.hub, "DOCUMENTS", 40)
    assert documents(dataset) == STORIES
    assert not list(cache.rglob("*.part"))


def test_a_link_in_place_of_the_lock_is_refused_and_not_followed(dataset, cache, tmp_path):
    (tmp_path / "precious").write_text("mine")
    settings = DataConfig(source="hf", name=str(dataset), field="story")
    cache.mkdir()
    (cache / f"hf_{data.hub.identity(settings)[:16]}.lock").symlink_to(tmp_path / "precious")
    assert "cannot be taken (Too many levels of symbolic links): remove it" in refused(dataset)
    assert (tmp_path / "precious").read_text() == "mine"


def test_who_waits_for_another_process_is_told(dataset, cache):
    said, found = [], []
    settings = DataConfig(source="hf", name=str(dataset), field="story")
    cache.mkdir()
    with FileLock(cache / f"hf_{data.hub.identity(settings)[:16]}.lock"):
        waits = threading.Thread(target=lambda: found.extend(documents(dataset, said.append)))
        waits.start()
        ends = time.monotonic() + 20
        while not said and waits.is_alive() and time.monotonic() < ends:
            time.sleep(0.01)
        assert said == [f"waiting for another process to fetch {dataset}"] and not found
    waits.join()
    assert found == STORIES


def closed_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return closed.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_hub_out_of_reach_is_given_up_at_once(host, monkeypatch):
    endpoint, said = f"http://{host}:{closed_port()}", []
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    began = time.monotonic()
    why = f"nobody/nothing cannot be read: no connection to {endpoint}"
    with pytest.raises(UserError, match=why):
        documents("nobody/nothing", said.append)
    assert time.monotonic() - began < 60
    assert said[0].startswith("fetching nobody/nothing from the Hugging Face hub (kept in ")


def test_a_hub_that_answers_late_or_with_an_error_is_within_reach(monkeypatch):
    class Late(BaseHTTPRequestHandler):
        def do_HEAD(self):
            time.sleep(0.5)
            self.send_error(503)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.handle_request).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        data.hub.reach_hub()


@pytest.mark.slow
def test_without_a_network_one_sentence_says_how_to_do_without(new_command, tmp_path):
    done = new_command("train.py", "data=tinystories", env={"HF_ENDPOINT": "http://127.0.0.1:9",
                                                            "HF_HOME": str(tmp_path / "home"),
                                                        "GLASSGPT_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "fetching roneneldan/TinyStories from the Hugging Face hub" in done.stdout
    assert "roneneldan/TinyStories cannot be read" in done.stderr
    assert "data.name=FOLDER" in done.stderr


@pytest.mark.slow
def test_a_run_trains_on_a_dataset_with_no_more_than_its_name(command, dataset):
    done = command("train.py", "data=hf", f"data.name={dataset}", "data.field=story", "run_dir=run",
                   "model.n_layer=1", "model.n_embd=16",
                   "model.block_size=16", "batch_size=2", "max_steps=2", "compile=false",
                   "tokenizer.vocab_size=300",
                   env={"GLASSGPT_CACHE": os.environ["GLASSGPT_CACHE"]})
    assert done.returncode == 0, done.stderr
    assert "25 of them, one in ten, for validation" in done.stdout
