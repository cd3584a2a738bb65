"""Logits → tokens → text: windows, seeds, sampling and whole characters."""

import unicodedata

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import VOCAB_SIZE, configs, few, lively, random_tokens, seeds, small, streamed

from common.text import printable
from data.tokenizer import CharTokenizer, train_bpe
from generation.decoder import Decoder
from generation.sampling import (
    ENDED,
    GeneratedText,
    Noise,
    Sampling,
    generate_texts,
    next_token_probabilities,
    sample_token,
    window_start,
)
from glass.heads.snapshot import sample_text
from variants import build_model

CPU = torch.device("cpu")


# --- Sequences of tokens --------------------------------------------------------------------------


@given(block_size=st.integers(1, 2000), length=st.integers(0, 10_000))
@example(block_size=16, length=17)
def test_the_window_starts_at_the_first_quarter_of_a_block_from_which_all_tokens_fit(
    block_size, length
):
    stride = max(1, block_size // 4)
    starts = range(0, length + stride, stride)
    assert window_start(length, block_size) == next(
        start for start in starts if length - start <= block_size
    )


def generate_without_cache(model, tokens, max_new_tokens, sampling, seed):
    """`generate` (B, T + new) with a forward pass over the whole window of each token."""
    batch_size, T = tokens.shape
    noise = Noise(batch_size, [seed + row for row in range(batch_size)], VOCAB_SIZE, CPU)
    with torch.no_grad():
        for length in range(T, T + max_new_tokens):
            start = window_start(length, model.config.block_size)
            logits = model(tokens[:, start:])[0][:, -1]
            probabilities = next_token_probabilities(logits.float(), sampling)
            token = sample_token(probabilities, noise.at(length))
            tokens = torch.cat((tokens, token[:, None]), dim=1)
    return tokens


@few
@given(
    config=configs,
    block_size=st.integers(2, 16),
    batch_size=st.integers(1, 2),
    prompt_length=st.integers(1, 40),
    max_new_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 1.2]),
    seed=seeds,
)
def test_generation_with_and_without_a_cache_is_equal_even_beyond_the_block(
    config, block_size, batch_size, prompt_length, max_new_tokens, temperature, seed
):
    config.block_size = block_size
    model = lively(build_model(config).double(), seed)
    prompt = random_tokens(batch_size, prompt_length, seed=seed)
    sampling = Sampling(temperature, top_p=0.9)
    tokens = model.generate(prompt, max_new_tokens, temperature, top_p=0.9, seed=seed)
    expected = generate_without_cache(model, prompt, max_new_tokens, sampling, seed)
    assert torch.equal(tokens, expected)


@few
@given(seed=st.integers(0, 2**40), batch_size=st.integers(1, 4), length=st.integers(1, 20))
def test_a_sequence_does_not_depend_on_its_batch(seed, batch_size, length):
    model = lively(build_model(small(n_kv_head=2)).double())
    prompts = random_tokens(batch_size, length)
    sampling = {"temperature": 1.3, "top_p": 0.95}
    batch = model.generate(prompts, 12, seed=seed, **sampling)
    for row in range(batch_size):
        single = model.generate(prompts[row : row + 1], 12, seed=seed + row, **sampling)
        assert torch.equal(batch[row : row + 1], single)


