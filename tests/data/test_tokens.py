"""Token files are prepared once, never stale and never incomplete."""

import json
import os
import re
import shutil
import threading
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from conftest import read_only
from corpora import ignore
from hypothesis import given
from hypothesis import strategies as st

import data.cache
import data.corpus
import data.tokens
from common.errors import UserError
from common.files import ordinary_file
from common.paths import writable_folder
from config import DataConfig, TokenizerConfig
from data.cache import open_or_write
from data.hf_tokenizer import HFTokenizer
from data.splits import SplitPiece
from data.text_files import normalize_text
from data.tokenizer import PATTERNS, CharTokenizer, save_tokenizer, train_bpe
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
    """Return a function that writes a text and returns the settings that name its file."""

    def write(text, name="text/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return DataConfig(source="text", path=str(tmp_path / name))

    return write


@pytest.fixture
def folder(tmp_path, write):
    """Return a function that writes texts to a folder and returns the settings that name it."""

    def folder(*texts):
        shutil.rmtree(tmp_path / "text", ignore_errors=True)
        for n, text in enumerate(texts):
            write(text, f"text/{n:03}.txt")
        return DataConfig(source="text", path=str(tmp_path / "text"))

    return folder


def decode_splits(tokens):
    """Return the text of the training split and of the validation split."""
    return tuple(tokens.tokenizer.decode(ids.tolist()) for ids in (tokens.train, tokens.val))


def cache_entries(cache):
    """Return the complete folders of the cache."""
    return [p.parent for p in cache.glob("*/meta.json")]


bounded_texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=2
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
@given(text=bounded_texts.filter(lambda text: len(set(normalize_text(text))) > 1))
def test_the_last_tenth_of_the_characters_validates_and_both_splits_make_up_the_text(
    config, text, tmp_path_factory
):
    file = tmp_path_factory.mktemp("any") / "a.txt"
    file.write_bytes(text.encode())
    text = normalize_text(text)
    tokens = prepare(DataConfig(source="text", path=str(file)), config, ignore)
    assert decode_splits(tokens) == (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :])
    assert astuple(tokens.size)[:3] == (1, len(text), len(text.encode()))


def test_bpe_does_not_learn_from_the_validation_split(write):
    one = prepare(write(PROSE * 9 + "z" * len(PROSE), "text/one.txt"), SMALL_BPE, ignore)
    other = prepare(write(PROSE * 9 + "Q" * len(PROSE), "text/other.txt"), SMALL_BPE, ignore)
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    assert np.array_equal(one.train, other.train) and not np.array_equal(one.val, other.val)


def test_end_of_text_separates_documents(folder):
    separator, texts = "<|endoftext|>", ["ab" * 45, "", "c" * 95, "d" * 5, "e" * 5]
    tokens = prepare(folder(*texts), SMALL_BPE, ignore)
    assert tokens.size.documents == 5
    assert decode_splits(tokens) == (
        f"{texts[0]}{separator}{'c' * 85}",
        f"{'c' * 10}{separator}ddddd{separator}eeeee",
    )
    assert decode_splits(prepare(folder(*texts), CHAR, ignore)) == (
        f"{texts[0]}{'c' * 85}",
        f"{'c' * 10}dddddeeeee",
    )


ALPHABET = sorted(set(PROSE))


def imported_tokenizer(
    begin: bool = False, end: bool = True, lowercase: bool = False, alphabet: str = ""
) -> HFTokenizer:
    """A tokenizer of single characters, whose last two ids may begin and end a text."""
    characters = [*ALPHABET, *alphabet]
    V = len(characters)
    vocabulary = dict(zip([*characters, "<s>", "</s>"], range(V + 2)))
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.add_special_tokens(["<s>", "</s>"])
    if begin:
        template = {"single": "<s> $A", "special_tokens": [("<s>", V)]}
        library.post_processor = tokenizers.processors.TemplateProcessing(**template)
    if lowercase:
        library.normalizer = tokenizers.normalizers.Lowercase()
    return HFTokenizer(library.to_str(), end_of_text=V + 1 if end else None)


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_end_of_text_and_then_begin_of_text_separate_documents_of_an_imported_tokenizer(
    folder, begin, end
):
    tokenizer = imported_tokenizer(begin, end)
    separator = [tokenizer.vocab_size - 1] * end + [tokenizer.vocab_size - 2] * begin
    a, c, d, e = (tokenizer.encode(letter) for letter in "acde")
    tokens = prepare(folder("a" * 90, "", "c" * 95, "d" * 5, "e" * 5), CHAR, ignore, tokenizer)
    assert tokens.train.tolist() == [*a * 90, *separator, *c * 85]
    assert tokens.val.tolist() == [*c * 10, *separator, *d * 5, *separator, *e * 5]


