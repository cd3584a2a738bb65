"""Composition, in a model of two layers whose heads are set by hand."""

from itertools import product

import formulas
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import induction_model, lively, small

from common.statistics import ratio_with_error
from glass.heads.measure import scores
from glass.heads.measure.capture import capture
from glass.heads.measure.composition import INPUTS, ScoredRows, measure_composition
from model import GPT, attention_weights, causal_mask
from run.row import Head, Row
from variants import build_model

V, T = 40, 24


@pytest.fixture(params=["rmsnorm", "layernorm"])
def model(request) -> GPT:
    return induction_model(V, T, request.param)


PERIODS = np.repeat([6, 8, 10, 12], 4)


@pytest.fixture
def texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows, repeated rows and control rows, (16, T) each."""
    rng = np.random.default_rng(0)
    windows, repeated, control = np.stack([rng.permutation(V)[:T] for _ in range(48)]).reshape(
        3, 16, T
    )
    for row, period in zip(repeated, PERIODS):
        row[period : 2 * period] = row[:period]
    return windows, repeated, control


def measure(
    model: GPT,
    texts: tuple[np.ndarray, ...],
    heads: dict[str, list[Head]],
    max_components: int | None = None,
) -> Row:
    """Return the composition of heads by score."""
    windows, repeated, control = texts
    random = capture(model, np.concatenate((repeated, control)))
    rows = {
        "previous_token": ScoredRows(capture(model, windows)),
        "induction": ScoredRows(random, PERIODS),
    }
    row = Row()
    for score, some in heads.items():
        row |= measure_composition(model, score, some, rows[score], max_components)
    return row


def upstream_of(row: Row, score: str, head: Head) -> set[str]:
    """Return the components with a share in the score of a head."""
    return {place.split("/")[1] for place in row.places(f"composition/{score}/{head}")}


INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD = Head(1, 1), Head(0, 0)


def test_an_induction_head_depends_on_the_previous_token_head_through_its_keys(model, texts):
    maps = [model.attention_maps(torch.from_numpy(ids)).numpy() for ids in texts]
    readings = scores.readings(*maps, PERIODS)
    assert readings["previous_token"][PREVIOUS_TOKEN_HEAD].mean() > 0.95
    assert readings["induction"][INDUCTION_HEAD].mean() > 0.8  # less, by the first token

    heads = {
        "induction": [INDUCTION_HEAD, Head(1, 0)],
        "previous_token": [PREVIOUS_TOKEN_HEAD],
    }
    row = measure(model, texts, heads)
    # Ids come from the embedding; neither the noisy head nor the empty MLP contributes.
    assert upstream_of(row, "induction", INDUCTION_HEAD) == {"L0H0", "embedding"}
    assert not row.places("composition/previous_token")  # nothing is upstream

    share, error = row.estimate("composition/induction", f"{INDUCTION_HEAD}/keys/L0H0")
    assert share == pytest.approx(1, abs=0.02) and error < 0.05
    prefix = f"composition/induction/{INDUCTION_HEAD}"
    assert row[f"{prefix}/queries/L0H0"] == pytest.approx(0, abs=0.05)
    # It moves ids, not previous tokens.
    assert row[f"{prefix}/values/L0H0"] == pytest.approx(0, abs=0.02)
    assert row[f"{prefix}/values/embedding"] > 0.8


def test_of_few_components_those_with_the_largest_direct_shares_are_measured(model, texts):
    row = measure(model, texts, {"induction": [INDUCTION_HEAD]})
    assert measure(model, texts, {"induction": [INDUCTION_HEAD]}, max_components=2) == row
    row = measure(model, texts, {"induction": [INDUCTION_HEAD]}, max_components=1)
    assert len(upstream_of(row, "induction", INDUCTION_HEAD)) == 1


def test_the_share_of_values_is_that_of_what_a_head_moves(model, texts):
    second, d = model.blocks[1].attention, max(V, T)
    with torch.no_grad():  # now it moves the previous token that L0H0 wrote
        second.W_V.weight[d : d + V].zero_()[:, V + T :] = torch.eye(V)
    row = measure(model, texts, {"induction": [INDUCTION_HEAD]})
    assert row[f"composition/induction/{INDUCTION_HEAD}/values/L0H0"] > 0.9


def slow_input(
    model: GPT, tokens: torch.Tensor, component: tuple[str, int, tuple], is_direct: bool
) -> torch.Tensor:
    """Return the input (B, T, C) of layer 2 with a component mean-ablated.

    The component is given by its tap and its place in the value.
    """
    name, layer, at = component

    def ablate(y):
        y = y.clone()
        y[at] = y[at].mean(dim=(0, 1))
        return y

    _, values = model.run_with_cache(tokens)
    if is_direct:
        written = values[name, layer][at]
        if name == "heads":
            written = written @ model.blocks[layer].attention.W_O.weight[:, 4:8].T
        return values["residual", 1] - written + written.mean(dim=(0, 1))
    inputs = []
    model.run_with_taps(tokens, {(name, layer): ablate, ("residual", 1): inputs.append})
    return inputs[0]


COMPONENTS = {
    "embedding": ("embedding", 0, (...,)),
    "L0H1": ("heads", 0, (slice(None), slice(None), 1)),
    "L1H1": ("heads", 1, (slice(None), slice(None), 1)),
    "L0MLP": ("mlp", 0, (...,)),
    "L1MLP": ("mlp", 1, (...,)),
}


def queries_and_keys(model: GPT, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys of layer 2 for an input x."""
    rotary, block = model.rotary_at(0, T), model.blocks[2]
    q, k, _ = block.attention.project(block.norm_1(x), rotary)
    return q, k


