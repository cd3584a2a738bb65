"""Finding text: the standard library, tiny Shakespeare, datasets, and the user's files."""

import gzip
import hashlib
import io
import os
import sys
import sysconfig
import urllib.request
from pathlib import Path
from unicodedata import normalize
from urllib.error import URLError

import pyarrow.parquet
import pytest
from conftest import read_only
from corpora import documents, ignore, refuse_to_log, text_corpus

from common.errors import UserError
from config import DataConfig
from data import downloads
from data.corpus import open_corpus
from data.downloads import download_shakespeare
from data.sources import find_stdlib_files, find_text_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, *names: str) -> Path:
    """Write files that contain their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def relative_names(files, folder):
    return [path.relative_to(folder).as_posix() for path in files]


def test_the_standard_library_is_sorted_and_has_no_tests_or_installed_packages(
    tmp_path, monkeypatch
):
    library = ("b.py", "a.py", "json/z.py", "testing.py")
    others = ("test/test_a.py", "json/tests/t.py", "site-packages/numpy.py", "notes.txt")
    root = write(tmp_path / "tests", *library, *others)  # folders above the library do not matter
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    assert relative_names(find_stdlib_files(), root) == sorted(library)


# --- the user's files -----------------------------------------------------------------------------


def test_a_folder_gives_all_files_below_it_sorted_except_hidden_ones(tmp_path):
    hidden = (".hidden.txt", ".git/config", "a/.secret/y.txt")
    write(tmp_path, "b.txt", "a/z.md", "a/deep/er/x", "B.txt", *hidden)
    corpus = text_corpus(tmp_path)
    assert documents(corpus) == ["B.txt", "a/deep/er/x", "a/z.md", "b.txt"]
    assert documents(text_corpus(tmp_path / ".git")) == [".git/config"]  # named explicitly


def test_files_that_are_not_text_are_skipped_and_three_of_them_are_named(tmp_path):
    write(tmp_path, "text.txt", "sub/more.txt")
    others = {
        "long.txt": b"x" + "é".encode() * 700_000,  # the part that is checked ends within an é
        "sub/z.txt": b"caf\xe9",
        "escape\x1b[31m": b"a\0b",
        "b.gz": gzip.compress(b"cut off" * 99)[:20],
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for a writer
    (tmp_path / "zone").symlink_to(tmp_path / "missing")
    log = []
    corpus = text_corpus(tmp_path, log.append)
    assert relative_names(corpus.files, tmp_path) == ["long.txt", "sub/more.txt", "text.txt"]
    (line,) = log
    assert " 5 files" in line and "b.gz" in line and "escape" in line
    assert "z.txt" not in line and "\x1b" not in line


def test_linked_folders_are_skipped_and_linked_files_are_read(tmp_path):
    folder = write(tmp_path, "other/b.txt", "notes/a.txt") / "notes"
    (folder / "circle").symlink_to(folder)
    (folder / "sub").symlink_to(tmp_path / "other")
    (folder / "c.txt").symlink_to(tmp_path / "other" / "b.txt")
    for path in (folder, f"{folder}/**/*.txt", f"{folder}/**"):
        assert documents(text_corpus(path)) == ["notes/a.txt", "other/b.txt"]


def test_runs_sweeps_and_the_cache_are_skipped_unless_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cached"))
    run = ("runs/one/config.yaml", "runs/one/metrics.jsonl")
    sweep = ("sweep/multirun.yaml", "sweep/lr=1/job.json")
    write(tmp_path, "a.txt", *run, *sweep, "cached/tinyshakespeare.txt", "settings/config.yaml")
    for path in (str(tmp_path), f"{tmp_path}/**"):
        files = find_text_files(path, refuse_to_log)
        assert relative_names(files, tmp_path) == ["a.txt", "settings/config.yaml"]
    run = tmp_path / "runs" / "one"
    files = find_text_files(str(run), refuse_to_log)
    assert relative_names(files, run) == ["config.yaml", "metrics.jsonl"]


TREE = ("a.txt", "drafts/b.txt", "sub/drafts/c.txt", "sub/deep/d.txt", "e.log", "f, g.md", ".git/h")


@pytest.mark.parametrize(
    "path, exclude, remaining",
    [
        ("", "drafts, *.log,f?*.md", ["a.txt", "sub/deep/d.txt"]),
        ("", "sub/*,drafts,?.log,f*", ["a.txt"]),
        ("", "/drafts/,*.log,f*,", ["a.txt", "sub/deep/d.txt", "sub/drafts/c.txt"]),
        ("", "**/drafts/b.txt, deep, [ef]*", ["a.txt", "sub/drafts/c.txt"]),
        ("", "*,!a.*", ["a.txt"]),
        ("", "sub/,.git,[def]*", ["a.txt"]),
        ("/*", "*.log,*.md", ["a.txt"]),
        ("/**/*.txt", "drafts", ["a.txt", "sub/deep/d.txt"]),
        ("/*/**", "drafts", ["sub/deep/d.txt"]),
    ],
)
def test_patterns_of_gitignore_exclude_further_files(tmp_path, path, exclude, remaining):
    write(tmp_path, *TREE)
    files = find_text_files(f"{tmp_path}{path}", refuse_to_log, exclude=exclude)
    assert relative_names(files, tmp_path) == remaining


@pytest.mark.parametrize("path", ["", "/*", "/**/*.txt", "/a.txt"])
@pytest.mark.parametrize("pattern", ["./a.txt", "../a.txt", "n/a.txt", "draft", "#a.txt", "!"])
def test_a_pattern_that_excludes_nothing_is_refused_by_name(tmp_path, path, pattern):
    write(tmp_path, *TREE)
    with pytest.raises(UserError, match=r"data\.exclude") as error:
        find_text_files(f"{tmp_path}{path}", ignore, exclude=f"a.txt,{pattern}")
    assert pattern in str(error.value) or path == "/a.txt"


@pytest.mark.parametrize("typed, stored", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_glob_matches_composed_and_decomposed_names(typed, stored, tmp_path):
    typed, stored = normalize(typed, "é"), normalize(stored, "é")
    names = [f"{stored}/{stored}{number}.txt" for number in range(3)]
    write(tmp_path, *names, f"{stored}/e.txt")
    files = find_text_files(f"{tmp_path}/{stored}/{typed}?.txt", refuse_to_log, f"{typed}1*")
    assert relative_names(files, tmp_path) == [names[0], names[2]]


@pytest.mark.parametrize(
    "source, path",
    [
        ("text", "nowhere.txt"),
        ("text", "*.txt"),
        ("text", "~nobody-of-that-name/a.txt"),
        ("text", "empty"),
        ("text", "binary"),
        ("text", "pipe"),
        ("shakespeare", "no.txt"),
    ],
)
def test_a_path_without_text_is_refused_by_name(tmp_path, monkeypatch, source, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(b"\0")
    with pytest.raises(UserError) as error:
        open_corpus(DataConfig(source=source, path=path), refuse_to_log)
    message = str(error.value)
    assert f"data.path={path} " in message and "\n" not in message
    assert "a.bin" in message or path != "binary"


# --- tiny Shakespeare -----------------------------------------------------------------------------

TEXT = b"First Citizen:\n"
DIGEST = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture
def serve(monkeypatch):
    """Return a function that makes every download return a body, or raise it if it is an error.

    The function returns a list that grows by the URL of each download.
    """

    def serve(body):
        requested = []

        def urlopen(url, timeout):
            requested.append(url)
            if isinstance(body, Exception):
                raise body
            return io.BytesIO(body)

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return requested

    return serve


def test_shakespeare_is_downloaded_once_and_again_if_it_is_damaged(serve, cache, monkeypatch):
    monkeypatch.setattr(downloads, "SHAKESPEARE_SHA256", DIGEST)
    requested, log = serve(TEXT), []
    for _ in range(2):
        file = download_shakespeare(log.append)
        assert file.read_bytes() == TEXT
    assert len(requested) == 1
    (line,) = log
    assert requested[0] in line
    with read_only(cache):
        assert download_shakespeare(pytest.fail) == file
    file.write_text("half a")
    assert download_shakespeare(ignore).read_bytes() == TEXT
    assert len(requested) == 2
    assert not list(cache.glob("*.part"))


WRONG = b"<html>Log in to this network</html>"


@pytest.mark.parametrize(
    "body, reason",
    [(WRONG, hashlib.sha256(WRONG).hexdigest()), (URLError("no route"), "no route")],
)
def test_another_text_than_shakespeare_is_refused_and_not_kept(serve, cache, body, reason):
    serve(body)
    with pytest.raises(UserError) as error:
        open_corpus(DataConfig(source="shakespeare"), ignore)
    assert reason in str(error.value) and "data.path=FILE" in str(error.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# --- datasets of the hub --------------------------------------------------------------------------

STORIES = [f"Story {n}: “once” upon a time\nthere were {n}/9 cats.\r\n\u2028" for n in range(250)]


@pytest.fixture
def dataset(tmp_path):
    """A folder in the form of a dataset of the hub, with two splits."""
    folder = tmp_path / "stories"
    folder.mkdir()
    parts = {"train-0": STORIES[:150], "train-1": STORIES[150:], "validation": ["the other split"]}
    for name, texts in parts.items():
        talk = [[{"role": "user", "content": "Why?"}]] * len(texts)
        table = pyarrow.table({"number": range(len(texts)), "story": texts, "talk": talk})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    return folder


def read_rows(folder, log=ignore, **settings) -> list[str]:
    config = DataConfig(source="hf", name=str(folder), **{"field": "story", **settings})
    return documents(open_corpus(config, log))


def test_a_dataset_is_converted_once_and_again_when_it_changes(dataset, cache, monkeypatch):
    log = []
    read_rows(dataset, log.append)
    with monkeypatch.context() as without_library:
        without_library.setitem(sys.modules, "datasets", None)
        assert read_rows(dataset, log.append) == STORIES and len(log) == 1
        assert read_rows(dataset, field="talk.content") == ["Why?"] * 250
    assert sorted(path.suffix for path in cache.iterdir()) == [".jsonl", ".lock"]
    (dataset / "train-1.parquet").unlink()
    assert read_rows(dataset) == STORIES[:150]
    assert read_rows(dataset, split="validation") == ["the other split"]


@pytest.mark.parametrize("setting, value", [("split", "test"), ("subset", "german")])
def test_an_unknown_split_or_subset_is_refused_by_name(dataset, cache, setting, value):
    with pytest.raises(UserError) as error:
        read_rows(dataset, **{setting: value})
    assert value in str(error.value) and "\n" not in str(error.value)
    assert f"data.{setting}" in str(error.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_field_that_a_dataset_lacks_is_refused_with_its_columns(dataset, cache):
    with pytest.raises(UserError, match="number, story, talk") as error:
        read_rows(dataset, field="text")
    assert str(dataset) in str(error.value) and str(cache) not in str(error.value)
