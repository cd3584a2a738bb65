"""The KV cache and the cached decoder, against forward passes over the whole text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import configs, few, lively, random_tokens, seeds, small
from presets import model_preset

from generation.decoder import Decoder, KVCache
from variants import build_model

close = torch.testing.assert_close


# --- The cache ------------------------------------------------------------------------------------


def test_the_cache_of_llama_3_is_a_quarter_of_a_multi_head_one():
    def cache(**changes):
        config = model_preset("llama3_8b", vocab_size=1, **changes)
        return KVCache(config, 1, device="meta", dtype=torch.bfloat16)

    grouped, multi_head = cache(), cache(n_kv_head=32)
    assert grouped.nbytes * 4 == multi_head.nbytes
    # keys and values · layers · groups · tokens · d · bytes: 1 GiB
    assert grouped.nbytes == 2 * 32 * 8 * 8192 * 128 * 2
    assert grouped.capacity == 8192


def test_keys_and_values_in_the_cache_may_differ_in_size():
    cache = KVCache(small(n_kv_head=2, head_dim=6, value_head_dim=3), batch_size=5, length=7)
    assert cache.keys.shape == (2, 5, 2, 7, 6)
    assert cache.values.shape == (2, 5, 2, 7, 3)
    assert cache.nbytes == 4 * 2 * 5 * 2 * 7 * (6 + 3)


@few
@given(config=configs, chunks=st.lists(st.integers(1, 8), min_size=1, max_size=8), seed=seeds)
def test_a_text_read_in_chunks_has_the_logits_of_the_whole_text(config, chunks, seed):
    length = min(sum(chunks), config.block_size)
    model, tokens = lively(build_model(config), seed), random_tokens(2, length, seed=seed)
    cache = KVCache(config, 2, length)
    logits, start = [], 0
    with torch.no_grad():
        for chunk in chunks:
            part = tokens[:, start : start + chunk]
            if part.shape[1] == 0:
                break
            logits.append(model(part, cache=cache)[0])
            start += chunk
        close(torch.cat(logits, dim=1), model(tokens)[0], atol=1e-5, rtol=1e-5)
    assert cache.length == length
    assert torch.equal(cache.previous_tokens, tokens)


def test_more_tokens_than_fit_the_cache_are_refused_and_change_nothing():
    model, tokens = build_model(small()).eval(), random_tokens(1, 6)
    cache = KVCache(model.config, 1, length=5)
    model(tokens[:, :3], cache=cache)
    with pytest.raises(ValueError):
        model(tokens[:, 3:], cache=cache)
    assert cache.length == 3


def test_more_tokens_than_fit_the_block_are_refused_whatever_the_cache():
    model = build_model(small(block_size=16)).eval()
    with pytest.raises(ValueError):
        model(random_tokens(1, 17), cache=KVCache(model.config, 1, length=20))


# --- The decoder ----------------------------------------------------------------------------------


@few
@given(
    config=configs,
    norm_embedding=st.booleans(),
    batch_size=st.integers(1, 3),
    prompt_length=st.integers(1, 15),
    seed=seeds,
)
def test_the_decoder_and_the_forward_pass_agree(
    config, norm_embedding, batch_size, prompt_length, seed
):
    config.norm_embedding = norm_embedding
    model, tokens = (
        lively(build_model(config).double(), seed),
        random_tokens(batch_size, 16, seed=seed),
    )
    expected, _ = model(tokens)
    decoder = Decoder(model, batch_size)
    with torch.no_grad():
        logits = [decoder.read(tokens[:, :prompt_length])]
        for t in range(prompt_length, 16):
            logits.append(decoder.read(tokens[:, t : t + 1]))
    close(torch.stack(logits, dim=1), expected[:, prompt_length - 1 :], atol=1e-9, rtol=0)
    assert decoder.cache.length == 16


def test_the_decoder_of_a_model_in_training_mode_drops_nothing():
    model, tokens = lively(build_model(small(dropout=0.5)).double()), random_tokens(1, 8)
    expected = model(tokens)[0][:, -1]
    decoder = Decoder(model.train(), 1)
    with torch.no_grad():
        decoder.read(tokens[:, :7])
        close(decoder.read(tokens[:, 7:]), expected)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_weights_in_bf16_with_a_float32_cache_give_the_probabilities_within_rounding(n_kv_head):
    torch.manual_seed(0)
    model = build_model(
        small(vocab_size=50, n_embd=64, n_kv_head=n_kv_head, block_size=32, position="rope")
    )
    tokens = torch.randint(0, 50, (3, 30))
    with torch.no_grad():
        exact = model(tokens)[0].softmax(-1)
        model.to(torch.bfloat16)
        decoder = Decoder(model, 3)
        assert decoder.cache.keys.dtype == torch.float32
        logits = [decoder.read(tokens[:, :20])]
        for t in range(20, 30):
            logits.append(decoder.read(tokens[:, t : t + 1]))
    probabilities = torch.stack(logits, dim=1).float().softmax(-1)
    assert torch.allclose(probabilities, exact[:, 19:], atol=2e-3)
