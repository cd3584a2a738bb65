"""The requests to a model in Python against direct computations, and their checks."""

import gc
import json
import math
import weakref

import numpy as np
import pytest
import torch
from asking import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB_SIZE, captured_with, configs, few, lively, random_tokens, small
from pages import HOSTILE, make_run, read_back

from common.errors import UserError
from data.tokenizer import CharTokenizer
from generation.decoder import window_start
from glass.heads.measure.capture import capture, value_norms
from glass.heads.measure.interventions import NO_INTERVENTIONS, Interventions
from glass.heads.measure.text_pass import MAX_ATTENTION_WEIGHTS, max_tokens
from glass.live.explorer import render_page
from glass.live.requests import MODEL_REQUESTS, TOKENIZER_REQUESTS
from glass.live.session import Session
from glass.page.describe import describe_scores
from glass.page.write import write_page
from model import GPT
from run.row import Head
from run.run_dir import RunDir
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuvw")
T = 12  # tokens of most texts here


def make_session(model: GPT) -> Session:
    return Session(model, TOKENIZER, "model", step=3)


def text_input(ids, off=(), hidden=()) -> dict:
    return {"step": 3, "ids": [*ids], "off": [*off], "hidden": [*hidden]}


@torch.no_grad()
def run(model: GPT, ids, interventions=NO_INTERVENTIONS) -> tuple[np.ndarray, torch.Tensor]:
    """Log-probabilities (T, V) and attention weights (L, H, T, T) without a cache."""
    forward = captured_with(model, torch.tensor(ids), interventions)
    logits = model.head(model.norm(forward.residuals[-1, 0]))  # (T, V)
    return logits.double().log_softmax(dim=-1).numpy(), forward.weights[:, 0]


ids_of_texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=16)
heads_of_model = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=2)


@few
@given(configs, st.lists(st.tuples(ids_of_texts, heads_of_model, st.data()), max_size=4))
def test_predictions_are_those_of_the_model_after_any_edits(config, texts):
    model = lively(build_model(config))
    session = make_session(model)
    for ids, off, data in texts:
        hidden = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=2))
        names = [f"L{layer}H{head}" for layer, head in off]
        _, read = ask(session, "read", **text_input(ids, names, hidden))
        changed = Interventions(tuple(Head(*head) for head in off), tuple(hidden))
        expected, A = run(model, ids, changed)
        before, _ = run(model, ids)

        steps = np.arange(len(ids))
        chances = np.exp(expected)
        likeliest = np.array(read["chances"])[:, :5]
        assert likeliest == pytest.approx(np.sort(chances)[:, :-6:-1], abs=1e-5)
        of_ids = np.take_along_axis(chances, np.array(read["next"]), axis=1)
        assert np.array(read["chances"]) == pytest.approx(of_ids, abs=1e-5)
        losses = -expected[steps[:-1], ids[1:]]
        assert read["losses"][:-1] == pytest.approx(losses, abs=1e-4)
        assert read["losses"].shape == (len(ids),) and math.isnan(read["losses"][-1])
        assert read["words"].keys() == set(np.array(read["next"]).ravel().tolist())
        assert all(text == TOKENIZER.decode([id]) for id, text in read["words"].items())
        if off or hidden:
            was = np.take_along_axis(np.exp(before), np.array(read["next"]), axis=1)
            assert np.array(read["was"]["chances"]) == pytest.approx(was, abs=1e-5)
            likeliest_before = np.sort(np.exp(before))[:, :-6:-1]
            assert was[:, 5:] == pytest.approx(likeliest_before, abs=1e-5)
            losses = -before[steps[:-1], ids[1:]]
            assert read["was"]["losses"][:-1] == pytest.approx(losses, abs=1e-4)
        else:
            assert read["was"] is None

        _, maps = ask(session, "maps", **text_input(ids, names, hidden))
        assert maps == pytest.approx(A.numpy(), abs=1e-5)
        norms = read["norms"]
        if not off and not hidden:
            v = capture(model, np.array([ids])).v
            assert norms == pytest.approx(value_norms(model, v)[:, 0].numpy(), rel=1e-3, abs=1e-4)
        assert read["largest"] == pytest.approx((maps * norms[:, :, None]).max(), rel=1e-4)
        _, logits = ask(session, "logits", **text_input(ids, names, hidden))
        assert torch.tensor(logits).log_softmax(dim=-1).numpy() == pytest.approx(expected, abs=1e-4)


