"""Probes: windows of the text at their spacing, and random rows that repeat as they say."""

from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from vocabularies import TOKENIZERS

from data.hf_tokenizer import HFTokenizer
from data.tokenizer import CharTokenizer
from glass.heads.measure import probes
from glass.heads.measure.probes import (
    make_probes,
    make_random_rows,
    spell_tokens,
    token_frequencies,
)

NUMBERS = CharTokenizer("\n" + "".join(map(chr, range(1000, 3000))))  # an id for each position
LINE_END = 0


@given(
    before=st.integers(0, 9),
    rows=st.integers(1, 40),
    spacing=st.integers(1, 40),
    length=st.integers(1, 100),
)
def test_windows_are_spread_over_the_text_and_begin_at_multiples_of_the_spacing(
    before, rows, spacing, length
):
    length = length if spacing == 1 else min(length, spacing)  # within a sequence
    val = np.arange(1, before + rows * spacing + 1)
    val[: max(0, before - 1)] = LINE_END  # blank lines
    assume(length <= len(val) - before)
    if before:
        val[before - 1] = LINE_END
    made = make_probes(val, val, NUMBERS, length, 0, spacing)
    assert made.text.tolist() == val[before : before + length].tolist()
    size = min(length, 64)
    starts = made.windows[:, 0] - 1
    assert (made.windows == 1 + starts[:, None] + np.arange(size)).all()
    assert starts[0] == before and ((starts - before) % spacing == 0).all()
    most = (len(val) - before) // (size if spacing == 1 else spacing)
    assert len(starts) == min(16, most)
    assert (np.diff(starts) >= size).all()
    even = np.linspace(before, len(val) - size, len(starts))
    assert (starts <= even).all() and (starts > even - spacing).all()


def test_text_probes_begin_with_begin_of_text_as_texts_do_when_they_are_read():
    for tokenizer in TOKENIZERS.values():
        ids = range(tokenizer.vocab_size)
        val = np.resize([id for id in ids if b"\n" not in tokenizer.token_bytes(id)], 90)
        made = make_probes(val, val, tokenizer, 30, 0)
        begin = tokenizer.begin_of_text
        if begin is not None:
            assert {made.text[0], *made.windows[:, 0]} == {begin}
        assert made.text.tolist() == [val[0] if begin is None else begin, *val[1:30]]


@given(
    vocabulary=st.integers(5, 90),
    unused=st.integers(0, 9),
    length=st.integers(6, 100),
    seed=st.integers(0, 999),
)
def test_random_rows_repeat_reshuffle_and_do_not_repeat(vocabulary, unused, length, seed):
    rng = np.random.default_rng(seed)
    probabilities = rng.permutation(np.append(rng.dirichlet(np.ones(vocabulary)), [0.0] * unused))
    rows = make_random_rows(probabilities, length, rng)
    kinds = (rows.repeated, rows.reshuffled, rows.control)
    size = max(6, min(length, 64, vocabulary))
    assert all(kind.shape == (16, size) for kind in kinds)
    distances = {*np.linspace(size // 4, size // 2, 4).astype(int).clip(min=3)}
    assert set(rows.periods) == distances
    counts = np.bincount(rows.periods)
    assert max(counts) - min(counts[counts > 0]) <= 1 and (np.diff(rows.periods) >= 0).all()
    assert (probabilities[np.stack(kinds)] > 0).all()
    for repeated, reshuffled, control, p in zip(*kinds, rows.periods):
        first, second = reshuffled[:p].tolist(), reshuffled[p : 2 * p].tolist()
        assert len({*first}) == p and len({*control}) == min(size, vocabulary)
        assert repeated.tolist() == first * 2 + reshuffled[2 * p :].tolist()
        assert second[0] == first[0] and sorted(second) == sorted(first)
        followers = dict(pairwise(first))
        assert all(followers.get(a) != b for a, b in pairwise(second))


@pytest.mark.parametrize(("vocabulary", "length"), [(4, 64), (5, 5), (0, 64)])
def test_there_are_no_random_rows_of_too_few_tokens(vocabulary, length):
    probabilities = np.append(np.full(vocabulary, 1 / max(1, vocabulary)), [0.0] * 9)
    rows = make_random_rows(probabilities, length, np.random.default_rng(0))
    assert all(len(kind) == 0 for kind in vars(rows).values())


def test_random_tokens_follow_their_frequencies_in_training_without_special_tokens():
    rng = np.random.default_rng(0)
    vocabulary = {"<s>" if id == 3 else str(id): id for id in range(70)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    library.add_special_tokens(["<s>"])
    tokenizer = HFTokenizer(library.to_str())
    assert spell_tokens(tokenizer, [2, 3, 99]) == ["2", "<s>", "<99>"]
    shares = rng.dirichlet(np.ones(70))
    train = rng.choice(70, 5000, p=shares)
    made = [make_probes(train, train, tokenizer, 6, seed) for seed in range(200)]
    assert np.array_equal(made[7].random, make_probes(train, train, tokenizer, 6, 7).random)
    first = np.concatenate([probe.random[:, 0] for probe in made])
    expected = np.bincount(train, minlength=70) * (np.arange(70) != 3)
    expected = expected / expected.sum()
    found = np.bincount(first, minlength=70) / len(first)
    assert found[3] == 0
    assert abs(found - expected).max() < 6 * np.sqrt(expected.max() / 6400)


def test_the_frequencies_of_a_long_text_are_those_of_pieces_from_the_first_to_the_last(monkeypatch):
    monkeypatch.setattr(probes, "PIECE_TOKENS", 10)
    monkeypatch.setattr(probes, "MAX_FREQUENCY_TOKENS", 45)
    ids = np.arange(95)
    counted = [*range(10), *range(30, 40), *range(60, 70), *range(90, 95)]
    assert token_frequencies(ids, 100).tolist() == [float(id in counted) for id in range(100)]
    assert token_frequencies(ids[:40] % 7, 7).tolist() == [6, 6, 6, 6, 6, 5, 5]
