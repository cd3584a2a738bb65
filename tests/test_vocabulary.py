"""Vocabularies that are padded: by the output layer's product alone, or with ids without a text."""

import pytest
import torch
from models import lively, random_tokens, small
from processes import run_to_end

import kernels
from interop import load, load_hf
from interop.names import map_tensors, parameter_shapes
from kernels import autocast
from variants import build_model

close = torch.testing.assert_close

GPT2_TOKENS, PADDED = 50257, 50304


def loss_and_gradients(model, tokens, targets):
    """The loss of a model, and the gradient of each parameter."""
    loss = model(tokens, targets)[1]
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("multiple", [1, 2, 23, 64])
def test_padding_the_product_of_the_head_changes_no_prediction_and_no_gradient(
    multiple, tie_embeddings
):
    plain = lively(build_model(small(tie_embeddings=tie_embeddings)).double())
    padded = build_model(small(tie_embeddings=tie_embeddings, vocab_multiple=multiple)).double()
    padded.load_state_dict(plain.state_dict())
    tokens, targets = random_tokens(2, 9), random_tokens(2, 9, seed=1)
    targets[0, 3] = -1
    logits, expected = padded(tokens)[0], plain(tokens)[0]
    assert logits.shape == expected.shape
    close(logits, expected)
    close(loss_and_gradients(padded, tokens, targets), loss_and_gradients(plain, tokens, targets))
    assert padded.num_parameters() == plain.num_parameters()
    assert padded.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_padded_product_has_the_rounded_width_and_padding_has_probability_0(
    precision, monkeypatch
):
    read = []
    cross_entropy = kernels.cross_entropy

    def note(logits, targets):
        read.append(logits)
        return cross_entropy(logits, targets)

    monkeypatch.setattr(kernels, "cross_entropy", note)
    model = lively(build_model(small(vocab_multiple=64)))
    tokens = random_tokens(2, 9)
    with autocast("cpu", precision):
        loss = model(tokens, tokens)[1]
    (logits,) = read
    assert logits.shape == (18, 64)
    assert not logits.softmax(dim=-1)[:, 23:].any()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def prefer_padding(model, tokens):
    """Make a model predict only ids from `tokens` on."""
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.zero_()[0] = 1
        model.head.weight[:, 0] = 0
        model.head.weight[tokens:, 0] = 50
    return model


def test_generate_draws_no_id_without_a_token():
    model = prefer_padding(lively(build_model(small(bias=True))), 20)
    prompt = random_tokens(2, 3) % 20
    assert (model.generate(prompt, 20)[:, 3:] >= 20).all()
    model.token_count = 20
    assert (model.generate(prompt, 20) < 20).all()


def save_as_nanogpt(model, path):
    """Write the ckpt.pt that nanoGPT writes of a model of these weights."""
    config, parameters = model.config, dict(model.named_parameters())
    names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")
    state = {
        mapping.name: torch.cat([parameters[name] for name in mapping.parameters])
        for mapping in map_tensors(parameter_shapes(config), "gpt2")
    }
    shape = {name: getattr(config, name) for name in names}
    torch.save({"model": state, "model_args": shape, "iter_num": 9}, path)


@pytest.mark.slow
def test_nanogpts_padded_vocabulary_is_sampled_and_exported(tmp_path, test_data, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    shape = {"vocab_size": PADDED, "n_layer": 1, "n_head": 1, "n_embd": 4, "bias": True}
    model = prefer_padding(lively(build_model(small(**shape))), GPT2_TOKENS)
    save_as_nanogpt(model, tmp_path / "ckpt.pt")

    loaded, _ = load(tmp_path / "ckpt.pt")
    assert loaded.config.vocab_size == PADDED
    assert (loaded.generate(torch.tensor([[1]]), 20) < GPT2_TOKENS).all()
    run_to_end(tmp_path, "init_from=ckpt.pt", "max_new_tokens=20", script="sample.py")
    run_to_end(tmp_path, "init_from=ckpt.pt", "to=exported", script="interop/__main__.py")
    assert load_hf(tmp_path / "exported").config.vocab_size == PADDED