@pytest.mark.parametrize(("length", "by_document"), [(110, True), (111, False)])
@pytest.mark.parametrize("place", [0, 50, 99])
def test_documents_validate_only_if_none_is_longer_than_a_tenth_of_the_text(
    folder, monkeypatch, length, by_document, place
):
    monkeypatch.setattr(data.corpus, "PIECE_CHARS", 40)
    texts = [f"number{n:03}\n" for n in range(99)]  # 990 characters
    texts.insert(place, f"{'long text ' * 12}"[:length])
    training, validation = decode_splits(prepare(folder(*texts), CHAR, ignore))
    text = "".join(texts)
    position = len(text) * 9 // 10
    is_cut = (training, validation) == (text[:position], text[position:])
    assert is_cut != by_document
    if by_document:
        assert validation.count("number") + ("long" in validation) == 10


@pytest.mark.parametrize("config", [CHAR, SMALL_BPE], ids=["char", "bpe"])
def test_one_document_of_every_ten_validates_and_it_is_always_the_same(
    config, folder, monkeypatch, cache
):
    texts = [f"document {n:03} says {n * n}\n" for n in range(125)]
    source = folder(*texts)
    tokens = prepare(source, config, ignore)
    parts = decode_splits(tokens)
    sides = [[int(n) for n in re.findall(r"document (\d+)", part)] for part in parts]
    assert sorted(sides[0] + sides[1]) == list(range(125))
    assert [n // 10 for n in sides[1]][:12] == list(range(12))
    for side, part in zip(sides, parts):
        assert part.replace("<|endoftext|>", "") == "".join(texts[n] for n in side)
        assert part.count("<|endoftext|>") == (0 if config is CHAR else len(side) - 1)
    assert len({n % 10 for n in sides[1]}) > 3  # drawn at random
    monkeypatch.setenv("GLASSGPT_CACHE", str(cache.with_name("other")))
    assert decode_splits(prepare(source, config, ignore)) == parts


@pytest.mark.parametrize(
    "symbols, dtype", [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_ids_have_the_smallest_dtype_that_holds_the_vocabulary(symbols, dtype, write):
    characters = (chr(c) for c in range(32, symbols + 4000) if not 0xD800 <= c < 0xE000)
    alphabet = "".join(characters)[:symbols]
    tokens = prepare(write(alphabet), CHAR, ignore)
    assert tokens.tokenizer.vocab_size == symbols
    assert tokens.train.dtype == tokens.val.dtype == dtype
    assert "".join(decode_splits(tokens)) == alphabet


def test_the_same_text_under_another_name_is_opened_from_the_cache(write, cache):
    log = []
    first = prepare(write(PROSE), SMALL_BPE, log.append)
    files = {p: p.stat().st_mtime_ns for p in cache_entries(cache)[0].iterdir()}
    second = prepare(write(PROSE, "text/b.txt"), SMALL_BPE, log.append)
    assert len(log) == 1 and str(cache) in log[0] and first.name in log[0]
    assert {p: p.stat().st_mtime_ns for p in cache_entries(cache)[0].iterdir()} == files
    assert first.fingerprint == second.fingerprint and second.name.endswith("b.txt")
    assert decode_splits(first) == decode_splits(second)
    for ids in (second.train, second.val):
        assert isinstance(ids, np.memmap) and not ids.flags.writeable


def replace_a_word(file: Path) -> None:
    """Change the text, but neither its size nor its time."""
    stamp = file.stat()
    file.write_bytes(file.read_bytes().replace(b"dog", b"god"))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_a_changed_text_gives_other_tokens(write):
    source = write(PROSE)
    old = prepare(source, CHAR, ignore)
    replace_a_word(Path(source.path))
    assert "".join(decode_splits(prepare(source, CHAR, ignore))) == PROSE.replace("dog", "god")
    assert "".join(decode_splits(old)) == PROSE


TEXTS = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("c", "ab")]
SETTINGS = [CHAR, SMALL_BPE, replace(SMALL_BPE, vocab_size=281), replace(SMALL_BPE, pattern="gpt2")]
TOKENIZERS = [
    CharTokenizer(PROSE + "x"),
    CharTokenizer(PROSE + "y"),  # of the same size
    train_bpe([PROSE], 280, PATTERNS["code"]),
    train_bpe([PROSE[::-1]], 280, PATTERNS["code"]),
    imported_tokenizer(),
    imported_tokenizer(alphabet="x"),
    imported_tokenizer(alphabet="y"),
    imported_tokenizer(begin=True),
    imported_tokenizer(end=False),
    imported_tokenizer(lowercase=True),
]


def folder_of(tokens):
    return Path(tokens.train.filename).parent  # the cache entry


def test_every_text_field_setting_and_tokenizer_has_a_cache_entry_of_its_own(write, tmp_path):
    prose = write(PROSE)
    rows = write(json.dumps({"one": PROSE, "two": PROSE[::-1]}), "text/a.jsonl")
    cases = [(prose, config, None) for config in SETTINGS]
    cases += [(prose, CHAR, tokenizer) for tokenizer in TOKENIZERS]
    cases += [(replace(rows, field=field), CHAR, None) for field in ("one", "two")]
    for number, texts in enumerate(TEXTS):
        for n, text in enumerate(texts):
            write(text, f"texts_{number}/{n}.txt")
        cases.append((replace(prose, path=str(tmp_path / f"texts_{number}")), CHAR, None))

    prepared = [prepare(source, config, ignore, own) for source, config, own in cases]
    assert len({folder_of(tokens) for tokens in prepared}) == len(cases)
    for (source, config, own), tokens in zip(cases, prepared):
        again = prepare(source, config, pytest.fail, own)
        assert folder_of(again) == folder_of(tokens) and decode_splits(again) == decode_splits(
            tokens
        )
        assert own is None or again.tokenizer.to_json() == own.to_json()


def test_how_each_file_is_read_belongs_to_the_fingerprint(write):
    """Renaming a file makes its lines documents, or one text, without another byte or order."""
    lines = '{"text": "the cat"}\n{"text": "the dog"}\n' * 9
    fingerprints, texts = set(), []
    names = ("a.txt", "a.jsonl"), ("b.txt", "b.ndjson.gz"), ("c.py", "c.JSONL")
    for chosen in product(*names):
        for name in chosen:
            source = write(lines, f"{'-'.join(chosen)}/{name}")
        tokens = prepare(replace(source, path=str(Path(source.path).parent)), CHAR, ignore)
        fingerprints.add(tokens.fingerprint)
        texts.append(decode_splits(tokens))
    assert len(fingerprints) == len({*texts}) == 8


@pytest.mark.parametrize(
    ("copied", "is_noted"), [([], False), ([3], False), ([3, 5, 5], True), (range(90), True)]
)
def test_copied_files_are_counted_if_they_are_much_of_the_text(copied, is_noted, folder):
    texts = [f"{n:02} is the number of this document, and {n * n} its square.\n" for n in range(90)]
    texts += ["", "", ""] + [texts[n] for n in copied] + [PROSE]
    for _ in range(2):  # the second time from the cache
        tokens = prepare(folder(*texts), CHAR, ignore)
        assert tokens.copies == (len(copied) + 2 if is_noted else 0)
        assert any(f"{tokens.copies} files" in line for line in tokens.summary()) == is_noted


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, Path.unlink, lambda f: os.truncate(f, f.stat().st_size - 1)],
    ids=["a byte", "missing", "shorter"],
)
@pytest.mark.parametrize("name", data.tokens.TOKEN_FILES)
def test_a_damaged_cache_entry_is_reported_and_prepared_again(name, damage, write, cache):
    intact, log = decode_splits(prepare(write(PROSE), SMALL_BPE, ignore)), []
    (entry,) = cache_entries(cache)
    damage(entry / name)
    assert decode_splits(prepare(write(PROSE), SMALL_BPE, log.append)) == intact
    assert len(log) == 1 and name in log[0] and str(entry) in log[0]
    assert decode_splits(prepare(write(PROSE), SMALL_BPE, pytest.fail)) == intact


