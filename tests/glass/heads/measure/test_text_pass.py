"""Interventions on a pass, and passes of edited texts against a fresh pass over each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import (
    VOCAB_SIZE,
    captured_with,
    configs,
    few,
    lively,
    random_tokens,
    small,
    smeared_configs,
)

from glass.heads.measure.capture import ForwardPass
from glass.heads.measure.interventions import Interventions
from glass.heads.measure.text_pass import TextPass
from run.row import Head
from variants import build_model

edits = st.lists(
    st.tuples(
        st.integers(0, 15),  # tokens kept of the text before
        st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),  # tokens after them
        st.sets(st.integers(0, 15), max_size=3),  # hidden tokens
    ),
    min_size=1,
    max_size=5,
)
heads = st.builds(Head, st.integers(0, 1), st.integers(0, 3))
ablations = st.lists(heads | st.sampled_from([("mlp", 0), ("attention", 1)]), max_size=3)


def assert_same_pass(actual: ForwardPass, expected: ForwardPass, tolerance: float = 1e-9) -> None:
    for name, values in vars(expected).items():
        found = getattr(actual, name)
        assert found.dtype == values.dtype and found.shape == values.shape
        assert torch.allclose(found, values, rtol=tolerance, atol=tolerance), name


@few
@given(configs)
def test_no_head_attends_to_a_hidden_token_and_ablated_heads_write_nothing(config):
    model, tokens = lively(build_model(config)), random_tokens(8)
    forward = captured_with(model, tokens, Interventions((Head(0, 1), Head(1, 3)), (2, 5)))
    for hidden in (2, 5):
        assert forward.weights[:, 0, :, hidden + 1 :, hidden].abs().max() == 0
        assert forward.weights[:, 0, :, hidden, hidden].min() > 0
    assert forward.heads[0, 0, :, 1].abs().max() == forward.heads[1, 0, :, 3].abs().max() == 0
    assert forward.heads[0, 0, :, 0].abs().max() > 0


@given(configs | smeared_configs, ablations, edits)
def test_an_edited_text_has_the_activations_of_a_fresh_pass(config, ablated, edits):
    model, ids = lively(build_model(config)).double(), []
    text_pass = TextPass(model, Interventions(tuple(ablated)))
    for kept, added, hidden in edits:
        ids = (ids[:kept] + added)[: config.block_size] or [0]
        hidden = sorted(j for j in hidden if j < len(ids))
        text_pass.read(ids, hidden)
        interventions = Interventions(tuple(ablated), tuple(hidden))
        assert text_pass.interventions == interventions
        assert_same_pass(text_pass.forward, captured_with(model, ids, interventions))


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=["float32", "bf16"]
)
def test_a_pass_has_the_precision_of_capture(dtype, tolerance):
    config = small(position="rope", n_kv_head=2, ngrams=3, ngram_rows=600)
    model, ids = lively(build_model(config)).to(dtype), random_tokens(16).tolist()
    text_pass = TextPass(model)
    for length in (5, 6, 16):
        captured = captured_with(model, ids[:length])
        text_pass.read(ids[:length])
        assert_same_pass(text_pass.forward, captured, tolerance)


def test_long_texts_keep_what_was_cached_when_the_buffers_grow():
    model, ids = lively(build_model(small(block_size=200))), random_tokens(200).tolist()
    text_pass = TextPass(model)
    for length in (1, 64, 65, 190, 3, 200):
        captured = captured_with(model, ids[:length])
        text_pass.read(ids[:length])
        assert_same_pass(text_pass.forward, captured, 1e-5)
    assert text_pass.first_changed == 3


def test_a_pass_that_was_interrupted_leaves_no_trace():
    text_pass = TextPass(lively(build_model(small())))
    text_pass.read(range(10))

    def interrupt(block, inputs):
        raise InterruptedError

    hook = text_pass.model.blocks[1].register_forward_pre_hook(interrupt)
    with hook, pytest.raises(InterruptedError):
        text_pass.read([0, 1, 2, 3, 9, 9, 9, 9, 9, 9], [1])
    ids = [0, 1, 2, 3, 9, 9, 9, 4]
    text_pass.read(ids)
    assert_same_pass(text_pass.forward, captured_with(text_pass.model, ids), 1e-5)
    assert text_pass.first_changed == 2  # the interrupted pass hid token 1
