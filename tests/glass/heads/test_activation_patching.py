"""Activation patching, against a GPT-2 written out in NumPy, a slow loop and a known circuit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import (
    VOCAB_SIZE,
    captured_with,
    configs,
    few,
    induction_model,
    lively,
    random_tokens,
    small,
)

from glass.heads.capture import capture
from glass.heads.interventions import Interventions, chain_taps
from glass.heads.patching import (
    CellValues,
    Contrast,
    Patch,
    Patching,
    measure_logit_difference,
    parse_patch,
)
from glass.heads.results import Head
from model import GPT
from variants import build_model

DIFFERING = 3  # the first token that differs in `two_texts`


def two_texts(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two texts that differ at token 3 and at two later tokens."""
    clean = random_tokens(length).numpy()
    corrupted = clean.copy()
    for t in (DIFFERING, 5, 8):
        corrupted[t] = (clean[t] + 7) % VOCAB_SIZE
    return clean, corrupted


def sensitive(model: GPT) -> GPT:
    """Scale the embeddings of a model, so that other tokens change its predictions more."""
    with torch.no_grad():
        model.token_embedding.weight *= 4
    return model


def to_table(parts, shape) -> np.ndarray:
    """Return the logit differences of all cells; each must be yielded once."""
    table = np.full(shape, np.nan)
    for part in parts:
        assert isinstance(part, CellValues) and len(part.cells) == len(part.logit_differences)
        for cell, value in zip(part.cells.tolist(), part.logit_differences):
            assert np.isnan(table[tuple(cell)])
            table[tuple(cell)] = value
    assert not np.isnan(table).any()
    return table


# --- GPT-2 in NumPy -------------------------------------------------------------------------------


def layer_norm(x, gain, bias):
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * gain + bias


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def run_gpt2(model: GPT, ids, patches, interventions) -> tuple[np.ndarray, dict[Patch, np.ndarray]]:
    """Return the logits (T, V), and all activations by the patch that copies them."""
    c, T = model.config, len(ids)
    w = {name: p.detach().numpy() for name, p in model.named_parameters()}
    activations = {}

    def patched(patch, value):
        value = patches.get(patch, value)
        activations[patch] = np.array(value)
        return value

    mask = np.tril(np.ones((T, T), bool))
    for j in interventions.hidden:
        mask[j + 1 :, j] = False
    x = w["token_embedding.weight"][ids] + w["position_embedding.weight"][:T]
    for layer in range(c.n_layer):
        for t in range(T):
            x[t] = patched(Patch("residual", layer, t), x[t])
        name = f"blocks.{layer}.attention"
        block = f"blocks.{layer}"
        z = layer_norm(x, w[f"{block}.norm_1.weight"], w[f"{block}.norm_1.bias"])
        q, k, v = (z @ w[f"{name}.W_{n}.weight"].T + w[f"{name}.W_{n}.bias"] for n in "QKV")
        d = c.n_embd // c.n_head
        outputs = []
        for head in range(c.n_head):
            part = slice(head * d, (head + 1) * d)
            scores = np.where(mask, q[:, part] @ k[:, part].T / np.sqrt(d), -np.inf)
            y = patched(Patch("head", layer, head), softmax(scores) @ v[:, part])
            if (layer, head) in interventions.ablated:
                y = np.zeros_like(y)
            outputs.append(y)
        x = x + np.concatenate(outputs, axis=1) @ w[f"{name}.W_O.weight"].T + w[f"{name}.W_O.bias"]
        z = layer_norm(x, w[f"{block}.norm_2.weight"], w[f"{block}.norm_2.bias"])
        z = gelu(z @ w[f"{block}.mlp.W_in.weight"].T + w[f"{block}.mlp.W_in.bias"])
        z = z @ w[f"{block}.mlp.W_out.weight"].T + w[f"{block}.mlp.W_out.bias"]
        x = x + patched(Patch("mlp", layer, 0), z)
    x = layer_norm(x, w["norm.weight"], w["norm.bias"])
    return x @ w["token_embedding.weight"].T, activations


