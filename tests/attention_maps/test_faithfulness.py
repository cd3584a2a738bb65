"""What is left when only some heads work, in a model of which all attention is known."""

import numpy as np
import pytest
import torch
from models import lively, small

from attention_maps import faithfulness, scores
from attention_maps.capture import capture, next_tokens, token_losses
from model import GPT

PERIODS = np.repeat([4, 5, 6, 7], 4)


@pytest.fixture
def alone() -> faithfulness.Alone:
    model = lively(GPT(small(position="rope", n_kv_head=2))).double()
    rng = np.random.default_rng(0)
    repeat = np.stack([rng.permutation(23)[:16] for _ in range(16)])
    reshuffled = repeat.copy()
    for row, other, period in zip(repeat, reshuffled, PERIODS):
        row[period : 2 * period] = row[:period]
        other[period : 2 * period] = row[:period][::-1]
    twice = capture(model, np.concatenate((repeat, reshuffled)))
    return faithfulness.Alone(model, twice, PERIODS)


def test_with_all_heads_all_is_left_and_without_any_what_a_model_without_attention_knows(alone):
    whole = alone.twice
    loss = token_losses(alone.model, whole.residuals[-1], next_tokens(whole.tokens)).numpy()
    assert alone.losses(alone.all) == pytest.approx(loss, abs=1e-9, nan_ok=True)
    assert alone.share(alone.all) == pytest.approx((1, 0))
    nothing = alone.losses([])[:, :-1]
    ids = whole.tokens.numpy()
    # Only the token itself is left: alike wherever it and its next token are the same.
    pairs = {}
    for row, its in zip(ids, nothing):
        for i, value in enumerate(its):
            assert pairs.setdefault((row[i], row[i + 1]), value) == pytest.approx(value)


def test_a_head_that_does_not_work_gives_its_mean(alone):
    model, whole = alone.model, alone.twice
    keep = [head for head in alone.all if head != (1, 2)]
    mean = whole.heads[1, :, :, 2].mean(dim=(0, 1))

    def change(module, inputs):
        y = inputs[0].clone()
        y[..., 8:12] = mean
        return (y,)

    with model.blocks[1].attention.W_O.register_forward_pre_hook(change), torch.no_grad():
        x = model.run_blocks(whole.tokens)
    loss = token_losses(model, x, next_tokens(whole.tokens)).numpy()
    assert alone.losses(keep) == pytest.approx(loss, abs=1e-9, nan_ok=True)
    gains = scores.copying_gains(*np.split(loss, 2), PERIODS)
    assert alone.share(keep)[0] == pytest.approx(gains.sum() / alone.gains_of_all.sum())


def test_what_is_left_is_told_where_only_two_heads_matter_together(alone, monkeypatch):
    """A gain to which two heads are needed, and a third adds a little."""

    def gains(heads):
        return np.linspace(0.9, 1.1, 16) * (
            0.9 * ({(0, 1), (1, 3)} <= {*heads}) + 0.1 * ((1, 0) in heads)
        )

    monkeypatch.setattr(alone, "gains", gains)
    alone.gains_of_all = gains(alone.all)
    row = faithfulness.enough(alone, [(1, 3)])
    assert row["faithfulness/none"] == row["faithfulness/circuit"] == 0
    assert row["faithfulness/circuit_and_layer_0"] == pytest.approx(0.9)
    assert row["circuit/L1H3"] == 1
