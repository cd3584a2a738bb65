"""Tokenizers convert any text to ids and back exactly."""

import os
from pathlib import Path
from unicodedata import normalize

import pytest
import requests
import tiktoken
import tiktoken.registry
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from vocabularies import TEXT, TOKENIZERS

from common.errors import UserError
from data.sources import find_stdlib_files
from data.tokenizer import (
    END_OF_TEXT,
    PATTERNS,
    BPETokenizer,
    CharTokenizer,
    encode_prompt,
    encode_with_bytes,
    load_tiktoken,
    load_tokenizer,
    normal_form_note,
    save_tokenizer,
    start_token,
    train_bpe,
)
from interop.tokenizer_export import export_tokenizer

TEST_DATA = os.environ.get("GLASSGPT_TEST_DATA")
TIKTOKEN_CACHE = Path(TEST_DATA or "", "tiktoken_cache")
needs_gpt2 = pytest.mark.skipif(
    not TEST_DATA or not TIKTOKEN_CACHE.is_dir(),
    reason="GLASSGPT_TEST_DATA does not name a folder with tiktoken_cache/",
)

SAMPLE = """def naïve(x: int) -> str:\r\n\treturn f"{x:>10}" * 3  # 12345 € 日本語 👩‍👩‍👧 \
it's\n\n\n    indented   \u00a0\u2003end"""
texts = st.text(st.characters(exclude_categories=["Cs"]))
with_end = st.lists(st.sampled_from([END_OF_TEXT, "<|", "|>", " ", "\n", "é"]) | texts).map("".join)

BYTES = train_bpe([], 257)
TRAINED = train_bpe([Path(__file__).read_text(encoding="utf-8")], 500)
BPE = pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])


@BPE
@given(text=with_end)
@example(text=SAMPLE)
@example(text="".join(map(chr, range(300))))
@example(text=f"a{END_OF_TEXT}{END_OF_TEXT} b")
def test_bpe_decodes_any_text_exactly_and_never_encodes_end_of_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.encode_array(text).tolist() == ids
    assert all(0 <= id < tokenizer.vocab_size and id != tokenizer.end_of_text for id in ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(text=st.text(st.sampled_from(TEXT), min_size=1))
@example(text=TEXT)
def test_the_tokens_of_a_text_stand_for_all_its_bytes(tokenizer, text):
    ids, sizes = encode_with_bytes(tokenizer, text)
    assert ids.tolist() == tokenizer.encode(text) and len(sizes) == len(ids)
    assert sizes.sum() == (len(text.encode()) if len(ids) else 0) and (sizes >= 0).all()


@pytest.mark.parametrize("form, other", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_text_in_another_normal_form_than_that_of_the_training_text_is_noticed(form, other):
    text = normalize(form, "été à la forêt, ça gèle: 가나다\n")
    converted = normalize(other, text)
    tokenizer = train_bpe([text * 20], 300)
    assert normal_form_note(tokenizer, text) is None
    assert form in normal_form_note(tokenizer, converted)
    with pytest.raises(UserError, match=f"to the form {form}"):
        CharTokenizer(text).encode(converted)
    with pytest.raises(UserError, match="leave it out"):
        CharTokenizer(text).encode(converted + "Ω")
    composing = TOKENIZERS["composed"]  # it normalizes texts itself
    assert normal_form_note(composing, text) == normal_form_note(composing, converted) is None


def test_a_vocabulary_has_the_requested_size_unless_the_text_has_too_few_pairs():
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)
    assert sorted(BYTES.token_bytes(id) for id in range(256)) == [bytes([b]) for b in range(256)]
    assert (TRAINED.vocab_size, TRAINED.end_of_text) == (500, 499)
    assert len({TRAINED.token_bytes(id) for id in range(499)}) == 499
    assert len(TRAINED.encode(SAMPLE)) < len(BYTES.encode(SAMPLE)) == len(SAMPLE.encode())
    assert 257 < train_bpe(["ab ab ab"], 5000).vocab_size < 270


@pytest.fixture(scope="module", params=sorted(PATTERNS))
def library_and_ours(request):
    """Return the encode function of the tokenizers library and our tokenizer, of one vocabulary."""
    texts = [path.read_text(encoding="utf-8") for path in find_stdlib_files()[:40]] + [
        SAMPLE * 3,
        "größer, größte; 漢字と漢字か\n" * 5,
    ]
    ours = train_bpe(texts, 3000, PATTERNS[request.param])
    theirs = Tokenizer.from_str(export_tokenizer(ours, 8)["tokenizer.json"])
    return lambda text: theirs.encode(text).ids, ours


@pytest.mark.slow
@given(text=texts | st.text("aáé\u0301 \n\t\r_-#1٣ßǆ漢👩\u200d\u00a0\u2028\x85\x1c"))
@example(text=SAMPLE)
def test_any_unicode_text_has_the_ids_of_the_tokenizers_library(library_and_ours, text):
    encode_in_library, ours = library_and_ours
    assert ours.encode(text) == encode_in_library(text)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("run", ["a", " ", "\n", "-", "7", "_", "漢"])
def test_runs_of_up_to_512_characters_have_tiktokens_ids_and_longer_ones_are_encoded_too(
    pattern, run
):
    tokenizer = train_bpe([SAMPLE + run * 300 + " x"] * 2, 400, PATTERNS[pattern])
    for n in (1, 255, 256, 257, 510):
        text = f"x {run * n} y{run * n}"
        assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)
    longer = run * 1_000_000 + "x"  # of white space, tiktoken alone would raise an error
    assert tokenizer.decode(tokenizer.encode(longer)) == longer


