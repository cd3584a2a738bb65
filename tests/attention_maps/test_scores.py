"""Scores on maps built by hand, where the right answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_maps import scores
from attention_maps.capture import Snapshot

T, PERIODS = 24, np.array([6, 8, 10, 12])


def looks_at(target, length: int = T) -> np.ndarray:
    """A map (T, T) whose query i puts all its weight on key target(i)."""
    A = np.zeros((length, length), np.float32)
    for i in range(length):
        A[i, min(i, max(0, target(i)))] = 1.0
    return A


def uniform(length: int = T) -> np.ndarray:
    A = np.tril(np.ones((length, length)))
    return A / A.sum(axis=-1, keepdims=True)


def snapshot(text, repeat, control) -> Snapshot:
    """One layer and one head: text (T, T); repeat and control are functions of the period that give maps."""
    stack = lambda of: np.stack([of(p) for p in PERIODS])[None, :, None]  # noqa: E731  (1, P, 1, T, T)
    no_norms = np.ones((1, 1, 1))  # scores look at weights alone
    return Snapshot(0, text[None, None], [""] * T, no_norms, stack(repeat), [[""] * T] * len(PERIODS), no_norms, stack(control), PERIODS)


PREVIOUS = looks_at(lambda i: i - 1)
SINK = looks_at(lambda i: 0)
SELF = looks_at(lambda i: i)


def repeated(shift: int):
    """Looks at the token `shift` after the first occurrence of a repeated token, else at the first token."""
    return lambda p: looks_at(lambda i: i - p + shift if p <= i < 2 * p else 0)


HEADS = {
    "previous token": (snapshot(PREVIOUS, lambda p: PREVIOUS, lambda p: PREVIOUS), {"previous_token"}),
    "sink": (snapshot(SINK, lambda p: SINK, lambda p: SINK), {"sink"}),
    "duplicate token": (snapshot(SELF, repeated(0), lambda p: SELF), {"duplicate_token"}),
    "induction": (snapshot(SELF, repeated(1), lambda p: SELF), {"induction"}),
}


@pytest.mark.parametrize("head", HEADS)
def test_an_ideal_head_scores_one_on_its_score_and_nothing_on_the_others(head):
    snap, own = HEADS[head]
    table = scores.score_heads(snap)
    for name in ("previous_token", "duplicate_token", "induction", "sink"):
        assert table[name].shape == (1, 1)
        # The very first pair of tokens is both "previous" and "first": hence the room.
        assert table[name][0, 0] == pytest.approx(1.0 if name in own else 0.0, abs=0.06)


@pytest.mark.parametrize("distance", range(1, 12))
def test_a_head_that_looks_a_fixed_distance_back_is_no_induction_and_no_duplicate_head(distance):
    fixed = looks_at(lambda i: i - distance)
    table = scores.score_heads(snapshot(fixed, lambda p: fixed, lambda p: fixed))
    assert table["induction"][0, 0] == table["duplicate_token"][0, 0] == 0.0


@given(st.integers(2, 300))
def test_uniform_causal_attention_has_entropy_one_at_any_length(length):
    assert scores.entropy(uniform(length)) == pytest.approx(1.0, abs=1e-12)


def test_attention_to_one_token_has_no_entropy():
    assert scores.entropy(PREVIOUS) == 0.0


def test_distance_is_in_tokens():
    assert scores.distance(looks_at(lambda i: i - 3)) == pytest.approx((0 + 1 + 2 + 3 * (T - 3)) / T)
    assert scores.distance(uniform()) == pytest.approx(np.mean(np.arange(T) / 2))


@given(st.integers(0, 10_000))
def test_scores_are_their_written_out_definitions(seed):
    rng = np.random.default_rng(seed)
    A = np.tril(rng.random((2, 3, T, T)))
    A /= A.sum(axis=-1, keepdims=True)
    assert scores.previous_token(A)[1, 2] == pytest.approx(np.mean([A[1, 2, i, i - 1] for i in range(1, T)]))
    assert scores.sink(A)[0, 1] == pytest.approx(np.mean([A[0, 1, i, 0] for i in range(1, T)]))
    R = np.tril(rng.random((2, 4, 3, T, T)))
    for shift in (0, 1):
        by_hand = np.mean([np.mean([R[1, r, 2, i, i - p + shift] for i in range(p, 2 * p)]) for r, p in enumerate(PERIODS)])
        assert scores.second_occurrence(R, PERIODS, shift)[1, 2] == pytest.approx(by_hand)


def test_metrics_are_named_by_layer_and_head():
    assert scores.named({"sink": np.array([[0.25, 0.5]])}) == {"heads/sink/L0H0": 0.25, "heads/sink/L0H1": 0.5}


def rows_of(key: str, values) -> list[dict]:
    return [{"step": 10 * n, "train/loss": 1.0, f"heads/{key}": value} for n, value in enumerate(values)]


def test_a_head_is_born_at_the_first_snapshot_from_which_it_stays():
    at = scores.THRESHOLDS["induction"]
    assert scores.births(rows_of("induction/L1H0", [0, at, 0, at, at + 0.1, 0])) == {"births/induction/L1H0": 30}
    assert scores.births(rows_of("induction/L1H0", [at, at])) == {"births/induction/L1H0": 0}
    assert scores.births(rows_of("induction/L1H0", [0, at, 0, at])) == {}
    assert scores.births(rows_of("entropy/L1H0", [1, 1, 1])) == {} == scores.births([])


def test_rows_without_scores_between_snapshots_do_not_count_and_heads_are_born_apart():
    rows = []
    for one, two in zip(rows_of("sink/L0H0", [0, 0.9, 0.9]), rows_of("sink/L0H1", [0.9, 0, 0.9])):
        rows += [one | two, {"step": one["step"] + 5, "train/loss": 2.0}]
    assert scores.births(rows) == {"births/sink/L0H0": 10}
