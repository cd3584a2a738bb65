"""Batches: a pure function of (seed, step) that visits every token as often as every other."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.batches import ROUNDS, Batches, shuffled

seeds, steps = st.integers(0, 2**64), st.integers(0, 10**9)


@st.composite
def sizes(draw):
    """(number of tokens, block size, batch size)"""
    block = draw(st.integers(1, 24))
    return (
        draw(st.integers(block + 1, block * 12)) if block > 1 else draw(st.integers(2, 40)),
        block,
        draw(st.integers(1, 20)),
    )


def counted(number):
    """Tokens that are their own positions."""
    return np.arange(number, dtype=np.uint32)


def epoch_starts(batches, epoch):
    """The starts of an epoch's windows, in the order in which they are visited."""
    first = epoch * batches.windows
    steps = range(first // batches.batch_size, (first + batches.windows) // batches.batch_size + 1)
    return np.concatenate([batches.starts(step) for step in steps])[first % batches.batch_size :][
        : batches.windows
    ]


# --- one batch ------------------------------------------------------------------------------------


@given(size=sizes(), seed=seeds, step=steps, before=st.lists(steps, max_size=3))
def test_a_batch_depends_on_the_seed_and_the_step_alone(size, seed, step, before):
    number, block, batch = size
    batches = Batches(counted(number), block, batch, seed)
    for other in before:
        batches.batch(other)
    asked, fresh = batches.batch(step), Batches(counted(number), block, batch, seed).batch(step)
    assert all(np.array_equal(a, b) for a, b in zip(asked, fresh))


@given(size=sizes(), seed=seeds, step=steps)
@example(size=(9, 8, 40), seed=0, step=0)
def test_targets_are_the_next_tokens_round_the_end(size, seed, step):
    number, block, batch = size
    inputs, targets = Batches(counted(number), block, batch, seed).batch(step)
    assert inputs.shape == targets.shape == (batch, block)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, (inputs + 1) % number)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.slow
@given(size=sizes(), seed=seeds, step=steps, processes=st.integers(1, 8))
def test_the_slices_of_the_processes_make_up_the_global_batch(size, seed, step, processes):
    number, block, batch = size
    batches = Batches(counted(number), block, batch * processes, seed)
    slices = [batches.batch(step, rank, processes) for rank in range(processes)]
    for whole, parts in zip(batches.batch(step), zip(*slices)):
        assert np.array_equal(whole, np.concatenate(parts))
        assert {len(part) for part in parts} == {batch}


def test_a_batch_may_span_two_epochs():
    batches = Batches(counted(45), 10, 3, seed=5)  # 4 windows an epoch
    starts = batches.starts(1)
    assert np.array_equal(starts[:1], epoch_starts(batches, 0)[3:])
    assert np.array_equal(starts[1:], epoch_starts(batches, 1)[:2])


def test_a_batch_may_span_many_epochs():
    batches = Batches(counted(45), 10, 21, seed=5)
    assert np.array_equal(
        batches.starts(0), np.concatenate([epoch_starts(batches, epoch) for epoch in range(6)])[:21]
    )


def test_windows_go_round_the_end_of_the_text():
    inputs, _ = Batches(counted(100), 30, 300, seed=0).batch(0)
    assert any(99 in row[:-1] and 0 in row[1:] for row in inputs)


def test_the_tokens_need_not_lie_in_memory(tmp_path):
    counted(1000).astype(np.uint16).tofile(tmp_path / "train.bin")
    kept = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    for a, b in zip(Batches(kept, 16, 4, 1).batch(7), Batches(counted(1000), 16, 4, 1).batch(7)):
        assert np.array_equal(a, b) and a.dtype == np.int64


# --- an epoch -------------------------------------------------------------------------------------


