"""Attention-score attribution and components, against recorded values and a known circuit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import (
    LaterConfig,
    captured_with,
    configs,
    few,
    induction_model,
    lively,
    random_tokens,
    small,
)

from common.errors import UserError
from glass.heads.measure.capture import capture
from glass.heads.measure.components import Component, iterate_components
from glass.heads.measure.interventions import Interventions
from glass.heads.measure.score_attribution import attribute_score
from run.row import Head
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


@few
@given(configs, ablations, hidden_tokens)
def test_what_components_wrote_sums_to_the_residual_stream(config, ablated, hidden):
    model, forward = read_text(config, ablated, hidden)
    written = dict(iterate_components(model, forward, tokens=slice(2, 9)))
    assert torch.allclose(sum(written.values()), forward.residuals[-1, :, 2:9])
    block = model.blocks[1]
    W_O, y, d_v = block.attention.W_O, forward.heads[1, :, 2:9], config.value_dim
    for number in range(config.n_head):
        expected = y[:, :, number] @ W_O.weight[:, number * d_v : (number + 1) * d_v].T
        assert torch.allclose(written[Component("head", 1, number)], expected)
    if block.mlp is not None:
        x = forward.residuals[1, :, 2:9]
        if not config.parallel_mlp:
            x = x + W_O(y.flatten(2))
        assert torch.allclose(written[Component("MLP", 1)], block.mlp(block.norm_2(x)))
    matrix = torch.randn(config.n_embd, 5, dtype=torch.float64)
    for component, projected in iterate_components(model, forward, 1, slice(2, 9), matrix):
        assert torch.allclose(projected, written[component] @ matrix)


def test_the_score_of_an_induction_head_comes_from_the_previous_token_head():
    model = induction_model(20, 16)
    ids = np.array([[3, 9, 1, 12, 7, 5, 3]])
    terms = attribute_score(model, capture(model, ids), Head(1, 1), 6, 1)
    total = sum(term.value for term in terms)
    largest = max(terms, key=lambda term: term.value)
    assert (largest.query, largest.key) == ("embedding", "L0H0")
    assert largest.value > 0.9 * total > 10


def test_scores_are_not_attributed_if_an_unknown_setting_may_change_them():
    model = lively(build_model(LaterConfig(**vars(small()), later="on")))
    with pytest.raises(UserError, match="later=on"):
        attribute_score(model, captured_with(model, random_tokens(11)), Head(1, 1), 6, 1)
