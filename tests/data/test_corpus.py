"""Where text comes from: what is found, in which order, and what is said when it cannot be had."""

import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from urllib.error import URLError

import pyarrow.parquet
import pytest

import data.corpus
from common.errors import UserError
from config import DataConfig
from data.corpus import open_corpus, stdlib_files, text_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def silent(line):
    raise AssertionError(f"nothing was to be said, but: {line}")


def write(folder: Path, *names: str) -> Path:
    """Files with their names as their text."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def names(files, folder):
    return [p.relative_to(folder).as_posix() for p in files]


def text_corpus(path, log=silent, **more):
    return open_corpus(DataConfig(source="text", path=str(path), **more), log)


def documents(corpus):
    """The whole texts of a corpus's documents."""
    texts = []
    for text, begins in corpus.pieces():
        texts = [*texts, text] if begins else [*texts[:-1], texts[-1] + text]
    return texts


# --- the standard library -------------------------------------------------------------------------


def test_the_standard_library_leaves_tests_and_installed_packages_out_and_comes_sorted(
    tmp_path, monkeypatch
):
    root = write(
        tmp_path / "tests",
        "b.py",
        "a.py",
        "json/z.py",
        "json/__init__.py",
        "test/test_a.py",
        "json/tests/t.py",
        "idlelib/idle_test/t.py",
        "site-packages/numpy.py",
        "dist-packages/x.py",
        "json/__pycache__/z.py",
        "testing.py",
        "notes.txt",
    )  # what lies above the library does not count
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    assert names(stdlib_files(), root) == [
        "a.py",
        "b.py",
        "json/__init__.py",
        "json/z.py",
        "testing.py",
    ]


# --- your files -----------------------------------------------------------------------------------


def test_a_folder_gives_all_below_it_sorted_but_what_is_hidden(tmp_path):
    write(
        tmp_path,
        "b.txt",
        "a/z.md",
        "a/deep/er/x",
        ".hidden.txt",
        ".git/config",
        "a/.secret/y.txt",
        "B.txt",
    )
    corpus = text_corpus(tmp_path)
    assert names(corpus.files, tmp_path) == ["B.txt", "a/deep/er/x", "a/z.md", "b.txt"]
    assert documents(corpus) == ["B.txt", "a/deep/er/x", "a/z.md", "b.txt"]
    assert documents(text_corpus(tmp_path / ".git")) == [".git/config"]  # asked for


def test_odd_paths_are_the_files_of_that_name(tmp_path, monkeypatch):
    write(tmp_path, "notes [1].txt", "notes 1.txt", "~notes.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path, name in (
        ("notes [1].txt", "notes [1].txt"),
        ("~notes.txt", "~notes.txt"),
        ("~/notes 1.txt", "notes 1.txt"),
        ("~/notes 1.*", "notes 1.txt"),
    ):
        assert documents(text_corpus(path)) == [name]


# --- what is left out -----------------------------------------------------------------------------


def test_what_is_no_text_is_counted_and_three_are_named(tmp_path):
    write(tmp_path, "text.txt", "sub/more.txt")
    many = b"x" + "é".encode() * 700_000  # what is looked at ends within an é
    (tmp_path / "many.txt").write_bytes(many)
    for name, content in {
        "sub/z.txt": b"caf\xe9",
        "escape\x1b[31m": b"a\0b",
        "b.gz": b"no gzip",
        "c.png": b"\x89PNG\r\n\0\0",
    }.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")  # and nothing waits for it
    (tmp_path / "zone").symlink_to(tmp_path / "gone")
    said = []
    corpus = text_corpus(tmp_path, said.append)
    assert names(corpus.files, tmp_path) == ["many.txt", "sub/more.txt", "text.txt"]
    assert said == [f"left out of {tmp_path}: 6 not text in utf-8, as b.gz, c.png, escape␛[31m"]


def test_linked_folders_are_passed_by_and_linked_files_are_read(tmp_path):
    folder = write(tmp_path, "other/b.txt", "notes/a.txt") / "notes"
    (folder / "circle").symlink_to(folder)
    (folder / "sub").symlink_to(tmp_path / "other")
    (folder / "c.txt").symlink_to(tmp_path / "other" / "b.txt")
    for path in (folder, f"{folder}/**/*.txt", f"{folder}/**"):
        assert documents(text_corpus(path)) == ["notes/a.txt", "other/b.txt"]


