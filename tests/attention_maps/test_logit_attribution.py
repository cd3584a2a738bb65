"""The card of a token: what is said of a prediction adds up to it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from models import configs, few, lively, random_tokens, small

from attention_maps.analysis import analyze
from attention_maps.capture import capture
from attention_maps.logit_attribution import attribute_logits, copying_scores, explain_predictions
from data.tokenizer import CharTokenizer
from model import GPT


@few
@given(configs)
def test_the_contributions_sum_to_the_logits(config):
    model, tokens = lively(GPT(config)).double(), random_tokens(12)
    found = attribute_logits(model, capture(model, tokens.numpy()[None]))
    logits = model(tokens[None])[0][0].detach()
    p = logits.softmax(dim=-1)
    assert np.array_equal(found["predicted_ids"], p.topk(5).indices)
    assert found["predicted_probs"] == pytest.approx(p.topk(5).values.numpy(), abs=1e-6)
    assert found["logit_attribution"].shape == (1 + 2 * 5 + 1, 12, 6)
    follows = torch.cat((tokens[1:], p[-1:].argmax(dim=-1)))
    targets = torch.cat((follows[:, None], p.topk(5).indices), dim=1)
    whole = (logits.gather(1, targets) - logits.mean(dim=1, keepdim=True)).numpy()
    assert found["logit_attribution"].sum(axis=0) == pytest.approx(whole, abs=1e-5)
    # The last part is what is left over. It is nothing but biases.
    if config.bias is False:
        assert np.abs(found["logit_attribution"][-1]).max() < 1e-5
    assert found["logit_lens"].shape == (3, 12) and np.isnan(found["logit_lens"][:, -1]).all()
    assert found["logit_lens"][-1, :-1] == pytest.approx(
        -p.log()[torch.arange(11), tokens[1:]].numpy(), abs=1e-5
    )


@pytest.mark.parametrize(
    "kind",
    [
        {"norm": "layernorm", "bias": True, "n_kv_head": 2},
        {"norm": "rmsnorm", "position": "rope", "value_head_dim": 3},
    ],
)
def test_a_heads_contribution_is_what_it_writes_through_the_output_layer(kind):
    model, tokens = lively(GPT(small(**kind))).double(), random_tokens(12)
    found = attribute_logits(model, capture(model, tokens.numpy()[None]))
    W_O = model.blocks[1].attention.W_O
    d_v, z = model.config.value_dim, []
    with W_O.register_forward_pre_hook(lambda module, inputs: z.append(inputs[0])):
        x = model.run_blocks(tokens[None])[0]  # (T, C)
    for head in range(4):
        own = slice(head * d_v, (head + 1) * d_v)
        wrote = (z[0][..., own] @ W_O.weight[:, own].T)[0]  # (T, C)
        if kind["norm"] == "layernorm":
            wrote, x = (t - t.mean(dim=-1, keepdim=True) for t in (wrote, x))
        gave = wrote / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * model.norm.weight
        pushed = gave @ model.head.weight.T  # (T, V)
        pushed = pushed - pushed.mean(dim=1, keepdim=True)
        follows = torch.cat((tokens[1:], model(tokens[None])[0][0, -1:].argmax(dim=-1)))
        expected = pushed.gather(1, follows[:, None])[:, 0].detach().numpy()
        assert found["logit_attribution"][1 + 5 + head, :, 0] == pytest.approx(expected, abs=1e-5)
        up, down = pushed.topk(3).indices, pushed.topk(3, largest=False).indices
        assert np.array_equal(
            found["promoted_and_suppressed_ids"][1, head], torch.cat((up, down), dim=1)
        )


ALL = np.ones((2, 2), bool)  # heads


def test_a_head_that_copies_scores_1_and_one_that_does_the_opposite_minus_1():
    model = GPT(
        small(n_embd=32, n_head=2, head_dim=32, tie_embeddings=True, vocab_size=30, norm="rmsnorm")
    )
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.eye(30, 32))
        model.position_embedding.weight.zero_()
        for block in model.blocks:
            block.attention.W_V.weight.copy_(torch.eye(32).repeat(2, 1))
            block.attention.W_O.weight.copy_(torch.cat((torch.eye(32), -torch.eye(32)), dim=1))
            block.mlp.W_out.weight.zero_()
    mean, error = copying_scores(model, capture(model, random_tokens(3, 16).numpy()), ALL)
    assert mean == pytest.approx(np.array([[1, -1], [1, -1]])) and not error.any()
    with torch.no_grad():  # nothing of the token is in what they write
        for block in model.blocks:
            block.attention.W_V.weight.normal_(std=0.1)
            block.attention.W_O.weight.normal_(std=0.1)
    mean, error = copying_scores(model, capture(model, random_tokens(8, 16).numpy()), ALL)
    assert (np.abs(mean) < 4 * error + 0.35).all() and (error > 0.05).all()


def test_of_a_model_in_bf16_with_spare_ids_all_is_told_in_float32():
    model = lively(GPT(small(position="rope", tie_embeddings=True))).to(torch.bfloat16)
    tokenizer, ids = CharTokenizer("abcdefghijklmnopqrst"), (random_tokens(12) % 20).tolist()
    found = analyze(model, tokenizer, ids)
    wide = GPT(model.config)
    wide.load_state_dict(model.state_dict())
    assert model.head.weight.dtype == torch.bfloat16
    expected = analyze(wide, tokenizer, ids)
    assert found.metrics == expected.metrics
    found, expected = found.arrays, expected.arrays
    assert found.keys() == expected.keys()
    assert np.array_equal(found["token_effect"], expected["token_effect"], equal_nan=True)
    words = dict(zip(found["named_ids"].tolist(), found["named_tokens"]))
    assert {20, 21, 22} & set(words)  # the model has three ids that its tokenizer lacks
    assert all(
        word == (f"<{id}>" if id > 19 else tokenizer.decode([id])) for id, word in words.items()
    )


@pytest.mark.parametrize("length", [1, 2])
def test_a_text_of_a_token_and_a_vocabulary_of_two_are_told_of(length):
    model = GPT(small(vocab_size=2))
    found = explain_predictions(
        model, capture(model, np.ones((1, length), np.int64)), CharTokenizer("ab")
    )
    assert (found["predicted_ids"][:, 2:] == -1).all() and list(found["named_tokens"]) == ["a", "b"]
    assert (
        found["token_effect"].shape == (length, length)
        and np.isnan(found["token_effect"][-1]).all()
    )
    assert found["predicted_ids"].shape == (length, 5)
    assert found["promoted_and_suppressed_ids"].shape == (2, 4, length, 6)
