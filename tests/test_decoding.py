import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import configs, few, lively, random_tokens, seeds, small, streamed

from attention_maps.snapshot import sample_text
from common.text import printable
from data.tokenizer import CharTokenizer, train_bpe
from decoder import Decoder
from decoding import Noise, Text, next_token_probabilities, sample_token, stream, window_start
from model import GPT

CPU = torch.device("cpu")


@given(block=st.integers(1, 2000), length=st.integers(0, 10_000))
def test_the_window_keeps_between_three_quarters_of_the_block_and_the_block_in_sight(block, length):
    start = window_start(length, block)
    assert length - start <= block
    assert start == 0 if length <= block else length - start >= 3 * block / 4
    assert 0 <= window_start(length + 1, block) - start <= max(1, block // 4)


def without_a_cache(model, tokens, new, seed=0, **choice):
    """The text (B, T + new) from passes over the whole window of each token."""
    rows, T = tokens.shape
    noise = Noise(rows, [seed + row for row in range(rows)], 23, CPU)
    with torch.no_grad():
        for length in range(T, T + new):
            start = window_start(length, model.config.block_size)
            logits = model(tokens[:, start:])[0][:, -1]
            probabilities = next_token_probabilities(logits.float(), **choice)
            token = sample_token(probabilities, noise.at(length))
            tokens = torch.cat((tokens, token[:, None]), dim=1)
    return tokens


@few
@given(
    config=configs,
    block=st.integers(2, 16),
    rows=st.integers(1, 2),
    prompt=st.integers(1, 40),
    new=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 1.2]),
    seed=seeds,
)
def test_text_with_the_cache_is_that_without_also_past_the_block(
    config, block, rows, prompt, new, temperature, seed
):
    config.block_size = block
    model, tokens = lively(GPT(config).double(), seed), random_tokens(rows, prompt, seed=seed)
    choice = {"temperature": temperature, "top_p": 0.9}
    got = model.generate(tokens, new, seed=seed, **choice)
    assert torch.equal(got, without_a_cache(model, tokens, new, seed, **choice))


@few
@given(seed=st.integers(0, 2**40), rows=st.integers(1, 4), prompt=st.integers(1, 20))
def test_a_row_of_a_batch_is_that_row_alone_with_its_own_seed(seed, rows, prompt):
    model, tokens = lively(GPT(small(n_kv_head=2)).double()), random_tokens(rows, prompt)
    choice = {"temperature": 1.3, "top_p": 0.95}
    together = model.generate(tokens, 12, seed=seed, **choice)
    for row in range(rows):
        alone = model.generate(tokens[row : row + 1], 12, seed=seed + row, **choice)
        assert torch.equal(together[row : row + 1], alone)