def test_what_glassgpt_wrote_is_passed_by(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cached"))
    write(
        tmp_path,
        "a.txt",
        "runs/one/config.yaml",
        "runs/one/metrics.jsonl",
        "runs/two/config.yaml",
        "runs/two/checkpoints/last",
        "sweep/multirun.yaml",
        "sweep/lr=1/job.json",
        "cached/tinyshakespeare.txt",
        "settings/config.yaml",
    )
    found = ["a.txt", "settings/config.yaml"]
    assert names(text_files(str(tmp_path), silent), tmp_path) == found
    assert names(text_files(f"{tmp_path}/**", silent), tmp_path) == found
    mine = tmp_path / "runs" / "one"  # is read where it is asked for
    assert names(text_files(str(mine), silent), mine) == ["config.yaml", "metrics.jsonl"]


@pytest.mark.parametrize(
    "path, exclude, left",
    [
        ("", "drafts, *.log,f?*.md", ["a.txt", "sub/deep/d.txt"]),
        ("", "**/drafts/,*.log,*.md,", ["a.txt", "sub/deep/d.txt"]),
        ("", "sub/*,drafts,?.log,f*", ["a.txt"]),
        ("/*", "*.log,*.md", ["a.txt"]),
        ("/**/*.txt", "drafts", ["a.txt", "sub/deep/d.txt"]),
    ],
)
def test_globs_say_what_else_to_leave_out(tmp_path, path, exclude, left):
    write(
        tmp_path, "a.txt", "drafts/b.txt", "sub/drafts/c.txt", "sub/deep/d.txt", "e.log", "f, g.md"
    )
    assert names(text_files(f"{tmp_path}{path}", silent, exclude=exclude), tmp_path) == left


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, path, sentence",
    [
        ("text", "nowhere.txt", "does not exist: give the path"),
        ("text", "*.txt", "holds no text"),
        ("text", "~nobody-of-that-name/a.txt", "does not exist"),
        ("text", "x" * 300, "does not exist"),
        ("text", "empty", "holds no text files"),
        ("text", "bad", "1 not text in utf-8, as a.bin"),
        ("text", "pipe", "is a pipe, a socket or a device"),
        ("shakespeare", "pipe", "is a pipe"),
        ("shakespeare", "empty", "is a folder"),
        ("shakespeare", "no.txt", "does not exist"),
    ],
)
def test_a_path_without_text_is_named(tmp_path, monkeypatch, source, path, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path, "bad/a.bin").joinpath("bad/a.bin").write_bytes(b"\0")
    with pytest.raises(UserError, match=sentence) as error:
        open_corpus(DataConfig(source=source, path=path), silent)
    assert f"data.path={path} " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content, offset",
    [
        (b"caf\xe9 au lait", 3),
        ("漢".encode()[:2], 0),
        (b"\xef\xbb\xbfcaf\xe9 au lait", 6),
        ("aé漢\n".encode() * 400_000 + b"\xff", 2_800_000),
    ],
)
def test_what_is_not_in_the_encoding_is_named_with_the_offset_of_its_byte(
    tmp_path, content, offset
):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(
        UserError,
        match=rf"a\.txt is not utf-8 text: byte 0x.. at offset {offset};"
        r".* or leave it out \(data\.exclude\)",
    ):
        documents(text_corpus(tmp_path / "a.txt"))


# --- tiny Shakespeare -----------------------------------------------------------------------------


def shakespeare(path=None, log=lambda line: None):
    return documents(open_corpus(DataConfig(source="shakespeare", path=path), log))


@pytest.fixture
def web(monkeypatch):
    """web(body) answers with it, or raises it where it is an error; it counts what is asked."""
    monkeypatch.setattr(
        data.corpus, "SHAKESPEARE_SHA256", hashlib.sha256(b"First Citizen:\n").hexdigest()
    )
    asked = []

    def web(body):
        def urlopen(url, timeout):
            asked.append(url)
            if isinstance(body, Exception):
                raise body
            return io.BytesIO(body)

        monkeypatch.setattr(data.corpus.urllib.request, "urlopen", urlopen)
        return asked

    return web


def test_shakespeare_is_fetched_once_and_again_where_it_is_damaged(web, tmp_path):
    asked, said = web(b"First Citizen:\n"), []
    assert shakespeare(log=said.append) == shakespeare() == ["First Citizen:\n"]
    assert len(said) == 1 and said == [f"fetching tiny Shakespeare from {url}" for url in asked]
    (tmp_path / "cache" / "tinyshakespeare.txt").write_text("half a")
    assert shakespeare() == ["First Citizen:\n"] and len(asked) == 2
    assert not list(tmp_path.glob("cache/*.part"))


@pytest.mark.parametrize(
    "answer, why",
    [
        (b"<html>Log in to this network</html>", "another text came, of sha256 "),
        (URLError("no route"), "no route"),
        (HTTPException("no HTTP"), "no HTTP"),
    ],
)
def test_another_answer_is_refused_and_nothing_is_kept(web, tmp_path, answer, why):
    web(answer)
    with pytest.raises(UserError, match=rf"{why}.*by hand and give it as data\.path=FILE"):
        shakespeare()
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


# --- datasets -------------------------------------------------------------------------------------


STORIES = [f"Story {n}: “once” upon a time\nthere were {n}/9 cats.\r\n\u2028" for n in range(250)]


