"""Text to ids and back, exactly, whatever the text."""

import base64
import json
import os
import random
import time
from pathlib import Path

import pytest
import tiktoken
import tiktoken.registry
from hypothesis import example, given
from hypothesis import strategies as st
from models import few
from tokenizers import Tokenizer

from config import TokenizerConfig, UserError
from data.corpus import stdlib_files
from data.learn import KINDS, LONGEST, bounded
from data.tokenizer import (
    END_OF_TEXT,
    PATTERNS,
    BPETokenizer,
    CharTokenizer,
    build_tokenizer,
    hf_files,
    load_tokenizer,
    of_tiktoken,
    save_tokenizer,
    train_bpe,
)

TEST_DATA = os.environ.get("GLASSGPT_TEST_DATA")
TIKTOKEN_CACHE = Path(TEST_DATA or "", "tiktoken_cache")
needs_gpt2 = pytest.mark.skipif(not TEST_DATA or not TIKTOKEN_CACHE.is_dir(),
                                reason="GLASSGPT_TEST_DATA names no folder with tiktoken_cache/")

SAMPLE = """def naïve(x: int) -> str:\r\n\treturn f"{x:>10}" * 3  # 12345 € 日本語 👩‍👩‍👧 \
it's\n\n\n    indented   \u00a0\u2003end"""
texts = st.text(st.characters(exclude_categories=["Cs"]))
with_end = st.lists(st.sampled_from([END_OF_TEXT, "<|", "|>", " ", "\n", "é"]) | texts).map("".join)

BYTES = train_bpe([], 257)
TRAINED = train_bpe([Path(__file__).read_text(encoding="utf-8")], 500)
BPE = pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])


# --- byte-pair encoding ---------------------------------------------------------------------------


@BPE
@given(text=with_end)
@example(text=SAMPLE)
@example(text="".join(map(chr, range(300))))
def test_bpe_gives_any_text_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_array(text)) == text


@BPE
@given(text=with_end)
@example(text=END_OF_TEXT)
@example(text=f"a{END_OF_TEXT}{END_OF_TEXT} b")
def test_no_text_produces_the_end_of_text_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids
    assert all(0 <= id < tokenizer.vocab_size for id in ids)


@BPE
@given(text=with_end)
@example(text=SAMPLE)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, text):
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@BPE
@given(text=with_end)
@example(text=f"a{END_OF_TEXT} b")
def test_the_array_holds_the_same_ids_as_the_list(tokenizer, text):
    assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)


@few  # a process learns each
@given(corpus=st.lists(texts, max_size=3), text=texts)
def test_a_vocabulary_trained_on_anything_encodes_anything(corpus, text):
    tokenizer = train_bpe(corpus, 270)
    assert 257 <= tokenizer.vocab_size <= 270
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_smallest_vocabulary_is_the_bytes_and_the_end_of_text():
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)
    assert sorted(BYTES.token_bytes(id) for id in range(256)) == [bytes([b]) for b in range(256)]
    assert len(BYTES.encode(SAMPLE)) == len(SAMPLE.encode())


def test_a_larger_vocabulary_has_the_size_asked_for_and_needs_fewer_tokens():
    assert (TRAINED.vocab_size, TRAINED.end_of_text) == (500, 499)
    assert len({TRAINED.token_bytes(id) for id in range(499)}) == 499
    assert len(TRAINED.encode(SAMPLE)) < len(BYTES.encode(SAMPLE))


def test_a_text_with_too_few_pairs_gives_a_smaller_vocabulary():
    assert 257 < train_bpe(["ab ab ab"], 5000).vocab_size < 270


def test_training_twice_on_the_same_text_gives_the_same_vocabulary():
    assert train_bpe([SAMPLE * 3], 300).to_json() == train_bpe([SAMPLE * 3], 300).to_json()


# --- trained by one library, run by another -------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(PATTERNS))
def both(request):
    """The same vocabulary in tokenizers, which trained it, and in tiktoken: what encodes a text
    there, and ours."""
    texts = [path.read_text(encoding="utf-8")
             for path in stdlib_files()[:40]] + [SAMPLE * 3, "größer, größte; 漢字と漢字か\n" * 5]
    ours = train_bpe(texts, 3000, PATTERNS[request.param])
    theirs = Tokenizer.from_str(hf_files(ours, 8)["tokenizer.json"])
    return lambda text: theirs.encode(text).ids, ours


