"""What looks into a forward pass or changes it: taps, masks, entries and attention maps."""

import itertools
import math
from functools import partial

import formulas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import configs, few, lively, random_tokens, seeds, small

from model import TAP_NAMES, causal_mask
from variants import build_model

close = torch.testing.assert_close


# --- Taps, masks, entries -------------------------------------------------------------------------


def tapped_values(model, tokens, double):
    """What every tap should see, name → values of all layers, from the layers' own functions.

    `double(name, layer, value)` is the tap."""
    config, T = model.config, tokens.shape[1]
    values = {name: [] for name in TAP_NAMES}

    def tap(name, layer, value):
        value = double(name, layer, value)
        values[name].append(value)
        return value

    x = tap("embedding", 0, model.embed(tokens))
    for layer, block in enumerate(model.blocks):
        before = x
        q, k, v = block.attention.project(block.norm_1(x), model.rotary_at(0, T))
        q, k, v = tap("q", layer, q), tap("k", layer, k), tap("v", layer, v)
        weights = formulas.attend(q, k, v, causal_mask(T, T), block.attention)[1]
        weights = tap("weights", layer, weights)
        v = v.repeat_interleave(config.n_head // config.kv_heads, dim=1)  # (B, H, T, d_v)
        y = (weights @ v).transpose(1, 2) * gates(block, block.norm_1(x))
        heads = tap("heads", layer, y)
        x = x + tap("attention", layer, block.attention.W_O(heads.flatten(2)))
        if block.mlp is not None:
            read = before if config.parallel_mlp else x
            x = x + tap("mlp", layer, block.mlp(block.norm_2(read)))
        x = tap("residual", layer, x)
    return values


def gates(block, x):
    """The factors of the heads' outputs, (B, T, H, 1 or d_v), for attention's input x (B, T, C)."""
    return block.attention.gates(x) if block.attention.config.gate_dim else 1


def value_names(config):
    """The names of the values that a model of these settings has."""
    return [name for name in TAP_NAMES if (name, config.mlp) != ("mlp", "none")]


@few
@given(
    config=configs,
    T=st.integers(1, 16),
    doubled_layer=st.integers(0, 1),
    seed=seeds,
    doubled_name=st.sampled_from([None, *TAP_NAMES]),
)
def test_a_tap_reads_its_value_and_what_it_returns_is_used(
    config, T, doubled_layer, seed, doubled_name
):
    model, tokens = lively(build_model(config).double(), seed), random_tokens(2, T, seed=seed)
    if doubled_name == "embedding":
        doubled_layer = 0
    values = {name: [] for name in TAP_NAMES}

    def double(name, layer, value):
        return value * 2 if (name, layer) == (doubled_name, doubled_layer) else value

    def record(name, layer, value):
        values[name].append(double(name, layer, value))
        return values[name][-1]

    keys = itertools.product(TAP_NAMES, range(config.n_layer))
    x = model.run_blocks(tokens, taps={key: partial(record, *key) for key in keys})
    expected = tapped_values(model, tokens, double)
    for name in value_names(config):
        close(values[name], expected[name])
    close(x, expected["residual"][-1])
    if doubled_name is None:
        close(x, model.run_blocks(tokens))


@few
@given(config=configs, T=st.integers(1, 16), seed=seeds)
def test_an_entry_runs_only_the_blocks_above_it_and_ends_the_same(config, T, seed):
    model, tokens, inputs = lively(build_model(config), seed), random_tokens(2, T, seed=seed), []
    keys = [("embedding", 0), ("residual", 0), ("residual", 1)]
    final = model.run_blocks(tokens, taps=dict.fromkeys(keys, inputs.append))
    for first_layer, x in enumerate(inputs):
        updates = []
        taps = {("attention", 0): updates.append, ("attention", 1): updates.append}
        again = model.run_blocks(tokens, taps=taps, entry=(first_layer, x))
        assert torch.equal(again, final)
        assert len(updates) == 2 - first_layer


@few
@given(
    config=configs,
    T=st.integers(1, 16),
    is_additive=st.booleans(),
    per_sequence=st.booleans(),
    seed=seeds,
)
def test_a_mask_reaches_the_attention_of_every_layer(config, T, is_additive, per_sequence, seed):
    tokens = random_tokens(3, T, seed=seed)
    mask = torch.rand(3, 1, T, T) < 0.6 if per_sequence else torch.rand(T, T) < 0.6
    if is_additive:
        mask = torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf)
    config.attention_gate = "none"
    model = lively(build_model(config).double(), seed)
    values = {name: [] for name in ("q", "k", "v", "heads")}
    taps = {(name, layer): values[name].append for name in values for layer in range(2)}
    fused = model.run_blocks(tokens, mask=mask, taps=taps)
    for block, q, k, v, heads in zip(model.blocks, *values.values()):
        y, _ = formulas.attend(q, k, v, mask, block.attention)
        close(heads, y.transpose(1, 2))
    keep = {("weights", layer): lambda value: None for layer in range(2)}
    close(model.run_blocks(tokens, mask=mask, taps=keep), fused)


