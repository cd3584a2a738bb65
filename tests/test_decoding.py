import math
import unicodedata
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from models import configs, few, lively, random_tokens, seeds, small, streamed

from attention_maps.snapshot import sample_text
from data.tokenizer import CharTokenizer, prompt_ids, train_bpe
from decoding import (
    Noise,
    Text,
    draw,
    next_token_probabilities,
    penalise_repetition,
    window_start,
    write,
)
from files import printable
from model import GPT, Decoder, GPTConfig, KVCache


@given(block=st.integers(1, 2000), length=st.integers(0, 10_000))
def test_the_window_keeps_between_three_quarters_of_the_block_and_the_block_in_sight(block, length):
    start = window_start(length, block)
    assert length - start <= block
    assert start == 0 if length <= block else length - start >= 3 * block / 4
    assert 0 <= window_start(length + 1, block) - start <= max(1, block // 4)


def test_the_window_moves_once_in_a_quarter_of_the_block():
    starts = Counter(window_start(length, 64) for length in range(65, 64 + 10 * 16 + 1))
    assert starts == {16 * i: 16 for i in range(1, 11)}


def greedy_without_a_cache(model, tokens, new):
    for _ in range(new):
        logits = model(tokens[:, window_start(tokens.shape[1], model.config.block_size):])[0]
        tokens = torch.cat((tokens, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    return tokens


@few
@given(config=configs, block=st.integers(2, 16), prompt=st.integers(1, 40), new=st.integers(1, 30),
       seed=seeds)
def test_greedy_text_with_the_cache_is_that_without_also_past_the_block(
        config, block, prompt, new, seed):
    config.block_size = block
    model, tokens = lively(GPT(config).double(), seed), random_tokens(2, prompt, seed=seed)
    expected = greedy_without_a_cache(model, tokens, new)
    assert torch.equal(model.generate(tokens, new, temperature=0), expected)
    cache = model.make_cache(2)
    assert cache.keys.dtype == torch.float64
    got = list(streamed(model, tokens, new, temperature=0, cache=cache))
    assert torch.equal(torch.stack(got, dim=1), expected[:, prompt:])


@few
@given(config=configs, block=st.integers(2, 16), prompt=st.integers(1, 40), new=st.integers(1, 30),
       seed=seeds)
def test_drawn_text_with_the_cache_is_that_without_also_past_the_block(
        config, block, prompt, new, seed):
    config.block_size = block
    model, tokens = lively(GPT(config).double(), seed), random_tokens(1, prompt, seed=seed)
    got, noise = model.generate(tokens, new, temperature=1.2, top_p=0.9,
                                seed=seed), Noise(1, [seed], 23, torch.device("cpu"))
    with torch.no_grad():
        for T in range(prompt, prompt + new):
            probabilities = next_token_probabilities(
                model(tokens[:, window_start(T, block):])[0][:, -1].float(), 1.2, top_p=0.9)
            tokens = torch.cat((tokens, draw(probabilities, noise.at(T))[:, None]), dim=1)
    assert torch.equal(got, tokens)


def reference_probabilities(logits, temperature, top_k, top_p, min_p):
    """The definitions, one after another, in plain Python on {token: probability}."""
    def normalised(kept):
        return {i: p / sum(kept.values()) for i, p in kept.items()}

    kept = normalised({i: math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)})
    ordered = sorted(kept, key=kept.get, reverse=True)
    if top_k is not None:
        ordered = ordered[:top_k]
        kept = normalised({i: kept[i] for i in ordered})
    if top_p is not None:
        n = 1
        while n < len(ordered) and sum(kept[i] for i in ordered[:n]) < top_p:
            n += 1
        assume(all(abs(sum(kept[i] for i in ordered[:m]) - top_p) > 1e-5
                   for m in range(1, len(ordered) + 1)))
        kept = normalised({i: kept[i] for i in ordered[:n]})
    if min_p is not None:
        highest = max(kept.values())
        assume(all(abs(p - min_p * highest) > 1e-6 for p in kept.values()))
        kept = normalised({i: p for i, p in kept.items() if p >= min_p * highest})
    return [kept.get(i, 0.0) for i in range(len(logits))]


@given(logits=st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True),
       temperature=st.floats(0.3, 3),
       top_k=st.none() | st.integers(1, 15), top_p=st.none() | st.floats(0.01, 1),
       min_p=st.none() | st.floats(0, 0.99))
def test_the_next_token_is_drawn_from_what_the_definitions_leave(
        logits, temperature, top_k, top_p, min_p):
    logits = [x / 100 for x in logits]
    expected = reference_probabilities(logits, temperature, top_k, top_p, min_p)
    got = next_token_probabilities(torch.tensor([logits]), temperature, top_k, top_p, min_p)[0]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert [p > 0 for p in got.tolist()] == [p > 0 for p in expected]


HAND_BUILT = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]).log()


