"""The KV cache and the cached decoder, against forward passes over the whole text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import LaterConfig, configs, few, lively, random_tokens, seeds, small

from common.errors import UserError
from generation.decoder import Decoder, allocate_cache
from model import KVCache
from variants import build_model

close = torch.testing.assert_close


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
    assert cache.length == length and allocate_cache(model, 2, 99).capacity == config.block_size
    assert torch.equal(cache.previous_tokens, tokens)


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


def test_a_model_with_smeared_keys_reads_the_whole_text_for_each_token():
    model, tokens = lively(build_model(small(smear_keys=True)).double()), random_tokens(2, 16)
    expected, _ = model(tokens)
    decoder = Decoder(model, 2)
    for t in range(16):
        close(decoder.next_logits(tokens[:, : t + 1]), expected[:, t])
    decoder.cache.length = 1
    with pytest.raises(UserError, match="smear_keys"):
        decoder.read(tokens[:, 1:2])


def test_the_decoder_of_a_model_in_training_mode_drops_nothing():
    model, tokens = lively(build_model(small(dropout=0.5)).double()), random_tokens(1, 8)
    expected = model(tokens)[0][:, -1]
    decoder = Decoder(model.train(), 1)
    with torch.no_grad():
        decoder.read(tokens[:, :7])
        close(decoder.read(tokens[:, 7:]), expected)


def test_a_model_with_a_setting_that_the_decoder_does_not_know_decodes_through_its_blocks():
    known, unknown = (
        Decoder(build_model(LaterConfig(**vars(small()), later=later)), 1)
        for later in ("off", "on")
    )
    assert known.layers and not unknown.layers