class WithBeginOfText(CharTokenizer):
    begin_of_text = 2


def test_a_session_that_is_replaced_frees_its_model_at_once():
    session = make_session(GPT(small()))
    session.read([1, 2, 3], NO_INTERVENTIONS)
    model = weakref.ref(session.model)
    gc.disable()
    try:
        del session
        assert model() is None
    finally:
        gc.enable()


def test_begin_of_text_is_read_but_not_shown():
    model = lively(build_model(small()))
    session = make_session(model)
    assert ask(session, "encode", text="cab")[1] == [2, 0, 1]
    assert ask(session, "encode", text="")[1] == [0]
    session.tokenizer = WithBeginOfText(TOKENIZER.alphabet)
    assert ask(session, "encode", text="cab")[1] == [2, 2, 0, 1]
    assert ask(session, "encode", text="")[1] == [2]
    session.tokenizer.special[2] = "<s>"
    assert ask(session, "decode", ids=[2, 3, 0, 1])[1] == "dab"
    assert ask(session, "decode", ids=[])[1] == ""
    assert ask(session, "tokenTexts", ids=[0, 2])[1] == ["a", "c"]


@few
@given(configs, heads_of_model, st.lists(st.integers(0, 10), max_size=3), st.booleans())
def test_a_text_is_continued_with_its_interventions_beyond_the_block_size(
    config, off, hidden, begins
):
    model, ids = lively(build_model(config)), random_tokens(T).tolist()
    names = [f"L{layer}H{head}" for layer, head in off]
    given = text_input(ids, names, hidden)
    session = make_session(model)
    if begins:
        session.tokenizer = WithBeginOfText(TOKENIZER.alphabet)
        ids[0] = given["ids"][0] = 2
    parts, _ = ask(session, "continue", temperature=0, maxTokens=10, **given)
    assert [len(part["ids"]) for part in parts] == list(range(T + 1, T + 11))
    continued = parts[-1]["ids"]
    assert continued[:T] == ids
    for part in parts:
        assert part["ids"] == continued[: len(part["ids"])]
    for length in range(T, len(continued)):
        places = list(range(window_start(length, config.block_size), length))
        if begins:
            places[0] = 0
        shifted = tuple(k for k, place in enumerate(places) if place in hidden)
        interventions = Interventions(tuple(Head(*head) for head in off), shifted)
        log_p, _ = run(model, [continued[place] for place in places], interventions)
        assert log_p[-1, continued[length]] == pytest.approx(log_p[-1].max(), abs=1e-3)


def test_a_continued_text_ends_at_each_end_of_text_token():
    model, ids = lively(build_model(small(vocab_size=VOCAB_SIZE))), random_tokens(T).tolist()
    greedy = model.generate(torch.tensor([ids]), 6, temperature=0)[0].tolist()
    for end in range(T, T + 6):
        session = make_session(model)
        session.tokenizer = CharTokenizer(TOKENIZER.alphabet)
        session.tokenizer.end_of_text_ids = (VOCAB_SIZE + 1, greedy[end])
        parts, _ = ask(session, "continue", temperature=0, maxTokens=6, **text_input(ids))
        first = greedy.index(greedy[end], T)
        assert parts[-1] == {"ids": greedy[:first], "isComplete": True}


def test_a_vocabulary_that_is_padded_is_never_drawn_from_its_padding():
    model = lively(build_model(small(vocab_size=40)))
    given = text_input(random_tokens(T).tolist())
    parts, _ = ask(make_session(model), "continue", temperature=50.0, maxTokens=60, **given)
    assert max(parts[-1]["ids"]) < VOCAB_SIZE


