"""Composition, in a model of two layers whose heads are set by hand."""

import numpy as np
import pytest
import torch
from models import induction_model, lively, small

from glass.heads import scores
from glass.heads.capture import capture
from glass.heads.composition import measure_composition
from glass.heads.results import CompositionShare, Head
from model import GPT, attention_weights, causal_mask
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
) -> dict[tuple[Head, str, str], CompositionShare]:
    """Return composition shares by head, input and upstream component."""
    windows, repeated, control = texts
    random = capture(model, np.concatenate((repeated, control)))
    forward = capture(model, windows)
    shares = measure_composition(model, forward, random, PERIODS, heads, max_components)
    return {(one.head, one.input, one.upstream): one for one in shares}


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
    shares = measure(model, texts, heads)
    # Ids come from the embedding; neither the noisy head nor the empty MLP contributes.
    upstream = {name for head, _, name in shares if head == INDUCTION_HEAD}
    assert upstream == {"L0H0", "embedding"}
    assert not any(head == PREVIOUS_TOKEN_HEAD for head, _, _ in shares)  # nothing is upstream

    keys, queries, values = (
        shares[INDUCTION_HEAD, name, "L0H0"].share for name in ("keys", "queries", "values")
    )
    assert keys.value == pytest.approx(1, abs=0.02) and keys.error < 0.05
    assert queries.value == pytest.approx(0, abs=0.05)
    assert values.value == pytest.approx(0, abs=0.02)  # it moves ids, not previous tokens
    assert shares[INDUCTION_HEAD, "values", "embedding"].share.value > 0.8


def test_of_few_components_those_with_the_largest_direct_shares_are_measured(model, texts):
    shares = measure(model, texts, {"induction": [INDUCTION_HEAD]})
    assert measure(model, texts, {"induction": [INDUCTION_HEAD]}, max_components=2) == shares
    shares = measure(model, texts, {"induction": [INDUCTION_HEAD]}, max_components=1)
    assert len({upstream for _, _, upstream in shares}) == 1


def test_the_share_of_values_is_that_of_what_a_head_moves(model, texts):
    second, d = model.blocks[1].attention, max(V, T)
    with torch.no_grad():  # now it moves the previous token that L0H0 wrote
        second.W_V.weight[d : d + V].zero_()[:, V + T :] = torch.eye(V)
    shares = measure(model, texts, {"induction": [INDUCTION_HEAD]})
    assert shares[INDUCTION_HEAD, "values", "L0H0"].share.value > 0.9


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


def previous_token_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the previous-token score of each head, (H,)."""
    A = attention_weights(q, k, causal_mask(T, T))
    return torch.diagonal(A, offset=-1, dim1=-2, dim2=-1).mean(dim=(0, 2))


@pytest.mark.parametrize(
    "changes",
    [{"norm": "layernorm", "bias": True}, {"norm": "rmsnorm", "position": "rope", "n_kv_head": 2}],
)
@torch.no_grad()
def test_shares_are_those_of_a_slow_loop_over_all_blocks(changes, texts):
    model = lively(build_model(small(n_layer=3, vocab_size=V, block_size=T, **changes))).double()
    tokens = torch.from_numpy(texts[0])
    heads = [Head(2, number) for number in range(4)]
    shares = measure(model, texts, {"previous_token": heads})
    components = {name for _, _, name in shares}
    assert len(components) > 5 and "embedding" in components
    q, k = queries_and_keys(model, capture(model, texts[0]).residuals[2])
    unchanged = previous_token_scores(q, k)
    for component in components & set(COMPONENTS):
        for is_direct in (False, True):
            x = slow_input(model, tokens, COMPONENTS[component], is_direct)
            q_without, k_without = queries_and_keys(model, x)
            lost = {
                "queries": 1 - previous_token_scores(q_without, k) / unchanged,
                "keys": 1 - previous_token_scores(q, k_without) / unchanged,
            }
            for head in heads:
                for name, expected in lost.items():
                    if one := shares.get((head, name, component)):
                        share = one.direct if is_direct else one.share
                        assert share.value == pytest.approx(expected[head.number].item(), abs=1e-6)


def test_a_ratio_has_the_standard_error_of_a_bootstrap():
    rng = np.random.default_rng(0)
    before = rng.gamma(4, 0.1, 16)
    after = before * rng.uniform(0.2, 0.6, 16)
    share, error = scores.ratio(after, before)
    assert share == pytest.approx(after.sum() / before.sum())
    drawn = rng.integers(0, 16, (8000, 16))
    ratios = after[drawn].sum(axis=1) / before[drawn].sum(axis=1)
    assert error == pytest.approx(ratios.std() * np.sqrt(16 / 15), rel=0.1)
