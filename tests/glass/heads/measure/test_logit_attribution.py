"""Logit attribution: the contributions of all components sum to the logits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from models import configs, few, lively, random_tokens, small

from data.tokenizer import CharTokenizer
from glass.heads.measure import ablation, logit_attribution
from glass.heads.measure.analysis import analyze
from glass.heads.measure.capture import capture
from glass.heads.measure.components import Component, iterate_components
from glass.heads.measure.logit_attribution import (
    attribute_logits,
    copying_scores,
    count_explained_tokens,
    explain_predictions,
    find_promoted_tokens,
)
from model import GPT
from variants import build_model


@few
@given(configs)
def test_the_contributions_sum_to_the_logits(config):
    model, tokens = lively(build_model(config)).double(), random_tokens(12)
    attribution = attribute_logits(model, capture(model, tokens.numpy()[None]))
    logits = model(tokens[None])[0][0].detach()
    five = logits.softmax(dim=-1).topk(5)
    assert np.array_equal(attribution.predicted_ids, five.indices)
    assert attribution.predicted_probs == pytest.approx(five.values.numpy(), abs=1e-6)
    contributions = attribution.logit_attribution
    assert contributions.shape == (1 + 2 * 5 + 1, 12, 6)
    following = torch.cat((tokens[1:], logits[-1:].argmax(dim=-1)))
    ids = torch.cat((following[:, None], five.indices), dim=1)
    centered = (logits.gather(1, ids) - logits.mean(dim=1, keepdim=True)).numpy()
    assert contributions.sum(axis=0) == pytest.approx(centered, abs=1e-5)
    if config.bias is False:  # the last component, the biases, contributes nothing
        assert np.abs(contributions[-1]).max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layernorm", "bias": True, "n_kv_head": 2},
        {"norm": "rmsnorm", "position": "rope", "value_head_dim": 3},
    ],
)
def test_the_contribution_of_a_head_or_mlp_is_what_it_writes_through_the_output_layer(changes):
    model, tokens = lively(build_model(small(**changes))).double(), random_tokens(12)
    forward = capture(model, tokens.numpy()[None])
    attribution = attribute_logits(model, forward)
    promoted_ids = find_promoted_tokens(model, forward, 1, range(4))  # (H, T, 6)
    written = dict(iterate_components(model, forward))
    x = forward.residuals[-1, 0]  # (T, C)
    if changes["norm"] == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    scale = (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    following = torch.cat((tokens[1:], model(tokens[None])[0][0, -1:].argmax(dim=-1)))
    names = [*(Component("head", 1, number) for number in range(4)), Component("MLP", 1)]
    for component, name in enumerate(names):
        y = written[name][0]  # (T, C)
        if changes["norm"] == "layernorm":
            y = y - y.mean(dim=-1, keepdim=True)
        logits = y / scale * model.norm.weight @ model.head.weight.T  # (T, V)
        logits = logits - logits.mean(dim=1, keepdim=True)
        expected = logits.gather(1, following[:, None])[:, 0].detach().numpy()
        contribution = attribution.logit_attribution[1 + 5 + component, :, 0]
        assert contribution == pytest.approx(expected, abs=1e-5)
        if component == 4:  # the MLP
            continue
        promoted = logits.topk(3).indices
        suppressed = logits.topk(3, largest=False).indices
        assert np.array_equal(promoted_ids[component], torch.cat((promoted, suppressed), dim=1))


@pytest.fixture
def embedding_model() -> GPT:
    """A model whose residual stream is the one-hot token."""
    model = build_model(
        small(n_embd=32, n_head=2, head_dim=32, tie_embeddings=True, vocab_size=30, norm="rmsnorm")
    )
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.eye(30, 32))
        model.position_embedding.weight.zero_()
        for block in model.blocks:
            block.mlp.W_out.weight.zero_()
    return model


@pytest.mark.parametrize(("rank", "score"), [(10, 1), (11, 0), (20, 0), (21, -1)])
@torch.no_grad()
def test_a_head_copies_if_the_token_is_among_the_ten_highest_logits(embedding_model, rank, score):
    vocabulary = torch.eye(30, 32)
    written = -torch.ones(30, 32)  # by the head for each token, whose own logit has this rank
    written[:, 30:] = 0
    written += vocabulary
    for distance in range(1, rank):
        written += 3 * vocabulary.roll(distance, dims=0)
    for block in embedding_model.blocks:
        block.attention.W_V.weight.copy_(torch.eye(32).repeat(2, 1))
        block.attention.W_O.weight.zero_()[:, :30] = written.T
    forward = capture(embedding_model, random_tokens(3, 16).numpy())
    first_head = np.array([[True, False], [False, False]])
    mean, _ = copying_scores(embedding_model, forward, first_head)
    assert mean[0, 0] == score


def test_a_model_in_bf16_with_spare_ids_is_analyzed_in_float32():
    model = lively(build_model(small(position="rope", tie_embeddings=True))).to(torch.bfloat16)
    tokenizer, ids = CharTokenizer("abcdefghijklmnopqrst"), (random_tokens(12) % 20).tolist()
    analysis = analyze(model, tokenizer, ids)
    float32_model = build_model(model.config)
    float32_model.load_state_dict(model.state_dict())
    assert model.head.weight.dtype == torch.bfloat16
    expected = analyze(float32_model, tokenizer, ids)
    assert analysis.row == expected.row
    assert analysis.arrays.keys() == expected.arrays.keys()
    token_effects = (one.arrays["token_effect"] for one in (analysis, expected))
    assert np.array_equal(*token_effects, equal_nan=True)
    arrays = analysis.arrays
    names = dict(zip(arrays["named_ids"].tolist(), arrays["named_tokens"]))
    assert {20, 21, 22} & set(names)  # the model has three ids that its tokenizer lacks
    for id, name in names.items():
        assert name == (f"<{id}>" if id > 19 else tokenizer.decode([id]))


@pytest.mark.parametrize("max_rows", [1, 100])
def test_only_the_last_tokens_of_a_text_that_is_too_long_are_explained(monkeypatch, max_rows):
    model = lively(build_model(small(n_kv_head=2, position="rope", block_size=32)))
    tokenizer, forward = CharTokenizer("abcdefgh"), capture(model, random_tokens(1, 20).numpy())
    complete = explain_predictions(model, forward, tokenizer)
    monkeypatch.setattr(logit_attribution, "MAX_EXPLAINED_COST", 49 * model.num_parameters())
    monkeypatch.setattr(ablation, "MAX_TOKENS_PER_PASS", max_rows)
    arrays = explain_predictions(model, forward, tokenizer)
    assert count_explained_tokens(model, 20) == 7 and count_explained_tokens(model, 6) == 6
    token_axes = {
        **{"token_effect": (0, 1), "token_effect_kl": (0, 1), "logit_lens": (1,)},
        **{"logit_attribution": (1,), "promoted_and_suppressed_ids": (2,)},
        **{"predicted_ids": (0,), "predicted_probs": (0,)},
    }
    for name, axes in token_axes.items():
        whole, part = complete[name], arrays[name]
        assert (part.shape, part.dtype) == (whole.shape, whole.dtype)
        explained = tuple(slice(13, None) if k in axes else slice(None) for k in range(part.ndim))
        np.testing.assert_allclose(part[explained], whole[explained], atol=1e-5)
        is_before = np.ones(part.shape, bool)
        is_before[explained] = False
        missing = np.isnan(part) if part.dtype.kind == "f" else part == -1
        assert missing[is_before].all()
    np.testing.assert_allclose(arrays["head_effect"], complete["head_effect"], atol=1e-5)