CHANGES = {
    "nothing": ((), Interventions()),
    "patches": (
        (
            Patch("residual", 0, 5),
            Patch("residual", 1, 3),
            Patch("residual", 2, 9),
            Patch("head", 1, 2),
            Patch("head", 2, 0),
            Patch("mlp", 0, 0),
            Patch("mlp", 2, 0),
        ),
        Interventions(),
    ),
    "interventions": ((), Interventions((Head(0, 3), Head(2, 1)), (1, 5))),
    "both": (
        (Patch("residual", 1, 8), Patch("head", 0, 3), Patch("mlp", 1, 0)),
        Interventions((Head(0, 3), Head(1, 0)), (2, 6)),
    ),
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("is_denoising", [True, False])
def test_patches_have_the_effects_that_they_have_in_a_gpt2_written_in_numpy(changes, is_denoising):
    kept, interventions = CHANGES[changes]
    config = small(n_layer=3, norm="layernorm", bias=True, tie_embeddings=True)
    model = sensitive(lively(build_model(config)))
    clean, corrupted = two_texts(12)
    source_ids, base_ids = (clean, corrupted) if is_denoising else (corrupted, clean)
    contrast = Contrast(position=10, answer=4, wrong=17)
    source, base = (captured_with(model, ids, interventions) for ids in (source_ids, base_ids))
    patching = Patching(model, source, base, contrast, kept, interventions)

    _, activations = run_gpt2(model, source_ids, {}, interventions)
    kept_values = {patch: activations[patch] for patch in kept}

    def expected(*more) -> float:
        patches = kept_values | {patch: activations[patch] for patch in more}
        logits = run_gpt2(model, base_ids, patches, interventions)[0][10]
        return logits[4] - logits[17]

    assert patching.logit_difference() == pytest.approx(expected(), abs=2e-5)
    logits = run_gpt2(model, base_ids, kept_values, interventions)[0][10]
    assert patching.logits().numpy() == pytest.approx(logits, abs=2e-5)
    residuals = to_table(patching.patch_residuals(), (3, 11))
    components = to_table(patching.patch_components(), (3, 5))
    for layer in range(3):
        for t in range(11):
            value = expected(Patch("residual", layer, t))
            assert residuals[layer, t] == pytest.approx(value, abs=2e-5)
        for head in range(4):
            value = expected(Patch("head", layer, head))
            assert components[layer, head] == pytest.approx(value, abs=2e-5)
        assert components[layer, 4] == pytest.approx(expected(Patch("mlp", layer, 0)), abs=2e-5)
    assert np.ptp(residuals) > 0.1 and np.ptp(components) > 0.1


# --- models of all kinds --------------------------------------------------------------------------


def run_slowly(model: GPT, ids, patches, source, contrast, interventions) -> float:
    """Return the logit difference of a whole pass with taps that assign each patch."""
    tokens = torch.from_numpy(ids)[None]
    device = tokens.device
    x = model.embed(tokens, hidden=interventions.is_hidden(len(ids), device))
    all_taps = []

    def assign(at, values, y):
        y = y.clone()
        y[at] = values
        return y

    for patch in patches:
        key, at = ("residual", patch.layer - 1), (slice(None), patch.index)
        if patch.kind == "residual":
            values = source["residual", patch.layer - 1][:, patch.index]
        elif patch.kind == "head":
            key, at = ("heads", patch.layer), (slice(None), slice(None), patch.index)
            values = source[key][at]
        else:
            key, at = ("mlp", patch.layer), slice(None)
            values = source[key]
        if key == ("residual", -1):
            x = assign(at, values, x)
        else:
            all_taps.append({key: lambda y, at=at, values=values: assign(at, values, y)})
    taps = chain_taps(*all_taps, interventions.taps())
    mask = interventions.mask(len(ids), device)
    x = model.run_blocks(tokens, mask=mask, taps=taps, entry=(0, x))
    return measure_logit_difference(model, x[0, contrast.position], contrast).item()


def record_all(model: GPT, ids, interventions) -> dict:
    """Return the activations of a pass by (name, layer); the embedding is ("residual", -1)."""
    tokens = torch.from_numpy(ids)[None]
    x = model.embed(tokens, hidden=interventions.is_hidden(len(ids), tokens.device))
    values = {("residual", -1): x}
    names = ["residual", "heads"] + ["mlp"] * (model.config.mlp != "none")
    keys = [(name, layer) for name in names for layer in range(model.config.n_layer)]
    record = {key: lambda value, key=key: values.update({key: value}) for key in keys}
    taps = chain_taps(interventions.taps(), record)
    mask = interventions.mask(len(ids), tokens.device)
    model.run_blocks(tokens, mask=mask, taps=taps, entry=(0, x))
    return values


@few
@given(
    configs,
    st.lists(st.sampled_from(["L0T3", "L1T4", "L1T9", "L0H2", "L1H1", "L0MLP"]), max_size=3),
    st.lists(st.builds(Head, st.integers(0, 1), st.integers(0, 3)), max_size=2),
    st.lists(st.integers(0, 9), max_size=2, unique=True),
)
def test_patches_of_any_model_have_the_effects_of_a_slow_loop(config, kept, ablated, hidden):
    model, (clean, corrupted) = lively(build_model(config)).double(), two_texts(11)
    has_mlp = config.mlp != "none"
    kept = [parse_patch(name) for name in kept if has_mlp or "MLP" not in name]
    interventions = Interventions(tuple(ablated), tuple(hidden))
    contrast = Contrast(position=9, answer=4, wrong=17)
    source, base = (captured_with(model, ids, interventions) for ids in (clean, corrupted))
    patching = Patching(model, source, base, contrast, kept, interventions)
    with torch.no_grad():
        recorded = record_all(model, clean, interventions)

        def slow(*more) -> float:
            patches = [*kept, *more]
            return run_slowly(model, corrupted, patches, recorded, contrast, interventions)

        assert patching.logit_difference() == pytest.approx(slow(), abs=1e-6)
        residuals = to_table(patching.patch_residuals(), (2, 10))
        components = to_table(patching.patch_components(), (2, 5 if has_mlp else 4))
        for layer in range(2):
            for t in range(10):
                value = slow(Patch("residual", layer, t))
                assert residuals[layer, t] == pytest.approx(value, abs=1e-6)
            for column in range(components.shape[1]):
                patch = Patch("mlp", layer, 0) if column == 4 else Patch("head", layer, column)
                assert components[layer, column] == pytest.approx(slow(patch), abs=1e-6)


def test_cells_of_many_passes_are_those_of_single_passes():
    model = lively(build_model(small(n_head=8, n_embd=32, block_size=64, smear_keys=True))).double()
    (clean, corrupted), contrast = two_texts(60), Contrast(59, 1, 2)
    source, base = captured_with(model, clean), captured_with(model, corrupted)
    patching = Patching(model, source, base, contrast)
    residual_parts, component_parts = patching.patch_residuals(), patching.patch_components()
    residuals, components = to_table(residual_parts, (2, 60)), to_table(component_parts, (2, 9))
    for patch, value in (
        (Patch("residual", 0, 8), residuals[0, 8]),
        (Patch("residual", 1, 40), residuals[1, 40]),
        (Patch("head", 1, 7), components[1, 7]),
        (Patch("mlp", 0, 0), components[0, 8]),
    ):
        kept = Patching(model, source, base, contrast, [patch])
        assert value == pytest.approx(kept.logit_difference(), abs=1e-9)


@pytest.mark.parametrize("mlp", ["swiglu", "none"])
def test_the_residual_stream_at_the_only_token_that_differs_restores_the_whole_difference(mlp):
    model = sensitive(lively(build_model(small(mlp=mlp)))).double()
    ids = random_tokens(14).numpy()
    corrupted = np.where(np.arange(14) == 6, (ids + 1) % VOCAB_SIZE, ids)
    contrast = Contrast(12, 3, 8)
    source, base = captured_with(model, ids), captured_with(model, corrupted)
    clean = measure_logit_difference(model, source.residuals[-1, 0, 12], contrast).item()
    patching = Patching(model, source, base, contrast)
    values = to_table(patching.patch_residuals(), (2, 13))
    assert values[0, 6] == pytest.approx(clean, abs=1e-9)
    others = np.delete(values[0], 6)
    assert others == pytest.approx(np.full(12, patching.logit_difference()), abs=1e-9)
    assert abs(clean - patching.logit_difference()) > 0.1
    # After all patches of a layer's input, nothing remains of the base.
    all_tokens = [Patch("residual", 1, t) for t in range(14)]
    patching = Patching(model, source, base, contrast, all_tokens)
    assert patching.logit_difference() == pytest.approx(clean, abs=1e-9)


def test_only_tokens_from_the_first_that_differs_to_the_prediction_are_run():
    model, (clean, corrupted) = lively(build_model(small())), two_texts(14)
    patching = Patching(
        model, captured_with(model, clean), captured_with(model, corrupted), Contrast(10, 3, 8)
    )
    lengths = []
    hook = model.blocks[1].register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[1]))
    with hook:
        parts = [*patching.patch_residuals(), *patching.patch_components()]
    assert parts and max(lengths) == 11 - DIFFERING
    # If no token differs up to the prediction, nothing is run.
    lengths.clear()
    position = DIFFERING - 1
    patching = Patching(
        model,
        captured_with(model, clean),
        captured_with(model, corrupted),
        Contrast(position, 3, 8),
    )
    hook = model.blocks[1].register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[1]))
    with hook:
        residuals = to_table(patching.patch_residuals(), (2, DIFFERING))
        components = to_table(patching.patch_components(), (2, 5))
    assert not lengths
    value = patching.logit_difference()
    assert (residuals == value).all() and (components == value).all()


