"""Where text comes from: what is found, in which order, and what is said when it cannot be had."""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from processes import without_rights

import data.corpus
from config import Config, DataConfig, UserError
from data.cache import cache_root
from data.corpus import Corpus, open_corpus, stdlib_files, text_files

TEST_DATA = os.environ.get("GLASSGPT_TEST_DATA")
SHAKESPEARE = Path(TEST_DATA or "", "data", "tinyshakespeare.txt")
needs_shakespeare = pytest.mark.skipif(not TEST_DATA or not SHAKESPEARE.exists(),
                                       reason="GLASSGPT_TEST_DATA names no folder with "
                                              "data/tinyshakespeare.txt")


def silent(line):
    raise AssertionError(f"nothing was to be said, but: {line}")


def names(files, folder):
    return [p.relative_to(folder).as_posix() for p in files]


def text_corpus(path, say=silent):
    return open_corpus(DataConfig(source="text", path=str(path)), say)


def documents(corpus):
    """The whole texts of a corpus's documents."""
    texts = []
    for text, begins in corpus.pieces():
        texts = [*texts, text] if begins else [*texts[:-1], texts[-1] + text]
    return texts


# --- the standard library -------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "json/z.py", "json/__init__.py", "test/test_a.py",
                 "json/tests/t.py", "idlelib/idle_test/t.py",
                 "site-packages/numpy.py", "dist-packages/x.py", "json/__pycache__/z.py",
                 "testing.py", "notes.txt"):
        file = tmp_path / "tests" / name  # what lies above the library does not count
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "tests"))
    return tmp_path / "tests"


def test_the_standard_library_leaves_tests_and_installed_packages_out_and_comes_sorted(library):
    assert names(stdlib_files(), library) == ["a.py", "b.py", "json/__init__.py", "json/z.py",
                                              "testing.py"]


def test_a_python_without_its_sources_is_told_to_use_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="data=text"):
        stdlib_files()


def test_this_pythons_library_is_found_in_the_same_order_every_time():
    corpus, root = open_corpus(DataConfig(), silent), Path(sysconfig.get_path("stdlib"))
    assert corpus.files == open_corpus(DataConfig(), silent).files == tuple(
        sorted(corpus.files, key=lambda p: p.relative_to(root).as_posix()))
    assert len(corpus.files) > 300
    parts = {part for p in corpus.files for part in p.relative_to(root).parts}
    assert {"argparse.py", "json"} <= parts
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert "Python 3." in corpus.name


def test_every_file_of_this_pythons_library_is_readable_text():
    corpus = open_corpus(DataConfig(), silent)
    assert sum(len(text) > 0 for text in documents(corpus)) > 300


# --- your files -----------------------------------------------------------------------------------


def test_a_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    assert documents(text_corpus(tmp_path / "a.txt")) == ["one"]