@given(text=texts)
@example(text=SAMPLE)
@example(text="\0\U0010ffff")
def test_the_character_tokenizer_decodes_any_text_exactly(text):
    tokenizer = CharTokenizer(text)
    ids, alphabet = tokenizer.encode(text), sorted(set(text))
    assert ids == [alphabet.index(c) for c in text] and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(alphabet) and tokenizer.end_of_text is None
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    with pytest.raises(UserError, match=r"'Ω'.*tokenizer=bpe"):
        CharTokenizer(text.replace("Ω", "")).encode(text + "Ω")


@pytest.mark.parametrize(
    "tokenizer",
    [
        BYTES,
        TRAINED,
        BPETokenizer(PATTERNS["gpt2"], [bytes([b]) for b in range(256)] + [None, b"de"], 256),
        CharTokenizer(SAMPLE + '\0\u2028"\\'),
    ],
    ids=["bytes", "trained", "gap", "char"],
)
def test_a_saved_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert loaded.decode(tokenizer.encode(SAMPLE)) == SAMPLE


@pytest.mark.parametrize("content", [None, b"#version: 0.2\n"], ids=["missing", "damaged"])
def test_a_vocabulary_that_cannot_be_read_is_named_with_the_cause(tmp_path, monkeypatch, content):
    def get(address):
        raise requests.ConnectionError(f"no network to {address}")

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    if content:
        (tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer=gpt2.*TIKTOKEN_CACHE_DIR.*no network to https"):
        load_tiktoken("gpt2")


@needs_gpt2
def test_gpt2_has_the_ids_of_tiktoken(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(TIKTOKEN_CACHE))
    ours, theirs = load_tiktoken("gpt2"), tiktoken.get_encoding("gpt2")
    assert ours.vocab_size == theirs.n_vocab == 50257
    assert ours.end_of_text == theirs.eot_token == 50256
    for text in (SAMPLE * 20, Path(__file__).read_text(encoding="utf-8"), f"a{END_OF_TEXT}", ""):
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text
    assert all(
        ours.token_bytes(id) == theirs.decode_single_token_bytes(id) for id in range(0, 50256, 97)
    )
    save_tokenizer(ours, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(SAMPLE) == theirs.encode_ordinary(SAMPLE)


def test_a_prompt_begins_with_begin_of_text_or_a_start_token():
    assert start_token(BYTES) == 256 and encode_prompt(BYTES, "") == [256]
    assert encode_prompt(BYTES, "ab") == BYTES.encode("ab")
    assert [start_token(CharTokenizer(text)) for text in ("ba", "b\na", "\tb\na")] == [0, 0, 1]
