"""Token files: prepared once, never stale, never half there."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from processes import run

import data.tokens
from config import DataConfig, TokenizerConfig, UserError
from data.corpus import Corpus
from data.tokenizer import CharTokenizer
from data.tokens import prepare, split_texts

ROOT = Path(__file__).parents[2]
CHAR, SMALL_BPE = TokenizerConfig(name="char"), TokenizerConfig(name="bpe", vocab_size=280)
PROSE = "the cat sat on the mat, and the dog lay on the log.\n" * 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("GLASSGPT_CACHE", str(folder))
    return folder


@pytest.fixture
def write(tmp_path):
    """Write a text as bytes, and give the settings that name its file."""

    def write(text, name="text/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return DataConfig(source="text", path=str(tmp_path / name))

    return write


@pytest.fixture
def folder(tmp_path, write):
    """Write texts as files of a folder, and give the settings that name it."""

    def folder(*texts):
        for n, text in enumerate(texts):
            write(text, f"text/{n:03}.txt")
        return DataConfig(source="text", path=str(tmp_path / "text"))

    return folder


def quiet(line):
    pass


def text_of(tokens):
    return tokens.tokenizer.decode(tokens.train.tolist()), tokens.tokenizer.decode(
        tokens.val.tolist())


def prepared(cache):
    """The finished folders of the cache."""
    return [p.parent for p in cache.glob("*/meta.json")]


# --- the split ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=2).filter(
    lambda t: len(set(t.removeprefix("\ufeff"))) > 1))
def test_the_last_tenth_of_the_characters_validates_and_nothing_is_lost(
        config, text, tmp_path_factory):
    file = tmp_path_factory.mktemp("any") / "a.txt"
    file.write_bytes(text.encode())
    text = text.removeprefix("\ufeff")
    tokens = prepare(DataConfig(source="text", path=str(file)), config, quiet)
    assert text_of(tokens) == (text[:len(text) * 9 // 10], text[len(text) * 9 // 10:])
    assert (tokens.characters, tokens.bytes, tokens.documents) == (len(text), len(text.encode()), 1)


def test_the_split_counts_characters_and_not_bytes(write):
    train, val = text_of(prepare(write("a" * 90 + "日" * 10), CHAR, quiet))
    assert (train, val) == ("a" * 90, "日" * 10)


def test_line_ends_stay_as_they_are(write):
    assert "".join(text_of(prepare(write("one\r\ntwo\rthree\n" * 9), SMALL_BPE,
                                   quiet))) == "one\r\ntwo\rthree\n" * 9


def test_bpe_does_not_learn_from_the_validation_split(write):
    one = prepare(write(PROSE * 9 + "z" * len(PROSE), "text/one.txt"), SMALL_BPE, quiet)
    other = prepare(write(PROSE * 9 + "Q" * len(PROSE), "text/other.txt"), SMALL_BPE, quiet)
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    assert np.array_equal(one.train, other.train) and not np.array_equal(one.val, other.val)


def test_documents_are_separated_by_the_end_of_text_token(folder):
    texts = ["first " * 5, "second " * 5, "", "third " * 5, "fourth " * 30]
    tokens = prepare(folder(*texts), SMALL_BPE, quiet)
    end, whole = tokens.tokenizer.end_of_text, "".join(texts)
    train = tokens.tokenizer.decode(tokens.train.tolist()).split("<|endoftext|>")
    assert train[:3] == [texts[0], texts[1], texts[3]]
    assert (tokens.train == end).sum() == 3 and not (tokens.val == end).any()
    assert "".join(train) + text_of(tokens)[1] == whole
    assert tokens.documents == 5


def test_documents_of_the_validation_split_are_separated_too(folder):
    tokens = prepare(folder("a" * 190, "b" * 5, "c" * 5), SMALL_BPE, quiet)
    assert text_of(tokens) == ("a" * 180, "a" * 10 + "<|endoftext|>bbbbb<|endoftext|>ccccc")


def test_a_document_that_begins_where_the_split_falls_has_no_token_before_it(folder):
    assert text_of(prepare(folder("a" * 90, "b" * 10), SMALL_BPE, quiet)) == ("a" * 90, "b" * 10)


def test_characters_have_no_token_between_documents(folder):
    assert text_of(prepare(folder("ab", "cd", "efghij"), CHAR, quiet)) == ("abcdefghi", "j")


@given(texts=st.lists(st.text("ab", max_size=9), min_size=1, max_size=6), cut=st.integers(0, 60))
def test_the_pieces_of_the_split_are_the_documents_in_order(texts, cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    files = tuple(folder / str(n) for n in range(len(texts)))
    for file, text in zip(files, texts):
        file.write_text(text)
    pieces, whole = list(split_texts(Corpus("texts", files), cut)), "".join(texts)
    assert "".join(text for train, text, _ in pieces if train) == whole[:cut]
    assert "".join(text for train, text, _ in pieces if not train) == whole[cut:]
    assert all(text for _, text, _ in pieces)
    assert sum(begins for *_, begins in pieces) == sum(map(bool, texts))


# --- the split of many documents ------------------------------------------------------------------


def numbered(count: int) -> list[str]:
    return [f"document {n:03} says {n * n}\n" for n in range(count)]


@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
def test_of_every_ten_documents_one_validates_whole_and_always_the_same(
        config, folder, monkeypatch, cache):
    texts = numbered(125)
    source = folder(*texts)
    tokens = prepare(source, config, quiet)
    sides = [[int(n) for n in re.findall(r"document (\d+)", side)] for side in text_of(tokens)]
    assert sorted(sides[0] + sides[1]) == list(range(125))
    assert all(side == sorted(side) for side in sides)
    assert [n // 10 for n in sides[1]][:12] == list(range(12))
    for side, part in zip(sides, text_of(tokens)):
        assert part.replace("<|endoftext|>", "") == "".join(texts[n] for n in side)
        assert part.count("<|endoftext|>") == (0 if config is CHAR else len(side) - 1)
    assert len({n % 10 for n in sides[1]}) > 3  # drawn, not every tenth
    assert tokens.val_documents == len(sides[1])
    assert f"{len(sides[1])} of them" in tokens.summary()[2]
    monkeypatch.setenv("GLASSGPT_CACHE", str(cache.with_name("other")))
    assert text_of(prepare(source, config, quiet)) == text_of(tokens)


def test_few_documents_are_split_by_position(folder):
    texts = numbered(99)
    tokens = prepare(folder(*texts), CHAR, quiet)
    assert tokens.val_documents is None and "".join(text_of(tokens)) == "".join(texts)


def test_one_long_document_among_short_ones_is_split_by_position(folder):
    texts = [*numbered(150), "long " * 1000]
    tokens = prepare(folder(*texts), CHAR, quiet)
    assert tokens.val_documents is None and "".join(text_of(tokens)) == "".join(texts)


def test_the_lines_of_a_jsonl_are_documents_to_split(write):
    tokens = prepare(write("".join(json.dumps({"text": text}) + "\n" for text in numbered(100)),
                           "text/a.jsonl"), CHAR, quiet)
    assert (tokens.documents, tokens.val_documents) == (100, 10)


# --- what training never sees ---------------------------------------------------------------------


def test_symbols_that_only_the_validation_split_has_are_tokens_and_are_reported(write):
    tokens = prepare(write("ab" * 90 + "abéab☃é" * 3 + "a" * 1), CHAR, quiet)
    assert text_of(tokens)[1].count("é") > 0
    assert tokens.tokenizer.decode(tokens.unseen) == "é☃"
    shown = "\n".join(tokens.summary())
    assert (f"{tokens.unseen_share:.2%} of the validation text is tokens that training never "
            "sees: 'é' '☃'") in shown
    val = tokens.val.tolist()
    assert tokens.unseen_share == sum(id in tokens.unseen for id in val) / len(val)


def test_nothing_is_reported_where_training_sees_all(write):
    tokens = prepare(write("ab" * 100), CHAR, quiet)
    assert tokens.unseen == () and tokens.unseen_share == 0 and len(tokens.summary()) == 5


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbols, dtype", [(2, "uint8"), (256, "uint8"), (257, "uint16"),
                                            (65536, "uint16"), (65537, "uint32")])
def test_the_smallest_type_that_holds_the_vocabulary_is_kept(symbols, dtype, write):
    alphabet = "".join(chr(c) for c in range(32, symbols + 4000)
                       if not 0xD800 <= c < 0xE000)[:symbols]
    tokens = prepare(write(alphabet), CHAR, quiet)
    assert tokens.tokenizer.vocab_size == symbols
    assert tokens.train.dtype == tokens.val.dtype == dtype
    assert "".join(text_of(tokens)) == alphabet


def test_the_bytes_and_the_end_of_text_need_two_bytes_a_token(folder):
    tokens = prepare(folder(PROSE, PROSE), TokenizerConfig(vocab_size=257), quiet)
    assert tokens.train.dtype == "uint16" and 256 in tokens.train


def test_the_arrays_are_memory_maps_that_cannot_be_written(write):
    tokens = prepare(write(PROSE), CHAR, quiet)
    for ids in (tokens.train, tokens.val):
        assert isinstance(ids, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 1


def test_the_summary_names_the_text_and_counts_it(write):
    tokens = prepare(write(PROSE), CHAR, quiet)
    name, text, split, size, vocabulary = tokens.summary()
    assert name.endswith("a.txt")
    assert "1 document, 1,040 characters" in text
    assert "the last tenth of the characters" in split
    assert "936 for training, 104 for validation" in size
    assert "1.00 bytes per token" in vocabulary


def test_a_second_call_does_not_prepare_again(write, cache):
    said = []
    first = prepare(write(PROSE), SMALL_BPE, said.append)
    files = {p: p.stat().st_mtime_ns for p in prepared(cache)[0].iterdir()}
    second = prepare(write(PROSE), SMALL_BPE, said.append)
    assert len(said) == 1 and said[0].startswith("preparing") and str(cache) in said[0]
    assert {p: p.stat().st_mtime_ns for p in prepared(cache)[0].iterdir()} == files
    assert first.fingerprint == second.fingerprint
    assert text_of(first) == text_of(second)


def test_the_same_text_elsewhere_is_not_prepared_again_and_has_its_own_name(write, cache):
    prepare(write(PROSE), CHAR, quiet)
    tokens = prepare(write(PROSE, "text/b.txt"), CHAR, quiet)
    assert len(prepared(cache)) == 1
    assert tokens.name.endswith("b.txt")


def test_one_changed_byte_gives_other_tokens(write, cache):
    file = Path(write(PROSE).path)
    old, stamp = prepare(write(PROSE), CHAR, quiet), file.stat()
    changed = write(PROSE[:7] + "X" + PROSE[8:])
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # neither its size nor its time tells
    new = prepare(changed, CHAR, quiet)
    assert old.fingerprint != new.fingerprint
    assert "".join(text_of(new)) == PROSE[:7] + "X" + PROSE[8:]
    assert "".join(text_of(old)) == PROSE
    assert len(prepared(cache)) == 2


def test_text_that_moves_between_documents_gives_other_tokens(folder):
    assert prepare(folder("ab", "c"), SMALL_BPE,
                   quiet).fingerprint != prepare(folder("a", "bc"), SMALL_BPE, quiet).fingerprint


def test_a_document_more_gives_other_tokens(folder):
    one = prepare(folder(PROSE), SMALL_BPE, quiet)
    two = prepare(folder(PROSE, ""), SMALL_BPE, quiet)
    assert (one.documents, two.documents) == (1, 2) and one.fingerprint != two.fingerprint


def test_another_tokenizer_setting_gives_other_tokens(write, cache):
    configs = [CHAR, SMALL_BPE, TokenizerConfig(name="bpe", vocab_size=300),
               TokenizerConfig(name="bpe")]
    text = Path(__file__).read_text(encoding="utf-8")
    made = [prepare(write(text), config, quiet) for config in configs]
    assert len({tokens.fingerprint for tokens in made}) == len(prepared(cache)) == 4
    assert [tokens.tokenizer.vocab_size for tokens in made][1:3] == [280, 300]
    again = prepare(write(text), SMALL_BPE, quiet)
    assert again.fingerprint == made[1].fingerprint and again.tokenizer.vocab_size == 280


def test_the_number_of_validation_tokens_used_does_not_prepare_again(write, cache):
    config = write(PROSE)
    prepare(config, CHAR, quiet)
    config.val_max_tokens = 7
    prepare(config, CHAR, quiet)
    assert len(prepared(cache)) == 1


# --- mistakes and accidents -----------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"\xef\xbb\xbf"],
                         ids=["no bytes", "a byte-order mark alone"])
def test_an_empty_text_is_refused_and_leaves_nothing(text, write, cache):
    with pytest.raises(UserError, match=r"a\.txt holds no text"):
        prepare(write(text), SMALL_BPE, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_text_that_is_not_utf8_is_refused_and_leaves_nothing(write, cache):
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text: byte 0xff at offset 2"):
        prepare(write(b"ab\xffcd"), CHAR, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(write, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set GLASSGPT_CACHE"):
        prepare(write(PROSE), CHAR, quiet)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_token_file_of_another_length_is_said_and_prepared_again(name, change, write, cache):
    whole = text_of(prepare(write(PROSE), CHAR, quiet))
    (folder,) = prepared(cache)
    os.truncate(folder / name, (folder / name).stat().st_size + change)
    said = []
    assert text_of(prepare(write(PROSE), CHAR, said.append)) == whole
    assert "is damaged" in said[0] and name in said[0]


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: os.truncate(f, 5)],
                         ids=["missing", "cut short"])
@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "meta.json"])
def test_a_damaged_cache_is_prepared_again(name, damage, write, cache):
    whole = text_of(prepare(write(PROSE), CHAR, quiet))
    damage(prepared(cache)[0] / name)
    assert text_of(prepare(write(PROSE), CHAR, quiet)) == whole


def test_a_failure_halfway_leaves_nothing_that_looks_finished(write, cache, monkeypatch):
    def full(*args):
        raise OSError("no space left")

    with monkeypatch.context() as broken, pytest.raises(UserError,
                                                        match=r"no space left.*GLASSGPT_CACHE"):
        broken.setattr(data.tokens, "save_tokenizer", full)
        prepare(write(PROSE), CHAR, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []
    assert "".join(text_of(prepare(write(PROSE), CHAR, quiet))) == PROSE


def zero_half(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:len(whole) // 2] + bytes(len(whole) - len(whole) // 2))


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
def test_a_file_with_other_bytes_of_the_same_length_is_noticed_and_made_again(name, write, cache):
    whole = text_of(prepare(write(PROSE), SMALL_BPE, quiet))
    zero_half(prepared(cache)[0] / name)
    said = []
    assert text_of(prepare(write(PROSE), SMALL_BPE, said.append)) == whole
    assert len(said) == 1 and "is damaged" in said[0]
    assert text_of(prepare(write(PROSE), SMALL_BPE, pytest.fail)) == whole


@pytest.mark.parametrize("change", [{"unseen_share": 0.5}, {"documents": 2},
                                    {"fingerprint": "0" * 64}], ids=str)
def test_a_changed_number_in_the_metadata_is_noticed(change, write, cache):
    prepare(write(PROSE), CHAR, quiet)
    meta = prepared(cache)[0] / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    said = []
    prepare(write(PROSE), CHAR, said.append)
    assert "meta.json is not as it was written" in said[0]


def test_of_a_large_file_some_blocks_are_looked_at_and_all_where_that_is_asked(
        write, cache, monkeypatch):
    monkeypatch.setattr(data.tokens, "BLOCK", 10)
    monkeypatch.setattr(data.tokens, "CHECKED", 3)
    whole, said = text_of(prepare(write(PROSE), CHAR, quiet)), []
    file = prepared(cache)[0] / "train.bin"
    damaged = bytearray(file.read_bytes())
    damaged[500] ^= 1
    with monkeypatch.context() as others:  # none but the first block
        others.setattr(data.tokens.random.Random, "sample", lambda self, blocks, k: [0] * k)
        file.write_bytes(damaged)
        prepare(write(PROSE), CHAR, pytest.fail)
    assert text_of(prepare(write(PROSE), CHAR, said.append, whole=True)) == whole
    assert "train.bin is not as it was written, at or after byte 500" in said[0]


def test_the_fingerprint_of_a_text_is_what_it_was_in_older_versions(write):
    """Else no run that was begun with them could be resumed."""
    assert prepare(write(PROSE), CHAR, quiet).fingerprint[:16] == "336477e4d9c65baf"


def test_a_cache_of_an_older_format_is_made_again(write, cache):
    old = prepare(write(PROSE), CHAR, quiet)
    meta = prepared(cache)[0] / "meta.json"
    kept = {key: value for key,
            value in json.loads(meta.read_text()).items() if key not in ("files", "sha256")}
    meta.write_text(json.dumps(kept | {"format": 2}))
    said = []
    assert prepare(write(PROSE), CHAR, said.append).fingerprint == old.fingerprint
    assert "of format 2, and this GlassGPT keeps format 3" in said[0]


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "meta.json"])
def test_a_pipe_in_place_of_a_kept_file_does_not_hang(name, write, cache):
    prepare(write(PROSE), CHAR, quiet)
    file = prepared(cache)[0] / name
    file.unlink()
    os.mkfifo(file)
    assert "".join(text_of(prepare(write(PROSE), CHAR, quiet))) == PROSE


def same_length(file: Path) -> None:
    """Another text of the same size and time."""
    stamp = file.stat()
    file.write_bytes(file.read_bytes().replace(b"dog", b"god"))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.mark.parametrize("change", [lambda file: file.write_text(PROSE * 2),
                                    lambda file: file.write_text("☃" + PROSE),
                                    same_length, lambda file: file.unlink()],
                         ids=["longer", "a new character", "same size", "gone"])
@pytest.mark.parametrize("function", ["build_tokenizer", "_write_ids"])
def test_text_that_changes_while_it_is_prepared_is_refused_and_not_kept(
        function, change, write, cache, monkeypatch):
    source, original = write(PROSE), getattr(data.tokens, function)

    def meanwhile(*args):
        if Path(source.path).exists():
            change(Path(source.path))
        return original(*args)

    with monkeypatch.context() as changing, pytest.raises(
        UserError, match=r"a\.txt (changed while it was read: start again|cannot be read)"):
        changing.setattr(data.tokens, function, meanwhile)
        prepare(source, CHAR, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("name", ["text/a.jsonl", "text/a.txt.gz", "text/a.jsonl.gz"])
def test_packed_text_and_lines_of_json_that_change_are_refused_too(name, write, cache, monkeypatch):
    def content(word: str) -> bytes:
        text = "".join(json.dumps({"text": f"{word} {n}"}) + "\n" for n in range(30)).encode()
        return gzip.compress(text, mtime=0) if name.endswith(".gz") else text

    source = write(content("one"), name)
    original = data.tokens.build_tokenizer
    monkeypatch.setattr(data.tokens, "build_tokenizer",
                        lambda *args: (write(content("two"), name), original(*args))[1])
    with pytest.raises(UserError, match="changed while it was read: start again"):
        prepare(source, CHAR, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
def test_a_text_of_one_distinct_character_is_refused(config, write, cache):
    for text in ("a", "é" * 3_000_000):
        with pytest.raises(UserError, match=rf"holds no character but '{text[0]}', so there is "
                                            rf"nothing to learn"):
            prepare(write(text), config, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_half_a_surrogate_pair_in_a_line_of_json_is_a_replacement_character(write):
    for config in (CHAR, SMALL_BPE):
        tokens = prepare(write('{"text": "x \\ud83d \\ud83d\\ude00y"}\n' * 5, "text/a.jsonl"),
                         config, quiet)
        assert "".join(text_of(tokens)).replace("<|endoftext|>", "") == "x \ufffd 😀y" * 5


@pytest.mark.parametrize("name, text, place", [
    ("text/b.txt", PROSE + "on\ntat Ω\n", "in line 22 of {}"),
    ("text/b.jsonl", '{"text": "a\\na"}\n\n{"text": "c\\n\\ndΩ"}\n',
     "in line 3 of document 2 of {}")], ids=["plain", "jsonl"])
def test_a_character_that_a_kept_tokenizer_does_not_know_is_named_with_its_file_and_line(
        name, text, place, folder, write, monkeypatch):
    monkeypatch.setattr(data.corpus, "PIECE", 100)
    source, path = folder(PROSE), write(text, name).path
    with pytest.raises(UserError) as error:
        prepare(source, CHAR, quiet, CharTokenizer(PROSE))
    assert f"the character 'Ω' {place.format(path)} is not among" in str(error.value)


def test_a_process_that_waits_for_another_one_says_so(write, cache):
    cache.mkdir()
    source, said = write(PROSE), []
    key = data.tokens.corpus_fingerprint(data.tokens.open_corpus(source, quiet), CHAR)[:16]
    held = threading.Event()

    def hold():
        with FileLock(cache / f"{key}.lock"):
            held.set()
            time.sleep(1.5)

    threading.Thread(target=hold).start()
    held.wait()
    assert "".join(text_of(prepare(source, CHAR, said.append))) == PROSE
    assert said[0] == "waiting for another process that prepares this text" and len(said) == 2


def test_what_killed_preparations_and_downloads_of_other_texts_left_is_removed(write, cache):
    left, held, download, fresh = (cache / name for name in (
        ".0123456789abcdef.part", ".fedcba9876543210.part", "a.99999.part", "b.part"))
    for part in (left, held):
        part.mkdir(parents=True)
        (part / "train.bin").write_bytes(b"x")
    shard = cache / "hf_0123" / ".000001.jsonl.gz.part"
    shard.parent.mkdir()
    for file in (shard, download, fresh):
        file.write_bytes(b"x")
    os.utime(download, (0, 0))
    with FileLock(cache / "fedcba9876543210.lock"):
        prepare(write(PROSE), CHAR, quiet)
    assert [p.exists()
            for p in (left, shard, download, held, fresh)] == [False, False, False, True, True]
    assert held.joinpath("train.bin").exists()


def prepare_command(source: DataConfig, *more: str) -> list[str]:
    return [sys.executable, "-m", "data.prepare", "data=text", f"data.path={source.path}", *more]


@pytest.mark.slow
def test_a_full_disk_is_a_sentence_and_nothing_is_kept(write, cache, tmp_path):
    cache.mkdir()
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k",
                                                    "none", cache], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        done = run(tmp_path, "data.prepare", "data=text", f"data.path={write(PROSE * 200).path}",
                   "tokenizer=char", env={"GLASSGPT_CACHE": str(cache)})
        said = done.stderr
        assert done.returncode == 1 and len(said.splitlines()) == 1, said
        assert "No space left on device" in said and "set GLASSGPT_CACHE" in said
        assert not [p for p in cache.iterdir() if p.is_dir()]
    finally:
        subprocess.run(["umount", "-l", cache], check=True)


def test_a_lock_that_cannot_be_taken_is_a_sentence(write, cache):
    cache.mkdir()
    source = write(PROSE)
    key = data.tokens.corpus_fingerprint(data.tokens.open_corpus(source, quiet), CHAR)[:16]
    (cache / f"{key}.lock").mkdir()  # as unwritable to root as to anyone
    with pytest.raises(UserError, match=rf"{key}\.lock.*set GLASSGPT_CACHE"):
        prepare(source, CHAR, quiet)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the children of a process")
@pytest.mark.slow
def test_ctrl_c_ends_the_learning_of_a_vocabulary_soon(write, cache):
    source = write("".join(map(chr, np.random.default_rng(0).integers(0x4e00, 0x6000, 2_000_000))))
    process = subprocess.Popen(prepare_command(source, "tokenizer.vocab_size=16384"),
                               cwd=ROOT, text=True,
                               env={**os.environ, "GLASSGPT_CACHE": str(cache)},
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith("preparing")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (learner := children.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert (process.wait(60), process.stderr.read()) == (130, "")
    assert time.monotonic() - began < 15 and not prepared(cache)
    assert not Path(f"/proc/{learner}").exists()


def test_the_remains_of_an_older_version_are_replaced(write, cache):
    prepare(write(PROSE), CHAR, quiet)
    (folder,) = prepared(cache)
    (folder / "meta.json").unlink()
    (folder / "train.bin").write_bytes(b"stale")
    assert "".join(text_of(prepare(write(PROSE), CHAR, quiet))) == PROSE


SCRIPT = """
import os, sys, time
import data.tokens
from config import DataConfig, TokenizerConfig
{before}
config = TokenizerConfig(name="bpe", vocab_size=280)
say = lambda line: print(line, flush=True)
tokens = data.tokens.prepare(DataConfig(source="text", path=sys.argv[1]), config, say)
print(len(tokens.train), tokens.fingerprint)
"""
SLOWLY = """
save = data.tokens.save_tokenizer
def slow(*args):
    time.sleep(0.5)
    save(*args)