def test_only_what_a_read_only_cache_lacks_is_written_elsewhere(write, cache):
    intact, lines = decode_splits(prepare(write(PROSE), CHAR, ignore)), []
    writable_folder.cache_clear()
    with read_only(cache):
        tokens = prepare(write(PROSE), CHAR, pytest.fail)
        assert decode_splits(tokens) == intact and folder_of(tokens).parent == cache
        for text in (PROSE, PROSE.upper()):
            for _ in range(2):
                tokens = prepare(write(text), SMALL_BPE, lines.append)
                assert "".join(decode_splits(tokens)) == text
        assert len(lines) == 2 and str(folder_of(tokens)) in lines[1]
    flip_a_byte(cache_entries(cache)[0] / "val.bin")
    with read_only(cache):
        assert decode_splits(prepare(write(PROSE), CHAR, lines.append)) == intact
    assert len(lines) == 3 and str(cache) not in lines[2].partition("damaged")[0]


def test_the_fingerprint_of_a_text_does_not_change_between_versions_and_tokenizers(write):
    """Otherwise a run of another version could not be resumed, or compared across tokenizers."""
    for tokenizer in (CHAR, SMALL_BPE):
        tokens = prepare(write(PROSE), tokenizer, ignore)
        assert tokens.fingerprint[:16] == "f251800920f7e642"