def test_a_folder_gives_all_below_it_sorted_and_hidden_files_left_out(tmp_path):
    for name in ("b.txt", "a/z.md", "a/deep/er/x", ".hidden.txt", ".git/config", "a/.secret/y.txt",
                 "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    said = []
    files = text_corpus(tmp_path, said.append).files
    assert names(files, tmp_path) == ["B.txt", "a/deep/er/x", "a/z.md", "b.txt"]
    assert said == [f"left out of {tmp_path}: .git, .hidden.txt, a/.secret (hidden)"]


def test_a_folder_below_a_hidden_one_is_read_when_it_is_asked_for(tmp_path):
    folder = tmp_path / ".notes" / "mine"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("x")
    assert names(text_corpus(folder).files, folder) == ["a.txt"]


def test_binary_files_are_left_out_and_a_line_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\0\0")
    (tmp_path / "c.bin").write_bytes(b"\0")
    said = []
    assert names(text_corpus(tmp_path, said.append).files, tmp_path) == ["a.txt"]
    assert said == [f"left out of {tmp_path}: b.png, c.bin (binary)"]


def test_a_glob_gives_what_it_matches(tmp_path):
    for name in ("a.txt", "b.txt", "c.md", "sub/d.txt", "sub/.e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert names(text_files(f"{tmp_path}/*.txt", silent), tmp_path) == ["a.txt", "b.txt"]
    assert names(text_files(f"{tmp_path}/**/*.txt", silent),
                 tmp_path) == ["a.txt", "b.txt", "sub/d.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "notes [1].txt").write_text("one")
    (tmp_path / "notes 1.txt").write_text("another")
    assert documents(text_corpus(tmp_path / "notes [1].txt")) == ["one"]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    for path in ("~", "~/a.txt", "~/*.txt"):
        assert names(text_corpus(path).files, tmp_path) == ["a.txt"]


def test_a_file_whose_name_begins_with_a_tilde_is_read(tmp_path, monkeypatch):
    (tmp_path / "~notes.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert documents(text_corpus("~notes.txt")) == ["x"]


@pytest.mark.parametrize("source", ["text", "shakespeare"])
def test_a_user_who_does_not_exist_is_a_path_that_does_not_exist(source):
    with pytest.raises(UserError, match=r"data\.path=~nobody-of-that-name/a\.txt does not exist"):
        open_corpus(DataConfig(source=source, path="~nobody-of-that-name/a.txt"), silent)


def test_a_byte_order_mark_is_dropped_and_line_ends_stay(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert documents(text_corpus(tmp_path / "a.txt")) == ["one\r\ntwo\rthree\n"]


def test_the_order_of_files_is_the_order_of_documents(tmp_path):
    for name in "cab":
        (tmp_path / name).write_text(name)
    assert documents(text_corpus(tmp_path)) == ["a", "b", "c"]


# --- what is left out ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with one text."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("text")
    return tmp_path / "notes"


def left_out(path, **more) -> str:
    """What is left out where a.txt alone is read."""
    said = []
    corpus = open_corpus(DataConfig(source="text", path=str(path), **more), said.append)
    assert [p.name for p in corpus.files] == ["a.txt"]
    (line,) = said
    assert line.startswith(f"left out of {path}: ")
    return line.partition(": ")[2]


def test_what_is_no_text_is_left_out_by_name_and_the_rest_is_read(folder):
    (folder / "old.txt").write_bytes(b"caf\xe9")
    (folder / "sub").mkdir()
    (folder / "sub" / "paper.pdf").write_bytes(b"%PDF-1.4\n1 0 obj\n")
    many = b"x" + "é".encode() * 700_000  # what is checked ends within an é
    (folder / "many.txt").write_bytes(many)
    with zipfile.ZipFile(folder / "b.zip", "w") as archive:
        archive.writestr("b.txt", "text")
    (folder / "broken.gz").write_bytes(b"no gzip")
    said = []
    files = text_corpus(folder, said.append).files
    assert names(files, folder) == ["a.txt", "many.txt"]
    assert said == [f"left out of {folder}: sub/paper.pdf (PDF); "
                    "old.txt (not UTF-8: see data.encoding); broken.gz (unreadable); "
                    "b.zip (zip archive)"]


def test_an_encoding_that_is_named_is_that_of_all_files(folder):
    (folder / "old.txt").write_bytes(b"caf\xe9")
    (folder / "paper.pdf").write_bytes(b"%PDF-1.4\n")
    said = []
    settings = DataConfig(source="text", path=str(folder), encoding="latin-1")
    assert documents(open_corpus(settings, said.append)) == ["text", "café"]
    assert said == [f"left out of {folder}: paper.pdf (PDF)"]


def test_pipes_sockets_and_broken_links_are_left_out_and_nothing_waits_for_them(folder):
    os.mkfifo(folder / "pipe")
    (folder / "nowhere").symlink_to(folder / "gone")
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(folder)  # a socket's path is short
        listening.bind("socket")
        os.chdir(before)
        assert left_out(folder) == "pipe, socket (not a file); nowhere (unreadable)"


def test_linked_folders_are_left_out_and_linked_files_are_read(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.txt").write_text("another")
    (folder / "circle").symlink_to(folder)
    (folder / "sub").symlink_to(tmp_path / "other")
    for path in (folder, f"{folder}/**/*.txt", f"{folder}/**"):
        assert left_out(path) == "circle, sub (linked folder)"
    (folder / "b.txt").symlink_to(tmp_path / "other" / "b.txt")
    corpus = text_corpus(folder, lambda line: None)
    assert documents(corpus) == ["text", "another"]


def test_what_may_not_be_read_is_left_out(folder):
    (folder / "closed").mkdir(mode=0)
    (folder / "listed").mkdir()
    (folder / "listed" / "c.txt").write_text("text")
    (folder / "listed").chmod(0o444)
    (folder / "b.txt").touch(mode=0)
    code = ("import sys; from data.corpus import text_files\n"
            "print(*(path.name for path in text_files(sys.argv[1], print)))")
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True,
                          text=True, preexec_fn=without_rights)
    assert done.stdout.splitlines() == [
        f"left out of {folder}: b.txt, closed, listed/c.txt (unreadable)", "a.txt"], done.stderr


def test_what_programs_wrote_is_left_out(folder, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(folder / "cached"))
    written = ["runs/one/config.yaml", "runs/one/metrics.jsonl", "runs/two/config.yaml",
               "runs/two/checkpoints/last", "runs/begun/config.yaml", "runs/begun/attention/x",
               "sweep/multirun.yaml", "sweep/lr=1/job.json", "old/f00/meta.json",
               "old/f00/train.bin", "cached/tinyshakespeare.txt", "__pycache__/a.pyc",
               "python/pyvenv.cfg", "python/lib/b.py", "wandb/debug.log"]
    for name in written:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    assert left_out(folder) == ("__pycache__, cached, old/f00, python, runs/begun, runs/one, "
                                "runs/two, sweep, wandb (written by a program)")
    mine = folder / "runs" / "one"  # is read where it is asked for
    assert names(text_files(str(mine), silent), mine) == ["config.yaml", "metrics.jsonl"]


def test_a_run_in_the_folder_of_its_text_goes_on_with_the_same_text(
        folder, tiny, train_here, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "a.txt").write_text("the glass model attends to every token\n" * 99)
    config = replace(tiny, run_dir="run", data=DataConfig(source="text", path="."))
    for resume, steps in ((False, 2), (True, 4)):
        train_here(config, resume, max_steps=steps)
        assert "1 document, 3,861 characters" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_in_the_folder_of_its_text_does_not_read_its_jobs(folder, command):
    (folder / "a.txt").write_text("the glass model attends to every token\n" * 99)
    done = command("train.py", *TINY, "-m", "seed=1,2", "data=text", "data.path=.", "max_steps=1",
                   "hydra.sweep.dir=sweep", "attention.every=0", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 document, 3,861 characters") == 2


def test_globs_say_what_else_to_leave_out(folder):
    for name in ("drafts/b.txt", "sub/drafts/c.txt", "sub/deep/d.log", "e.log", "f, g.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    shown = "drafts, e.log, f, g.md, sub/deep/d.log, sub/drafts (data.exclude)"
    assert left_out(folder, exclude="drafts, *.log,f?*.md") == shown
    assert left_out(folder, exclude="**/drafts/,*.log,*.md,") == shown
    assert left_out(folder, exclude="sub/*,drafts,?.log,f*") == (
        "drafts, e.log, f, g.md, sub/deep, sub/drafts (data.exclude)")
    assert left_out(f"{folder}/*", exclude="*.log,*.md") == "e.log, f, g.md (data.exclude)"
    assert left_out(f"{folder}/**/*.txt", exclude="drafts") == (
        "drafts, sub/drafts (data.exclude)")


def test_a_glob_that_leaves_nothing_out_is_named(folder):
    said = []
    assert text_files(str(folder), said.append, exclude="*.txt~,b*") == (folder / "a.txt",)
    assert said == [f"note: data.exclude={name} matches nothing in {folder}"
                    for name in ("*.txt~", "b*")]


@pytest.mark.parametrize("source", ["stdlib", "shakespeare"])
def test_leaving_out_is_for_text(source):
    config = Config(data=DataConfig(source=source, exclude="*.log"))
    with pytest.raises(UserError, match=r"data\.exclude=\*\.log is for data=text: add that"):
        config.check()


def test_of_many_names_some_are_given_and_none_is_of_odd_signs(folder):
    for n in range(1234):
        (folder / f"{n:04}.png").write_bytes(b"\0")
    (folder / "escape\x1b[31m.zip").write_bytes(b"PK\3\4")
    (folder / os.fsdecode(b"latin\xe9.pdf")).write_bytes(b"%PDF-")
    line = left_out(folder)
    assert ", 0009.png and 1,224 more (binary)" in line and "0010" not in line
    assert line.isprintable() and "'escape\\x1b[31m.zip'" in line and "'latin\\udce9.pdf'" in line


def test_the_preset_and_the_command_line_take_an_encoding_and_globs(command, folder):
    (folder / "b.log").write_bytes(b"\xe9")
    done = command("train.py", "--cfg", "job", "data=text", f"data.path={folder}",
                   "data.exclude=*.log,drafts/*")
    assert "exclude: '*.log,drafts/*'" in done.stdout


# --- mistakes -------------------------------------------------------------------------------------


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.*nowhere\.txt does not exist"):
        text_corpus(tmp_path / "nowhere.txt")


def test_a_glob_without_a_match_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.*\*\.txt holds no text files"):
        text_corpus(tmp_path / "*.txt")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no text files") as error:
        text_corpus(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_of_binary_files_alone_holds_no_text(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(UserError, match="holds no text files"):
        text_corpus(tmp_path, lambda line: None)


def test_a_folder_of_files_in_another_encoding_alone_is_refused_with_the_first(tmp_path):
    for name in "ba":
        (tmp_path / name).write_bytes(b"caf\xe9")
    (tmp_path / "c").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"/a is not UTF-8 text: byte 0xe9 at offset 3"):
        text_corpus(tmp_path)


def test_a_folder_without_text_is_refused_with_what_was_left_out(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4")
    with pytest.raises(UserError, match=r"holds no text files; left out: a\.pdf \(PDF\)"):
        text_corpus(tmp_path)


@pytest.mark.parametrize(("name", "begin", "why"), [
    ("a.zip", b"PK\3\4", "is a zip archive: unpack it and give the folder"),
    ("a", b"PK\5\6", "is a zip archive: unpack it and give the folder"),
    ("a.docx", b"PK\3\4", "is a zip archive: save it as plain text"),
    ("a.XLSX", b"PK\3\4", "is a zip archive: save it as plain text"),
    ("a.pdf", b"%PDF-1.7", "is a PDF: save it as plain text")])
@pytest.mark.parametrize("source", ["text", "shakespeare"])
def test_an_archive_or_a_document_that_is_given_is_named(tmp_path, name, begin, why, source):
    (tmp_path / name).write_bytes(begin + bytes(99))
    with pytest.raises(UserError, match=f"{name} {why}$"):
        open_corpus(DataConfig(source=source, path=str(tmp_path / name)), silent)


def test_a_pipe_that_is_given_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for source in ("text", "shakespeare"):
        with pytest.raises(UserError, match=r"pipe is a pipe, a socket or a device: give the path"):
            open_corpus(DataConfig(source=source, path=str(tmp_path / "pipe")), silent)


def test_a_file_that_turns_to_another_encoding_far_on_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * data.corpus.CHECKED + b"caf\xe9")
    with pytest.raises(UserError, match=r"or leave it out \(data\.exclude\)"):
        documents(text_corpus(tmp_path))


def test_what_is_not_utf8_is_named_with_the_offset_of_its_byte(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError,
                       match=r"latin\.txt is not UTF-8 text: byte 0xe9 at offset 3") as error:
        documents(text_corpus(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_the_offset_counts_a_byte_order_mark(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 au lait")
    with pytest.raises(UserError, match="offset 6"):
        documents(text_corpus(tmp_path))


def test_a_file_that_goes_away_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.txt cannot be read: No such file"):
        documents(Corpus("gone", (tmp_path / "gone.txt",)))


# --- tiny Shakespeare -----------------------------------------------------------------------------


def shakespeare(path, say=lambda line: None):
    return open_corpus(DataConfig(source="shakespeare", path=path and str(path)), say)


@needs_shakespeare
def test_the_local_copy_of_shakespeare_is_taken_without_a_word():
    (text,) = documents(shakespeare(SHAKESPEARE, silent))
    assert len(text) == 1_115_394 and text.startswith("First Citizen:")


def test_another_text_for_shakespeare_is_taken_and_noted(tmp_path):
    said = []
    (tmp_path / "mine.txt").write_text("To be")
    assert documents(shakespeare(tmp_path / "mine.txt", said.append)) == ["To be"]
    assert len(said) == 1 and "another sha256" in said[0] and "mine.txt" in said[0]


def test_a_folder_for_shakespeare_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.* is a folder: give the path of a text file"):
        shakespeare(tmp_path)


def test_a_missing_copy_of_shakespeare_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no\.txt does not exist"):
        shakespeare(tmp_path / "no.txt")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no proxy between here and the loopback."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "cache"
    monkeypatch.setenv("GLASSGPT_CACHE", str(folder))
    return folder


@pytest.fixture
def server(cache, monkeypatch):
    """A web server on the loopback that answers with `.status` and `.body`, and counts what it was
    `.asked`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked += 1
            if self.server.raw is not None:
                self.wfile.write(self.server.raw)
                return
            elsewhere = self.server.elsewhere is not None and self.path != self.server.elsewhere
            self.send_response(302 if elsewhere else self.server.status)
            if elsewhere:
                self.send_header("Location", self.server.elsewhere)
            self.send_header("Content-Length",
                             str(0 if elsewhere else self.server.length or len(self.server.body)))
            self.end_headers()
            for byte in b"" if elsewhere else self.server.body:
                with suppress(OSError):  # who asked has gone
                    self.wfile.write(bytes([byte]))
                time.sleep(self.server.pause)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.status, server.body, server.asked = 200, b"First Citizen:\n", 0
        server.length = server.raw = None
        server.elsewhere, server.pause = None, 0
        monkeypatch.setattr(data.corpus, "SHAKESPEARE_URL",
                            f"http://127.0.0.1:{server.server_port}/input.txt")
        monkeypatch.setattr(data.corpus, "SHAKESPEARE_SHA256",
                            hashlib.sha256(server.body).hexdigest())
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def refused_fetch(cache) -> str:
    """The sentence with which fetching fails, leaving nothing behind."""
    with pytest.raises(UserError, match=r"data\.path=FILE") as error:
        shakespeare(None)
    assert [p.name for p in cache.iterdir()] == ["tinyshakespeare.lock"]
    assert data.corpus.SHAKESPEARE_URL in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_shakespeare_is_fetched_once_and_kept(server, cache):
    assert documents(shakespeare(None)) == documents(shakespeare(None)) == ["First Citizen:\n"]
    assert server.asked == 1
    assert {p.name for p in cache.iterdir()} == {"tinyshakespeare.txt", "tinyshakespeare.lock"}


def test_what_is_fetched_is_named_at_once_and_nothing_is_left_of_a_download_that_was_killed(
        server, cache):
    cache.mkdir()
    code = ("import os, sys; from pathlib import Path; import data.corpus as corpus\n"
            "Path.replace = lambda *paths: os.kill(os.getpid(), 9)\n"
            "corpus.SHAKESPEARE_URL, corpus.SHAKESPEARE_SHA256 = sys.argv[1:]\n"
            "corpus.shakespeare_file(None, print)")
    done = subprocess.run([sys.executable, "-c", code, data.corpus.SHAKESPEARE_URL,
                           data.corpus.SHAKESPEARE_SHA256], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == -9 and len(list(cache.glob(".*.part"))) == 1
    said = []
    assert documents(shakespeare(None, said.append)) == ["First Citizen:\n"]
    assert said == [f"fetching tiny Shakespeare from {data.corpus.SHAKESPEARE_URL}"]
    assert not list(cache.glob(".*"))


def test_a_damaged_copy_in_the_cache_is_fetched_again(server, cache):
    cache.mkdir()
    (cache / "tinyshakespeare.txt").write_text("half a")
    assert documents(shakespeare(None)) == ["First Citizen:\n"]
    assert server.asked == 1


def test_another_text_from_the_network_is_refused_with_its_hash(server, cache):
    server.body = b"<html>Log in to this network</html>"
    assert hashlib.sha256(server.body).hexdigest() in refused_fetch(cache)


def test_an_answer_that_breaks_off_is_refused(server, cache):
    server.body, server.length = b"First Cit", 15
    refused_fetch(cache)


def test_a_page_that_is_not_found_is_told(server, cache):
    server.status = 404
    assert "Not Found" in refused_fetch(cache)


def test_a_server_that_sends_the_reader_elsewhere_is_followed(server, cache):
    server.elsewhere = "/there.txt"
    assert documents(shakespeare(None)) == ["First Citizen:\n"] and server.asked == 2


def test_a_server_that_sends_the_reader_to_a_file_of_this_machine_is_not_followed(
        server, cache, tmp_path):
    server.elsewhere = (tmp_path / "secret").as_uri()
    assert "not allowed" in refused_fetch(cache)


def test_a_server_that_says_nothing_for_long_is_told(server, cache, monkeypatch):
    monkeypatch.setattr(data.corpus, "STALLED", 0.2)
    server.pause = 0.6
    assert "timed out" in refused_fetch(cache)


def test_a_server_that_says_a_little_at_a_time_without_end_is_told(server, cache, monkeypatch):
    monkeypatch.setattr(data.corpus, "PATIENCE", 0.3)
    server.pause = 0.1
    assert "bytes came in 0.3 s" in refused_fetch(cache)


def test_a_slow_server_is_waited_for(server, cache):
    server.pause = 0.05
    assert documents(shakespeare(None)) == ["First Citizen:\n"]


def test_a_server_that_speaks_no_http_is_told(server, cache):
    server.raw = b"SSH-2.0-OpenSSH_9.6\r\n"
    assert "could not be fetched" in refused_fetch(cache)


def test_a_refused_connection_is_told(cache, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr(data.corpus, "SHAKESPEARE_URL", f"http://127.0.0.1:{port}/input.txt")
    assert "refused" in refused_fetch(cache)


# --- the cache folder -----------------------------------------------------------------------------


def test_the_cache_is_the_folder_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "a" / "b"))
    assert cache_root() == tmp_path / "a" / "b"
    assert list(cache_root().iterdir()) == []


def test_without_the_environment_the_cache_lies_beside_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv("GLASSGPT_CACHE", raising=False)
    monkeypatch.setattr(data.corpus, "__file__", str(tmp_path / "corpus.py"))
    assert cache_root() == tmp_path / "cache"


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set GLASSGPT_CACHE") as error:
        cache_root()
    assert str(tmp_path) in str(error.value)


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_document_in_pieces_is_the_document_cut_before_lines_that_begin_with_a_letter(
        tmp_path, monkeypatch, size):
    monkeypatch.setattr(data.corpus, "PIECE", size)
    text = "\ufeffif x:\r\n\n\n    é = 1\n\n\n# note\nélan 漢字\n漢字\n\nafter a gap\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"")
    corpus = text_corpus(tmp_path)
    assert documents(corpus) == [text.removeprefix("\ufeff"), ""]
    pieces = [piece for piece, _ in corpus.pieces()]
    assert len(pieces) > 10
    if size > 7:  # else the pieces are so small that lines do not fit into two of them
        assert all(before.endswith("\n") and not before[-2].isspace()
                   and (not after or after[0].isalnum()) for before, after in pairwise(pieces))


def test_a_text_of_one_long_line_is_cut_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(data.corpus, "PIECE", 100)
    (tmp_path / "a.txt").write_text("x" * 5000)
    assert [len(piece) for piece, _ in text_corpus(tmp_path).pieces()] == [200] * 25


def test_a_bad_byte_far_into_a_file_is_found_at_its_offset(tmp_path):
    good = "aé漢\n".encode() * 400_000
    (tmp_path / "a.txt").write_bytes(good + b"\xff" + good)
    with pytest.raises(UserError, match=f"byte 0xff at offset {len(good)};"):
        documents(text_corpus(tmp_path))
    (tmp_path / "a.txt").write_bytes(good + "漢".encode()[:2])
    with pytest.raises(UserError, match=f"byte 0xe6 at offset {len(good)};"):
        documents(text_corpus(tmp_path))


# --- packed files and lines of JSON ---------------------------------------------------------------


def test_packed_and_plain_files_and_lines_of_json_are_documents_beside_each_other(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffone é\n".encode()))
    (tmp_path / "b.jsonl").write_text('{"text": "two", "id": 1}\n\n{"id": 2, "text": "thr\\nee '
                                      '\\u00e9"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}'))
    (tmp_path / "d.bin.gz").write_bytes(gzip.compress(b"x\0y"))
    said = []
    assert documents(text_corpus(tmp_path, said.append)) == ["one é\n", "two", "thr\nee é", "four"]
    assert said == [f"left out of {tmp_path}: d.bin.gz (binary)"]


def test_another_field_of_the_lines_is_taken_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one", "text": "no"}\n')
    corpus = open_corpus(DataConfig(source="text", path=str(tmp_path / "a.jsonl"), field="body"),
                         silent)
    assert documents(corpus) == ["one"]


@pytest.mark.parametrize(("field", "text"), [
    ("messages.content", "Why?\n\nWell."), ("meta.title", "A talk"), ("meta.v1.0", "dotted"),
    ("tags", "a\n\nb"), ("parts.list.text", "one\n\ntwo\n\nthree"), ("a.b", "its own name")])
def test_dots_go_into_objects_and_texts_of_a_list_are_joined(tmp_path, field, text):
    record = {"messages": [{"role": "user", "content": "Why?"}, {"role": "tool", "content": None},
                           {"role": "tool"}, {"role": "model", "content": "Well."}],
              "meta": {"title": "A talk", "v1.0": "dotted"}, "tags": ["a", "b"],
              "a": {"b": "no"}, "a.b": "its own name",
              "parts": [{"list": [{"text": "one"}, {"text": "two"}]}, {"list": {"text": "three"}}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    settings = DataConfig(source="text", path=str(tmp_path / "a.jsonl"), field=field)
    assert documents(open_corpus(settings, silent)) == [text]


@pytest.mark.parametrize("field", ["messages", "messages.role.x", "messages.n", "n", "none", "."])
def test_a_way_that_leads_to_no_text_is_refused_with_those_that_do(tmp_path, field):
    record = {"messages": [{"role": "user", "content": "Why?", "n": 1}], "n": 2, "title": "Talk"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    settings = DataConfig(source="text", path=str(tmp_path / "a.jsonl"), field=field)
    known = r"texts there: messages\.role, messages\.content, title\)"
    with pytest.raises(UserError, match=known):
        documents(open_corpus(settings, silent))


def test_lists_in_lists_without_end_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 9999 + '"x"' + "]" * 9999 + "}")
    with pytest.raises(UserError, match=r"no text in the field|not JSON"):
        documents(text_corpus(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(("line", "why"), [("{", "not JSON in line 2"),
                                           ("[1]", r"field text of line 2 \(texts there: none\)"),
                                           ('{"body": "x", "n": 1}',
                                            r"line 2 \(texts there: body\): name another with "
                                            r"data.field="),
                                           ('{"text": null}', r"texts there: none")])
def test_a_line_without_its_text_is_named(tmp_path, line, why):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(UserError, match=why):
        documents(text_corpus(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"no gzip",
                                    lambda data: data[:12] + bytes(8) + data[20:]])
def test_a_damaged_gzip_is_named(tmp_path, damage):
    (tmp_path / "a.gz").write_bytes(damage(gzip.compress(b"some text " * 9000)))
    with pytest.raises(UserError, match=r"a\.gz cannot be read: .+"):
        documents(text_corpus(tmp_path / "a.gz"))

