"""The transformer's layers and GPT, against torch's and against the formulas."""

import math
import zlib
from dataclasses import fields, replace
from itertools import combinations

import formulas
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from models import (
    CHOICES,
    VOCAB_SIZE,
    configs,
    few,
    lively,
    ngram_vectors,
    random_tokens,
    seeds,
    small,
    smear_keys,
    smeared_configs,
)
from omegaconf import OmegaConf

from common.errors import UserError
from common.settings import explain_unused
from config import Config, GPTConfig
from model import GPT, Context, attention, causal_mask, rotary_table
from variants import build_model, count_ngrams

close = torch.testing.assert_close


def rotary(config, T):
    """The rotary table (2, T, d_k) of positions 0 … T - 1; None if positions are not rotary."""
    return rotary_table(0, T, config) if config.is_rotary else None


def assert_equal_gradients(y, expected, inputs, direction, atol=1e-5, rtol=0):
    """Compare the gradients of two functions of the same inputs."""
    gradients = torch.autograd.grad((y * direction).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    for a, b in zip(gradients, expected_gradients):
        close(a, b, atol=atol * max(1, b.abs().max().item()), rtol=rtol)


# --- Self-attention -------------------------------------------------------------------------------


@few
@given(config=configs, T=st.integers(1, 9), seed=seeds)
def test_self_attention_is_the_formula_with_equal_gradients(config, T, seed):
    layer = lively(build_model(config).blocks[0].attention.double(), seed)
    x = torch.randn(2, T, config.n_embd, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x, Context(rotary(config, T))), formulas.self_attention(layer, x)
    close(y, expected, atol=1e-5, rtol=1e-5)  # the rotary angles are in float32
    inputs = [x, *layer.parameters()]
    assert_equal_gradients(y, expected, inputs, torch.randn_like(y), rtol=1e-5)


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("n_kv_head", [1, 2, 8])
def test_fused_and_written_out_attention_agree_and_so_do_their_gradients(n_kv_head, position):
    config = small(n_embd=32, n_head=8, n_kv_head=n_kv_head, value_head_dim=6, position=position)
    layer = lively(build_model(config).blocks[0].attention)
    x = torch.randn(3, 70, 32, requires_grad=True)
    q, k, v = layer.project(x, rotary(config, 70))
    output = attention(q, k, v, causal_mask(70, 70))[0]  # (B, H, T, d_v)
    written_out = layer.W_O(output.transpose(1, 2).flatten(2))
    fused = layer(x, Context(rotary(config, 70)))
    close(fused, written_out, atol=1e-5, rtol=0)
    inputs = [x, *layer.parameters()]
    assert_equal_gradients(fused, written_out, inputs, torch.randn_like(fused) / 70)


# --- Dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_training", "share"), [(True, 0.3), (False, 0.0)])
def test_every_part_drops_in_training_only(is_training, share):
    model = lively(build_model(small(dropout=0.3))).train(is_training)
    embeddings, x = [], torch.randn(500, 16, 16)
    model.run_blocks(random_tokens(500, 16), taps={("embedding", 0): embeddings.append})
    for output in (embeddings[0], model.blocks[0].attention(x, Context()), model.blocks[0].mlp(x)):
        assert (output == 0).float().mean().item() == pytest.approx(share, abs=0.01)


# --- GPT ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("gpt2", 50257, 124_439_808),
        ("gpt2_medium", 50257, 354_823_168),
        ("gpt2_large", 50257, 774_030_080),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, vocab_size, parameters):
    settings = dict(OmegaConf.load(ROOT / "configs" / "model" / f"{name}.yaml"))
    for base in settings.pop("defaults", ()):
        settings = {**OmegaConf.load(ROOT / "configs" / "model" / f"{base}.yaml"), **settings}
    with torch.device("meta"):
        model = build_model(GPTConfig(**{**settings, "vocab_size": vocab_size}))
    assert model.num_parameters() == parameters