@pytest.mark.parametrize(("how", "left"), [
    ({}, [0.1, 0.4, 0.05, 0.25, 0.2]),
    ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
    ({"temperature": 0.5}, [x / 0.275 for x in (0.01, 0.16, 0.0025, 0.0625, 0.04)]),
    ({"top_k": 1}, [0, 1, 0, 0, 0]),
    ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    ({"top_k": 9}, [0.1, 0.4, 0.05, 0.25, 0.2]),
    ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
    ({"top_p": 0.645}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    ({"top_p": 0.655}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
    ({"top_p": 1.0}, [0.1, 0.4, 0.05, 0.25, 0.2]),
    ({"min_p": 0.55}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    ({"min_p": 0.0}, [0.1, 0.4, 0.05, 0.25, 0.2]),
    ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
    ({"top_k": 3, "top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    # of what top_k left, 0.65/0.85 is enough
    ({"top_k": 3, "top_p": 0.75}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
])
def test_a_setting_leaves_the_tokens_that_its_definition_leaves(how, left):
    other = HAND_BUILT.flip(0)
    got = next_token_probabilities(torch.stack((HAND_BUILT, other)), **how)
    torch.testing.assert_close(got, torch.tensor([left, left[::-1]], dtype=torch.float32))


@pytest.mark.parametrize("temperature",
                         [0.0, 1e-320, 1e-300, 1e-45, 1e-39, 1e-38, 1e-30, 1e-10, 1e-4])
@pytest.mark.parametrize("how", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature, how):
    logits = torch.tensor([[1e4, -1e4, 3.0], [-3.0, 2.0, -math.inf], [0.0, -1.0, 3e38],
                           [-1e30, -1e31, -2e30]])
    assert next_token_probabilities(logits, temperature,
                                    **how).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    model, prompt = lively(GPT(small(vocab_size=8))), torch.tensor([[3, 1]])
    with torch.no_grad():
        likely = next_token_probabilities(model(prompt)[0][:, -1], 0.8, top_k=5)[0]
    drawn = model.generate(prompt.expand(4000, -1), 1, temperature=0.8, top_k=5, seed=0)[:, -1]
    often = torch.bincount(drawn, minlength=8) / 4000
    assert ((often - likely).abs() <= 4 * (likely * (1 - likely) / 4000).sqrt()).all()


@few
@given(seed=st.integers(0, 2**40), rows=st.integers(1, 4), prompt=st.integers(1, 20))
def test_a_row_of_a_batch_is_that_row_alone_with_its_own_seed(seed, rows, prompt):
    model, tokens = lively(GPT(small(n_kv_head=2)).double()), random_tokens(rows, prompt)
    together = model.generate(tokens, 12, temperature=1.3, top_p=0.95, seed=seed)
    assert torch.equal(together, model.generate(tokens, 12, temperature=1.3, top_p=0.95, seed=seed))
    for row in range(rows):
        alone = model.generate(tokens[row:row + 1], 12, temperature=1.3, top_p=0.95,
                               seed=seed + row)
        assert torch.equal(together[row:row + 1], alone)


def test_the_same_prompt_in_two_rows_is_continued_in_two_ways():
    text = lively(GPT(small())).generate(random_tokens(1, 3).expand(2, -1), 12, seed=1)
    assert not torch.equal(text[0], text[1])


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
    expected = [row[:n] + [stop] * (max(lengths) - n) for row, n in zip(free, lengths)]
    assert model.generate(tokens, new, seed=seed, stop_token=stop)[:, 4:].tolist() == expected


@pytest.mark.parametrize("training", [True, False])
def test_generation_drops_nothing_and_leaves_the_mode_as_it_was(training):
    model, tokens = lively(GPT(small(dropout=0.5))), random_tokens(2, 3)
    expected = greedy_without_a_cache(model, tokens, 20)
    model.train(training)
    assert torch.equal(model.generate(tokens, 20, temperature=0), expected)
    texts = streamed(model, tokens, 20)
    next(texts)
    texts.close()
    assert all(m.training == training for m in model.modules())
    with pytest.raises(RuntimeError):
        model.generate(tokens.float(), 1)
    assert all(m.training == training for m in model.modules())


def test_generation_builds_no_graph_and_keeps_the_prompt():
    model, tokens = lively(GPT(small())), random_tokens(2, 3)
    assert torch.equal(model.generate(tokens, 0), tokens)
    text = model.generate(tokens, 7, seed=0)
    assert text.shape == (2, 10)
    assert torch.equal(text[:, :3], tokens)
    assert torch.is_grad_enabled()
    cache = KVCache(model.config, 2)
    list(streamed(model, tokens, 3, cache=cache))
    assert not cache.keys.requires_grad
    assert cache.length == 5  # the token drawn last is not read any more


def test_generation_from_no_token_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        GPT(small()).generate(torch.zeros(1, 0, dtype=torch.long), 3)


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("temperature", math.nan),
                                             ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5),
                                             ("min_p", -0.1), ("min_p", 2.0)])
def test_sampling_settings_out_of_bounds_are_refused(name, value):
    with pytest.raises(ValueError, match="out of its bounds"):
        next_token_probabilities(torch.zeros(1, 3), **{name: value})


def test_a_cache_used_before_is_used_afresh():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, block_size=16, n_layer=2, n_head=2, n_embd=16))
    tokens, cache = torch.tensor([[1, 2, 3]]), KVCache(model.config, 1)
    first, second = ([int(t) for t in streamed(model, tokens, 8, temperature=0, cache=cache)]
                     for _ in range(2))
    assert first == second


@few
@given(config=configs, norm_embedding=st.booleans(), rows=st.integers(1, 3),
       filled=st.integers(1, 15), seed=seeds)
def test_a_step_of_the_decoder_is_that_of_the_model(config, norm_embedding, rows, filled, seed):
    config.norm_embedding = norm_embedding
    model, tokens = lively(GPT(config).double(), seed), random_tokens(rows, 16, seed=seed)
    expected, _ = model(tokens)
    decoder = Decoder(model, model.make_cache(rows))
    with torch.no_grad():
        assert torch.allclose(decoder.fill(tokens[:, :filled]), expected[:, filled - 1], atol=1e-9)
        for t in range(filled, 16):
            assert torch.allclose(decoder.step(tokens[:, t]), expected[:, t], atol=1e-9)
    assert decoder.cache.length == 16


@few
@given(config=configs, rows=st.integers(1, 3), filled=st.integers(1, 12), seed=seeds)
def test_a_step_of_fixed_shapes_as_a_gpu_records_it_is_that_of_the_decoder(config, rows, filled,
                                                                           seed):
    model, tokens = lively(GPT(config).double(), seed), random_tokens(rows, 16, seed=seed)
    free, fixed = (Decoder(model, model.make_cache(rows)) for _ in range(2))
    with torch.inference_mode():
        for decoder in (free, fixed):
            decoder.fill(tokens[:, :filled])
        for t in range(filled, 16):
            expected = free.step(tokens[:, t])
            seen = 16 if t % 2 else t + 1  # with tokens to come, masked, and without
            assert torch.allclose(fixed.compute(tokens[:, t], torch.tensor([t]), seen), expected,
                                  atol=1e-9)
    assert torch.allclose(fixed.cache.keys, free.cache.keys, atol=1e-9)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_weights_in_bf16_with_a_cache_in_float32_give_the_probabilities_of_float32_within_rounding(
        n_kv_head):
    torch.manual_seed(0)
    model = GPT(small(vocab_size=50, n_embd=64, n_kv_head=n_kv_head, block_size=32,
                      position="rope"))
    tokens = torch.randint(0, 50, (3, 30))
    with torch.no_grad():
        exact = model(tokens)[0].softmax(-1)
        model.to(torch.bfloat16)
        decoder = Decoder(model, model.make_cache(3))
        assert decoder.cache.keys.dtype == torch.float32
        logits = [decoder.fill(tokens[:, :20])] + [decoder.step(tokens[:, t])
                                                   for t in range(20, 30)]
    assert torch.allclose(torch.stack(logits, dim=1).float().softmax(-1), exact[:, 19:], atol=2e-3)


@given(weights=st.lists(st.sampled_from([0.0, 1e-30, 1.0, 2.0, 5.0]), min_size=1,
                        max_size=12).filter(lambda w: sum(w) >= 1), seed=seeds)
def test_a_token_without_a_chance_is_never_drawn(weights, seed):
    p = torch.tensor([weights]) / sum(weights)
    assert p[0, int(draw(p, Noise(1, [seed], len(weights), torch.device("cpu")).at(3)))] >= 0.01


def test_the_race_that_draws_is_won_as_often_as_a_token_is_likely():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    drawn = draw(p.expand(20_000, -1), Noise(20_000, None, 5, torch.device("cpu")).at(0))
    often = torch.bincount(drawn, minlength=5) / 20_000
    assert ((often - p).abs() <= 4 * (p * (1 - p) / 20_000).sqrt()).all()
    noise = Noise(1, [5], 5, torch.device("cpu"))
    often = torch.bincount(torch.cat([draw(p[None], noise.at(t)) for t in range(20_000)]),
                           minlength=5) / 20_000
    assert ((often - p).abs() <= 4 * (p * (1 - p) / 20_000).sqrt()).all()


@few
@given(vocab_size=st.sampled_from([1, 7, 1000, 20_000]),
       seeds=st.lists(st.integers(0, 2**64), min_size=1, max_size=3),
       positions=st.lists(st.integers(0, 3000), min_size=1, max_size=5))
def test_the_noise_is_a_function_of_the_seed_and_the_position(vocab_size, seeds, positions):
    noise = Noise(len(seeds), seeds, vocab_size, torch.device("cpu"))
    for position in positions:
        made = noise.at(position)
        assert made.shape == (len(seeds), vocab_size) and (made > 0).all()
        assert torch.isfinite(made).all()
        for row, seed in enumerate(seeds):
            assert torch.equal(made[row:row + 1],
                               Noise(1, [seed], vocab_size, torch.device("cpu")).at(position))
    assert vocab_size < 1000 or not torch.equal(noise.at(0), noise.at(1))


# --- prompts of different lengths in one batch ----------------------------------------------------


def alone(model, prompt, new, seed, **choice):
    return [int(token) for token in streamed(model, prompt[None], new, [seed], **choice)]


@few
@given(config=configs, block=st.integers(2, 16),
       lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), new=st.integers(1, 30),
       temperature=st.sampled_from([0.0, 1.0]), penalty=st.sampled_from([1.0, 1.3]),
       stop_token=st.none() | st.integers(0, 22), seed=seeds)
