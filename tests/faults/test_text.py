"""Text: what changed is refused with both fingerprints, or gone on with; bad text is told in a
sentence, odd text is read."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from models import few
from processes import finished, rows, tiny

import data.corpus
from config import Config, DataConfig, TokenizerConfig, UserError, read_config
from data.tokens import prepare
from training.checkpoint import load_run

CHAR = TokenizerConfig(name="char")


@pytest.fixture
def mine(text_file, tmp_path) -> Path:
    """A copy of the text, to be changed."""
    path = tmp_path / "mine.txt"
    path.write_bytes(text_file.read_bytes())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    ["tokenizer=char"],
    pytest.param(["tokenizer=bpe", "tokenizer.vocab_size=300"], marks=pytest.mark.soak)])
def test_a_text_changed_by_one_byte_is_refused_with_both_fingerprints_unless_told_to_go_on(
        tmp_path, mine, settings):
    argv = tiny(mine, *settings)
    finished(tmp_path, *argv, "max_steps=8")
    before = load_run(tmp_path / "run")[1]
    tokenizer = read_config(tmp_path / "run" / "config.yaml").tokenizer
    then = prepare(DataConfig(source="text", path=str(mine)), tokenizer, print).fingerprint
    mine.write_bytes(mine.read_bytes().replace(b"glass", b"glaas", 1))
    now = prepare(DataConfig(source="text", path=str(mine)), tokenizer, print).fingerprint
    assert then != now
    finished(tmp_path, *argv, "resume=true", status=1)
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert f"fingerprint {then[:16]} then, {now[:16]} now" in sentence
    assert "accept_changed_data=true" in sentence
    said = finished(tmp_path, *argv, "resume=true", "accept_changed_data=true", "max_steps=10")
    assert "note: the text" in said and rows(tmp_path / "run")[-1]["step"] == 10
    assert load_run(tmp_path / "run")[1].to_json() == before.to_json()
    # it is said once; the run is of the new text now
    finished(tmp_path, *argv, "resume=true", "max_steps=12")
    assert load_run(tmp_path / "run")[1].to_json() == before.to_json()


@pytest.mark.slow
def test_changed_text_with_characters_that_the_run_does_not_know_is_one_sentence(tmp_path, mine):
    finished(tmp_path, *tiny(mine), "max_steps=4")
    mine.write_text(mine.read_text(encoding="utf-8") + "Ω", encoding="utf-8")
    said = finished(tmp_path, *tiny(mine, "resume=true"), status=1)
    assert "fingerprint" in said
    finished(tmp_path, *tiny(mine, "resume=true", "accept_changed_data=true"), status=1)
    assert f"the character 'Ω' in line 271 of {mine} is not among" in (
        tmp_path / "err.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["tokenizer=bpe"], ["tokenizer=bpe", "tokenizer.vocab_size=300"]])
def test_another_tokenizer_is_refused_with_both(tmp_path, text_file, whole, argv):
    run = f"run_dir={whole}"  # refused, it is not changed
    assert "tokenizer.name: char in the run, bpe asked for" in finished(
        tmp_path, *tiny(text_file, run, "resume=true", *argv), status=1)


@pytest.mark.slow
@pytest.mark.parametrize("content, sentence", [
    (b"", "holds no text"),
    (b"a" * 5000, "holds no character but 'a'"),
    (b"too short", "too few for model.block_size=32"),
    (b"a few words more than that\n" * 6, "the validation split has"),
    (b"caf\xe9 " * 100,
     "is not UTF-8 text: byte 0xe9 at offset 3; name its encoding, as in data.encoding=cp1252"),
    (bytes(range(256)) * 20, "is not UTF-8 text: byte 0x80 at offset 128"),
    (None, "does not exist"),
])
def test_a_text_that_cannot_be_trained_on_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    finished(tmp_path, *tiny(path), status=1)
    assert sentence in (tmp_path / "err.txt").read_text()
    assert len((tmp_path / "err.txt").read_text().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["tokenizer.vocab_size=3000000000", "data.val_max_tokens=1"])
def test_a_size_that_cannot_be_is_one_sentence(tmp_path, text_file, setting):
    argv = [word for word in tiny(text_file, setting) if word != "tokenizer=char"]
    assert setting in finished(tmp_path, *argv, status=1)
    assert len((tmp_path / "err.txt").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_pipe_in_place_of_a_text_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    said = finished(tmp_path, *tiny(tmp_path / "pipe"), status=1)
    assert "is a pipe, a socket or a device" in said


@pytest.mark.slow
def test_text_in_another_encoding_with_dos_line_ends_is_read_and_they_are_counted(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes("où est le verre?\r\nici — là\r\n".replace("—", "-").encode("cp1252") * 60)
    said = finished(tmp_path, *tiny(path, "data.encoding=cp1252", "max_steps=2"))
    assert "120 line ends are CR LF" in said
    assert {"ù", "\r", "\n"} < set(load_run(tmp_path / "run")[1].alphabet)


def read(path: Path, say=pytest.fail, **more):
    return prepare(DataConfig(source="text", path=str(path), **more), CHAR,
                   lambda line: None if line.startswith("preparing") else say(line))


@pytest.mark.parametrize("encoding",
                         ["utf-16", "utf-16-le", "latin-1", "UTF8", "utf-8-sig", "shift_jis"])
def test_an_encoding_that_is_named_is_used(tmp_path, encoding):
    text = "ab\r\nc" * 40 if encoding in ("latin-1", "shift_jis") else "a日b\r\nc" * 40
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    for path in (tmp_path / "a.txt", tmp_path):
        tokens = read(path, encoding=encoding)
        assert tokens.tokenizer.decode([*tokens.train.tolist(), *tokens.val.tolist()]) == text
        assert tokens.crlf == 40


def test_the_encoding_is_part_of_the_fingerprint(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc" * 50)
    same = {read(tmp_path / "a.txt", encoding=name).fingerprint for name in ("utf-8", "UTF8")}
    assert len(same) == 1 and read(tmp_path / "a.txt", encoding="latin-1").fingerprint not in same


@pytest.mark.parametrize("name", ["utf-9", "hex", "", "rot13", "utf\0"])
def test_what_is_no_encoding_is_refused_before_anything_is_read(name):
    with pytest.raises(UserError, match="is not an encoding"):
        Config(data=DataConfig(source="text", path="nowhere", encoding=name)).check()


@pytest.mark.parametrize("encoding, bad", [("ascii", b"ab\xe9"), ("utf-16", b"\xff\xfea\0b"),
                                           ("shift_jis", b"ab\x80")])
def test_text_that_is_not_in_the_encoding_that_is_named_is_told_with_the_offset(
        tmp_path, encoding, bad):
    (tmp_path / "a.txt").write_bytes(bad)
    with pytest.raises(UserError,
                       match=rf"a\.txt is not {encoding} text: byte 0x.. at offset [24]"):
        read(tmp_path / "a.txt", encoding=encoding)


def test_a_file_with_nul_bytes_that_is_asked_for_is_read_and_noted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\0b\0" * 30)
    said = []
    read(tmp_path / "a.txt", said.append)
    assert len(said) == 1 and "data.encoding=utf-16" in said[0]


def test_one_enormous_line_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data.corpus, "PIECE", 1 << 14)
    (tmp_path / "a.txt").write_text("word " * 400_000)
    assert read(tmp_path / "a.txt").characters == 2_000_000


def test_a_vocabulary_above_65535_is_taken(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(c) for c in range(
        0x20, 0x11000) if not 0xD800 <= c < 0xE000), encoding="utf-8", newline="")
    tokens = read(tmp_path / "a.txt")
    assert tokens.tokenizer.vocab_size > 65_535 and tokens.train.dtype == "uint32"


@few
@given(content=st.binary(max_size=300) | st.text(max_size=200).map(str.encode),
       tokenizer=st.sampled_from([CHAR, TokenizerConfig(vocab_size=270)]))
def test_any_bytes_are_a_text_or_a_sentence(content, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_bytes(content)
    try:
        tokens = prepare(DataConfig(source="text", path=str(path)), tokenizer, lambda line: None)
    except UserError as e:
        assert str(path) in str(e) and "\n" not in str(e)
    else:
        assert "".join(tokens.tokenizer.decode(ids.tolist()) for ids in (
            tokens.train, tokens.val)).encode() == content.removeprefix(b"\xef\xbb\xbf")


@pytest.mark.soak
def test_a_gigabyte_of_text_is_prepared_in_memory_that_does_not_grow_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    line = b"the glass model attends to every token before it and writes what follows\n"
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(1_000_000_000 // (len(line) * 1000)):
            file.write(line * 1000)
    code = ("import resource, sys; from config import *; from data.tokens import prepare\n"
            "tokens = prepare(DataConfig(source='text', path=sys.argv[1]), "
            "TokenizerConfig(name='char'))\n"
            "print(len(tokens.train) + len(tokens.val), "
            "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.txt")], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ)
    count, kilobytes = map(int, done.stdout.splitlines()[-1].split())
    assert count == (tmp_path / "a.txt").stat().st_size and kilobytes < 800_000


PEAK = """
import pathlib, re, resource, sys
from config import *
from data.tokens import prepare
size = None if sys.argv[2] == "char" else 1024
prepare(DataConfig(source="text", path=sys.argv[1]), TokenizerConfig(sys.argv[2], size))
# ru_maxrss begins with the parent's.
own = re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())
print(max(int(own[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, tokenizer", [("a.jsonl", "char"), *(
    pytest.param(*case, marks=pytest.mark.soak)
    for case in (("a.jsonl", "bpe"), ("a.txt", "bpe"), ("a.txt", "char")))])
def test_a_document_of_forty_megabytes_is_prepared_in_bounded_memory(
        tmp_path, monkeypatch, name, tokenizer):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    text = "".join(f"word{n % 5000} " for n in range(4_500_000))
    (tmp_path / name).write_text(json.dumps({"text": text}) if name.endswith("jsonl") else text)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / name), tokenizer], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 606_000  # kB


