"""Faithfulness, in a model in which all attention is known."""

from itertools import combinations

import numpy as np
import pytest
import torch
from formulas import mlp, norm, self_attention
from models import induction_model, lively, small

from generation.scoring import token_losses
from glass.heads import scores
from glass.heads.capture import capture, next_tokens
from glass.heads.faithfulness import IsolatedHeads, measure_faithfulness
from glass.heads.probes import make_random_rows
from glass.heads.results import Faithfulness, Head
from variants import build_model

PERIODS = np.repeat([4, 5, 6, 7], 4)


@pytest.fixture
def isolated() -> IsolatedHeads:
    model = lively(build_model(small(position="rope", n_kv_head=2))).double()
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
    assert isolated.losses(isolated.all_heads, forward.tokens) == pytest.approx(
        loss, abs=1e-9, nan_ok=True
    )


def test_without_any_head_the_loss_depends_on_the_current_token_alone(isolated):
    losses = isolated.losses([], isolated.forward.tokens)[:, :-1]
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
    assert isolated.losses(circuit, forward.tokens) == pytest.approx(loss, abs=1e-9, nan_ok=True)
    gains = scores.copying_gains(*np.split(loss, 2), PERIODS)
    faithfulness = measure_faithfulness(isolated.copying_gains, isolated.all_heads, circuit)
    all_gains = isolated.copying_gains(isolated.all_heads)
    assert faithfulness.circuit.value == pytest.approx(gains.sum() / all_gains.sum())


def test_the_circuit_with_layer_0_is_measured_too(isolated):
    """A gain that needs two heads together, and to which a third adds a little."""

    def copying_gains(heads, rows):
        gain = 0.9 * ({Head(0, 1), Head(1, 3)} <= {*heads}) + 0.1 * (Head(1, 0) in heads)
        return np.linspace(0.9, 1.1, 16)[rows] * gain

    faithfulness = measure_faithfulness(copying_gains, isolated.all_heads, [Head(1, 3)])
    assert faithfulness.none.value == faithfulness.circuit.value == 0
    assert faithfulness.circuit_and_layer_0.value == pytest.approx(0.9)
    assert faithfulness.circuit_heads == (Head(1, 3),)


# --- sufficient heads -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known_circuit() -> IsolatedHeads:
    """A model in which L1H1 copies with the help of L0H0, on 16 repeated and reshuffled rows."""
    model = induction_model(40, 24).double()
    rows = make_random_rows(np.full(40, 1 / 40), 24, np.random.default_rng(0))
    forward = capture(model, np.concatenate((rows.repeated, rows.reshuffled)))
    return IsolatedHeads(model, forward, rows.periods)


@pytest.fixture(scope="module")
def measured(known_circuit) -> Faithfulness:
    return measure_faithfulness(known_circuit.copying_gains, known_circuit.all_heads, [Head(1, 1)])


CIRCUIT = (Head(0, 0), Head(1, 1))


def test_the_sufficient_heads_are_those_that_were_built_to_copy(known_circuit, measured):
    isolated = known_circuit
    assert measured.sufficient_heads == CIRCUIT
    share, error = measured.sufficient
    assert share >= 0.9 and 0 < error < 0.05
    all_gains = isolated.copying_gains(isolated.all_heads)
    for pair in combinations(isolated.all_heads, 2):
        other_share = isolated.copying_gains([*pair]).sum() / all_gains.sum()
        assert pair == CIRCUIT or other_share < 0.3


def test_the_share_of_sufficient_heads_is_that_of_the_formulas_on_the_other_rows(
    known_circuit, measured
):
    model, tokens = known_circuit.model, known_circuit.forward.tokens

    @torch.no_grad()
    def gains(heads) -> torch.Tensor:
        """The copying gains of the rows, computed head by head and query by query."""
        x, T = model.embed(tokens), tokens.shape[1]
        for layer, block in enumerate(model.blocks):

            def replace_head(number, y, layer=layer):
                if heads is None or (layer, number) in heads:
                    return y
                return means[layer, number].expand_as(y)

            normed = norm(block.norm_1, x, model.config)
            x = x + self_attention(block.attention, normed, replace_head)
            x = x + mlp(block.mlp, norm(block.norm_2, x, model.config))
        log_p = (norm(model.norm, x, model.config) @ model.head.weight.T).log_softmax(dim=-1)
        loss = -log_p[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]  # (32, T - 1)
        is_copied = torch.arange(T - 1) >= torch.from_numpy(known_circuit.periods)[:, None]
        is_copied &= torch.arange(T - 1) < 2 * torch.from_numpy(known_circuit.periods)[:, None] - 1
        difference = (loss[16:] - loss[:16]).where(is_copied, 0)
        return difference.sum(dim=1) / is_copied.sum(dim=1)

    means = known_circuit.forward.heads.mean(dim=(1, 2))
    alone, complete = gains(CIRCUIT), gains(None)
    held_out = slice(1, None, 2)
    expected = alone[held_out].sum() / complete[held_out].sum()
    assert measured.sufficient.value == pytest.approx(expected.item(), abs=1e-9)
    circuit = gains([Head(1, 1)]).sum() / complete.sum()
    assert measured.circuit.value == pytest.approx(circuit.item(), abs=1e-9)


def test_a_head_that_is_only_needed_together_with_others_is_kept():
    """Two heads copy together; a third one harms, and a fourth one is needed on one half only."""
    heads = [Head(0, number) for number in range(6)]

    def copying_gains(active, rows):
        is_odd = np.arange(16)[rows] % 2 == 1
        gain = 1.0 * ({heads[1], heads[4]} <= {*active}) - 0.2 * (heads[2] in active)
        return np.linspace(0.9, 1.1, 16)[rows] * (gain - 0.5 * is_odd * (heads[5] not in active))

    faithfulness = measure_faithfulness(copying_gains, heads, [])
    assert faithfulness.sufficient_heads == (heads[1], heads[4])
    assert faithfulness.sufficient.value == pytest.approx(0.5 / 0.8)  # on the other half
    not_found = measure_faithfulness(copying_gains, heads, [], finds_sufficient=False)
    assert not_found.sufficient_heads == () and not not_found.sufficient.is_known
    assert not_found.circuit == faithfulness.circuit