@pytest.fixture
def dataset(tmp_path):
    """A folder as the hub's datasets have it: files of two splits."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for name, texts in (
        ("train-0", STORIES[:150]),
        ("train-1", STORIES[150:]),
        ("validation", ["the other split"]),
    ):
        talk = [[{"role": "user", "content": "Why?"}]] * len(texts)
        table = pyarrow.table({"number": range(len(texts)), "story": texts, "talk": talk})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    return folder


def rows_of(folder, log=lambda line: None, **more) -> list[str]:
    return documents(
        open_corpus(DataConfig(source="hf", name=str(folder), **{"field": "story", **more}), log)
    )


def test_the_texts_of_a_dataset_come_whole_and_in_order_and_its_other_splits_by_name(dataset):
    assert rows_of(dataset) == STORIES
    assert rows_of(dataset, split="validation") == ["the other split"]


def test_it_is_read_once_and_again_when_it_changes(dataset, cache, monkeypatch):
    said = []
    rows_of(dataset, said.append)
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "datasets", None)
        assert rows_of(dataset, said.append) == STORIES and len(said) == 1
        assert rows_of(dataset, field="talk.content") == ["Why?"] * 250
    assert sorted(path.suffix for path in cache.iterdir()) == [".jsonl", ".lock"]
    (kept,) = cache.glob("*.jsonl")
    kept.write_bytes(kept.read_bytes()[:9000])  # where a part of it is lost
    assert rows_of(dataset) == STORIES
    (dataset / "train-1.parquet").unlink()
    assert rows_of(dataset) == STORIES[:150]


@pytest.mark.parametrize("more", [{"split": "test"}, {"subset": "german"}])
def test_a_split_or_a_subset_that_is_not_there_is_named(dataset, cache, more):
    with pytest.raises(UserError, match=next(iter(more.values()))) as error:
        rows_of(dataset, **more)
    assert "\n" not in str(error.value) and [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.soak
def test_without_a_network_one_sentence_says_how_to_do_without(new_command, tmp_path):
    done = new_command(
        "train.py",
        "data=tinystories",
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "fetching roneneldan/TinyStories" in done.stdout
    assert "TinyStories cannot be read" in done.stderr and "data.name=FOLDER" in done.stderr


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_document_in_pieces_is_the_document_cut_before_lines_that_begin_with_a_letter(
    tmp_path, monkeypatch, size
):
    monkeypatch.setattr(data.corpus, "PIECE", size)
    text = "\ufeffif x:\r\n\n\n    é = 1\n\n\n# note\nélan 漢字\n漢字\n\nafter a gap\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"")
    corpus = text_corpus(tmp_path)
    assert documents(corpus) == [text.removeprefix("\ufeff"), ""]
    pieces = [piece for piece, _ in corpus.pieces()]
    assert len(pieces) > 10
    if size > 7:  # else the pieces are so small that lines do not fit into two of them
        assert all(
            before.endswith("\n") and not before[-2].isspace() and (not after or after[0].isalnum())
            for before, after in pairwise(pieces)
        )


# --- packed files and lines of JSON ---------------------------------------------------------------


def test_packed_and_plain_files_and_lines_of_json_are_documents_beside_each_other(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffone é\n".encode()))
    (tmp_path / "b.jsonl").write_text(
        '{"text": "two", "id": 1}\n\n{"id": 2, "text": "thr\\nee '
        '\\u00e9 \\ud83d \\ud83d\\ude00"}\n{"text": ""}\n'
    )
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}'))
    assert documents(text_corpus(tmp_path)) == [
        "one é\n",
        "two",
        "thr\nee é \ufffd 😀",
        "",
        "four",
    ]  # half a pair is replaced


RECORD = {
    "messages": [
        {"role": "user", "content": "Why?"},
        {"role": "tool", "content": None},
        {"role": "tool"},
        {"role": "model", "content": "Well."},
    ],
    "meta": {"title": "A talk", "n": 2},
    "tags": ["a", "b"],
    "body": "one",
    "empty": None,
}


@pytest.mark.parametrize(
    "field, text",
    [
        ("body", "one"),
        ("messages.content", "Why?\n\nWell."),
        ("meta.title", "A talk"),
        ("tags", "a\n\nb"),
    ],
)
def test_dots_go_into_objects_and_texts_of_a_list_are_joined(tmp_path, field, text):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD) + "\n")
    assert documents(text_corpus(tmp_path / "a.jsonl", field=field)) == [text]


@pytest.mark.parametrize(
    "field, line",
    [
        *(
            (field, json.dumps(RECORD))
            for field in ("messages", "messages.role.x", "meta.n", "meta", "none", ".", "empty")
        ),
        ("text", "{"),
        ("text", "[1]"),
        ("text", '"text"'),
        ("text", "null"),
        ("text", '{"text": ' + "[" * 9999 + '"x"' + "]" * 9999 + "}"),
    ],
)
def test_a_line_without_its_text_is_named_and_shown(tmp_path, field, line):
    (tmp_path / "a.jsonl").write_text("\n" + line + "\n")
    with pytest.raises(UserError) as error:
        documents(text_corpus(tmp_path / "a.jsonl", field=field))
    assert str(error.value).endswith(
        f"line 2 of {tmp_path / 'a.jsonl'} is no JSON object with "
        f"text in data.field={field}: {line[:80]}"
    )