data.tokens.save_tokenizer = slow
"""


def process(config, before=""):
    return subprocess.Popen([sys.executable, "-c", SCRIPT.format(before=before), config.path],
                            cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data.tokens.save_tokenizer", "data.tokens.build_tokenizer",
                                   "data.tokens.shutil.rmtree"])
def test_a_killed_preparation_leaves_nothing_that_looks_finished(where, write, cache):
    killed = process(write(PROSE), f"{where} = lambda *a, **k: os.kill(os.getpid(), 9)")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not any((p / "meta.json").exists() for p in cache.iterdir()
                   if not p.name.startswith("."))
    assert "".join(text_of(prepare(write(PROSE), SMALL_BPE, quiet))) == PROSE
    assert len(prepared(cache)) == 1


@pytest.mark.slow
def test_what_a_killed_preparation_left_is_cleared_by_the_next(write, cache):
    process(write(PROSE),
            "data.tokens.save_tokenizer = lambda *a: os.kill(os.getpid(), 9)").communicate(
                timeout=60)
    prepare(write(PROSE), SMALL_BPE, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == prepared(cache)


@pytest.mark.slow
def test_two_processes_that_prepare_at_once_do_it_once(write, cache):
    pair = [process(write(PROSE), SLOWLY) for _ in range(2)]
    out, errors = zip(*(p.communicate(timeout=60) for p in pair))
    assert [p.returncode for p in pair] == [0, 0], errors
    assert "".join(out).count("preparing") == 1
    assert out[0].splitlines()[-1] == out[1].splitlines()[-1]
    assert len(prepared(cache)) == 1


@pytest.mark.parametrize("pattern", ["code", "gpt2"])
def test_text_in_many_pieces_has_the_tokens_of_the_whole_on_any_number_of_cores(
        pattern, write, monkeypatch):
    text = "".join(f"def name_{n}(x):\n    return {n} * x  # "
                   f"{'é' * (n % 5)}\n\n{'word ' * (n % 3)}\nlast \r\n{n}\n" for n in range(400))
    config = replace(SMALL_BPE, pattern=pattern)
    whole = prepare(write(text, "text/a.txt"), config, quiet)
    monkeypatch.setattr(data.corpus, "PIECE", 300)
    monkeypatch.setenv("GLASSGPT_CACHE", str(Path(os.environ["GLASSGPT_CACHE"]).with_name("other")))
    pieces = prepare(write(text, "text/a.txt"), config, quiet)
    assert np.array_equal(whole.train, pieces.train) and np.array_equal(whole.val, pieces.val)


def test_progress_is_told_up_to_the_end(write):
    told = []
    prepare(write(PROSE + "é"), CHAR, quiet, progress=lambda *args: told.append(args))
    assert {stage for stage, _, _ in told} == {"reading", "vocabulary", "tokens"}
    size = len((PROSE + "é").encode())
    assert ("reading", size, size) in told and told[-1] == ("tokens", size, size)  # in bytes


@pytest.mark.slow
def test_preparing_is_stopped_by_ctrl_c_and_leaves_nothing(tmp_path, write, cache):
    source = write(PROSE * 10_000)  # 10 MB
    process = subprocess.Popen([sys.executable, "-m", "data.prepare", "data=text",
                                f"data.path={source.path}", "tokenizer.vocab_size=257"], cwd=ROOT,
                               env={**os.environ, "GLASSGPT_CACHE": str(cache)},
                               stderr=subprocess.PIPE, text=True)
    while not list(cache.glob(".*.part/train.bin")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert (process.wait(60), process.stderr.read()) == (130, "")
    assert not list(cache.glob(".*.part")) and not prepared(cache)


@pytest.mark.slow
def test_text_is_prepared_without_training(tmp_path, write, cache):
    source = write(PROSE)
    argv, env = ["data.prepare", "data=text", "tokenizer=char"], {"GLASSGPT_CACHE": str(cache)}
    done = run(tmp_path, *argv, f"data.path={source.path}", env=env)
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout and len(list(cache.glob("*/train.bin"))) == 1
    done = run(tmp_path, *argv, "data.path=nowhere", env=env)
    assert done.returncode == 1
    assert done.stderr == ("error: data.path=nowhere does not exist: give the path of a text file, "
                           "of a folder, or a glob\n")

