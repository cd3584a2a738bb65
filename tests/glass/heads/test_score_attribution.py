"""Attention-score attribution, against recorded scores, a slow loop and the page's code."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import (
    captured_with,
    configs,
    few,
    in_browser,
    induction_model,
    lively,
    page_weights,
    random_tokens,
)

from glass.heads.capture import capture, residual_writes
from glass.heads.interventions import Interventions
from glass.heads.logit_attribution import scale_like_norm
from glass.heads.results import Head
from glass.heads.score_attribution import attribute_score
from kernels import rms_norm
from variants import build_model

ablations = st.lists(st.builds(Head, st.integers(0, 1), st.integers(0, 3)), max_size=2)
hidden_tokens = st.lists(st.integers(0, 10), max_size=3, unique=True)
# Head, query and key; a hidden key has a score too, which the head ignores.
CELLS = [(Head(0, 0), 5, 2), (Head(1, 3), 9, 9), (Head(1, 1), 10, 4), (Head(1, 2), 0, 0)]


def read_text(config, ablated, hidden):
    model = lively(build_model(config)).double()
    interventions = Interventions(tuple(ablated), tuple(hidden))
    return model, captured_with(model, random_tokens(11), interventions)


@few
@given(configs, ablations, hidden_tokens)
def test_terms_sum_to_the_score_minus_its_mean_over_visible_tokens(config, ablated, hidden):
    model, forward = read_text(config, ablated, hidden)
    for head, i, j in CELLS:
        visible = [t for t in range(i + 1) if t == i or t not in hidden]
        if j not in visible:
            continue
        terms = attribute_score(model, forward, head, i, j, hidden)
        # Log weights differ from scores by a constant of the row.
        row = forward.weights[head.layer, 0, head.number, i].clamp(min=1e-300).log()
        total = sum(term.value for term in terms)
        tolerance = 1e-6 * (1 + sum(abs(term.value) for term in terms))  # tables are float32
        assert total == pytest.approx((row[j] - row[visible].mean()).item(), abs=tolerance)


def project_slowly(model, forward, layer, which, number, t) -> dict[str, torch.Tensor]:
    """Return what each component wrote to an unrotated query or key of token t, by name."""
    block = model.blocks[layer]
    attention, config = block.attention, model.config
    x = forward.residuals[layer, :, t]  # (1, C)
    writes = {"embedding": forward.residuals[0, 0, t]}
    for lower in range(layer):
        W_O = model.blocks[lower].attention.W_O
        heads = residual_writes(model.blocks[lower].attention, forward.heads[lower, 0, t])
        for number_below in range(config.n_head):
            writes[f"L{lower}H{number_below}"] = heads[number_below]
        after = forward.residuals[lower, 0, t] + heads.sum(dim=0)
        if W_O.bias is not None:
            writes[f"L{lower} bias"] = W_O.bias
            after = after + W_O.bias
        mlp = model.blocks[lower].mlp
        no_mlp = torch.zeros_like(after)
        writes[f"L{lower} MLP"] = no_mlp if mlp is None else mlp(model.blocks[lower].norm_2(after))
    linear = attention.W_Q if which == "q" else attention.W_K
    rows = slice(number * config.key_dim, (number + 1) * config.key_dim)
    bias = torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias
    vectors = {
        name: linear.weight[rows] @ scale_like_norm(block.norm_1, write, x)[0]
        for name, write in writes.items()
    }
    norm_bias = getattr(block.norm_1, "bias", None)
    if norm_bias is not None or linear.bias is not None:
        vectors["biases"] = bias[rows].clone()
        if norm_bias is not None:
            vectors["biases"] += linear.weight[rows] @ norm_bias
    if config.qk_norm:
        norm = getattr(attention, f"norm_{which}", None)
        gains = None if norm is None else norm.weight
        whole = sum(vectors.values())
        normalized = rms_norm(whole, gains, None if norm is None else norm.eps)
        vectors = {name: vector / whole * normalized for name, vector in vectors.items()}
    return vectors


def turn(model, vector, position):
    rotary = model.rotary_at(position, position + 1)
    if rotary is None:
        return vector
    cos, sin = rotary[:, 0].to(vector.dtype)
    half = len(vector) // 2
    return vector * cos + torch.cat((vector[half:], vector[:half])) * sin


@few
@given(configs, ablations, hidden_tokens)
def test_each_term_is_that_of_a_slow_loop(config, ablated, hidden):
    model, forward = read_text(config, ablated, hidden)
    with torch.no_grad():
        for head, i, j in CELLS:
            terms = attribute_score(model, forward, head, i, j, hidden)
            expected = attribute_slowly(model, forward, head, i, j, hidden)
            assert [(term.query, term.key) for term in terms] == list(expected)
            values = [term.value for term in terms]
            assert values == pytest.approx(list(expected.values()), abs=1e-5, rel=1e-5)


def attribute_slowly(model, forward, head, i, j, hidden) -> dict[tuple[str, str], float]:
    """Return the terms by the names of the query's and the key's component."""
    c, (layer, number) = model.config, head
    group = number // (c.n_head // c.kv_heads)
    queries = project_slowly(model, forward, layer, "q", number, i)
    keys = []
    for t in range(i + 1):
        own = project_slowly(model, forward, layer, "k", group, t)
        parts = own
        if c.smear_keys:
            share = model.blocks[layer].attention.smear[group].sigmoid()
            is_visible = t > 0 and t - 1 not in hidden
            before = project_slowly(model, forward, layer, "k", group, max(0, t - 1))
            parts = {}
            for name in own:
                parts[name] = share * own[name]
                parts[f"previous {name}"] = (1 - share) * before[name] * is_visible
        keys.append({name: turn(model, part, t) for name, part in parts.items()})
    visible = [t for t in range(i + 1) if t == i or t not in hidden]
    terms = {}
    for query, vector in queries.items():
        rotated = turn(model, vector, i) / c.key_dim**0.5
        for key in keys[0]:
            scores = {t: (rotated @ keys[t][key]).item() for t in {*visible, j}}
            terms[query, key] = scores[j] - np.mean([scores[t] for t in visible])
    return terms


def test_the_score_of_an_induction_head_comes_from_the_previous_token_head():
    model = induction_model(20, 16)
    ids = np.array([[3, 9, 1, 12, 7, 5, 3]])
    terms = attribute_score(model, capture(model, ids), Head(1, 1), 6, 1)
    total = sum(term.value for term in terms)
    largest = max(terms, key=lambda term: term.value)
    assert (largest.query, largest.key) == ("embedding", "L0H0")
    assert largest.value > 0.9 * total > 10


ASK = """([config, weights, ids, off, hidden, cells]) => {
  const { HANDLERS, models, passes, session } = engine;
  for (const weight of Object.values(weights)) weight.data = Float64Array.from(weight.data);
  models.set(0, weights);
  Object.assign(session, { config, tokenizer: { tokenText: String, decode: String } });
  passes.clear();
  return cells.map(([[layer, head], i, j]) =>
    HANDLERS.explainScore({ step: 0, ids, off, hidden, layer, head, i, j }));
}"""


@in_browser
@given(configs, ablations, hidden_tokens)
def test_the_page_lists_the_same_terms(engine_tab, config, ablated, hidden):
    model, forward = read_text(config, ablated, hidden)
    ids, off = forward.tokens[0].tolist(), [str(head) for head in ablated]
    lists = engine_tab.evaluate(ASK, [vars(config), page_weights(model), ids, off, hidden, CELLS])
    for (head, i, j), listed in zip(CELLS, lists):
        terms = attribute_score(model, forward, head, i, j, hidden)
        names = [(term["query"], term["key"]) for term in listed]
        assert names == [(term.query, term.key) for term in terms]
        values = [term["value"] for term in listed]
        assert values == pytest.approx([term.value for term in terms], abs=1e-4, rel=1e-4)