def test_seeded_generation_does_not_touch_the_global_random_state():
    model, prompts = lively(build_model(small())), random_tokens(2, 3)
    state = torch.get_rng_state()
    model.generate(prompts, 5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_unseeded_generation_draws_from_the_global_random_state():
    model, prompts = lively(build_model(small())), random_tokens(2, 3)
    state = torch.get_rng_state()
    first = model.generate(prompts, 12)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(model.generate(prompts, 12), first)


def test_a_sequence_that_the_caller_ends_gets_no_more_tokens_and_the_others_do():
    model = lively(build_model(small()).double())
    prompts, has_ended = random_tokens(3, 4), torch.zeros(3, dtype=torch.bool)
    steps = []
    for tokens in streamed(model, prompts, 10, seeds=[1, 2, 3], has_ended=has_ended):
        steps.append(tokens.tolist())
        has_ended[1] = True
        has_ended[2] = len(steps) >= 4
    single = [
        [int(token) for token in streamed(model, prompt[None], 10, seeds=[1 + row])]
        for row, prompt in enumerate(prompts)
    ]
    assert [step[0] for step in steps] == single[0]
    assert [step[1] for step in steps] == single[1][:1] + [ENDED] * 9
    assert [step[2] for step in steps] == single[2][:4] + [ENDED] * 6


def test_generation_stops_when_all_sequences_have_ended():
    model, has_ended = lively(build_model(small())), torch.zeros(2, dtype=torch.bool)
    n_steps = 0
    for _ in streamed(model, random_tokens(2, 4), 10, has_ended=has_ended):
        n_steps += 1
        has_ended[:] = n_steps == 3
    assert n_steps == 3


def test_generation_without_a_first_token_is_refused():
    with pytest.raises(ValueError):
        build_model(small()).generate(random_tokens(1, 0), 5)


# --- Drawing a token ------------------------------------------------------------------------------


def test_a_token_is_drawn_as_often_as_its_probability():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    one_batch = sample_token(p.expand(20_000, -1), Noise(20_000, None, 5, CPU).at(0))
    noise = Noise(1, [5], 5, CPU)
    one_sequence = torch.cat([sample_token(p[None], noise.at(t)) for t in range(20_000)])
    for tokens in (one_batch, one_sequence):
        frequency = torch.bincount(tokens, minlength=5) / 20_000
        standard_error = (p * (1 - p) / 20_000).sqrt()
        assert ((frequency - p).abs() <= 4 * standard_error).all()


@few
@given(
    vocab_size=st.sampled_from([1, 7, 1000, 20_000]),
    seeds=st.lists(st.integers(0, 2**64), min_size=1, max_size=3),
    positions=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
)
def test_the_noise_is_a_function_of_the_seed_and_the_position(vocab_size, seeds, positions):
    noise = Noise(len(seeds), seeds, vocab_size, CPU)
    for position in positions:
        values = noise.at(position)
        assert values.shape == (len(seeds), vocab_size)
        assert (values > 0).all() and torch.isfinite(values).all()
        for row, seed in enumerate(seeds):
            single = Noise(1, [seed], vocab_size, CPU).at(position)
            assert torch.equal(values[row : row + 1], single)
    if vocab_size >= 1000:
        numbers = [noise.at(position) for position in (0, 1, noise.positions_per_call)]
        assert not torch.equal(numbers[0], numbers[1])
        assert not torch.equal(numbers[0], numbers[2])


@given(
    seed=seeds,
    batch_size=st.integers(1, 3),
    vocab_size=st.integers(2, 60),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.floats(0.05, 0.99),
    min_p=st.none() | st.floats(0.001, 0.9),
)
def test_the_probabilities_are_those_of_transformers(
    seed, batch_size, vocab_size, temperature, top_k, top_p, min_p
):
    from transformers import generation as hf

    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(batch_size, vocab_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (batch_size, 10), generator=generator)
    processors = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        processors.append(hf.TopKLogitsWarper(top_k))
    if top_p is not None:
        processors.append(hf.TopPLogitsWarper(top_p))
    if min_p is not None:
        processors.append(hf.MinPLogitsWarper(min_p))
    expected = processors(tokens, logits).softmax(dim=-1)
    probabilities = next_token_probabilities(logits, Sampling(temperature, top_k, top_p, min_p))
    torch.testing.assert_close(probabilities, expected, atol=1e-12, rtol=1e-9)


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    model = lively(build_model(small(vocab_size=400)))  # with more ids than its tokenizer
    texts = [GeneratedText(BYTES, [0]), GeneratedText(BYTES, [1], seed=1)]
    for _ in generate_texts(Decoder(model, 2, 30), texts, 20, Sampling()):
        pass
    drawn = [id for text in texts for id in text.tokens]
    assert drawn and max(drawn) < BYTES.vocab_size


# --- Text -----------------------------------------------------------------------------------------

BYTES = train_bpe(["é日😀"], 257)  # one token per byte


def append_all(text, ids):
    """The text after each token, until it ends."""
    shown = []
    for id in ids:
        text.append(id)
        shown.append(text.text)
        if text.end_reason is not None:
            break
    return shown


def test_an_incomplete_character_is_held_back_and_replaced_at_the_end():
    text = GeneratedText(BYTES, [0])
    incomplete = list(BYTES.encode("é日"))[:-1]
    assert append_all(text, incomplete) == ["", "é", "é", "é"]
    text.finish("length")
    assert text.text == "é\ufffd"


def test_the_end_of_text_token_ends_a_text():
    text = GeneratedText(BYTES, [0])
    ids = [*BYTES.encode("xa"), BYTES.end_of_text, *BYTES.encode("b")]
    assert append_all(text, ids) == ["x", "xa", "xa"]
    assert text.end_reason == "end_of_text"
    assert len(text.tokens) == 3


def test_a_text_without_a_prompt_may_begin_with_the_end_of_text_token():
    text = GeneratedText(BYTES, [0], max_documents=2)
    ids = [BYTES.end_of_text, *BYTES.encode("xa"), BYTES.end_of_text, *BYTES.encode("b")]
    assert append_all(text, ids)[-1] == "\nxa"
    assert text.end_reason == "end_of_text"


def cut_at_first_stop(text, stops):
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(
    text=st.text("abé", max_size=30),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    tokenizer=st.sampled_from([BYTES, CharTokenizer("abé"), train_bpe(["abab abé aab baé"], 270)]),
)
def test_a_stop_string_ends_a_text_before_it_however_it_is_split_into_tokens(
    text, stops, tokenizer
):
    generated = GeneratedText(tokenizer, [0], stops=stops)
    shown = append_all(generated, tokenizer.encode(text))
    expected = cut_at_first_stop(text, stops)
    assert (generated.end_reason == "stop") == (expected is not None)
    if expected is None:
        generated.finish("length")
        expected = text
    assert generated.text == expected
    assert all(expected.startswith(part) for part in shown)


def test_a_stop_string_does_not_extend_over_the_end_of_a_text():
    text = GeneratedText(BYTES, [0], max_documents=2, stops=["ab", "\n"])
    ids = [*BYTES.encode("a"), BYTES.end_of_text, *BYTES.encode("b"), BYTES.end_of_text]
    assert append_all(text, ids) == ["", "a\n", "a\nb", "a\nb"]
    assert text.end_reason == "end_of_text"


@given(text=st.text() | st.text(st.characters(categories=["Cc"])))
def test_no_control_character_reaches_a_terminal(text):
    shown = printable(text)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\t\n" for c in shown)
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown) if unicodedata.category(a) != "Cc")


@pytest.mark.parametrize(
    "tokenizer", [CharTokenizer("abc\n"), CharTokenizer("xyz"), train_bpe(["one two one two"], 270)]
)
def test_the_sample_of_a_snapshot_depends_on_the_seed_alone(tokenizer):
    model, state = (
        lively(build_model(small(vocab_size=tokenizer.vocab_size))),
        torch.get_rng_state(),
    )
    first, second, other = (sample_text(model, tokenizer, 30, seed) for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert "<|endoftext|>" not in first
    assert torch.equal(torch.get_rng_state(), state)
