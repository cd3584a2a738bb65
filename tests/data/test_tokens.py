"""Token files: prepared once, never stale, never half there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

import data.tokens
from common.errors import UserError
from config import DataConfig, TokenizerConfig
from data.tokenizer import CharTokenizer
from data.tokens import prepare

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
        shutil.rmtree(tmp_path / "text", ignore_errors=True)
        for n, text in enumerate(texts):
            write(text, f"text/{n:03}.txt")
        return DataConfig(source="text", path=str(tmp_path / "text"))

    return folder


def quiet(line):
    pass


def text_of(tokens):
    return tokens.tokenizer.decode(tokens.train.tolist()), tokens.tokenizer.decode(
        tokens.val.tolist()
    )


def prepared(cache):
    """The finished folders of the cache."""
    return [p.parent for p in cache.glob("*/meta.json")]


@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=2).filter(
        lambda t: len(set(t.removeprefix("\ufeff"))) > 1
    )
)
def test_the_last_tenth_of_the_characters_validates_and_nothing_is_lost(
    config, text, tmp_path_factory
):
    file = tmp_path_factory.mktemp("any") / "a.txt"
    file.write_bytes(text.encode())
    text = text.removeprefix("\ufeff")
    tokens = prepare(DataConfig(source="text", path=str(file)), config, quiet)
    assert text_of(tokens) == (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :])
    assert (tokens.characters, tokens.bytes, tokens.documents) == (len(text), len(text.encode()), 1)


def test_bpe_does_not_learn_from_the_validation_split(write):
    one = prepare(write(PROSE * 9 + "z" * len(PROSE), "text/one.txt"), SMALL_BPE, quiet)
    other = prepare(write(PROSE * 9 + "Q" * len(PROSE), "text/other.txt"), SMALL_BPE, quiet)
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    assert np.array_equal(one.train, other.train) and not np.array_equal(one.val, other.val)


def test_documents_are_separated_by_the_end_of_text_token(folder):
    between, texts = "<|endoftext|>", ["ab" * 45, "", "c" * 95, "d" * 5, "e" * 5]
    tokens = prepare(folder(*texts), SMALL_BPE, quiet)
    assert tokens.documents == 5
    assert text_of(tokens) == (
        f"{texts[0]}{between}{'c' * 85}",
        f"{'c' * 10}{between}ddddd{between}eeeee",
    )
    assert text_of(prepare(folder(*texts), CHAR, quiet)) == (
        f"{texts[0]}{'c' * 85}",
        f"{'c' * 10}dddddeeeee",
    )


def numbered(count: int) -> list[str]:
    return [f"document {n:03} says {n * n}\n" for n in range(count)]


@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
def test_of_every_ten_documents_one_validates_whole_and_always_the_same(
    config, folder, monkeypatch, cache
):
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


@pytest.mark.parametrize(
    "symbols, dtype",
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_smallest_type_that_holds_the_vocabulary_is_kept(symbols, dtype, write):
    alphabet = "".join(chr(c) for c in range(32, symbols + 4000) if not 0xD800 <= c < 0xE000)[
        :symbols
    ]
    tokens = prepare(write(alphabet), CHAR, quiet)
    assert tokens.tokenizer.vocab_size == symbols
    assert tokens.train.dtype == tokens.val.dtype == dtype
    assert "".join(text_of(tokens)) == alphabet


def test_a_second_call_does_not_prepare_again_and_the_text_has_its_own_name(write, cache):
    said = []
    first = prepare(write(PROSE), SMALL_BPE, said.append)
    files = {p: p.stat().st_mtime_ns for p in prepared(cache)[0].iterdir()}
    second = prepare(write(PROSE, "text/b.txt"), SMALL_BPE, said.append)
    assert len(said) == 1 and said[0].startswith("preparing") and str(cache) in said[0]
    assert {p: p.stat().st_mtime_ns for p in prepared(cache)[0].iterdir()} == files
    assert first.fingerprint == second.fingerprint and second.name.endswith("b.txt")
    assert text_of(first) == text_of(second)
    for ids in (second.train, second.val):
        assert isinstance(ids, np.memmap) and not ids.flags.writeable


def same_length(file: Path) -> None:
    """Another text of the same size and time."""
    stamp = file.stat()
    file.write_bytes(file.read_bytes().replace(b"dog", b"god"))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_a_changed_text_and_borders_of_documents_give_other_tokens(write, folder):
    source = write(PROSE)
    old = prepare(source, CHAR, quiet)
    same_length(Path(source.path))
    assert "".join(text_of(prepare(source, CHAR, quiet))) == PROSE.replace("dog", "god")
    assert "".join(text_of(old)) == PROSE
    sources = (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""))
    assert len({prepare(folder(*texts), SMALL_BPE, quiet).fingerprint for texts in sources}) == 4


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        pipe,
        lambda f: f.unlink(),
        lambda f: os.truncate(f, f.stat().st_size - 1),
        lambda f: os.truncate(f, f.stat().st_size + 1),
    ],
    ids=["a byte", "a pipe", "missing", "shorter", "longer"],
)
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json"])
def test_a_damaged_cache_is_said_and_prepared_again(name, damage, write, cache):
    whole, said = text_of(prepare(write(PROSE), SMALL_BPE, quiet)), []
    damage(prepared(cache)[0] / name)
    assert text_of(prepare(write(PROSE), SMALL_BPE, said.append)) == whole
    assert len(said) == 1 and "is damaged" in said[0]
    assert text_of(prepare(write(PROSE), SMALL_BPE, pytest.fail)) == whole


def test_of_a_file_above_the_bound_the_size_is_looked_at_and_all_where_that_is_asked(
    write, cache, monkeypatch
):
    monkeypatch.setattr(data.tokens, "CHECKED", 500)
    whole, said = text_of(prepare(write(PROSE), CHAR, quiet)), []
    flip_a_byte(prepared(cache)[0] / "train.bin")
    prepare(write(PROSE), CHAR, pytest.fail)
    assert text_of(prepare(write(PROSE), CHAR, said.append, whole=True)) == whole
    assert "train.bin is not as it was written" in said[0]


def test_the_fingerprint_of_a_text_is_what_it_was(write):
    """Else no run that was begun before could be resumed."""
    assert prepare(write(PROSE), CHAR, quiet).fingerprint[:16] == "336477e4d9c65baf"


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text(PROSE * 2),
        same_length,
        lambda file: file.write_text("☃" + PROSE),
        lambda file: file.unlink(),
    ],
    ids=["longer", "same size", "a new character", "gone"],
)
@pytest.mark.parametrize("function", ["build_tokenizer", "save_tokenizer"])
def test_text_that_changes_while_it_is_prepared_is_refused_and_not_kept(
    function, change, write, cache, monkeypatch
):
    source, original = write(PROSE), getattr(data.tokens, function)

    def meanwhile(*args):
        if Path(source.path).exists():
            change(Path(source.path))
        return original(*args)

    with (
        monkeypatch.context() as changing,
        pytest.raises(
            UserError, match=r"changed while it was read: start again|cannot be read|'☃' in"
        ),
    ):
        changing.setattr(data.tokens, function, meanwhile)
        prepare(source, CHAR, quiet)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_a_tokenizer_from_elsewhere_is_used_and_what_it_does_not_know_is_shown(write, cache):
    tokens = prepare(write(PROSE), CHAR, quiet, CharTokenizer(PROSE + "xyz"))
    assert "".join(text_of(tokens)) == PROSE and "z" in tokens.tokenizer.alphabet
    assert prepare(write(PROSE), CHAR, quiet).fingerprint == tokens.fingerprint
    assert len(prepared(cache)) == 2
    with pytest.raises(UserError, match=r"'Ω' in '.*Ω\\n' is not among the"):
        prepare(write(PROSE + "on\ntat Ω\n"), CHAR, quiet, CharTokenizer(PROSE))


def test_what_killed_processes_left_is_removed_and_nothing_else_is(write, cache):
    killed, held, *others = (
        cache / name
        for name in (
            "0123456789abcdef.ab_1cd2e.part",
            "fedcba9876543210.ab_1cd2e.part",
            "thesis.part",
            ".notes.part",
            "0123456789.x.part",
            "0123456789abcdef.part",
        )
    )
    for part in (killed, held, *others):
        part.mkdir(parents=True)
        (part / "train.bin").write_bytes(b"x")
    with FileLock(cache / "fedcba9876543210.lock"):
        prepare(write(PROSE), CHAR, quiet)
    assert not killed.exists() and all((p / "train.bin").exists() for p in (held, *others))


SCRIPT = """
import os, sys, time
import data.tokens
from config import DataConfig, TokenizerConfig
{before}
config = TokenizerConfig(name="bpe", vocab_size=280)
log = lambda line: print(line, flush=True)
tokens = data.tokens.prepare(DataConfig(source="text", path=sys.argv[1]), config, log)
print(len(tokens.train), tokens.fingerprint)
assert not {{"torch", "training", "datasets"}} & {{*sys.modules}}
"""
SLOWLY = """
save = data.tokens.save_tokenizer
def slow(*args):
    time.sleep(0.5)
    save(*args)
data.tokens.save_tokenizer = slow
"""


def process(config, before=""):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(before=before), config.path],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


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
    pattern, write, monkeypatch
):
    text = "".join(
        f"def name_{n}(x):\n    return {n} * x  # "
        f"{'é' * (n % 5)}\n\n{'word ' * (n % 3)}\nlast \r\n{n}\n"
        for n in range(400)
    )
    config = replace(SMALL_BPE, pattern=pattern)
    whole = prepare(write(text, "text/a.txt"), config, quiet)
    monkeypatch.setattr(data.corpus, "PIECE", 300)
    monkeypatch.setenv("GLASSGPT_CACHE", str(Path(os.environ["GLASSGPT_CACHE"]).with_name("other")))
    pieces = prepare(write(text, "text/a.txt"), config, quiet)
    assert np.array_equal(whole.train, pieces.train) and np.array_equal(whole.val, pieces.val)