def test_a_prompt_gets_in_a_batch_of_any_lengths_what_it_gets_alone(
        config, block, lengths, new, temperature, penalty, stop_token, seed):
    config.block_size = block
    model = lively(GPT(config).double(), seed)
    prompts = [random_tokens(length, seed=seed + length) for length in lengths]
    choice = {"temperature": temperature, "repetition_penalty": penalty, "stop_token": stop_token}
    got = [[] for _ in prompts]
    for tokens in streamed(model, prompts, new, [seed + 7 * row for row in range(len(prompts))],
                           **choice):
        assert (tokens >= 0).any() or len(set(lengths)) > 1
        for row, token in enumerate(tokens.tolist()):
            if token >= 0:
                got[row].append(token)
    assert got == [alone(model, prompt, new, seed + 7 * row, **choice) for row,
                   prompt in enumerate(prompts)]


def test_in_float32_too_a_text_is_the_same_alone_and_in_a_batch_of_any_lengths():
    torch.manual_seed(0)
    model = lively(GPT(small(vocab_size=300, n_embd=64, block_size=64, position="rope")))
    prompts = [torch.randint(300, (length,)) for length in (1, 90, 5, 30)]
    together = torch.stack(list(streamed(model, prompts, 100, [1, 2, 3, 4])), dim=1)
    for row, prompt in enumerate(prompts):
        assert together[row][together[row] >= 0].tolist() == alone(model, prompt, 100, row + 1)


