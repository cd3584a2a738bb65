"""Activation patching, against a slow loop."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import (
    VOCAB_SIZE,
    captured_with,
    configs,
    few,
    lively,
    random_tokens,
    small,
)

from glass.heads.measure.capture import capture
from glass.heads.measure.interventions import Interventions, chain_taps
from glass.heads.measure.patching import (
    Contrast,
    Patch,
    Patching,
    measure_logit_difference,
    parse_patch,
)
from model import GPT
from run.row import Head, parse_head
from variants import build_model

DIFFERING = 3  # the first token that differs in `two_texts`


def two_texts(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two texts that differ at token 3 and at two later tokens."""
    clean = random_tokens(length).numpy()
    corrupted = clean.copy()
    for t in (DIFFERING, 5, 8):
        corrupted[t] = (clean[t] + 7) % VOCAB_SIZE
    return clean, corrupted


def to_table(parts, shape) -> np.ndarray:
    """Return the values of all cells; each must be yielded once."""
    table = np.full(shape, np.nan)
    for cells, values in parts:
        for cell, value in zip(cells.tolist(), values, strict=True):
            assert np.isnan(table[tuple(cell)])
            table[tuple(cell)] = value
    assert not np.isnan(table).any()
    return table


def run_slowly(model: GPT, ids, patches, source, interventions) -> torch.Tensor:
    """Return the final residual stream (T, C) of a whole pass with taps that assign each patch.

    `source` has the values of the source pass by (name, layer).
    """
    all_taps = []
    for patch in patches:
        key, at = ("residual", patch.layer - 1), (slice(None), patch.index)
        if patch.kind == "head":
            key, at = ("heads", patch.layer), (slice(None), slice(None), patch.index)
        elif patch.kind == "mlp":
            key, at = ("mlp", patch.layer), (slice(None),)
        elif patch.layer == 0:
            key = ("embedding", 0)

        def assign(y, at=at, values=source[key]):
            y = y.clone()
            y[at] = values[at]
            return y

        all_taps.append({key: assign})
    return capture(model, ids[None], interventions, chain_taps(*all_taps)).residuals[-1, 0]


def record_all(model: GPT, ids, interventions) -> dict:
    """Return the activations of a pass by (name, layer)."""
    names = ["residual", "heads"] + ["mlp"] * (model.config.mlp != "none")
    keys = [(name, layer) for name in names for layer in range(model.config.n_layer)]
    values = {}
    record = {key: lambda value, key=key: values.update({key: value}) for key in keys}
    record["embedding", 0] = lambda value: values.update({("embedding", 0): value})
    taps = chain_taps(interventions.taps(), record)
    capture(model, ids[None], Interventions(hidden=interventions.hidden), taps)
    return values


@few
@given(
    configs,
    st.lists(st.sampled_from(["L0T3", "L1T4", "L1T9", "L0H2", "L1H1", "L0MLP"]), max_size=3),
    st.lists(st.builds(Head, st.integers(0, 1), st.integers(0, 3)), max_size=2),
    st.lists(st.integers(0, 10), max_size=2, unique=True),
)
@example(small(), [], [], [10])  # the token after the prediction
def test_patches_of_any_model_have_the_effects_of_a_slow_loop(config, kept, ablated, hidden):
    model, (clean, corrupted) = lively(build_model(config)).double(), two_texts(11)
    has_mlp = config.mlp != "none"
    kept = [parse_patch(name) for name in kept if has_mlp or "MLP" not in name]
    interventions = Interventions(tuple(ablated), tuple(hidden))
    contrast = Contrast(position=9, answer=4, wrong=17)
    source, base = (captured_with(model, ids, interventions) for ids in (clean, corrupted))
    patching = Patching(model, source, base, contrast, kept, interventions)
    recorded = record_all(model, clean, interventions)

    def slow(*more) -> float:
        x = run_slowly(model, corrupted, [*kept, *more], recorded, interventions)
        return measure_logit_difference(model, x[contrast.position], contrast).item()

    assert patching.value() == pytest.approx(slow(), abs=1e-6)
    residuals = to_table(patching.patch_residuals(), (2, 10))
    components = to_table(patching.patch_components(), (2, 5 if has_mlp else 4))
    for layer in range(2):
        for t in range(10):
            value = slow(Patch("residual", layer, t))
            assert residuals[layer, t] == pytest.approx(value, abs=1e-6)
        for column in range(components.shape[1]):
            patch = Patch("mlp", layer, 0) if column == 4 else Patch("head", layer, column)
            assert components[layer, column] == pytest.approx(slow(patch), abs=1e-6)


@pytest.fixture(scope="module")
def passes():
    """A model in float64, and its passes over the two texts of 14 tokens."""
    model, texts = lively(build_model(small())).double(), two_texts(14)
    return model, *(captured_with(model, ids) for ids in texts)


def test_any_function_of_the_logits_can_be_the_metric(passes):
    contrast = Contrast(10, 3, 8)

    def loss(logits):
        return -logits.log_softmax(dim=-1)[:, 3]

    by_default, by_metric, by_loss = (
        Patching(*passes, contrast, metric=metric)
        for metric in (None, lambda logits: logits[:, 3] - logits[:, 8], loss)
    )
    expected = to_table(by_default.patch_components(), (2, 5))
    assert to_table(by_metric.patch_components(), (2, 5)) == pytest.approx(expected, abs=1e-9)
    assert by_metric.value() == pytest.approx(by_default.value(), abs=1e-9)
    assert by_loss.value() == pytest.approx(loss(by_loss.logits()[None]).item(), abs=1e-9)
    losses = to_table(by_loss.patch_residuals(), (2, 11))
    kept = Patching(*passes, contrast, [Patch("residual", 1, 5)])
    assert losses[1, 5] == pytest.approx(loss(kept.logits()[None]).item(), abs=1e-9)


def test_cells_of_many_passes_are_those_of_single_passes():
    model = lively(build_model(small(n_head=8, n_embd=32, block_size=64))).double()
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
        assert value == pytest.approx(kept.value(), abs=1e-9)


@pytest.mark.parametrize(
    "name", ["", "L1", "L1M2", "MLP", "L1MLP2", "L-1H2", "L1T1 ", "L1T٣", "L٠H０"]
)
def test_other_names_are_no_patches(name):
    assert parse_patch(name) is None and parse_head(name) is None


def test_a_prediction_after_the_end_of_a_text_is_refused(passes):
    with pytest.raises(ValueError, match="position=14"):
        Patching(*passes, Contrast(14, 0, 1))