# --- Attention maps -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    "look",
    [
        lambda model, tokens: model.attention_maps(tokens),
        lambda model, tokens: model.run_with_taps(tokens, {}),
    ],
)
def test_looking_drops_nothing_and_changes_neither_the_model_nor_the_random_state(
    look, is_training
):
    model, tokens = lively(build_model(small(dropout=0.5))).train(is_training), random_tokens(2, 9)
    model(tokens, tokens)[1].backward()
    before = [(p.clone(), p.grad.clone()) for p in model.parameters()]
    random_state = torch.get_rng_state()
    seen = look(model, tokens)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training == is_training for module in model.modules())
    close([(p, p.grad) for p in model.parameters()], before, atol=0, rtol=0)
    assert torch.equal(seen, look(model.eval(), tokens))


# --- From Python ----------------------------------------------------------------------------------


@few
@given(config=configs, T=st.integers(1, 16), seed=seeds)
def test_a_cache_has_every_value_and_its_values_replace_those_of_another_text(config, T, seed):
    model = lively(build_model(config).double(), seed)
    clean, corrupted = random_tokens(2, T, seed=seed), random_tokens(2, T, seed=seed + 1)
    logits, cache = model.run_with_cache(clean)
    expected = tapped_values(model, clean, lambda name, layer, value: value)
    assert {name for name, _ in cache} == {*value_names(config)}
    for name in value_names(config):
        values = expected[name]
        close([cache[name, layer] for layer in range(len(values))], values)
    close(logits, model(clean)[0])
    for key in [("embedding", 0), ("residual", 0), ("residual", 1)]:  # all later values follow
        close(model.run_with_taps(corrupted, {key: lambda value, key=key: cache[key]}), logits)
    close(model.run_with_taps(corrupted, {}), model(corrupted)[0])


@pytest.mark.parametrize("change", [torch.add, torch.Tensor.add_])
@pytest.mark.parametrize("name", ["q", "v", "weights", "heads", "mlp", "residual"])
def test_gradients_flow_through_what_a_tap_returns_or_changes_in_place(name, change):
    model, tokens = lively(build_model(small(n_kv_head=2)).double()), random_tokens(2, 5)
    value = model.run_with_cache(tokens, name)[1][name, 0]
    added = torch.zeros(value.shape[1:], dtype=value.dtype, requires_grad=True)

    def loss(added):
        return model.run_with_taps(tokens, {(name, 0): lambda value: change(value, added)})[
            :, -1
        ].sum()

    assert torch.autograd.gradcheck(loss, added)


@pytest.mark.parametrize(
    ("key", "returned"),
    [
        (("blocks.0.attn.hook_z", 0), None),
        (("heads", 2), None),
        (("heads", 0), torch.zeros(2, 9, 4)),
    ],
)
def test_a_tap_that_cannot_work_is_refused(key, returned):
    with pytest.raises(ValueError, match=r"\bheads\b"):
        build_model(small()).run_with_taps(random_tokens(2, 9), {key: lambda value: returned})


@pytest.mark.parametrize(
    "tokens, wrong",
    [
        ([[1, 23]], "23"),
        ([[-1, 2]], "-1"),
        ([[1.0, 2.0]], "integers"),
        ([1, 2], "B, T"),
    ],
)
@pytest.mark.parametrize("name", ["run_with_cache", "attention_maps", "generate"])
def test_tokens_that_a_model_does_not_have_are_named(name, tokens, wrong):
    model = build_model(small())
    more = [1] if name == "generate" else []
    with pytest.raises(ValueError, match=wrong):
        getattr(model, name)(torch.tensor(tokens), *more)