@pytest.mark.parametrize("has_scores", [True, False])
def test_a_served_page_has_the_scores_of_one_step_and_may_ask_its_server(tmp_path, has_scores):
    run = make_run(tmp_path / "run")
    scores = describe_scores(20, RunDir(run).rows()) if has_scores else None
    model = build_model(small())
    session = Session(model, TOKENIZER, HOSTILE[0], 24, 30, prompt=HOSTILE[0], scores=scores)
    path = tmp_path / "served.html"
    path.write_text(render_page(session))
    content, blobs = read_back(path)
    assert (content["title"], content["server"]["prompt"]) == (HOSTILE[0], HOSTILE[0])
    assert (content["steps"], content["maxSteps"], content["shape"]) == ([24], 30, [2, 4])
    assert content["scored"]["steps"] == ([20] if has_scores else [])
    assert not any(key.startswith("emerged/") for key in content["scored"]["columns"])
    assert content["server"]["unmeasured"] == (not has_scores) and blobs == []
    assert "connect-src 'self';" in path.read_text()
    own_page = write_page(RunDir(run)).read_text()
    assert "connect-src" not in own_page
    assert "{" not in own_page.partition("<style>")[0]  # no placeholder is left


def test_measured_heads_are_on_the_page():
    model = lively(build_model(small(vocab_size=VOCAB_SIZE)))
    session = make_session(model)
    parts, answer = ask(session, "measureHeads", **text_input(random_tokens(T).tolist()))
    assert answer is None
    assert len(parts) >= 2 and all(isinstance(part, str) for part in parts)
    scored = session.scores["scored"]
    page = render_page(session)
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert scored["steps"] == [3] and not data["server"]["unmeasured"]
    assert scored["columns"]["heads/induction/L0H0"] and data["scored"] == scored


SESSION = make_session(lively(build_model(small())))
VALID = {
    **text_input([1, 2, 3, 4], ["L1H3"], [1]),
    "text": "abc",
    "heads": [0, 7],
    "i": 2,
    "j": 1,
    "of": [1, 2],
    "layer": 1,
    "head": 3,
    "temperature": 0.5,
    "maxTokens": 2,
    "corrupted": [1, 3, 3, 4],
    "answer": 3,
    "wrong": 4,
    "direction": "denoising",
    "patched": ["L1T2", "L0H1", "L1MLP"],
    "kind": "component",
}
REQUESTS = [name for name in (*TOKENIZER_REQUESTS, *MODEL_REQUESTS) if name != "measureHeads"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
near_valid = (
    st.integers(-2, 30)
    | st.lists(st.integers(-1, 24), max_size=18)
    | st.lists(st.sampled_from(["L0H0", "L2H0", "L0T9", "L0T2", "L1MLP", "L2MLP", "", "x"]))
)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.sampled_from(REQUESTS),
    st.dictionaries(st.sampled_from([*VALID]), json_values | near_valid, max_size=3),
    st.sets(st.sampled_from([*VALID]), max_size=1),
)
def test_wrong_parameters_give_one_sentence(name, changes, removed):
    values = {key: value for key, value in (VALID | changes).items() if key not in removed}
    try:
        ask(SESSION, name, **values)
    except UserError as e:
        assert "\n" not in str(e) and len(str(e)) < 300
    ask(SESSION, name, **VALID)


WRONG = [
    ("read", {"ids": [], "hidden": [], "i": 0, "j": 0}),
    ("read", {"ids": [0] * 17}),
    ("read", {"ids": [VOCAB_SIZE]}),
    ("read", {"hidden": [4]}),
    ("read", {"off": ["L0H4"]}),
    ("read", {"step": 2}),
    ("patterns", {"heads": [8]}),
    ("headEffects", {"i": 3}),
    ("explainScore", {"j": 3}),
    ("continue", {"temperature": math.nan}),
    ("contrast", {"corrupted": [1, 2, 3]}),
    ("contrast", {"patched": ["L2MLP"]}),
    ("patchCells", {"kind": "heads"}),
]


@pytest.mark.parametrize("name, changes", WRONG)
def test_a_wrong_parameter_is_refused(name, changes):
    with pytest.raises(UserError):
        ask(SESSION, name, **(VALID | changes))


def test_a_text_is_bounded_by_the_memory_of_its_attention_maps():
    config = small(block_size=8192, n_layer=2, n_head=4)
    assert max_tokens(config) == 2896 and 2896**2 * 8 <= MAX_ATTENTION_WEIGHTS < 2897**2 * 8