@given(size=sizes(), seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_lays_windows_end_to_end_and_visits_each_once(size, seed, epoch):
    number, block, batch = size
    batches = Batches(counted(number), block, batch, seed)
    starts = np.sort(epoch_starts(batches, epoch))
    gaps = np.diff(np.append(starts, starts[0] + number))
    assert len(starts) == number // block
    assert sorted(gaps)[:-1] == [block] * (len(starts) - 1)  # all but one end where the next begins
    assert max(gaps) == block + number % block


@given(size=sizes(), seed=seeds, epoch=st.integers(0, 10**6))
def test_no_token_is_seen_twice_in_an_epoch(size, seed, epoch):
    number, block, _ = size
    batches = Batches(counted(number), block, 1, seed)
    seen = np.concatenate(
        [batches.batch(epoch * batches.windows + n)[0][0] for n in range(batches.windows)]
    )
    assert len(np.unique(seen)) == len(seen) == number // block * block


@pytest.mark.slow
def test_over_many_epochs_every_token_is_seen_about_as_often_as_every_other():
    number, block, epochs = 97, 10, 3000
    batches = Batches(counted(number), block, 9 * epochs, seed=3)
    inputs, _ = batches.batch(0)
    share = np.bincount(inputs.ravel(), minlength=number) / epochs
    left_out = 1 - 90 / 97
    assert abs(share - 90 / 97).max() < 5 * (left_out * (1 - left_out) / epochs) ** 0.5


@pytest.mark.slow
def test_every_token_opens_a_window_about_as_often_as_every_other():
    batches = Batches(counted(97), 10, 9 * 5000, seed=3)
    opened = np.bincount(batches.starts(0), minlength=97)
    expected = 9 * 5000 / 97
    assert abs(opened - expected).max() < 5 * expected**0.5


def test_epochs_differ_in_where_they_begin_and_in_their_order():
    batches = Batches(counted(100_003), 100, 16, seed=1337)
    epochs = [epoch_starts(batches, epoch) for epoch in range(20)]
    assert len({int(starts[0] % 100) for starts in epochs}) > 10
    assert len({starts.min() for starts in epochs}) > 15
    orders = {tuple(np.argsort(starts)) for starts in epochs}
    assert len(orders) == 20


def test_seeds_differ_in_their_order():
    orders = {tuple(Batches(counted(1000), 10, 100, seed).starts(0)) for seed in range(50)}
    assert len(orders) == 50


def test_neighbouring_windows_are_not_visited_one_after_the_other():
    starts = epoch_starts(Batches(counted(100_000), 10, 16, seed=1337), 0) // 10
    steps = np.diff(starts)
    assert (abs(steps) <= 1).mean() < 0.01
    assert abs(np.corrcoef(np.arange(len(starts)), starts)[0, 1]) < 0.05


# --- the shuffle ----------------------------------------------------------------------------------


def key(seed):
    return np.random.SeedSequence(seed).generate_state(ROUNDS + 1, np.uint64)


@pytest.mark.parametrize("seed", [0, 1, 1337])
def test_the_shuffle_is_a_permutation_of_every_small_size(seed):
    for size in range(1, 301):
        assert np.array_equal(
            np.sort(shuffled(np.arange(size), size, key(seed))), np.arange(size)
        ), size


@given(size=st.integers(1, 5000), seed=seeds)
def test_the_shuffle_is_a_permutation(size, seed):
    assert np.array_equal(np.sort(shuffled(np.arange(size), size, key(seed))), np.arange(size))


@pytest.mark.parametrize("size", [2**20, 2**20 + 1, 10**9 + 7, 2**32, 2**40 + 3, 10**15])
def test_the_shuffle_of_a_large_size_stays_in_it_and_repeats_nothing(size):
    index = np.unique(
        np.concatenate(
            (
                np.arange(1000),
                size - 1 - np.arange(1000),
                np.random.default_rng(0).integers(0, size, 20_000),
            )
        )
    )
    there = shuffled(index, size, key(7))
    assert there.min() >= 0 and there.max() < size
    assert len(np.unique(there)) == len(index)
    assert abs(there.mean() / size - 0.5) < 0.02


@given(
    size=st.integers(1, 2**40),
    seed=seeds,
    picks=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=9),
)
def test_where_an_index_goes_does_not_depend_on_the_others_asked_for(size, seed, picks):
    index = np.array([int(pick * size) for pick in picks])
    one_by_one = [shuffled(index[n : n + 1], size, key(seed))[0] for n in range(len(index))]
    assert shuffled(index, size, key(seed)).tolist() == one_by_one


def test_the_shuffle_leaves_its_argument_as_it_was():
    index = np.arange(50, dtype=np.uint64)
    shuffled(index, 50, key(0))
    assert np.array_equal(index, np.arange(50))


def test_every_order_of_four_is_about_as_likely_as_every_other():
    orders = [tuple(shuffled(np.arange(4), 4, key(seed))) for seed in range(4800)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24
    assert counts.min() > 100 and counts.max() < 320
