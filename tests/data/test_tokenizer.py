"""Text to ids and back, exactly, whatever the text."""

import json
import os
import re
from pathlib import Path

import pytest
import tiktoken
import tiktoken.registry
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import UserError
from data.corpus import stdlib_files
from data.tokenizer import (
    END_OF_TEXT,
    LONGEST,
    PATTERNS,
    BPETokenizer,
    CharTokenizer,
    bounded,
    first_token,
    hf_files,
    load_tokenizer,
    of_tiktoken,
    prompt_ids,
    save_tokenizer,
    train_bpe,
)

TEST_DATA = os.environ.get("GLASSGPT_TEST_DATA")
TIKTOKEN_CACHE = Path(TEST_DATA or "", "tiktoken_cache")
needs_gpt2 = pytest.mark.skipif(
    not TEST_DATA or not TIKTOKEN_CACHE.is_dir(),
    reason="GLASSGPT_TEST_DATA names no folder with tiktoken_cache/",
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
def test_bpe_gives_any_text_back_exactly_and_no_text_produces_end_of_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.encode_array(text).tolist() == ids
    assert all(0 <= id < tokenizer.vocab_size and id != tokenizer.end_of_text for id in ids)


def test_a_vocabulary_has_the_size_asked_for_unless_the_text_has_too_few_pairs():
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)
    assert sorted(BYTES.token_bytes(id) for id in range(256)) == [bytes([b]) for b in range(256)]
    assert (TRAINED.vocab_size, TRAINED.end_of_text) == (500, 499)
    assert len({TRAINED.token_bytes(id) for id in range(499)}) == 499
    assert len(TRAINED.encode(SAMPLE)) < len(BYTES.encode(SAMPLE)) == len(SAMPLE.encode())
    assert 257 < train_bpe(["ab ab ab"], 5000).vocab_size < 270


@pytest.fixture(scope="module", params=sorted(PATTERNS))
def both(request):
    """The same vocabulary in tokenizers, which trained it, and in tiktoken: what encodes a text
    there, and ours."""
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()[:40]] + [
        SAMPLE * 3,
        "größer, größte; 漢字と漢字か\n" * 5,
    ]
    ours = train_bpe(texts, 3000, PATTERNS[request.param])
    theirs = Tokenizer.from_str(hf_files(ours, 8)["tokenizer.json"])
    return lambda text: theirs.encode(text).ids, ours


@pytest.mark.slow
@given(text=texts | st.text("aáé\u0301 \n\t\r_-#1٣ßǆ漢👩\u200d\u00a0\u2028\x85\x1c"))
@example(text=SAMPLE)
def test_any_unicode_has_the_ids_that_the_library_which_trained_the_vocabulary_gives_it(both, text):
    theirs, ours = both
    assert ours.encode(text) == theirs(text)


runs = st.lists(
    st.tuples(
        st.sampled_from("aé9- \n漢!٣"),
        st.sampled_from([1, 2, 255, 256, 257, 511, 512, 513, 1024, 1025, 2000]),
    ),
    max_size=8,
)


@pytest.mark.slow
@given(runs=runs)
def test_runs_are_cut_after_each_512_characters_from_their_beginning_and_nothing_else_is(runs):
    text, cuts, at = "".join(c * n for c, n in runs), set(), 0
    for run in re.finditer(r"\s+|\S+", text):
        cuts |= set(range(run.start() + LONGEST, run.end(), LONGEST))
    for part in bounded(text)[:-1]:
        at += len(part)
        cuts.remove(at)
    assert not cuts and "".join(bounded(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("run", ["a", " ", "\n", "-", "7", "_", "漢"])
def test_runs_up_to_the_bound_have_the_ids_of_tiktoken_and_longer_ones_are_taken_too(pattern, run):
    tokenizer = train_bpe([SAMPLE + run * 300 + " x"] * 2, 400, PATTERNS[pattern])
    for n in (1, 255, 256, 257, 510):
        text = f"x {run * n} y{run * n}"
        assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)
    longer = run * 1_000_000 + "x"  # of white space, tiktoken alone would raise an error
    assert tokenizer.decode(tokenizer.encode(longer)) == longer


@given(text=texts)
@example(text=SAMPLE)
@example(text="\0\U0010ffff")
def test_characters_give_the_text_back_exactly(text):
    tokenizer = CharTokenizer(text)
    ids, alphabet = tokenizer.encode(text), sorted(set(text))
    assert ids == [alphabet.index(c) for c in text] and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(alphabet) and tokenizer.end_of_text is None
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(alphabet=texts, text=texts)
@example(alphabet="abc", text="ab\nab")
def test_a_text_is_encoded_or_its_first_unknown_character_is_shown(alphabet, text):
    unknown = [c for c in text if c not in alphabet]
    if unknown:
        with pytest.raises(UserError) as error:
            CharTokenizer(alphabet).encode(text)
        assert f"the character {unknown[0]!r} in " in str(error.value)
        assert f" is not among the {len(set(alphabet))} that" in str(error.value)
    else:
        assert CharTokenizer(alphabet).decode(CharTokenizer(alphabet).encode(text)) == text


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
def test_a_kept_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert loaded.decode(tokenizer.encode(SAMPLE)) == SAMPLE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        json.dumps(TRAINED.to_json())[:-9].encode(),
        b"(dp0",
        b"[]",
        b"null",
        b"{}",
        b'{"kind": "words"}',
        b'{"kind": "char"}',
        b"\xff\xfe",
        b'{"kind": "char", "alphabet": 5}',
        b'{"kind": "bpe", "tokens": []}',
        *(
            json.dumps({**BYTES.to_json(), **changed}).encode()
            for changed in ({"pattern": "("}, {"pattern": 5}, {"tokens": ["*"]}, {"tokens": [5]})
        ),
        None,
    ],
)
def test_a_file_that_holds_no_tokenizer_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json does not hold a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


@needs_gpt2
def test_gpt2_is_tiktokens_own_encoding(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(TIKTOKEN_CACHE))
    ours, theirs = of_tiktoken("gpt2"), tiktoken.get_encoding("gpt2")
    assert ours.vocab_size == theirs.n_vocab == 50257
    assert ours.end_of_text == theirs.eot_token == 50256
    for text in (
        SAMPLE,
        SAMPLE * 20,
        Path(__file__).read_text(encoding="utf-8"),
        f"a{END_OF_TEXT}",
        "",
    ):
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text
    assert all(
        ours.token_bytes(id) == theirs.decode_single_token_bytes(id) for id in range(0, 50256, 97)
    )
    save_tokenizer(ours, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(SAMPLE) == theirs.encode_ordinary(
        SAMPLE
    )


def test_gpt2_without_a_network_names_the_folder_to_set(tmp_path, monkeypatch):
    def unreachable(url):
        raise ConnectionError(url)

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr("tiktoken.load.read_file", unreachable)
    with pytest.raises(UserError, match=r"the vocabulary gpt2 .*set TIKTOKEN_CACHE_DIR") as error:
        of_tiktoken("gpt2")
    assert "\n" not in str(error.value)


def test_a_prompt_begins_as_a_document_does():
    assert first_token(BYTES) == 256 and prompt_ids(BYTES, "") == [256]
    assert prompt_ids(BYTES, "ab") == BYTES.encode("ab")
    assert [first_token(CharTokenizer(text)) for text in ("ba", "b\na", "\tb\na")] == [0, 0, 1]
