"""Generated sequences follow the definition of their task, and depend on the seed and step only."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.checks import check_config, fixed_sequence_length
from common.errors import UserError
from config import TASK_SYMBOLS, Config, DataConfig, ModelConfig
from data.synthetic import BATCH, CHARACTERS, make_task, walk
from data.tokenizer import CharTokenizer
from data.tokens import generate_tokens
from glass.heads.measure.probes import make_probes

EVERY_TASK = pytest.mark.parametrize("task", list(TASK_SYMBOLS))
seeds, steps = st.integers(0, 2**63 - 1), st.integers(0, 10**9)


def config_of(task, block_size=40, seed=1, batch_size=8, **data):
    data = DataConfig(source="synthetic", task=task, **{"val_max_tokens": 2000} | data)
    model = ModelConfig(vocab_size=None, block_size=fixed_sequence_length(data) or block_size)
    return Config(model=model, data=data, seed=seed, batch_size=batch_size)


def task_of(*args, **settings):
    config = config_of(*args, **settings)
    check_config(config)
    return make_task(config)


@EVERY_TASK
@given(seed=seeds, step=steps, before=st.lists(steps, max_size=2), begin=st.booleans())
def test_a_batch_depends_only_on_the_seed_and_the_step(task, seed, step, before, begin):
    used = task_of(task, seed=seed, begin=begin)
    for other in before:
        used.batch(other)
    inputs, targets = used.batch(step)
    fresh = task_of(task, seed=seed, begin=begin)
    for array, slices in zip(
        (inputs, targets), zip(fresh.batch(step, 0, 2), fresh.batch(step, 1, 2))
    ):
        assert np.array_equal(array, np.concatenate(slices))
        assert array.dtype == np.int64 and array.shape == (8, used.block_size)
    counted = targets[:, :-1] >= 0
    assert np.array_equal(targets[:, :-1][counted], inputs[:, 1:][counted])
    assert inputs.min() >= 0 and inputs.max() < used.tokenizer.vocab_size


@EVERY_TASK
def test_seeds_steps_and_streams_give_different_sequences(task):
    batches = [task_of(task, seed=seed).batch(step)[0] for seed in (1, 2) for step in (0, 1)]
    assert len({batch.tobytes() for batch in batches}) == 4
    a_task = task_of(task)
    assert not np.array_equal(a_task.training.tokens[:8], a_task.validation.tokens[:8])


def test_validation_has_no_sequence_of_a_batch():
    a_task = task_of("passages")
    held_out = {row.tobytes() for row in a_task.validation.tokens}
    assert len(held_out) == len(a_task.validation.tokens)
    for step in range(100):
        assert held_out.isdisjoint(row.tobytes() for row in a_task.generate(BATCH, 8, step).tokens)


@EVERY_TASK
def test_the_begin_symbol_comes_first_and_symbols_are_written_as_characters_in_order(task):
    a_task = task_of(task, symbols=100, begin=True)
    tokens, is_counted = a_task.validation
    plain = task_of(task, symbols=100, block_size=39).validation
    assert (tokens[:, 0] == a_task.begin_id).all() and (tokens[:, 1:] != a_task.begin_id).all()
    assert (is_counted[:, 0] == is_counted[:, 1]).all()
    assert is_counted[:, 1:].sum(1).tolist()[:5] == plain.is_counted.sum(1).tolist()[:5]
    assert a_task.tokenizer.decode([a_task.begin_id]) == "^"
    spelled = a_task.tokenizer.decode(a_task.symbol_ids)
    assert spelled.removesuffix("+=") == CHARACTERS[:100] and spelled.isprintable()


@pytest.mark.parametrize(("task", "block_size"), [("passages", 40), ("markov", 7)])
@given(val_max_tokens=st.integers(2, 300))
def test_as_many_sequences_are_held_out_as_the_tokens_to_validate_fill(
    task, block_size, val_max_tokens
):
    a_task = task_of(task, block_size, val_max_tokens=val_max_tokens)
    T, most = a_task.block_size, max(val_max_tokens, a_task.block_size)
    for sequences in (a_task.training, a_task.validation):
        n, length = sequences.inputs.shape
        assert length == T and n * T <= most < (n + 1) * T


def test_probes_of_a_task_are_sequences_and_draw_no_begin_symbol():
    text = generate_tokens(config_of("passages", begin=True), None)
    probes = make_probes(text.train, text.val, text.tokenizer, 24, 0, text.task.block_size + 1)
    sequences = text.task.validation.tokens
    assert all(any((row == known[:24]).all() for known in sequences) for row in probes.windows)
    assert len(np.unique(probes.windows, axis=0)) == len(probes.windows) == 16
    assert (probes.random != text.task.begin_id).all() and len(probes.repeated)


def test_a_model_brings_its_tokenizer_which_must_have_every_symbol():
    config = config_of("markov", seed=4)
    own, given = make_task(config), make_task(config, CharTokenizer("zyx 0123456789"))
    texts = [task.tokenizer.decode(task.batch(0)[0][0]) for task in (own, given)]
    assert texts[0] == texts[1]
    with pytest.raises(UserError, match="'2'"):
        make_task(config, CharTokenizer("01"))


def test_the_fingerprint_covers_settings_and_seed_and_does_not_change_between_versions():
    assert task_of("modular").fingerprint()[:16] == "93c1355ef2d8da16"
    config = config_of("markov")
    fingerprint = make_task(config).fingerprint()
    same = replace(config, max_steps=7, data=replace(config.data, symbols=3))
    assert make_task(same).fingerprint() == fingerprint
    for changed in (
        replace(config, seed=2),
        replace(config, data=replace(config.data, concentration=2)),
        replace(config, model=replace(config.model, block_size=41)),
    ):
        assert make_task(changed).fingerprint() != fingerprint


BATCHES = {
    "passages": "25ba34e2fd9286dd",
    "markov": "c77074309602c794",
    "modular": "49d2142fb6e5495a",
}


@pytest.mark.parametrize(("task", "expected"), BATCHES.items())
def test_batches_do_not_change_between_versions(task, expected):
    """Otherwise a run that another version began would go on with other sequences."""
    tokens, is_counted = task_of(task).generate(BATCH, 8, step=3)
    content = tokens.astype("<i8").tobytes() + is_counted.tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == expected


# --- passages -------------------------------------------------------------------------------------


@given(seed=seeds, low=st.integers(1, 12), more=st.integers(0, 12))
def test_passages_repeat_with_their_period(seed, low, more):
    task = task_of("passages", seed=seed, min_period=low, max_period=low + more)
    for row in task.validation.tokens[:20]:
        periods = [p for p in range(1, low + more + 1) if (row[p:] == row[:-p]).all()]
        assert any(low <= period for period in periods)
    assert task.validation.is_counted.all()


# --- Markov chains --------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), shared=st.booleans())
def test_chains_have_the_transition_probabilities_that_are_given(seed, shared):
    random = np.random.default_rng(seed)
    n = 4000
    matrix = random.dirichlet(np.ones(3), size=3)
    given_matrix = matrix if shared else np.broadcast_to(matrix, (n, 3, 3))
    states = walk(np.zeros(n, int), given_matrix, 3, random)
    assert (states[:, 0] == 0).all()
    for t, probabilities in ((1, matrix[0]), (2, matrix[0] @ matrix)):
        share = np.bincount(states[:, t], minlength=3) / n
        error = np.sqrt(probabilities * (1 - probabilities) / n)
        assert (abs(share - probabilities) < 5.5 * error + 1e-9).all()


def test_a_chain_begins_in_its_stationary_distribution():
    task = task_of("markov", symbols=4, concentration=0.5)
    n, random = 200, np.random.default_rng(7)
    transitions = random.dirichlet(np.full(4, 0.5), size=(n, 4))
    chosen = random.random(n)
    expected = []
    for matrix, quantile in zip(transitions, chosen):
        values, vectors = np.linalg.eig(matrix.T)
        stationary = vectors[:, np.argmin(abs(values - 1))].real  # the eigenvector of value 1
        expected.append(np.searchsorted((stationary / stationary.sum()).cumsum(), quantile))
    drawn = task._draw(BATCH, n, np.random.default_rng(7)).tokens
    assert drawn[:, 0].tolist() == expected
    assert np.array_equal(drawn, walk(drawn[:, 0], transitions, task.length + 1, random))


# --- modular addition -----------------------------------------------------------------------------


@given(P=st.integers(2, 40), share=st.floats(0.2, 0.8), seed=seeds)
def test_sums_are_split_by_unordered_pairs(P, share, seed):
    task = task_of("modular", symbols=P, train_share=share, seed=seed)
    sides = []
    for sequences in (task.training, task.validation):
        a, plus, b, equals, c = task.symbols_of(sequences).T
        assert (plus == P).all() and (equals == P + 1).all()
        assert np.array_equal(c, (a + b) % P)
        assert (sequences.is_counted == [False, False, False, True]).all()
        sides.append(set(zip(a.tolist(), b.tolist())))
        assert len(sides[-1]) == len(a)
    training, validation = sides
    assert training.isdisjoint(validation) and len(training | validation) == P * P
    assert {(b, a) for a, b in training} == training
    assert len({frozenset(pair) for pair in training}) == round(share * P * (P + 1) / 2)