def test_a_longer_prompt_is_read_at_once_when_only_it_is_left(monkeypatch):
    model, fills = lively(GPT(small(block_size=64))), []
    fill = Decoder.fill
    monkeypatch.setattr(Decoder, "fill", lambda self,
                        tokens: fills.append(tokens.shape[1]) or fill(self, tokens))
    list(streamed(model, [random_tokens(2), random_tokens(50)], 3))
    assert fills == [2, 1, 1, 50 - 4, 1, 1]


def test_a_text_that_goes_on_from_where_it_was_cut_is_the_text_that_was_not():
    model, prompt = lively(GPT(small()).double()), random_tokens(3)
    whole = alone(model, prompt, 30, 5)
    for cut in (1, 13, 29):
        assert alone(model, torch.cat((prompt, torch.tensor(whole[:cut]))), 30 - cut,
                     5) == whole[cut:]


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


@given(seed=seeds, rows=st.integers(1, 3), vocab_size=st.integers(2, 60),
       temperature=st.floats(0.2, 3), top_k=st.none() | st.integers(1, 70),
       top_p=st.none() | st.floats(0.05, 0.99), min_p=st.none() | st.floats(0.001, 0.9),
       penalty=st.sampled_from([1.0, 0.7, 1.2, 3.0]))
def test_the_choice_is_that_of_transformers_processors(seed, rows, vocab_size, temperature, top_k,
                                                       top_p, min_p, penalty):
    from transformers import generation as hf

    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (rows, 10), generator=generator)
    theirs = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(penalty),
                                     hf.TemperatureLogitsWarper(temperature)])
    theirs += [hf.TopKLogitsWarper(top_k)] if top_k else []
    theirs += [hf.TopPLogitsWarper(top_p)] if top_p else []
    theirs += [hf.MinPLogitsWarper(min_p)] if min_p else []
    seen = torch.zeros(rows, vocab_size, dtype=torch.bool).scatter(1, tokens, True)
    ours = next_token_probabilities(penalise_repetition(logits, seen, penalty), temperature, top_k,
                                    top_p, min_p)
    torch.testing.assert_close(ours, theirs(tokens, logits).softmax(dim=-1), atol=1e-12, rtol=1e-9)