@few
@given(
    config=configs | smeared_configs,
    vocab_multiple=st.sampled_from([None, 16]),
    T=st.integers(1, 16),
    seed=seeds,
)
def test_the_logits_are_those_of_the_formulas(config, vocab_multiple, T, seed):
    config = replace(config, vocab_multiple=vocab_multiple)
    model, tokens = lively(build_model(config).double(), seed), random_tokens(2, T, seed=seed)
    x = model.token_embedding.weight[tokens]
    if config.position == "learned":
        x = x + model.position_embedding.weight[:T]
    if config.ngrams:
        x = x + torch.stack([ngram_vectors(model, text) for text in tokens])
    if config.norm_embedding:
        x = formulas.rms_norm(x, torch.finfo(x.dtype).eps)
    for block in model.blocks:
        x = formulas.block(block, x)
    head = model.token_embedding.weight if config.tie_embeddings else model.head.weight
    logits, loss = model(tokens)
    assert logits.shape == (2, T, VOCAB_SIZE)
    assert loss is None
    close(logits, formulas.norm(model.norm, x, config) @ head.T, atol=1e-6, rtol=1e-6)


@few
@given(config=configs | smeared_configs, T=st.integers(2, 16), data=st.data())
def test_a_token_changes_no_logits_before_its_own(config, T, data):
    model, t = lively(build_model(config)), data.draw(st.integers(0, T - 1))
    tokens = random_tokens(2, T)
    changed = tokens.clone()
    changed[:, t] = (changed[:, t] + data.draw(st.integers(1, VOCAB_SIZE - 1))) % VOCAB_SIZE
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("n_previous", [0, 1, 2, 6])
@pytest.mark.parametrize("ngrams", [2, 3, 5])
def test_ngrams_read_previous_tokens_but_no_hidden_ones(ngrams, n_previous):
    model = lively(build_model(small(ngrams=ngrams, ngram_rows=600, ngram_size=5)).double())
    text = random_tokens(10)
    previous, tokens = text[None, :n_previous], text[None, n_previous:]
    for hidden in (None, *range(len(text))):
        is_hidden = None if hidden is None else (torch.arange(len(text)) == hidden)[None]
        added = model.ngrams(tokens, previous, is_hidden)[0]
        close(added, ngram_vectors(model, text, hidden)[n_previous:])


def test_the_first_weights_have_the_documented_standard_deviations():
    torch.manual_seed(0)
    config = small(
        vocab_size=300,
        n_embd=128,
        block_size=128,
        n_layer=8,
        bias=True,
        mlp="swiglu",
        tie_embeddings=False,
    )
    for name, p in build_model(config).named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(16) if "W_O" in name or "W_out" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.04), name
            assert abs(p.mean().item()) < 0.04 * std, name
        else:
            value = 1.0 if "norm" in name and "weight" in name else 0.0
            assert torch.equal(p, torch.full_like(p, value)), name


def test_attention_begins_sharper_below_the_last_layer_beside_normalized_embeddings():
    for norm_embedding in (True, False):
        model = GPT(small(n_layer=3, qk_norm="gains", norm_embedding=norm_embedding))
        gains = [
            block.attention.norm_q.weight * block.attention.norm_k.weight for block in model.blocks
        ]
        if norm_embedding:
            assert gains[0].min() == gains[1].max() > 1 > gains[2].max()
        else:
            assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)


# --- Every setting --------------------------------------------------------------------------------


def observe(config):
    """What a model computes with settings, bit for bit: its logits, its loss and its gradients."""
    tokens = random_tokens(2, config.block_size)
    if config.ngrams:
        keys = count_ngrams(tokens.flatten().repeat(2).numpy(), VOCAB_SIZE, config)
        config = replace(config, ngram_rows=config.ngram_rows or len(keys))
    model = build_model(config)
    for name, p in model.named_parameters():
        torch.manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.normal_(p, std=0.5)
    torch.manual_seed(0)  # for dropout
    logits, loss = model(tokens, tokens.roll(-1))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [*logits.flatten().tolist(), loss.item()], {
        name: grad.flatten().tolist() for name, grad in gradients.items() if grad.any()
    }