@pytest.mark.slow
def test_a_large_text_has_the_ids_that_the_library_which_trained_the_vocabulary_gives_it(both):
    theirs, ours = both
    for path in stdlib_files()[::12]:
        text = path.read_text(encoding="utf-8")
        assert ours.encode(text) == theirs(text), path


@pytest.mark.slow
@given(text=texts | st.text("aáé\u0301 \n\t\r_-#1٣ßǆ漢👩\u200d\u00a0\u2028\x85\x1c"))
@example(text=SAMPLE)
def test_any_unicode_has_the_ids_that_the_library_which_trained_the_vocabulary_gives_it(both, text):
    theirs, ours = both
    assert ours.encode(text) == theirs(text)


def test_gpt2s_pattern_splits_as_gpt2_does():
    trained = train_bpe(["snake_case snake_case it's it's  two"] * 3, 400, PATTERNS["gpt2"])
    assert [trained.token_bytes(id)
            for id in trained.encode("snake_case it's")] == [b"snake", b"_", b"case", b" it", b"'s"]
    ours = train_bpe(["snake_case snake_case"] * 3, 400)
    assert [ours.token_bytes(id) for id in ours.encode("snake_case")] == [b"snake_case"]


@pytest.mark.slow
def test_a_vocabulary_past_65536_is_learned_and_gives_text_back():
    letters = random.Random(0)
    words = " ".join("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=7))
                     for _ in range(60_000)) * 2
    trained = train_bpe([words], 70_000)
    assert trained.vocab_size == 70_000
    assert trained.decode(trained.encode(words[:5000])) == words[:5000]
    assert max(trained.encode_array(words)) > 65_536


def test_ids_that_no_text_has_are_left_free():
    """As in some of tiktoken's vocabularies, where end-of-text stands among the others, or after a
    gap."""
    bytes_ = [bytes([b]) for b in range(256)]
    for tokens, end in (([*bytes_, None, b"ab"], 256), ([*bytes_, b"ab"], 300)):
        tokenizer = BPETokenizer(PATTERNS["code"], tokens, end)
        ab = tokens.index(b"ab")
        assert tokenizer.encode("cab") == [99, ab] and tokenizer.decode([99, ab]) == "cab"
        assert (tokenizer.end_of_text, tokenizer.vocab_size) == (end, max(end + 1, ab + 1))
        assert b"".join(map(tokenizer.token_bytes,
                            range(tokenizer.vocab_size))) == b"".join(bytes_) + b"ab"
        assert tokenizer.decode(range(97, tokenizer.vocab_size)).count(END_OF_TEXT) == 1


def test_the_end_of_text_token_stands_for_no_bytes():
    assert TRAINED.token_bytes(TRAINED.end_of_text) == b""


@pytest.mark.parametrize("run", ["a", " ", "\n", " \n", "9", "é", "日本", "-"])
def test_a_long_run_of_one_sign_is_encoded_fast(run):
    text, began = run * 200_000, time.perf_counter()
    assert TRAINED.decode(TRAINED.encode(text)) == text
    assert time.perf_counter() - began < 60


runs = st.lists(st.tuples(st.sampled_from("aé9- \n漢!٣"), st.sampled_from(
    [1, 2, 255, 256, 257, 511, 512, 513, 1024, 1025, 2000])), max_size=8)


@pytest.mark.slow
@given(runs=runs)
def test_runs_are_cut_after_each_512_characters_from_their_beginning_and_nothing_else_is(runs):
    text, cuts, at = "".join(c * n for c, n in runs), set(), 0
    for run in sorted((m for kind in KINDS for m in kind.finditer(text)), key=lambda m: m.start()):
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