# --- a known circuit ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_patching_finds_the_heads_of_an_induction_circuit(norm):
    """L0H0 attends to the previous token; L1H1 to the token after the previous occurrence.

    Token 9 follows the previous occurrence of the last token in the clean text, and token 7 in the
    corrupted one.
    """
    model = induction_model(20, 16, norm)
    clean = np.array([5, 3, 9, 1, 12, 7, 2, 3])
    corrupted = np.array([5, 12, 9, 1, 3, 7, 2, 3])
    contrast = Contrast(position=7, answer=9, wrong=7)
    source, base = capture(model, clean[None]), capture(model, corrupted[None])

    difference = measure_logit_difference(model, source.residuals[-1, 0, 7], contrast).item()
    patching = Patching(model, source, base, contrast)
    before = patching.logit_difference()

    def restored(value):
        return (value - before) / (difference - before)

    assert difference > 0.05 and before < -0.05
    heads = to_table(patching.patch_components(), (2, 3))[:, :2]
    assert restored(heads) == pytest.approx(np.eye(2), abs=0.05)
    # The previous-token head writes to tokens 2 and 5 what the induction head reads there.
    for kept in (["L0H0"], ["L1H1"], ["L1T2", "L1T5"], ["L0T1", "L0T4"]):
        patching = Patching(model, source, base, contrast, [parse_patch(name) for name in kept])
        assert restored(patching.logit_difference()) == pytest.approx(1, abs=0.05)
    # Tokens that neither head reads restore nothing.
    tokens = restored(to_table(Patching(model, source, base, contrast).patch_residuals(), (2, 8)))
    assert tokens[1, [0, 1, 3, 4, 6]] == pytest.approx(np.zeros(5), abs=0.05)


