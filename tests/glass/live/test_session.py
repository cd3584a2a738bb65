"""The requests to a model in Python against direct computations, and their checks."""

import json
import math

import numpy as np
import pytest
import torch
from asking import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB_SIZE, configs, few, lively, random_tokens, small

from common.errors import UserError
from data.tokenizer import CharTokenizer
from generation.decoder import window_start
from glass.heads.ablation import measure_head_effects, measure_token_effects
from glass.heads.capture import capture, value_norms
from glass.heads.interventions import Interventions
from glass.heads.logit_attribution import attribute_logits, find_promoted_tokens
from glass.heads.results import Head
from glass.live.parameters import MAX_ATTENTION_WEIGHTS, max_tokens
from glass.live.requests import MODEL_REQUESTS, TOKENIZER_REQUESTS
from glass.live.session import Session
from glass.page.write import ExploredModel, render_explore_page
from model import GPT
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuvw")
T = 12  # tokens of most texts here


def make_session(model: GPT, **arguments) -> Session:
    return Session(model, TOKENIZER, ExploredModel("model", model.config, step=3), **arguments)


def text_input(ids, off=(), hidden=()) -> dict:
    return {"step": 3, "ids": [*ids], "off": [*off], "hidden": [*hidden]}


@torch.no_grad()
def run(model: GPT, ids, interventions=Interventions()) -> tuple[np.ndarray, torch.Tensor]:  # noqa: B008
    """Log-probabilities (T, V) and attention weights (L, H, T, T) without a cache."""
    tokens, maps = torch.tensor([ids]), []
    layers = range(model.config.n_layer)
    taps = interventions.taps() | {("weights", layer): maps.append for layer in layers}
    device = tokens.device
    x = model.embed(tokens, hidden=interventions.is_hidden(len(ids), device))
    mask = interventions.mask(len(ids), device)
    x = model.run_blocks(tokens, mask=mask, entry=(0, x), taps=taps)
    return model.head(model.norm(x))[0].double().log_softmax(dim=-1).numpy(), torch.cat(maps)


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
        assert read["chances"] == pytest.approx(np.sort(chances)[:, :-6:-1], abs=1e-5)
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


def test_patterns_are_the_lower_triangles_of_the_heads_in_the_order_asked():
    session = make_session(lively(build_model(small())))
    given = text_input(random_tokens(T).tolist(), ["L0H1"], [3])
    maps = ask(session, "maps", **given)[1].reshape(8, T, T)
    heads = [5, 0, 7]
    parts, answer = ask(session, "patterns", heads=heads, **given)
    assert answer is None
    assert [k for part in parts for k in part["heads"]] == heads
    patterns = np.concatenate([part["maps"] for part in parts])
    assert patterns.dtype == np.float16
    rows, columns = np.tril_indices(T)
    expected = maps[heads][:, rows, columns]
    assert patterns == pytest.approx(expected, abs=1e-3)