def test_seeded_text_leaves_torchs_own_random_state_untouched_and_unseeded_text_uses_it():
    model, tokens = lively(GPT(small())), random_tokens(2, 3)
    state = torch.get_rng_state()
    model.generate(tokens, 5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    first = model.generate(tokens, 12)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(model.generate(tokens, 12), first)


@few
@given(seed=st.integers(0, 1000), stop=st.integers(0, 22), new=st.integers(1, 30))
def test_a_sequence_ends_at_its_stop_token_and_all_end_when_all_have(seed, stop, new):
    model, tokens = lively(GPT(small())), random_tokens(3, 4)
    free = model.generate(tokens, new, seed=seed)[:, 4:].tolist()
    lengths = [row.index(stop) + 1 if stop in row else new for row in free]
    expected = [row[:n] + [-1] * (max(lengths) - n) for row, n in zip(free, lengths)]
    seeds = [seed, seed + 1, seed + 2]
    steps = list(stream(model.make_decoder(3, 4 + new), tokens, new, seeds, stop_token=stop))
    assert torch.stack(steps, dim=1).tolist() == expected


@few
@given(
    config=configs,
    norm_embedding=st.booleans(),
    rows=st.integers(1, 3),
    filled=st.integers(1, 15),
    seed=seeds,
)
def test_a_step_of_the_decoder_is_that_of_the_model(config, norm_embedding, rows, filled, seed):
    config.norm_embedding = norm_embedding
    model, tokens = lively(GPT(config).double(), seed), random_tokens(rows, 16, seed=seed)
    expected, _ = model(tokens)
    decoder = Decoder(model, model.make_cache(rows))
    with torch.no_grad():
        assert torch.allclose(decoder.read(tokens[:, :filled]), expected[:, filled - 1], atol=1e-9)
        for t in range(filled, 16):
            assert torch.allclose(decoder.read(tokens[:, t : t + 1]), expected[:, t], atol=1e-9)
    assert decoder.cache.length == 16


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_weights_in_bf16_with_a_cache_in_float32_give_the_probabilities_of_float32_within_rounding(
    n_kv_head,
):
    torch.manual_seed(0)
    model = GPT(
        small(vocab_size=50, n_embd=64, n_kv_head=n_kv_head, block_size=32, position="rope")
    )
    tokens = torch.randint(0, 50, (3, 30))
    with torch.no_grad():
        exact = model(tokens)[0].softmax(-1)
        model.to(torch.bfloat16)
        decoder = Decoder(model, model.make_cache(3))
        assert decoder.cache.keys.dtype == torch.float32
        logits = [decoder.read(tokens[:, :20])] + [
            decoder.read(tokens[:, t : t + 1]) for t in range(20, 30)
        ]
    assert torch.allclose(torch.stack(logits, dim=1).float().softmax(-1), exact[:, 19:], atol=2e-3)


def test_the_race_that_draws_is_won_as_often_as_a_token_is_likely():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    many, noise = Noise(20_000, None, 5, CPU).at(0), Noise(1, [5], 5, CPU)
    one_by_one = torch.cat([sample_token(p[None], noise.at(t)) for t in range(20_000)])
    for drawn in (sample_token(p.expand(20_000, -1), many), one_by_one):
        often = torch.bincount(drawn, minlength=5) / 20_000
        assert ((often - p).abs() <= 4 * (p * (1 - p) / 20_000).sqrt()).all()


@few
@given(
    vocab_size=st.sampled_from([1, 7, 1000, 20_000]),
    seeds=st.lists(st.integers(0, 2**64), min_size=1, max_size=3),
    positions=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
)
def test_the_noise_is_a_function_of_the_seed_and_the_position(vocab_size, seeds, positions):
    noise = Noise(len(seeds), seeds, vocab_size, CPU)
    for position in positions:
        made = noise.at(position)
        assert made.shape == (len(seeds), vocab_size) and (made > 0).all()
        assert torch.isfinite(made).all()
        for row, seed in enumerate(seeds):
            alone = Noise(1, [seed], vocab_size, CPU).at(position)
            assert torch.equal(made[row : row + 1], alone)
    assert vocab_size < 1000 or not torch.equal(noise.at(0), noise.at(1))


def alone(model, prompt, new, seed, **choice):
    return [int(token) for token in streamed(model, prompt[None], new, [seed], **choice)]


def test_a_text_that_the_caller_ends_gets_no_more_tokens_and_the_others_do():
    model, ended = lively(GPT(small()).double()), torch.zeros(3, dtype=torch.bool)
    prompts = random_tokens(3, 4)
    got = []
    for tokens in streamed(model, prompts, 10, [1, 2, 3], ended=ended):
        got.append(tokens.tolist())
        ended[1] = True
        ended[2] = len(got) >= 4
    free = [alone(model, prompt, 10, 1 + row) for row, prompt in enumerate(prompts)]
    assert [row[0] for row in got] == free[0]
    assert [row[1] for row in got] == [free[1][0]] + [-1] * 9
    assert [row[2] for row in got] == free[2][:4] + [-1] * 6


# --- the definitions of others --------------------------------------------------------------------


@given(
    seed=seeds,
    rows=st.integers(1, 3),
    vocab_size=st.integers(2, 60),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.floats(0.05, 0.99),
    min_p=st.none() | st.floats(0.001, 0.9),
)
def test_the_choice_is_that_of_transformers_processors(
    seed, rows, vocab_size, temperature, top_k, top_p, min_p
):
    from transformers import generation as hf

    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (rows, 10), generator=generator)
    theirs = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    theirs += [hf.TopKLogitsWarper(top_k)] if top_k else []
    theirs += [hf.TopPLogitsWarper(top_p)] if top_p else []
    theirs += [hf.MinPLogitsWarper(min_p)] if min_p else []
    ours = next_token_probabilities(logits, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(ours, theirs(tokens, logits).softmax(dim=-1), atol=1e-12, rtol=1e-9)


# --- text: whole characters ----------------------------------------------------------------------

BYTES = train_bpe(["é日😀"], 257)  # a token for each byte


def grown(text, ids):
    """What is certain after each token; the text is given its tokens until it ends."""
    certain = []
    for id in ids:
        text.add(id)
        certain.append(text.text)
        if text.ended:
            break
    return certain


def test_half_a_character_is_held_back_and_at_the_end_shown_as_one_that_is_not_whole():
    text = Text(BYTES, [0])
    assert grown(text, list(BYTES.encode("é日"))[:-1]) == ["", "é", "é", "é"]
    text.end("length")
    assert text.text == "é\ufffd"


def test_the_end_of_text_token_ends_a_text():
    text = Text(BYTES, [0])
    ids = [*BYTES.encode("xa"), BYTES.end_of_text, *BYTES.encode("b")]
    assert grown(text, ids) == ["x", "xa", "xa"]
    assert text.ended == "end_of_text" and len(text.tokens) == 3
    text = Text(BYTES, [0], documents=2)  # as where no prompt is given
    assert grown(text, [BYTES.end_of_text, *ids])[-1] == "\nxa" and text.ended == "end_of_text"


@given(text=st.text() | st.text(st.characters(categories=["Cc"])))
def test_what_a_terminal_is_shown_holds_no_character_that_drives_it(text):
    shown = printable(text)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\t\n" for c in shown)
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown) if unicodedata.category(a) != "Cc")


@pytest.mark.parametrize(
    "tokenizer", [CharTokenizer("abc\n"), CharTokenizer("xyz"), train_bpe(["one two one two"], 270)]
)
def test_a_sample_is_a_text_from_its_beginning_the_same_every_time_and_moves_no_random_state(
    tokenizer,
):
    model, state = lively(GPT(small(vocab_size=tokenizer.vocab_size))), torch.get_rng_state()
    text, again, other = (sample_text(model, tokenizer, 30, seed) for seed in (3, 3, 4))
    assert text == again != other
    assert "<|endoftext|>" not in text and torch.equal(torch.get_rng_state(), state)
