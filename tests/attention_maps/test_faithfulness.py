"""Faithfulness, in a model in which all attention is known."""

import numpy as np
import pytest
import torch
from models import lively, small

from attention_maps import scores
from attention_maps.capture import capture, next_tokens, token_losses
from attention_maps.faithfulness import IsolatedHeads, measure_faithfulness
from attention_maps.results import Head
from model import GPT

PERIODS = np.repeat([4, 5, 6, 7], 4)


@pytest.fixture
def isolated() -> IsolatedHeads:
    model = lively(GPT(small(position="rope", n_kv_head=2))).double()
    rng = np.random.default_rng(0)
    repeated = np.stack([rng.permutation(23)[:16] for _ in range(16)])
    reshuffled = repeated.copy()
    for repeated_row, reshuffled_row, period in zip(repeated, reshuffled, PERIODS):
        repeated_row[period : 2 * period] = repeated_row[:period]
        reshuffled_row[period : 2 * period] = repeated_row[:period][::-1]
    forward = capture(model, np.concatenate((repeated, reshuffled)))
    return IsolatedHeads(model, forward, PERIODS)


def test_with_all_heads_the_losses_are_those_of_the_model(isolated):
    forward = isolated.forward
    loss = token_losses(isolated.model, forward.residuals[-1], next_tokens(forward.tokens)).numpy()
    assert isolated.losses(isolated.all_heads) == pytest.approx(loss, abs=1e-9, nan_ok=True)


def test_without_any_head_the_loss_depends_on_the_current_token_alone(isolated):
    losses = isolated.losses([])[:, :-1]
    ids = isolated.forward.tokens.numpy()
    loss_of_pair = {}
    for row, row_losses in zip(ids, losses):
        for i, loss in enumerate(row_losses):
            pair = (row[i], row[i + 1])
            assert loss_of_pair.setdefault(pair, loss) == pytest.approx(loss)


def test_a_head_outside_of_the_circuit_outputs_its_mean(isolated):
    model, forward = isolated.model, isolated.forward
    circuit = [head for head in isolated.all_heads if head != Head(1, 2)]
    mean = forward.heads[1, :, :, 2].mean(dim=(0, 1))

    def replace_head(module, inputs):
        y = inputs[0].clone()
        y[..., 8:12] = mean
        return (y,)

    hook = model.blocks[1].attention.W_O.register_forward_pre_hook(replace_head)
    with hook, torch.no_grad():
        x = model.run_blocks(forward.tokens)
    loss = token_losses(model, x, next_tokens(forward.tokens)).numpy()
    assert isolated.losses(circuit) == pytest.approx(loss, abs=1e-9, nan_ok=True)
    gains = scores.copying_gains(*np.split(loss, 2), PERIODS)
    faithfulness = measure_faithfulness(isolated.copying_gains, isolated.all_heads, circuit)
    all_gains = isolated.copying_gains(isolated.all_heads)
    assert faithfulness.circuit.value == pytest.approx(gains.sum() / all_gains.sum())


def test_the_circuit_with_layer_0_is_measured_too(isolated):
    """A gain that needs two heads together, and to which a third adds a little."""

    def copying_gains(heads):
        gain = 0.9 * ({Head(0, 1), Head(1, 3)} <= {*heads}) + 0.1 * (Head(1, 0) in heads)
        return np.linspace(0.9, 1.1, 16) * gain

    faithfulness = measure_faithfulness(copying_gains, isolated.all_heads, [Head(1, 3)])
    assert faithfulness.none.value == faithfulness.circuit.value == 0
    assert faithfulness.circuit_and_layer_0.value == pytest.approx(0.9)
    assert faithfulness.heads == (Head(1, 3),)
