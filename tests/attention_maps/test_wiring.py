"""Who feeds whom, in a model of two layers whose heads are set by hand."""

import numpy as np
import pytest
import torch

from attention_maps import scores
from attention_maps.capture import capture
from attention_maps.probe import Probes
from attention_maps.wiring import PARTS, lost, named, wiring
from config import GPTConfig
from model import GPT

V, T, SHARP = 40, 24, 200.0


@pytest.fixture(params=["rmsnorm", "layernorm"])
def model(request) -> GPT:
    """L0H0 looks at the token before and writes it down; L1H1 looks where what is written down is
    the token that it is at: an induction head, by its keys. The other two heads write noise.

    A token's embedding has its id in the first V places, its position in the next T; what L0H0
    writes is in the last V.
    """
    torch.manual_seed(0)
    C, d = 2 * V + T, max(V, T)
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=2, n_embd=C, head_dim=d,
                          norm=request.param))
    id, place, note = slice(V), slice(V, V + T), slice(V + T, C)
    with torch.no_grad():
        for p in model.blocks.parameters():
            if p.dim() == 2:
                p.zero_()
        model.token_embedding.weight.zero_()[:, id] = torch.eye(V)
        model.position_embedding.weight.zero_()[:, place] = torch.eye(T)
        first, second = (block.attention for block in model.blocks)
        first.W_Q.weight[1:T, place] = SHARP * torch.eye(T)[:T - 1]  # query i is key i - 1
        first.W_Q.weight[:T, place] = SHARP * torch.eye(T).roll(-1, dims=0)
        first.W_K.weight[:T, place] = torch.eye(T)
        first.W_V.weight[:V, id] = torch.eye(V)
        first.W_O.weight[note, :V] = 4 * torch.eye(V)
        second.W_Q.weight[d:d + V, id] = SHARP * torch.eye(V)
        second.W_K.weight[d:d + V, note] = torch.eye(V)
        second.W_V.weight[d:d + V, id] = torch.eye(V)
        second.W_O.weight[id, d:d + V] = torch.eye(V)
        for layer, head in ((first, 1), (second, 0)):
            layer.W_V.weight[head * d:(head + 1) * d].normal_(std=0.03)
            layer.W_O.weight[:, head * d:(head + 1) * d].normal_(std=0.03)
    return model


@pytest.fixture
def probes() -> Probes:
    rng, periods = np.random.default_rng(0), np.repeat([6, 8, 10, 12], 4)
    repeat, control = (np.stack([rng.permutation(V)[:T] for _ in periods]) for _ in range(2))
    for row, period in zip(repeat, periods):
        row[period:2 * period] = row[:period]
    return Probes(rng.permutation(V)[:T], ["w"] * T, repeat, [["w"] * T] * 16, control, periods)


def fed(model, probes, heads):
    """`wiring` on the probes."""
    random = capture(model, np.concatenate((probes.repeat, probes.control)))
    return wiring(model, capture(model, probes.text[None]), random, probes.periods, heads)


def test_an_induction_head_is_fed_by_the_previous_token_head_through_its_keys(model, probes):
    text, repeat, control = (
        model.attention_maps(torch.from_numpy(ids)).numpy() for ids in
        (probes.text[None], probes.repeat, probes.control))
    found = scores.readings(text[:, 0], repeat, control, probes.periods)
    assert found["previous_token"][0, 0].mean() > 0.95
    assert found["induction"][1, 1].mean() > 0.8  # the first token notes itself
    tables = fed(model, probes, {"induction": [(1, 1), (1, 0)], "previous_token": [(0, 0)]})
    assert set(tables) == {("induction", 1, 1), ("induction", 1, 0)}  # nothing is below layer 0
    share, error = tables["induction", 1, 1]
    assert share.shape == error.shape == (len(PARTS), 1, 2)
    by_name = dict(zip(PARTS, share[:, 0, 0]))
    assert by_name["keys"] == pytest.approx(1, abs=0.02)
    assert by_name["queries"] == pytest.approx(0, abs=0.05)
    assert by_name["values"] == pytest.approx(0, abs=0.02)  # it moves ids, not what was noted
    assert np.abs(share[:, 0, 1]).max() < 0.05  # the head that writes noise feeds nobody
    assert (error[:, 0, 0] < 0.05).all()

    row = named({("induction", 1, 1): (share, error)})
    assert row["wiring/induction/L1H1/keys/L0H0"] == pytest.approx(1, abs=0.02)
    assert set(row) == {f"wiring/induction{end}/L1H1/{part}/L0H0"
                        for end in ("", "_se") for part in PARTS}


def test_values_tell_how_much_of_what_a_head_moves_came_from_below(model, probes):
    second, d = model.blocks[1].attention, max(V, T)
    with torch.no_grad():  # now it moves what was noted
        second.W_V.weight[d:d + V].zero_()[:, V + T:] = torch.eye(V)
    share, _ = fed(model, probes, {"induction": [(1, 1)]})["induction", 1, 1]
    assert share[PARTS.index("values"), 0, 0] > 0.9


def test_a_share_is_the_mean_of_a_slow_loop_and_its_error_a_bootstrap():
    rng = np.random.default_rng(0)
    before = rng.gamma(4, 0.1, 16)
    after = before * rng.uniform(0.2, 0.6, 16)
    share, error = lost(before, after)
    assert share == pytest.approx(1 - after.sum() / before.sum())
    drawn = rng.integers(0, 16, (8000, 16))
    ratios = 1 - after[drawn].sum(axis=1) / before[drawn].sum(axis=1)
    assert error == pytest.approx(ratios.std() * np.sqrt(16 / 15), rel=0.1)