def test_repeated_tokens_are_penalised_as_defined_and_others_are_not():
    logits, seen = torch.tensor([[2.0, -2.0, 1.0, 0.0]]), torch.tensor([[True, True, False, True]])
    assert penalise_repetition(logits, seen, 4.0).tolist() == [[0.5, -8.0, 1.0, 0.0]]


@few
@given(prompt=st.integers(1, 30), new=st.integers(1, 25), seed=seeds)
def test_greedy_text_with_a_penalty_is_that_of_transformers_processor_over_prompt_and_text(
        prompt, new, seed):
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    model, tokens = lively(GPT(small()).double(), seed), random_tokens(2, prompt, seed=seed)
    got = model.generate(tokens, new, temperature=0, repetition_penalty=1.5)
    for _ in range(new):
        with torch.no_grad():
            logits = model(tokens[:, window_start(tokens.shape[1], 16):])[0][:, -1]
        tokens = torch.cat((tokens, RepetitionPenaltyLogitsProcessor(1.5)(tokens, logits).argmax(
            -1, keepdim=True)), dim=1)
    assert torch.equal(got, tokens)


# --- text: whole characters, stop strings ---------------------------------------------------------

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


def ended_by_definition(whole, stops):
    """The text before the first stop string that its characters, one after the other, complete."""
    for n in range(1, len(whole) + 1):
        complete = [stop for stop in stops if whole[:n].endswith(stop)]
        if complete:
            return whole[:n - max(map(len, complete))], "stop"
    return whole, "length"