@few
@given(configs, st.integers(0, T - 2), st.integers(0, 1), st.integers(0, 3))
def test_explanations_are_those_of_the_whole_pass(config, i, layer, head):
    model, ids = lively(build_model(config)), random_tokens(T)
    session, given = make_session(model), text_input(ids.tolist())
    forward = capture(model, ids.numpy()[None])

    _, breakdown = ask(session, "breakDown", i=i, of=[layer, head], **given)
    attribution = attribute_logits(model, forward)
    assert breakdown["targets"] == [ids[i + 1], *attribution.predicted_ids[i]]
    assert breakdown["lens"] == pytest.approx(attribution.logit_lens[:, i], abs=1e-4)
    direct = np.array(breakdown["direct"])
    assert direct == pytest.approx(attribution.logit_attribution[:, i], abs=1e-4)
    promoted = find_promoted_tokens(model, forward, layer, [head])[0, i].tolist()
    assert breakdown["writes"] == promoted
    assert breakdown["words"].keys() == {*breakdown["targets"], *promoted}

    parts, _ = ask(session, "headEffects", i=i, **given)
    effects = np.concatenate([part["nats"] for part in parts])
    assert [k for part in parts for k in part["heads"]] == list(range(8))
    expected = measure_head_effects(model, forward)[..., i].ravel()
    assert effects == pytest.approx(expected, abs=1e-4)

    parts, _ = ask(session, "tokenEffects", **given)
    assert [part["j"] for part in parts] == list(range(T - 2, -1, -1))
    expected = measure_token_effects(model, forward)
    for part in parts:
        j = part["j"]
        for name, values in (("effects", expected.loss), ("kl", expected.kl)):
            assert part[name] == pytest.approx(values[j + 1 :, j], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_patching_copies_from_the_clean_or_the_corrupted_text(direction):
    model = lively(build_model(small()))
    clean, corrupted = random_tokens(T).tolist(), random_tokens(T).tolist()
    corrupted[4] = (clean[4] + 1) % VOCAB_SIZE
    session = make_session(model)
    logits = [run(model, ids)[0] for ids in (clean, corrupted)]
    i, answer, wrong = 9, 3, 8
    contrast = {"corrupted": corrupted, "i": i, "answer": answer, "wrong": wrong}
    given = {**text_input(clean), **contrast, "direction": direction}
    _, unpatched = ask(session, "contrast", patched=[], **given)
    differences = [row[i, answer] - row[i, wrong] for row in logits]
    assert unpatched["clean"] == pytest.approx(differences[0], abs=1e-4)
    assert unpatched["corrupted"] == pytest.approx(differences[1], abs=1e-4)
    base = 1 if direction == "denoising" else 0
    assert unpatched["patched"] == pytest.approx(differences[base], abs=1e-4)
    likeliest = np.argsort(-logits[base][i])[:5].tolist()
    assert [item["id"] for item in unpatched["next"]] == likeliest
    assert unpatched["next"][0]["chance"] == pytest.approx(np.exp(logits[base][i].max()), abs=1e-5)
    assert unpatched["words"].keys() == set(likeliest)

    # The residual stream at the only token that differs holds all that differs.
    _, restored = ask(session, "contrast", patched=["L0T4"], **given)
    assert restored["patched"] == pytest.approx(differences[1 - base], abs=1e-4)


def test_hidden_tokens_after_the_prediction_do_not_matter_to_its_explanations():
    session, ids = make_session(lively(build_model(small(n_kv_head=2)))), random_tokens(T).tolist()
    for hidden in ([], [10]):
        given = {**text_input(ids, hidden=hidden), "i": 5}
        effects = [part["nats"].tolist() for part in ask(session, "headEffects", **given)[0]]
        terms = ask(session, "explainScore", layer=1, head=2, j=3, **given)[1]
        contrast = {"corrupted": ids[::-1], "answer": 1, "wrong": 2, "direction": "noising"}
        patched = ask(session, "contrast", patched=["L0H1", "L1T11"], **contrast, **given)[1]
        results = effects, [term["value"] for term in terms], patched["patched"]
        if not hidden:
            expected = results
    for found, value in zip(results, expected):
        assert np.array(found) == pytest.approx(np.array(value), abs=1e-5)


def test_one_more_token_runs_only_that_token():
    model = lively(build_model(small()))
    session, ids = make_session(model), random_tokens(T).tolist()
    ask(session, "read", **text_input(ids[:-1]))
    rows = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, y: rows.append(y.shape[-2]))
        for module in (model.blocks[1], model.head)
    ]
    ask(session, "read", **text_input(ids))
    assert [n for n in rows if n] == [1, 1]
    rows.clear()
    ask(session, "read", **text_input(ids))  # nothing is new
    assert sum(rows) == 0
    for hook in hooks:
        hook.remove()


def test_a_canceled_request_ends_before_the_next_block_and_leaves_no_trace():
    class Ended(Exception):
        pass

    calls = []

    def check():
        calls.append(1)
        if len(calls) == 2:
            raise Ended

    model, ids = lively(build_model(small())), random_tokens(T).tolist()
    session = make_session(model, check_canceled=check)
    with pytest.raises(Ended):
        ask(session, "read", **text_input(ids))
    assert len(calls) == 2
    found = ask(session, "read", **text_input(ids))[1]
    expected = ask(make_session(lively(build_model(small()))), "read", **text_input(ids))[1]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5, nan_ok=True)
    assert found["norms"] == pytest.approx(expected["norms"], abs=1e-5)


class WithBeginOfText(CharTokenizer):
    begin_of_text = 2