@pytest.mark.slow
def test_a_strangers_folder_goes_from_its_path_to_a_sample(tmp_path, command):
    """Mixed kinds, encodings of line ends, an empty and a hidden file, a picture, a packed one, a
    name to trip over."""
    folder = tmp_path / "my notes (1), it's"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    for name, text in {"a.md": "# Glass\n\nÀ propos: 漢字 and 👩‍👩‍👧.\n" * 60,
                       "deep/b.TXT": "one\r\ntwo\r\n" * 80, "empty": "",
                       "deep/.hidden/c": "never read",
                       "d.jsonl": "".join(json.dumps({"text": f"entry {n}", "id": n}) + "\n"
                                          for n in range(120)), "no newline": "x" * 3000}.items():
        (folder / name).write_bytes(text.encode())
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\0\0")
    (folder / "old.txt.gz").write_bytes(gzip.compress("packed — text\n".encode() * 90))
    small = ["model.n_layer=1", "model.n_embd=16", "model.block_size=16", "batch_size=2",
             "max_steps=2", "compile=false"]
    done = command("train.py", "data=text", f"data.path={folder}", "run_dir=run", *small)
    assert done.returncode == 0, done.stderr
    assert "125 documents" in done.stdout and "photo.jpg" in done.stdout
    assert "160 line ends are CR LF" in done.stdout
    sample = command("sample.py", "run_dir=run", "prompt=À propos", "max_new_tokens=8")
    assert sample.returncode == 0 and sample.stdout, sample.stderr