def unbroken(kind: str, n: int) -> str:
    draw = random.Random(0)
    return {"chinese": lambda: "".join(chr(draw.randrange(0x4e00, 0x5e00)) for _ in range(n // 3)),
            "genome": lambda: "".join(draw.choices("ACGT", k=n))}.get(kind, lambda: kind * n)()


@pytest.mark.slow
@pytest.mark.parametrize("kind, pattern", [("a", "code"), ("-", "gpt2"), ("chinese", "code"), *(
    pytest.param(kind, pattern, marks=pytest.mark.soak)
    for kind in ("a", "-", " ", "\n", "chinese", "genome") for pattern in sorted(PATTERNS)
    if (kind, pattern) not in (("a", "code"), ("-", "gpt2"), ("chinese", "code")))])
def test_unbroken_text_takes_time_in_proportion_to_its_length(pattern, kind):
    seconds = []
    for n in (500_000, 4_000_000):
        text, began = unbroken(kind, n) + "x", time.process_time()
        tokenizer = train_bpe([text[at:at + 100_000] for at in range(0, len(text), 100_000)], 300,
                              PATTERNS[pattern])
        tokenizer.encode(text)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 2 * 8 * (seconds[0] + 0.1)


@pytest.mark.slow
def test_more_than_a_little_text_gives_the_vocabulary_that_it_gives_here(monkeypatch):
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()[:30]]
    apart = train_bpe(texts, 600).to_json()
    monkeypatch.setattr("data.learn.LITTLE", 1 << 40)
    assert train_bpe(texts, 600).to_json() == apart


def test_what_goes_wrong_as_texts_are_read_is_raised(monkeypatch):
    def texts():
        yield "some words " * 100_000
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        train_bpe(texts(), 300)


# --- characters -----------------------------------------------------------------------------------


@given(text=texts)
@example(text=SAMPLE)
@example(text="\0\U0010ffff")
def test_characters_give_the_text_back_exactly(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(set(text))
    assert len(ids) == len(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_characters_are_numbered_in_the_order_of_the_code_points():
    assert CharTokenizer("cab😀é").encode("abcé😀") == [0, 1, 2, 3, 4]
    assert CharTokenizer("ab").end_of_text is None


@pytest.mark.parametrize("text, character, position", [("abz", "'z'", 2), ("😀a", "'😀'", 0),
                                                       ("ab\nab", r"'\n'", 2), ("aAb", "'A'", 1)])
def test_an_unknown_character_is_named_with_its_position(text, character, position):
    with pytest.raises(UserError) as error:
        CharTokenizer("abc").encode(text)
    assert f"the character {character} at position {position} is not among the 3" in str(
        error.value)


@given(alphabet=texts, text=texts)
def test_a_text_is_encoded_or_its_first_unknown_character_is_named(alphabet, text):
    unknown = [at for at, c in enumerate(text) if c not in alphabet]
    if unknown:
        with pytest.raises(UserError, match=f"at position {unknown[0]} "):
            CharTokenizer(alphabet).encode(text)
    else:
        assert CharTokenizer(alphabet).decode(CharTokenizer(alphabet).encode(text)) == text


def test_an_empty_text_has_no_tokens():
    assert CharTokenizer("ab").encode("") == CharTokenizer("").encode("") == BYTES.encode("") == []


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED, BPETokenizer(
    PATTERNS["gpt2"], [bytes([b]) for b in range(256)] + [None, b"de"], 256),
                                       CharTokenizer(SAMPLE + "\0\u2028\"\\")],
                         ids=["bytes", "trained", "gap", "char"])
def test_a_kept_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert loaded.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_a_pattern_that_backtracks_without_end_is_a_sentence(capfd):
    tokenizer = BPETokenizer(r"(?:a|aa)+(?!c)(?=b)|[\s\S]", [bytes([b]) for b in range(256)])
    with pytest.raises(UserError, match="splitting pattern fails on 'aaaa"):
        tokenizer.encode("a" * 60)


def test_a_kept_tokenizer_is_plain_json(tmp_path):
    save_tokenizer(TRAINED, tmp_path / "tokenizer.json")
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="ascii"))
    assert saved["kind"] == "bpe" and len(saved["tokens"]) == TRAINED.vocab_size - 1