def test_begin_of_text_is_read_but_not_shown():
    model = lively(build_model(small()))
    session = make_session(model)
    assert ask(session, "encode", text="cab")[1] == [2, 0, 1]
    assert ask(session, "encode", text="")[1] == []
    session.tokenizer = WithBeginOfText(TOKENIZER.alphabet)
    assert ask(session, "encode", text="cab")[1] == [2, 2, 0, 1]
    assert ask(session, "encode", text="")[1] == []
    assert ask(session, "decode", ids=[2, 2, 0, 1])[1] == "cab"
    assert ask(session, "decode", ids=[0, 2])[1] == "ac"
    assert ask(session, "decode", ids=[])[1] == ""
    assert ask(session, "tokenTexts", ids=[0, 2])[1] == ["a", "c"]
    given = text_input([2, 5], ["L0H0"])
    parts, _ = ask(session, "continue", temperature=0, maxTokens=1, **given)
    assert parts[0]["text"] == session.tokenizer.decode(parts[0]["ids"][1:])


@few
@given(configs, heads_of_model, st.lists(st.integers(0, 10), max_size=2))
def test_a_text_is_continued_with_its_interventions_beyond_the_block_size(config, off, hidden):
    model, ids = lively(build_model(config)), random_tokens(T).tolist()
    names = [f"L{layer}H{head}" for layer, head in off]
    given = text_input(ids, names, hidden)
    parts, _ = ask(make_session(model), "continue", temperature=0, maxTokens=10, **given)
    assert [len(part["ids"]) for part in parts] == list(range(T + 1, T + 11))
    continued = parts[-1]["ids"]
    assert continued[:T] == ids
    for part in parts:
        assert part["ids"] == continued[: len(part["ids"])]
        assert part["text"] == TOKENIZER.decode(part["ids"])
    for length in range(T, len(continued)):
        start = window_start(length, config.block_size)
        shifted = tuple(j - start for j in hidden if j >= start)
        interventions = Interventions(tuple(Head(*head) for head in off), shifted)
        log_p, _ = run(model, continued[start:length], interventions)
        assert log_p[-1, continued[length]] == pytest.approx(log_p[-1].max(), abs=1e-3)


def test_a_vocabulary_that_is_padded_is_never_drawn_from_its_padding():
    model = lively(build_model(small(vocab_size=40)))
    given = text_input(random_tokens(T).tolist())
    parts, _ = ask(make_session(model), "continue", temperature=50.0, maxTokens=60, **given)
    assert max(parts[-1]["ids"]) < VOCAB_SIZE


def test_measured_heads_are_on_the_page():
    model = lively(build_model(small(vocab_size=VOCAB_SIZE)))
    session = make_session(model)
    parts, answer = ask(session, "measureHeads", **text_input(random_tokens(T).tolist()))
    assert answer is None
    assert len(parts) >= 2 and all(isinstance(part, str) for part in parts)
    row = session.explored.scores.row
    page = render_explore_page(session.explored, T)
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert row["step"] == 3 and not data["server"]["canMeasure"]
    value = pytest.approx(row["heads/induction/L0H0"], rel=1e-3)
    assert data["scored"]["columns"]["heads/induction/L0H0"] == [value]


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


@settings(max_examples=150)
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
    ("read", {"ids": [1, -1]}),
    ("read", {"hidden": [4]}),
    ("read", {"off": ["L0H4"]}),
    ("read", {"step": 2}),
    ("patterns", {"heads": [8]}),
    ("headEffects", {"i": 3}),
    ("explainScore", {"j": 3}),
    ("continue", {"temperature": math.nan}),
    ("continue", {"maxTokens": 1001}),
    ("contrast", {"corrupted": [1, 2, 3]}),
    ("contrast", {"patched": ["L2MLP"]}),
    ("patchCells", {"kind": "heads"}),
    ("encode", {"text": "xyz"}),
]


@pytest.mark.parametrize("name, changes", WRONG)
def test_a_wrong_parameter_is_refused(name, changes):
    with pytest.raises(UserError):
        ask(SESSION, name, **(VALID | changes))


def test_a_text_is_bounded_by_the_memory_of_its_attention_maps():
    config = small(block_size=8192, n_layer=2, n_head=4)
    assert max_tokens(config) == 2896 and 2896**2 * 8 <= MAX_ATTENTION_WEIGHTS < 2897**2 * 8