@pytest.mark.parametrize("change", [replace_a_word, Path.unlink], ids=["same size", "gone"])
@pytest.mark.parametrize("function", ["build_tokenizer", "save_tokenizer"])
def test_text_that_changes_while_it_is_prepared_is_refused_and_not_kept(
    function, change, write, cache, monkeypatch
):
    source, original = write(PROSE), getattr(data.tokens, function)

    def change_before(*args):
        if Path(source.path).exists():
            change(Path(source.path))
        return original(*args)

    monkeypatch.setattr(data.tokens, function, change_before)
    with pytest.raises(UserError) as error:
        prepare(source, CHAR, ignore)
    assert source.path in str(error.value)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_the_tokenizer_of_another_model_is_used_and_characters_it_lacks_are_refused(write, cache):
    tokens = prepare(write(PROSE), CHAR, ignore, CharTokenizer(PROSE + "xyz"))
    assert "".join(decode_splits(tokens)) == PROSE and "z" in tokens.tokenizer.alphabet
    assert prepare(write(PROSE), CHAR, ignore).fingerprint == tokens.fingerprint
    assert len(cache_entries(cache)) == 2
    with pytest.raises(UserError) as error:
        prepare(write(PROSE + "on\ntat Ω\n"), CHAR, ignore, CharTokenizer(PROSE))
    assert "'Ω'" in str(error.value)


def test_what_a_killed_process_left_of_an_entry_is_removed(cache):
    (cache / "key.part").mkdir(parents=True)
    (cache / "key.part" / "left").touch()

    def write(file: Path) -> None:
        assert not list(file.parent.iterdir())
        file.touch()
        file.with_name("left").touch()

    assert open_or_write("key", ordinary_file, write, "", ignore) == cache / "key"
    assert not (cache / "key.part").exists()


def test_two_processes_that_prepare_the_same_text_do_it_once(write, cache, monkeypatch):
    source, waits, lines = write(PROSE), threading.Event(), []

    def log(line):
        lines.append(line)
        if "waiting" in line:
            waits.set()

    def save_while_another_waits(*args):
        other.start()
        assert waits.wait(60)
        save_tokenizer(*args)

    found = []
    other = threading.Thread(target=lambda: found.append(prepare(source, SMALL_BPE, log)))
    monkeypatch.setattr(data.tokens, "save_tokenizer", save_while_another_waits)
    monkeypatch.setattr(data.cache, "SILENT_WAIT_SECONDS", 0)
    prepared = prepare(source, SMALL_BPE, log)
    other.join()
    assert sum(f"kept in {cache}" in line for line in lines) == 1
    assert found[0].fingerprint == prepared.fingerprint and len(cache_entries(cache)) == 1


LINES = "".join(
    f"def name_{n}(x):\n    return {n} * x  # "
    f"{'é' * (n % 5)}\n\n{'word ' * (n % 3)}\nlast \r\n{n}\n"
    for n in range(400)
)


@pytest.mark.parametrize("text", [LINES, " ".join(LINES.split())], ids=["lines", "one line"])
@pytest.mark.parametrize("pattern", ["code", "gpt2"])
def test_text_in_many_pieces_has_the_tokens_of_the_text_in_one_piece(
    pattern, text, write, cache, monkeypatch
):
    config = replace(SMALL_BPE, pattern=pattern)
    one_piece = prepare(write(text), config, ignore)
    monkeypatch.setenv("GLASSGPT_CACHE", str(cache.with_name("other")))
    monkeypatch.setattr(data.corpus, "PIECE_CHARS", 300)
    many_pieces = prepare(write(text), config, ignore)
    assert np.array_equal(one_piece.train, many_pieces.train)
    assert np.array_equal(one_piece.val, many_pieces.val)


def test_only_a_few_pieces_are_read_before_the_first_tokens_are_taken():
    read = []
    pieces = (read.append(n) or SplitPiece(True, "a" * n, False) for n in range(1000))
    encoded = data.tokens.encode_pieces(lambda piece: piece.text, pieces)
    for n in range(100):
        piece, text = next(encoded)
        assert piece.text == text.result() == "a" * n
        assert len(read) - n <= 2 * os.cpu_count() + 1