@given(keep=st.floats(0, 0.999))
def test_a_tokenizer_file_cut_short_is_refused(keep, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "tokenizer.json"
    save_tokenizer(TRAINED, path)
    path.write_bytes(path.read_bytes()[:int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"tokenizer\.json does not hold a tokenizer"):
        load_tokenizer(path)


def bpe_file(**changed):
    return json.dumps({**BYTES.to_json(), **changed})


DAMAGED = {
    "nothing": "", "another language": "(dp0", "no object": "[]", "null": "null", "no kind": "{}",
    "another kind": '{"kind": "words"}',
    "no alphabet": '{"kind": "char"}', "a number as alphabet": '{"kind": "char", "alphabet": 5}',
    "a list as alphabet": '{"kind": "char", "alphabet": ["ab", "c"]}',
    "no pattern": '{"kind": "bpe", "tokens": []}', "a broken pattern": bpe_file(pattern="("),
    "a number as pattern": bpe_file(pattern=5),
    "an empty pattern": bpe_file(pattern=""),
    "a pattern that can match nothing": bpe_file(pattern=r"x|\d*"),
    "a pattern that leaves letters out": bpe_file(pattern=r"\d+|\s+"),
    "no tokens": bpe_file(tokens=[]), "tokens that are no base64": bpe_file(tokens=["*"]),
    "a number as token": bpe_file(tokens=[5]),
    "bytes that are missing": bpe_file(tokens=BYTES.to_json()["tokens"][:100]),
    "a token twice": bpe_file(tokens=[*BYTES.to_json()["tokens"], base64.b64encode(b"a").decode()]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_tokenizer_file_is_refused(damage, tmp_path):
    (tmp_path / "tokenizer.json").write_text(DAMAGED[damage])
    with pytest.raises(ValueError, match=r"tokenizer\.json does not hold a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("write", [lambda path: path.write_bytes(b"\xff\xfe"),
                                   lambda path: path.mkdir(), lambda path: None],
                         ids=["not UTF-8", "a folder", "missing"])
def test_a_tokenizer_file_that_cannot_be_read_is_refused(write, tmp_path):
    write(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json does not hold a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


# --- GPT-2 ----------------------------------------------------------------------------------------


@pytest.fixture
def gpt2_cache(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(TIKTOKEN_CACHE))


@needs_gpt2
def test_gpt2_is_tiktokens_own_encoding(gpt2_cache, tmp_path):
    ours, theirs = of_tiktoken("gpt2"), tiktoken.get_encoding("gpt2")
    assert ours.vocab_size == theirs.n_vocab == 50257
    assert ours.end_of_text == theirs.eot_token == 50256
    for text in (SAMPLE, SAMPLE * 20, Path(__file__).read_text(encoding="utf-8"), f"a{END_OF_TEXT}",
                 ""):
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text
    assert all(ours.token_bytes(id) == theirs.decode_single_token_bytes(id)
               for id in range(0, 50256, 97))
    save_tokenizer(ours, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(SAMPLE) == theirs.encode_ordinary(
        SAMPLE)


@needs_gpt2
def test_the_configuration_gives_gpt2_without_reading_the_text(gpt2_cache):
    unread = iter(["unread"])
    assert build_tokenizer(TokenizerConfig(name="gpt2"), unread, unread).vocab_size == 50257
    assert list(unread) == ["unread"]


def test_gpt2_without_a_network_names_the_folder_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    began = time.perf_counter()
    with pytest.raises(UserError, match="set TIKTOKEN_CACHE_DIR") as error:
        of_tiktoken("gpt2")
    assert str(tmp_path / "empty") in str(error.value)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - began < 60


# --- what the tokenizer learns from ---------------------------------------------------------------


def test_bpe_learns_from_the_training_split_alone():
    train, config = ["the cat sat on the mat " * 20], TokenizerConfig(name="bpe", vocab_size=300)
    alone = build_tokenizer(config, train, train)
    assert build_tokenizer(config, [*train, "zyxwvut " * 500], train).to_json() == alone.to_json()
    assert not any(b"zy" in alone.token_bytes(id) for id in range(alone.end_of_text))


def test_the_alphabet_is_that_of_the_whole_text():
    assert build_tokenizer(TokenizerConfig(name="char"), ["ab", "cé"], ["ab"]).alphabet == "abcé"


def test_bpe_has_1024_tokens_where_nothing_is_said():
    numbers = " ".join(f"{a}{b}{c}" for a in "abcdefghijkl" for b in "mnopqrstuvwx"
                       for c in "aeiouy") + " "
    assert build_tokenizer(TokenizerConfig(name="bpe"), [], [numbers * 2]).vocab_size == 1024


@given(text=texts)
@example(text=SAMPLE)
def test_the_pattern_leaves_no_character_out(text):
    pieces = tiktoken.Encoding("bytes", pat_str=PATTERNS["code"], special_tokens={},
                               mergeable_ranks={bytes([b]): b for b in range(256)})
    assert bytes(pieces.encode_ordinary(text)) == text.encode()


def test_a_bpe_tokenizer_merges_in_the_order_of_its_tokens():
    bytes_ = [bytes([b]) for b in range(256)]
    assert BPETokenizer(PATTERNS["code"], [*bytes_, b"bc", b"ab"]).encode("abc") == [97, 256]
    assert BPETokenizer(PATTERNS["code"], [*bytes_, b"ab", b"bc"]).encode("abc") == [256, 99]
