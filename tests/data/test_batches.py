"""Batches are a pure function of (seed, step) and visit every token equally often."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.batches import FEISTEL_ROUNDS, Batches, permute

seeds, steps = st.integers(0, 2**64), st.integers(0, 10**9)


@st.composite
def sizes(draw):
    """Draw (number of tokens, block size, batch size)."""
    block = draw(st.integers(1, 24))
    return draw(st.integers(block + 1, max(40, block * 12))), block, draw(st.integers(1, 20))


def numbered_tokens(number):
    """Tokens whose ids are their positions."""
    return np.arange(number, dtype=np.uint32)


def epoch_starts(batches, epoch):
    """Return the starts of an epoch's windows in the order of visit."""
    first = epoch * batches.windows_per_epoch
    last = first + batches.windows_per_epoch
    of_steps = range(first // batches.batch_size, last // batches.batch_size + 1)
    starts = np.concatenate([batches.window_starts(step) for step in of_steps])
    return starts[first % batches.batch_size :][: batches.windows_per_epoch]


@given(size=sizes(), seed=seeds, step=steps, before=st.lists(steps, max_size=3))
def test_a_batch_depends_only_on_the_seed_and_the_step(size, seed, step, before):
    number, block, batch = size
    batches = Batches(numbered_tokens(number), block, batch, seed)
    for other in before:
        batches.batch(other)
    fresh = Batches(numbered_tokens(number), block, batch, seed)
    for actual, expected in zip(batches.batch(step), fresh.batch(step)):
        assert np.array_equal(actual, expected)


@given(size=sizes(), seed=seeds, step=steps)
@example(size=(9, 8, 40), seed=0, step=0)
def test_targets_are_the_next_tokens_also_at_the_end_of_the_text(size, seed, step):
    number, block, batch = size
    inputs, targets = Batches(numbered_tokens(number), block, batch, seed).batch(step)
    assert inputs.shape == targets.shape == (batch, block)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, (inputs + 1) % number)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


@given(size=sizes(), seed=seeds, step=steps, processes=st.integers(1, 8))
def test_the_slices_of_all_processes_make_up_the_global_batch(size, seed, step, processes):
    number, block, batch = size
    batches = Batches(numbered_tokens(number), block, batch * processes, seed)
    slices = [batches.batch(step, rank, processes) for rank in range(processes)]
    for global_batch, parts in zip(batches.batch(step), zip(*slices)):
        assert np.array_equal(global_batch, np.concatenate(parts))
        assert {len(part) for part in parts} == {batch}


@given(size=sizes(), seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_lays_windows_end_to_end_and_visits_each_once(size, seed, epoch):
    number, block, batch = size
    batches = Batches(numbered_tokens(number), block, batch, seed)
    starts = np.sort(epoch_starts(batches, epoch))
    gaps = np.diff(np.append(starts, starts[0] + number))
    assert len(starts) == number // block
    assert sorted(gaps)[:-1] == [block] * (len(starts) - 1)  # all but one end where the next begins
    assert max(gaps) == block + number % block


def written_out_starts(number: int, block: int, seed: int, epoch: int) -> list[int]:
    """Return the starts of an epoch's windows in the order of visit, one by one."""
    *round_keys, last = map(
        int, np.random.SeedSequence((seed, epoch)).generate_state(FEISTEL_ROUNDS + 1, np.uint64)
    )
    windows, half_bits = number // block, 1
    while 4**half_bits < windows:
        half_bits += 1
    half = 2**half_bits

    def permuted(value: int) -> int:
        left, right = divmod(value, half)
        for round_key in round_keys:
            mixed = (right + round_key) * 0x9E3779B97F4A7C15 % 2**64
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64
            left, right = right, left ^ (mixed >> 32) % half
        value = left * half + right
        return value if value < windows else permuted(value)

    return [(last % number + permuted(window) * block) % number for window in range(windows)]


@given(size=sizes(), seed=st.integers(0, 2**64 - 1), first=st.sampled_from([0, 1, 2, 10**6]))
def test_epochs_equal_their_written_out_formula(size, seed, first):
    """Otherwise a run that another version began would go on with other batches."""
    number, block, batch = size
    batches = Batches(numbered_tokens(number), block, batch, seed)
    for epoch in range(first, first + 3):
        starts = written_out_starts(number, block, seed, epoch)
        assert epoch_starts(batches, epoch).tolist() == starts


def test_epochs_differ_in_their_offset_and_in_their_order_and_so_do_seeds():
    batches = Batches(numbered_tokens(100_003), 100, 16, seed=1337)
    epochs = [epoch_starts(batches, epoch) for epoch in range(20)]
    assert len({int(starts[0] % 100) for starts in epochs}) > 10
    assert len({tuple(np.argsort(starts)) for starts in epochs}) == 20
    of_seeds = [
        Batches(numbered_tokens(1000), 10, 100, seed).window_starts(0) for seed in range(50)
    ]
    assert len({tuple(starts) for starts in of_seeds}) == 50


# --- the permutation ------------------------------------------------------------------------------


def key(seed):
    return np.random.SeedSequence(seed).generate_state(FEISTEL_ROUNDS + 1, np.uint64)


@pytest.mark.parametrize("size", [2**20, 2**20 + 1, 10**9 + 7, 2**40 + 3])
def test_permute_of_a_large_size_stays_in_range_without_repetition(size):
    drawn = np.random.default_rng(0).integers(0, size, 20_000)
    index = np.unique(np.concatenate((np.arange(1000), size - 1 - np.arange(1000), drawn)))
    image = permute(index, size, key(7))
    assert image.min() >= 0 and image.max() < size
    assert len(np.unique(image)) == len(index)
    assert abs(image.mean() / size - 0.5) < 0.02
    assert permute(index[5:6], size, key(7)) == image[5]
