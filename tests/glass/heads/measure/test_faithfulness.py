"""Faithfulness, in a model in which all attention is known."""

from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import induction_model

from glass.heads.measure.capture import ForwardPass, capture
from glass.heads.measure.faithfulness import (
    find_sufficient_heads,
    measure_faithfulness,
    measure_isolated_gains,
)
from glass.heads.measure.probes import make_random_rows
from model import GPT
from run.row import Head, Row


class Circuit(NamedTuple):
    """A model, and its pass over repeated and reshuffled rows with these periods."""

    model: GPT
    forward: ForwardPass
    periods: np.ndarray

    @property
    def all_heads(self) -> list[Head]:
        config = self.model.config
        return [Head(*index) for index in np.ndindex(config.n_layer, config.n_head)]

    def gains(self, heads, rows=slice(None)) -> np.ndarray:
        return measure_isolated_gains(*self, heads, rows)


@pytest.fixture(scope="module")
def known_circuit() -> Circuit:
    """A model in which L1H1 copies with the help of L0H0, on 16 repeated and reshuffled rows."""
    model = induction_model(40, 24).double()
    rows = make_random_rows(np.full(40, 1 / 40), 24, np.random.default_rng(0))
    forward = capture(model, np.concatenate((rows.repeated, rows.reshuffled)))
    return Circuit(model, forward, rows.periods)


@pytest.fixture(scope="module")
def measured(known_circuit) -> Row:
    return measure_faithfulness(known_circuit.gains, known_circuit.all_heads, [Head(1, 1)])


CIRCUIT = (Head(0, 0), Head(1, 1))


def test_the_sufficient_heads_are_those_that_were_built_to_copy(known_circuit, measured):
    isolated = known_circuit
    assert measured.heads("sufficient").keys() == {*CIRCUIT}
    share, error = measured.estimate("faithfulness", "sufficient")
    assert share >= 0.9 and 0 < error < 0.05
    all_gains = isolated.gains(isolated.all_heads)
    for pair in combinations(isolated.all_heads, 2):
        other_share = isolated.gains([*pair]).sum() / all_gains.sum()
        assert pair == CIRCUIT or other_share < 0.3


def test_shares_are_those_of_whole_passes_and_that_of_sufficient_heads_is_of_the_other_rows(
    known_circuit, measured
):
    model, tokens = known_circuit.model, known_circuit.forward.tokens

    @torch.no_grad()
    def gains(heads) -> np.ndarray:
        """The copying gains of the rows, with taps that replace the other heads."""

        def replace_heads(layer, y):
            y = y.clone()
            for number in range(2):
                if heads is not None and (layer, number) not in heads:
                    y[:, :, number] = means[layer, number]
            return y

        taps = {("heads", layer): partial(replace_heads, layer) for layer in range(2)}
        logits = model.run_with_taps(tokens, taps)[:, :-1]
        loss = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").numpy()
        return np.array(
            [
                (loss[16 + row] - loss[row])[period : 2 * period - 1].mean()
                for row, period in enumerate(known_circuit.periods)
            ]
        )

    means = known_circuit.forward.heads.mean(dim=(1, 2))
    alone, complete = gains(CIRCUIT), gains(None)
    held_out = slice(1, None, 2)
    expected = alone[held_out].sum() / complete[held_out].sum()
    assert measured["faithfulness/sufficient"] == pytest.approx(expected, abs=1e-9)
    for name, heads in (
        ("none", []),
        ("circuit", [Head(1, 1)]),
        ("circuit_and_layer_0", [Head(0, 0), Head(0, 1), Head(1, 1)]),
    ):
        share = gains(heads).sum() / complete.sum()
        assert measured[f"faithfulness/{name}"] == pytest.approx(share, abs=1e-9)


def test_a_head_that_is_only_needed_together_with_others_is_kept():
    """Two heads copy together; a third one harms, and a fourth one is needed on one half only."""
    heads = [Head(0, number) for number in range(6)]

    def copying_gains(active, rows):
        is_odd = np.arange(16)[rows] % 2 == 1
        gain = 1.0 * ({heads[1], heads[4]} <= {*active}) - 0.2 * (heads[2] in active)
        return np.linspace(0.9, 1.1, 16)[rows] * (gain - 0.5 * is_odd * (heads[5] not in active))

    row = measure_faithfulness(copying_gains, heads, [])
    assert row.heads("sufficient").keys() == {heads[1], heads[4]}
    assert row["faithfulness/sufficient"] == pytest.approx(0.5 / 0.8)  # on the other half
    not_found = measure_faithfulness(copying_gains, heads, [], finds_sufficient=False)
    assert not not_found.heads("sufficient") and "faithfulness/sufficient" not in not_found
    assert not_found["faithfulness/circuit"] == row["faithfulness/circuit"]


@pytest.mark.parametrize(("share", "count"), [(0.89, 2), (0.91, 1)])
def test_sufficient_heads_keep_nine_tenths(share, count):
    shares = {Head(0, 0): 1 - share, Head(0, 1): share}
    found = find_sufficient_heads(lambda active: sum(shares[head] for head in active), [*shares])
    assert found == [*shares][-count:]
