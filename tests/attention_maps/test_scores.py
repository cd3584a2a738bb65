"""Scores on maps built by hand, where the right answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_maps import scores

LENGTHS = (8, 48, 512)


def looks_at(target, length: int) -> np.ndarray:
    """A map (T, T) whose query i puts all its weight on key target(i)."""
    A = np.zeros((length, length), np.float32)
    for i in range(length):
        A[i, min(i, max(0, target(i)))] = 1.0
    return A


def uniform(length: int) -> np.ndarray:
    A = np.tril(np.ones((length, length)))
    return A / A.sum(axis=-1, keepdims=True)


def periods(length: int) -> np.ndarray:
    return np.array([length // 4, length // 2])


def scored(text: np.ndarray, repeat=None, control=None) -> dict[str, float]:
    """The scores of one head: text (T, T); repeat and control are functions of the period."""

    def of(maps):
        return np.stack([maps(p) for p in periods(len(text))])[None, :, None]  # (1, P, 1, T, T)

    repeat, control = repeat or (lambda p: text), control or (lambda p: text)
    windows = text[None, None, None]  # (1, 1, 1, T, T)
    found = scores.readings(windows, of(repeat), of(control), periods(len(text)))
    return {name: scores.mean_and_error(values)[0].item() for name, values in found.items()}


def repeated(length: int, shift: int):
    """Looks at the token `shift` after the first occurrence of a repeated token, else at itself."""
    return lambda p: looks_at(lambda i: i - p + shift if p <= i < 2 * p else i, length)


@pytest.mark.parametrize("T", LENGTHS)
def test_every_score_of_a_hand_built_head_is_the_known_value(T):
    harmonic = (1 / np.arange(2, T + 1)).mean()
    itself = looks_at(lambda i: i, T)
    repeats = dict.fromkeys(("duplicate_token", "induction"), 0.0)
    # Query 1's previous token is the first token.
    for text, more, expected in (
        (
            looks_at(lambda i: i - 1, T),
            (),
            {"previous_token": 1, "sink": 1 / (T - 1), "entropy": 0, "distance": (T - 1) / T},
        ),
        (
            looks_at(lambda i: 0, T),
            (),
            {"previous_token": 1 / (T - 1), "sink": 1, "entropy": 0, "distance": (T - 1) / 2},
        ),
        (
            uniform(T),
            (),
            {"previous_token": harmonic, "sink": harmonic, "entropy": 1, "distance": (T - 1) / 4},
        ),
        (
            itself,
            (repeated(T, 0),),
            {
                "current_token": 1,
                "previous_token": 0,
                "sink": 0,
                "entropy": 0,
                "distance": 0,
                "duplicate_token": 1,
            },
        ),
        (itself, (repeated(T, 1),), {"induction": 1}),
        # Half of the weight of each query on the token before it, half on the first.
        (
            (looks_at(lambda i: i - 1, T) + looks_at(lambda i: 0, T)) / 2,
            (),
            {"previous_token": (1 + (T - 2) / 2) / (T - 1), "sink": (1 + (T - 2) / 2) / (T - 1)},
        ),
    ):
        found = scored(text, *more)
        for name, value in (repeats | expected).items():
            assert found[name] == pytest.approx(value, abs=1e-6), name


def test_the_repeat_gain_is_of_what_comes_again_in_order_against_another_order():
    rng, periods = np.random.default_rng(0), np.array([3, 5])
    repeat, reshuffled = rng.random((2, 2, 10))  # [r, i]: of the token after i
    gains = [
        np.mean([reshuffled[r, p + k - 1] - repeat[r, p + k - 1] for k in range(1, p)])
        for r, p in enumerate(periods)
    ]
    found = scores.probed({"gain": scores.copying_gains(repeat, reshuffled, periods)})
    assert found["probe/gain"] == pytest.approx(np.mean(gains))
    assert found["probe/gain_se"] == pytest.approx(np.std(gains, ddof=1) / np.sqrt(2))
    assert scores.probed({"gain": np.array([0.5])}) == {"probe/gain": 0.5}


@pytest.mark.parametrize("T", LENGTHS)
def test_what_a_sink_hides_is_read_with_the_first_token_left_out(T):
    """A previous-token head that leaves nine tenths of its weight on the first token."""
    A = 0.9 * looks_at(lambda i: 0, T) + 0.1 * looks_at(lambda i: i - 1, T)
    found = scored(A)
    assert found["previous_token"] == pytest.approx((1 + 0.1 * (T - 2)) / (T - 1))
    # Query 1 has nothing left but the first token, and so is no reading.
    assert found["previous_token_without_first"] == pytest.approx(1)
    assert found["entropy_without_first"] == pytest.approx(0, abs=1e-6)
    even = scored(uniform(T))
    assert even["entropy_without_first"] == pytest.approx(1)
    assert even["previous_token_without_first"] == pytest.approx((1 / np.arange(2, T)).mean())
    assert np.isnan(scored(looks_at(lambda i: 0, T))["previous_token_without_first"])


@pytest.mark.parametrize("distance", range(1, 24))
def test_a_head_that_looks_a_fixed_distance_back_is_no_induction_and_no_duplicate_head(distance):
    found = scored(looks_at(lambda i: i - distance, 48))
    assert found["induction"] == found["duplicate_token"] == 0.0


@given(st.integers(0, 10_000))
def test_scores_are_their_written_out_definitions(seed):
    rng, T = np.random.default_rng(seed), 24
    A = np.tril(rng.random((2, 2, 3, T, T)))  # (L, W, H, T, T)
    A /= A.sum(axis=-1, keepdims=True)
    R, C = (np.tril(rng.random((2, 2, 3, T, T))) for _ in range(2))
    found = {
        name: values[1, 2, 1] for name, values in scores.readings(A, R, C, periods(T)).items()
    }  # of the second window, or text
    one = A[1, 1, 2]
    assert found["current_token"] == pytest.approx(np.mean([one[i, i] for i in range(1, T)]))
    assert found["previous_token"] == pytest.approx(np.mean([one[i, i - 1] for i in range(1, T)]))
    assert found["sink"] == pytest.approx(np.mean([one[i, 0] for i in range(1, T)]))
    by_hand = [sum(one[i, j] * (i - j) for j in range(i + 1)) for i in range(T)]
    assert found["distance"] == pytest.approx(np.mean(by_hand))
    rows = [one[i, : i + 1] for i in range(1, T)]
    by_hand = [-(row * np.log(row)).sum() / np.log(len(row)) for row in rows]
    assert found["entropy"] == pytest.approx(np.mean(by_hand))
    for name, shift in (("duplicate_token", 0), ("induction", 1)):
        p = periods(T)[1]
        by_hand = [
            R[1, 1, 2, i, i - p + shift] - C[1, 1, 2, i, i - p + shift] for i in range(p, 2 * p)
        ]
        assert found[name] == pytest.approx(np.mean(by_hand))
    left = one[1:, 1:] / one[1:, 1:].sum(axis=-1, keepdims=True)
    by_hand = np.mean([left[i, i - 1] for i in range(1, T - 1)])
    assert found["previous_token_without_first"] == pytest.approx(by_hand)


def test_standard_errors_are_those_of_a_bootstrap():
    rng = np.random.default_rng(0)
    values = rng.gamma(0.5, 0.3, (3, 4, 16))
    drawn = values[..., rng.integers(0, 16, (5000, 16))].mean(axis=-1)  # (3, 4, 5000)
    # A bootstrap's variance is the readings' over n, where the standard error's is over n - 1.
    expected = drawn.std(axis=-1) * np.sqrt(16 / 15)
    assert scores.mean_and_error(values)[1] == pytest.approx(expected, rel=0.05)
    assert np.isnan(scores.mean_and_error(values[..., :1])[1]).all()


def test_metrics_are_named_by_layer_and_head_and_lack_what_is_not_known():
    table = np.array([[0.25, np.nan, 0.5]])
    assert scores.as_metrics({"sink_without_first": (table, table)}) == {
        "heads/sink_without_first/L0H0": 0.25,
        "heads/sink_without_first/L0H2": 0.5,
    }
    assert scores.as_metrics({"sink": (table[:, 2:], table[:, :1])}) == {
        "heads/sink/L0H0": 0.5,
        "heads/sink_se/L0H0": 0.25,
    }


@pytest.mark.parametrize(("T", "even"), [(8, 0.245), (48, 0.074), (512, 0.0114)])
def test_thresholds_lie_above_what_even_attention_gives_at_that_length(T, even):
    found = scored(uniform(T))
    for score in scores.SHARES:
        against_control = score in ("duplicate_token", "induction")
        assert found[score] == pytest.approx(0 if against_control else even, abs=5e-4)
        above = scores.threshold(score, T) - found[score]
        assert above == pytest.approx(scores.SHARES[score] * (1 - found[score]))


def born_of(key: str, values, length: int = 48, every: int = 10) -> dict[str, int]:
    """The births told after snapshots with these values and errors, one after the other."""
    score, head = key.split("/")
    before: dict = {}
    for n, (value, error) in enumerate(values):
        now = {"step": every * n, f"heads/{key}": value, f"heads/{score}_se/{head}": error}
        before = now | scores.births(before, now, length)
    return {key: step for key, step in before.items() if key.startswith(("emerged/", "lost/"))}


def test_a_head_is_born_at_the_first_snapshot_from_which_it_stays():
    at = scores.threshold("induction", 48)
    key, born = "induction/L1H0", "emerged/induction/L1H0"
    dead = "lost/induction/L1H0"
    assert born_of(key, [(v, 0) for v in (0, at, 0, at, at + 0.1, 0, 0)]) == {born: 30, dead: 40}
    assert born_of(key, [(v, 0) for v in (at, at, 0, 0, at)]) == {born: 0}
    assert born_of(key, [(v, 0) for v in (at, at)]) == {born: 0}
    assert born_of(key, [(v, 0) for v in (0, at, 0, at)]) == {}
    assert born_of("entropy/L1H0", [(1, 0)] * 3) == {} == scores.births({}, {}, 48)


def test_a_birth_takes_a_score_that_stands_clear_of_its_standard_error():
    at = scores.threshold("induction", 48)
    values = [(at + 0.01, 0.03), (at + 0.04, 0.03), (at + 0.04, 0.03)]
    assert born_of("induction/L1H0", values) == {"emerged/induction/L1H0": 10}


@given(st.integers(0, 1000), st.floats(0.004, 0.05), st.integers(200, 1500))
def test_births_scored_every_100_steps_are_within_one_of_those_scored_every_20(seed, rate, middle):
    """A score that rises to 0.6 as an induction head's does, read with an error."""
    rng, key = np.random.default_rng(seed), "induction/L2H0"
    steps = np.arange(0, 2401, 20)
    rise = 0.6 / (1 + np.exp(-rate * (steps - middle))) + 0.004 * rng.standard_normal(len(steps))
    often = born_of(key, [(v, 0.02) for v in rise], every=20)
    seldom = born_of(key, [(v, 0.02) for v in rise[::5]], every=100)
    assert often and 0 <= seldom[f"emerged/{key}"] - often[f"emerged/{key}"] <= 100