def head_outputs(model: GPT, A: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return what the heads of layer 2 write with patterns A (B, H, T, T), (B, H, T, C).

    Values are those of an input x, gates those of an input `at`.
    """
    c, block = model.config, model.blocks[2]
    layer, outputs = block.attention, []
    x, at = (formulas.norm(block.norm_1, one, c) for one in (x, at))
    for head in range(c.n_head):
        group = head // (c.n_head // c.kv_heads)
        y = A[:, head] @ formulas.project_head(layer.W_V, group, c.value_dim, x)
        if c.attention_gate != "none":
            gates = formulas.project_head(layer.W_gate, head, c.gate_dim // c.n_head, at)
            y = y / (1 + torch.exp(-gates))
        outputs.append(y @ layer.W_O.weight[:, head * c.value_dim : (head + 1) * c.value_dim].T)
    return torch.stack(outputs, dim=1)


def reading_of_patterns(score: str, A: torch.Tensor) -> np.ndarray:
    """Return the sum over rows of the score of each head with patterns A (B, H, T, T), (H,)."""
    if score == "induction":
        return scores.induction(A[:16].numpy(), A[16:].numpy(), PERIODS).sum(axis=-1)
    return torch.diagonal(A, offset=-1, dim1=-2, dim2=-1).mean(dim=-1).sum(dim=0).numpy()


def reading_of_outputs(score: str, values: torch.Tensor) -> np.ndarray:
    """Return the mean of values (B, H, T) over the tokens on which a score is measured, (H,)."""
    rows = values[:, :, 1:]
    if score == "induction":  # the second occurrences
        rows = [
            values[row, :, p : 2 * p].mean(dim=-1, keepdim=True) for row, p in enumerate(PERIODS)
        ]
        rows = torch.stack(rows)
    return rows.mean(dim=(0, 2)).numpy()


def lost_shares(
    model: GPT, score: str, x: torch.Tensor, without: torch.Tensor
) -> dict[str, np.ndarray]:
    """Return the lost shares of all heads of layer 2 by input, of which one is patched, (H,)."""
    (q, k), (patched_q, patched_k) = (queries_and_keys(model, one) for one in (x, without))
    mask = causal_mask(T, T)
    A = attention_weights(q, k, mask)
    unchanged = reading_of_patterns(score, A)
    outputs, patched = (head_outputs(model, A, one, x) for one in (x, without))
    kept = {
        "queries": reading_of_patterns(score, attention_weights(patched_q, k, mask)) / unchanged,
        "keys": reading_of_patterns(score, attention_weights(q, patched_k, mask)) / unchanged,
        "values": reading_of_outputs(score, F.cosine_similarity(outputs, patched, dim=-1) ** 2),
    }
    return {name: 1 - share for name, share in kept.items()}


@pytest.mark.parametrize("score", ["previous_token", "induction"])
@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layernorm", "bias": True},
        {"norm": "rmsnorm", "position": "rope", "n_kv_head": 2, "attention_gate": "channel"},
        {"parallel_mlp": True, "position": "rope", "rope_share": 0.5, "mlp": "gelu_exact"},
    ],
)
@torch.no_grad()
def test_shares_are_those_of_a_slow_loop_over_all_blocks(changes, score, texts):
    model = lively(build_model(small(n_layer=3, vocab_size=V, block_size=T, **changes))).double()
    ids = np.concatenate(texts[1:]) if score == "induction" else texts[0]
    heads = [Head(2, number) for number in range(4)]
    row = measure(model, texts, {score: heads})
    upstream = {head: upstream_of(row, score, head) for head in heads}
    components = set().union(*upstream.values())
    assert len(components) > 5 and "embedding" in components
    for head, component in [(one, name) for one in heads for name in upstream[one]]:
        places = [f"{head}/{name}/{component}" for name in INPUTS]
        measured = [row.estimate(f"composition/{score}", place) for place in places]
        assert any(share.exceeds(minimum=0.05, errors=2) for share in measured)
    x = capture(model, ids).residuals[2]
    for component in components & set(COMPONENTS):
        for is_direct in (False, True):
            without = slow_input(model, torch.from_numpy(ids), COMPONENTS[component], is_direct)
            expected = lost_shares(model, score, x, without)
            name = f"composition/{score}{'_direct' if is_direct else ''}"
            for head, read in product(heads, expected):
                if component in upstream[head]:
                    share = pytest.approx(expected[read][head.number], rel=1e-4, abs=1e-5)
                    assert row[f"{name}/{head}/{read}/{component}"] == share


def test_a_ratio_has_the_standard_error_of_a_bootstrap():
    rng = np.random.default_rng(0)
    before = rng.gamma(4, 0.1, 16)
    after = before * rng.uniform(0.2, 0.6, 16)
    share, error = ratio_with_error(after, before)
    assert share == pytest.approx(after.sum() / before.sum())
    drawn = rng.integers(0, 16, (8000, 16))
    ratios = after[drawn].sum(axis=1) / before[drawn].sum(axis=1)
    assert error == pytest.approx(ratios.std() * np.sqrt(16 / 15), rel=0.1)
