"""The model in the page against the model in torch; the tokenizers."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import in_browser, lively, page_weights, random_tokens, small

from data.tokenizer import (
    PATTERNS,
    CharTokenizer,
    decode_characters,
    load_tiktoken,
    train_bpe,
)
from generation.decoder import cut, window_start
from generation.known_settings import MODEL_NUMBERS, find_unknown_setting
from glass.heads.measure import scores
from glass.page.embedded_model import CAN_RUN
from variants import build_model


def ask(tab, model, *questions: dict) -> list:
    """Return what the page answers to questions about a model, one after the other."""
    return tab.evaluate("engine.ask", [vars(model.config), page_weights(model), questions])


def test_the_page_ends_a_text_at_the_end_of_text_token(engine_tab):
    model, ids = lively(build_model(small(vocab_size=23))), random_tokens(12)
    greedy = model.generate(ids[None], 6, temperature=0)[0].tolist()
    end = next(k for k in range(13, 18) if greedy[k] not in greedy[12:k])
    question = {"request": "continue", "ids": ids.tolist(), "off": [], "hidden": []}
    question |= {"temperature": 0, "maxTokens": 6, "endOfText": greedy[end]}
    (parts,) = ask(engine_tab, model, question)
    assert parts[-1] == {"ids": greedy[:end], "isComplete": True}
    assert [len(part["ids"]) for part in parts[:-1]] == list(range(13, end + 1))


# Another value of each number, with the settings beside which it has an effect.
OTHER_NUMBERS = {
    "vocab_size": {"vocab_size": 31},
    "block_size": {"block_size": 13},
    "n_layer": {"n_layer": 3},
    "n_head": {"n_head": 8},
    "n_kv_head": {"n_kv_head": 2},
    "n_embd": {"n_embd": 20},
    "head_dim": {"head_dim": 6},
    "value_head_dim": {"value_head_dim": 3},
    "mlp_hidden": {"mlp_hidden": 11},
    "mlp_ratio": {"mlp_ratio": 1.5},
    "norm_eps": {"norm_eps": 0.5},
    "rope_theta": {"position": "rope", "rope_theta": 100.0},
    "rope_factor": {"position": "rope", "rope_factor": 4.0},
    "rope_share": {"position": "rope", "rope_share": 0.5},
    "rope_trained": {"position": "rope", "rope_factor": 4.0, "rope_trained": 8},
    "dropout": {"dropout": 0.5},
    "vocab_multiple": {"vocab_multiple": 64},
}
LISTED_VALUES = [{name: value} for name, values in CAN_RUN.items() for value in values]


def test_every_number_that_a_page_takes_as_it_is_is_compared():
    of_ngrams = {"ngrams", "ngram_size", "ngram_count", "ngram_rows"}  # which a page cannot run
    assert OTHER_NUMBERS.keys() | of_ngrams == MODEL_NUMBERS


@pytest.mark.parametrize("changes", [*LISTED_VALUES, *OTHER_NUMBERS.values()], ids=str)
def test_the_page_computes_the_logits_of_each_setting_that_it_can_run(engine_tab, changes):
    model, ids = lively(build_model(small(**changes))), random_tokens(12)
    assert find_unknown_setting(model.config, CAN_RUN) is None
    question = {"request": "logits", "ids": ids.tolist(), "off": [], "hidden": []}
    (logits,) = ask(engine_tab, model, question)
    with torch.no_grad():
        expected = model(ids[None])[0][0].numpy()
    assert np.reshape(logits, expected.shape) == pytest.approx(expected, abs=5e-4, rel=2e-4)


# Biases and an output layer of its own are read from the weights.
@pytest.mark.parametrize("name", sorted(CAN_RUN.keys() - {"bias", "tie_embeddings"}))
def test_the_page_names_a_setting_whose_value_it_does_not_know(engine_tab, name):
    model = lively(build_model(small()))
    setattr(model.config, name, "invented")
    question = {"request": "logits", "ids": [1, 2, 3], "off": [], "hidden": []}
    with pytest.raises(Exception, match=f"model.{name}=invented"):
        ask(engine_tab, model, question)


@in_browser
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 20),
    st.none() | st.integers(0, 3),
    st.booleans(),
)
@example([1, *range(2, 21)], 16, 1, False)
def test_the_page_cuts_a_text_as_python_does(engine_tab, ids, limit, begin_of_text, is_continued):
    start = window_start(len(ids), limit) if is_continued else max(0, len(ids) - limit)
    expected = cut(torch.tensor([ids]), start, begin_of_text)[0].tolist()
    question = [ids, {"maxTokens": limit, "beginOfText": begin_of_text}, is_continued]
    places = engine_tab.evaluate("question => engine.placesRead(...question)", question)
    assert [ids[place] for place in places] == expected and len(places) <= limit
    assert places[1:] == list(range(start, len(ids)))[1:]


@pytest.mark.slow
def test_the_page_draws_tokens_as_often_as_their_probability_at_a_temperature(engine_tab):
    model = lively(build_model(small(vocab_size=40)))  # 17 ids are no tokens
    ids = random_tokens(12)
    # The random numbers are evenly spaced.
    engine_tab.evaluate("let k = 0; Math.random = () => (k++ + 0.5) / 200")
    question = {"request": "continue", "ids": ids.tolist(), "off": [], "hidden": []}
    question |= {"temperature": 0.7, "maxTokens": 1}
    answers = ask(engine_tab, model, *[question] * 200)
    drawn = [part["ids"][-1] for (part,) in answers]
    with torch.no_grad():
        probabilities = (model(ids[None])[0][0, -1, :23] / 0.7).softmax(dim=-1).numpy()
    assert np.bincount(drawn, minlength=23) == pytest.approx(200 * probabilities, abs=2)


def test_the_framed_cells_are_those_that_the_scores_read(engine_tab):
    diagonals = engine_tab.evaluate("engine.scoredDiagonals(8)")
    assert {diagonal["score"] for diagonal in diagonals} == {"duplicate token", "induction"}
    queries = np.arange(8, 16)
    for diagonal in diagonals:
        A = np.zeros((1, 1, 16, 16))  # (P, H, T, T)
        A[..., queries, queries - diagonal["distance"]] = 1
        compute_score = getattr(scores, diagonal["score"].replace(" ", "_"))
        assert compute_score(A, np.zeros_like(A), np.array([8])).item() == 1


BPE = {
    name: train_bpe(["def f(x):\n    return 'é 漢字' * 12\n" * 9], 300, pattern)
    for name, pattern in PATTERNS.items()
}
CHARACTERS = "ab é漢😀\n"
texts = (
    st.text()
    | st.text("aé 漢\n\t'😀\x1c\x85\u2028\u3000don 12_")
    | st.builds(
        lambda a, n, b: a * n + b,
        st.sampled_from(["a", " ", "😀", "\x1c"]),
        st.integers(500, 1100),
        st.text(max_size=9),
    )
)


@pytest.fixture(params=["char", *PATTERNS, "tiktoken"])
def tokenizer(request):
    if request.param == "char":
        return CharTokenizer(CHARACTERS)
    if request.param == "tiktoken":
        folder = request.getfixturevalue("test_data") / "tiktoken_cache"
        request.getfixturevalue("monkeypatch").setenv("TIKTOKEN_CACHE_DIR", str(folder))
        return load_tiktoken("gpt2")
    return BPE[request.param]


@pytest.mark.slow
def test_the_page_encodes_and_decodes_as_python_does(engine_tab, tokenizer):
    is_char = isinstance(tokenizer, CharTokenizer)
    create = "saved => { window.tokenizer = engine.createTokenizer(saved) }"
    engine_tab.evaluate(create, tokenizer.to_json())

    @given(st.text(CHARACTERS) if is_char else texts)
    @example("")
    @example("a" if is_char else "a\r\n\r\n  b\ufeffc")
    @example("a" if is_char else "😀\ufffd日")
    def check(text):
        ids = engine_tab.evaluate("text => tokenizer.encode(text)", text)
        assert ids == tokenizer.encode(text), json.dumps(text)
        for start, end in ((0, None), (1, None), (0, -1), (1, -1)):
            part = [*ids[start:end], *tokenizer.special]
            expected = decode_characters(tokenizer, part)
            assert engine_tab.evaluate("ids => tokenizer.decode(ids)", part) == expected
            assert expected in text
        assert decode_characters(tokenizer, ids) == text

    check()
    if not is_char:
        assert engine_tab.evaluate("tokenizer.encode('a\\ud83d')") == tokenizer.encode("a\ud83d")