@given(whole=st.text("ab\né😀", max_size=20),
       stops=st.lists(st.text("ab\né😀", min_size=1, max_size=4), max_size=3), data=st.data())
def test_a_text_ends_before_the_first_stop_string_however_its_characters_fall_into_tokens(
        whole, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole.encode())), max_size=6)))
    pieces = [whole.encode()[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole.encode())])]
    tokenizer = SimpleNamespace(end_of_text=None, token_bytes=pieces.__getitem__)
    text = Text(tokenizer, [0], stop=stops)
    certain = grown(text, range(len(pieces)))
    if text.ended is None:
        text.end("length")
    expected, why = ended_by_definition(whole, stops)
    assert (text.text, text.ended) == (expected, why)
    for before, after in zip(certain, [*certain[1:], text.text]):
        assert after.startswith(before)


def test_what_may_become_a_stop_string_is_held_back_and_given_when_it_does_not():
    text = Text(BYTES, [0], stop=["\n\nend"])
    assert grown(text, BYTES.encode("a\n\nen\n\nen")) == ["a"] * 5 + ["a\n\nen"] * 4
    text.end("length")
    assert text.text == "a\n\nen\n\nen"


def test_half_a_character_is_held_back_and_at_the_end_shown_as_one_that_is_not_whole():
    text = Text(BYTES, [0])
    assert grown(text, list(BYTES.encode("é日"))[:-1]) == ["", "é", "é", "é"]
    text.end("length")
    assert text.text == "é\ufffd"


def test_the_end_of_text_token_ends_a_text_and_gives_what_was_held_back():
    text = Text(BYTES, [0], stop=["ab"])
    assert grown(text,
                 [*BYTES.encode("xa"), BYTES.end_of_text, *BYTES.encode("b")]) == ["x", "x", "xa"]
    assert text.ended == "end_of_text" and len(text.tokens) == 3


def test_texts_written_together_are_those_written_alone_and_end_each_for_its_own_reason():
    model = lively(GPT(small(vocab_size=257, block_size=32)).double())
    tokenizer = train_bpe([""], 257)

    def made(*kinds):
        texts = [Text(tokenizer, prompt_ids(tokenizer, prompt), seed, stop) for prompt, seed,
                 stop in kinds]
        for _ in write(Decoder(model, model.make_cache(len(texts))), texts, 40):
            pass
        return [(text.text, text.tokens, text.ended) for text in texts]

    free, *_ = made(("", 1, []))
    stop = free[0][3:5]
    kinds = [("", 1, [stop]), ("", 1, []), ("a longer prompt", 2, []), ("b", 3, ["never"])]
    together = made(*kinds)
    assert together == [made(kind)[0] for kind in kinds]
    assert together[0] == (free[0][:free[0].index(stop)], together[0][1], "stop")
    assert together[1] == free
    assert {ended for _, _, ended in together} <= {"stop", "length", "end_of_text"}


@given(text=st.text() | st.text(st.characters(categories=["Cc"])))
def test_what_a_terminal_is_shown_holds_no_character_that_drives_it(text):
    shown = printable(text)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\t\n" for c in shown)
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown) if unicodedata.category(a) != "Cc")


@pytest.mark.parametrize("tokenizer", [CharTokenizer("abc\n"), CharTokenizer("xyz"),
                                       train_bpe(["one two one two"], 270)])
def test_a_sample_is_a_text_from_its_beginning_the_same_every_time_and_moves_no_random_state(
        tokenizer):
    model, state = lively(GPT(small(vocab_size=tokenizer.vocab_size))), torch.get_rng_state()
    text = sample_text(model, tokenizer, 30, seed=3)
    assert text == sample_text(model, tokenizer, 30,
                               seed=3) != sample_text(model, tokenizer, 30, seed=4)
    assert "<|endoftext|>" not in text and torch.equal(torch.get_rng_state(), state)