def other_values(name, value):
    """Values of a setting of the model that differ from one."""
    if choices := (CHOICES | {"smear_keys": smear_keys}).get(name):
        return [choice for choice in choices if choice is not value]
    if name == "rope_trained":
        return [64]  # so that some wavelengths turn often in it
    if name == "rope_share":
        return [0.5]
    return [value + 0.3 if isinstance(value, float) else 2 * (value or 1)]


BASES = [{}, {"ngrams": 2}, {"position": "rope", "rope_factor": 2.0}, {"mlp_hidden": 9}]
BASES += [{name: choice} for name, choices in CHOICES.items() for choice in choices]


@pytest.mark.parametrize("base", BASES, ids=str)
def test_exactly_the_settings_of_a_model_that_change_something_are_accepted(base):
    config = small(n_layer=1, **base)
    plain = observe(config)
    for field in fields(config):
        changes = [
            replace(config, **{field.name: value})
            for value in other_values(field.name, getattr(config, field.name))
        ]
        is_read = any(observe(changed) != plain for changed in changes)
        is_accepted = not explain_unused(Config(model=changes[0]), f"model.{field.name}")
        # A padded vocabulary changes only the time
        assert is_accepted == (is_read or field.name == "vocab_multiple"), field.name


@pytest.mark.parametrize("name", CHOICES)
def test_each_two_choices_of_a_setting_differ_and_no_other_is_taken_for_one_of_them(
    name, monkeypatch
):
    choices = [small(**{name: choice}) for choice in CHOICES[name]]
    assert all(a != b for a, b in combinations(map(observe, choices), 2))
    if len(choices) > 2 or isinstance(CHOICES[name][0], str):
        monkeypatch.setattr("common.settings._check_value", lambda *_: None)
        with pytest.raises((LookupError, AttributeError, AssertionError)):
            observe(small(**{name: "another"}))


# --- The loss -------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_targets_that_are_not_negative_in_float32():
    model = lively(build_model(small())).bfloat16()
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=1)
    targets[0, 1] = targets[1, 4] = -1
    logits, loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    logits, targets = logits.double().flatten(0, 1), targets.flatten()
    close(loss, F.cross_entropy(logits, targets, ignore_index=-1).float())


# --- A padded vocabulary --------------------------------------------------------------------------


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("multiple", [2, 64])
def test_padding_the_product_of_the_head_changes_no_prediction_and_no_gradient(
    multiple, tie_embeddings
):
    plain = lively(build_model(small(tie_embeddings=tie_embeddings)).double())
    padded = build_model(small(tie_embeddings=tie_embeddings, vocab_multiple=multiple)).double()
    padded.load_state_dict(plain.state_dict())
    tokens, targets = random_tokens(2, 9), random_tokens(2, 9, seed=1)
    losses = [model(tokens, targets)[1] for model in (padded, plain)]
    close(padded(tokens)[0], plain(tokens)[0])
    close(*losses)
    gradients = [
        torch.autograd.grad(loss, list(model.parameters()))
        for loss, model in zip(losses, (padded, plain))
    ]
    close(*gradients)


def test_no_id_without_a_token_is_generated():
    model = lively(build_model(small(bias=True)))
    with torch.no_grad():  # the model predicts only ids from 20 on
        model.norm.weight.zero_()
        model.norm.bias.zero_()[0] = 1
        model.head.weight[:, 0] = 0
        model.head.weight[20:, 0] = 50
    prompt = random_tokens(2, 3) % 20
    assert (model.generate(prompt, 20)[:, 3:] >= 20).all()
    model.token_count = 20
    assert (model.generate(prompt, 20) < 20).all()


@pytest.mark.parametrize("optional", [{"ngrams": 2, "ngram_rows": 3}, {"smear_keys": True}])
def test_a_model_with_optional_parts_is_built_only_by_build_model(optional):
    with pytest.raises(UserError, match="build_model"):
        GPT(small(**optional))