# --- names and mistakes ---------------------------------------------------------------------------


@given(
    st.builds(Patch, st.sampled_from(["residual", "head"]), st.integers(0, 999), st.integers(0, 99))
    | st.builds(Patch, st.just("mlp"), st.integers(0, 999), st.just(0))
)
def test_names_of_patches_are_parsed(patch):
    assert parse_patch(str(patch)) == patch


@pytest.mark.parametrize("name", ["", "L1", "L1M2", "MLP", "L1MLP2", "L-1H2", "L1T1 ", "L1T٣"])
def test_other_names_are_no_patches(name):
    assert parse_patch(name) is None


@pytest.mark.parametrize(
    "patch", [Patch("mlp", 0, 0), Patch("head", 0, 4), Patch("head", 2, 0), Patch("residual", 2, 0)]
)
def test_a_patch_that_the_model_does_not_have_is_refused(patch):
    model = build_model(small(mlp="none"))
    forward = captured_with(model, random_tokens(6))
    with pytest.raises(ValueError, match=str(patch)):
        Patching(model, forward, forward, Contrast(4, 0, 1), [patch])


def test_a_prediction_after_the_end_of_a_text_is_refused():
    model = build_model(small())
    source, base = captured_with(model, random_tokens(6)), captured_with(model, random_tokens(9))
    with pytest.raises(ValueError, match="position=6"):
        Patching(model, source, base, Contrast(6, 0, 1))


def test_patching_leaves_the_model_the_passes_and_the_random_state_unchanged():
    model = build_model(small(dropout=0.5)).train()
    clean, corrupted = two_texts(12)
    source, base = captured_with(model, clean), captured_with(model, corrupted)
    copies = [t.clone() for forward in (source, base) for t in vars(forward).values()]
    state = torch.get_rng_state()
    kept = [Patch("residual", 0, 5), Patch("head", 0, 1), Patch("mlp", 1, 0)]
    patching = Patching(model, source, base, Contrast(10, 0, 1), kept)
    first, second = (to_table(patching.patch_components(), (2, 5)) for _ in range(2))
    assert np.array_equal(first, second)  # no dropout
    to_table(patching.patch_residuals(), (2, 11))
    assert model.training and torch.equal(state, torch.get_rng_state())
    after = [t for forward in (source, base) for t in vars(forward).values()]
    assert all(torch.equal(a, b) for a, b in zip(copies, after))
