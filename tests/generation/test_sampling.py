"""Logits → tokens → text: windows, seeds, sampling and whole characters."""

import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import VOCAB_SIZE, configs, few, lively, random_tokens, seeds, small

from common.text import printable
from data.tokenizer import CharTokenizer, train_bpe
from generation.decoder import window_start
from generation.sampling import (
    Sampling,
    draw_tokens,
    next_token_probabilities,
    noise_at,
    stream_text,
)
from variants import build_model

CPU = torch.device("cpu")


# --- Sequences of tokens --------------------------------------------------------------------------


def generate_without_cache(model, tokens, max_new_tokens, sampling, seed):
    """`generate` (B, T + new) with a forward pass over the whole window of each token."""
    batch_size, T = tokens.shape
    row_seeds = tuple(seed + row for row in range(batch_size))
    with torch.no_grad():
        for length in range(T, T + max_new_tokens):
            start = window_start(length, model.config.block_size)
            window = tokens[:, start:].clone()
            begins = tokens[:, 0] == (-1 if model.begin_of_text is None else model.begin_of_text)
            window[begins, 0] = tokens[begins, 0]
            logits = model(window)[0][:, -1]
            probabilities = next_token_probabilities(logits.float(), sampling)
            token = (probabilities / noise_at(length, row_seeds, VOCAB_SIZE, CPU)).argmax(dim=-1)
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
    begin_of_text=st.sampled_from([None, 3]),
    seed=seeds,
)
def test_generation_with_and_without_a_cache_is_equal_even_beyond_the_block(
    config, block_size, batch_size, prompt_length, max_new_tokens, temperature, begin_of_text, seed
):
    config.block_size = block_size
    model = lively(build_model(config).double(), seed)
    model.begin_of_text = begin_of_text
    prompt = random_tokens(batch_size, prompt_length, seed=seed)
    prompt[0, 0] = 3  # other rows do not begin with it
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


def test_only_unseeded_generation_draws_from_the_global_random_state():
    model, prompts = lively(build_model(small())), random_tokens(2, 3)
    state = torch.get_rng_state()
    model.generate(prompts, 5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    first = model.generate(prompts, 12)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(model.generate(prompts, 12), first)


# --- Drawing a token ------------------------------------------------------------------------------


def test_a_token_is_drawn_as_often_as_its_probability():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])

    def draw(batch_size, n_steps):
        def next_logits(tokens):
            return p.log().clamp(min=-1e9).expand(batch_size, -1)

        prompt = torch.zeros(batch_size, 1, dtype=torch.int64)
        steps = draw_tokens(next_logits, prompt, n_steps, Sampling(), range(batch_size))
        return torch.cat(list(steps))

    for tokens in (draw(4_000, 1), draw(1, 4_000)):
        frequency = torch.bincount(tokens, minlength=5) / 4_000
        standard_error = (p * (1 - p) / 4_000).sqrt()
        assert ((frequency - p).abs() <= 4 * standard_error).all()


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


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(5e-324),
        Sampling(1e-30),
        Sampling(1e30, top_k=3, top_p=0.5, min_p=0.5),
        Sampling(1.0, top_k=10**18, top_p=1e-300),
    ],
)
def test_extreme_settings_give_probabilities(sampling):
    p = next_token_probabilities(torch.tensor([[3.0, -1.0, 2.0, 2.5]]), sampling)
    assert p.sum().item() == pytest.approx(1) and (p >= 0).all()


# --- Text -----------------------------------------------------------------------------------------

BYTES = train_bpe(["é日😀"], 257)  # one token per byte
END = BYTES.end_of_text


@pytest.mark.parametrize(
    ("ids", "settings", "pieces"),
    [
        # An incomplete character is held back and replaced at the end
        ([*BYTES.encode("é日")][:-1], {}, ["", "é", "", "", "\ufffd"]),
        # The end-of-text token ends a text
        ([*BYTES.encode("xa"), END, *BYTES.encode("b")], {}, ["x", "a", ""]),
        ([END, *BYTES.encode("b")], {}, [""]),
        # A text without a prompt may begin with it
        (
            [END, END, *BYTES.encode("xa"), END, *BYTES.encode("b")],
            {"has_prompt": False},
            ["x", "a", ""],
        ),
        # What may have become a stop string is shown
        ([*BYTES.encode("xa"), END], {"stops": ["ab"]}, ["x", "", "a"]),
    ],
)
def test_a_text_is_streamed_in_whole_characters_up_to_its_end(ids, settings, pieces):
    assert list(stream_text(BYTES, ids, **settings)) == pieces


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
    expected = cut_at_first_stop(text, stops)
    if expected is None:
        expected = text
    assert "".join(stream_text(tokenizer, tokenizer.encode(text), stops)) == expected


@given(text=st.text() | st.text(st.characters(categories=["Cc", "Cf"])))
def test_no_control_character_reaches_a_terminal(text):
    shown = printable(text)
    assert len(shown) == len(text) and printable(text, one_line=True).isprintable()
    for before, after in zip(text, shown):
        is_hidden = unicodedata.category(before) in ("Cc", "Cf")
        if before in "\t\n\u200c\u200d" or not is_hidden:
            assert after == before
        else:
            assert after == "\ufffd"
