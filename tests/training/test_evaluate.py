import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config import Config, DataConfig, GPTConfig
from data.tokenizer import CharTokenizer
from model import GPT
from training.evaluate import Windows, evaluate
from training.processes import World


def config_of(block_size: int, **data) -> Config:
    return Config(
        device="cpu",
        precision="fp32",
        model=GPTConfig(None, block_size=block_size),
        data=DataConfig(**data),
    )


def test_bits_per_byte_are_those_computed_by_hand():
    tokenizer = CharTokenizer("aé\n")
    text = "aéa\n" * 30 + "é"
    model = GPT(GPTConfig(vocab_size=3, block_size=7, n_layer=1, n_head=1, n_embd=4))
    with torch.no_grad():
        model.head.weight.zero_()  # every token is then equally likely
    validation = Windows(np.array(tokenizer.encode(text)), tokenizer, config_of(7))
    bits = len(text[1:]) * math.log2(3) / len(text[1:].encode())
    found = evaluate(model, (validation, validation), last=True)
    assert found == {
        "val/loss": pytest.approx(math.log(3), abs=1e-6),
        "train/eval_loss": pytest.approx(math.log(3), abs=1e-6),
        "val/bits_per_byte": pytest.approx(bits, abs=1e-6),
    }


LETTERS = CharTokenizer("".join(map(chr, range(1000, 1300))))


def windows(length: int, block_size: int, world: World | None = None, **data) -> Windows:
    """Validation on `length` tokens, each with its own number where there are up to 300."""
    return Windows(np.arange(length) % 300, LETTERS, config_of(block_size, **data), world)


def test_windows_cover_the_first_the_middle_and_the_last_documents():
    seen = windows(300, 10, val_max_tokens=50)  # thirty documents of ten tokens
    predicted = seen.targets[seen.targets >= 0].numpy()
    documents = set(predicted // 10)
    assert {0, 29} <= documents and documents & {14, 15} and len(predicted) <= 50
    x, y = windows(300, 10).excerpt(30)  # for heads' importance: at least 16
    assert len(x) == 16 and x[0, 0] == 0 and y[-1].tolist()[-2:] == [299, -1]


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 400))
def test_windows_are_different_whole_and_no_more_than_asked_for(length, block_size, most):
    seen = windows(length, block_size, val_max_tokens=most)
    predicted = seen.targets[seen.targets >= 0].tolist()
    assert 1 <= len(predicted) == len(set(predicted)) <= max(block_size, most + block_size - 1)
    assert len(predicted) == length - 1 or len(predicted) >= most - block_size
    for x, y in zip(seen.inputs, seen.targets):
        held = int((y >= 0).sum())
        assert torch.equal(x[:held] + 1, y[:held])
        assert held in (block_size, (length - 1) % block_size)


def test_the_windows_of_several_processes_are_those_of_one(monkeypatch):
    model = GPT(replace(config_of(10).model, vocab_size=300, n_layer=1, n_head=1, n_embd=4))
    monkeypatch.setattr(World, "check_stop", lambda self: None)  # which asks the others
    whole, *parts = [
        windows(300, 10, World(rank, size), val_max_tokens=70).local_loss(model)
        for size, rank in ((1, 0), (3, 0), (3, 1), (3, 2))
    ]
    assert sum(count for _, count in parts) == whole[1] == 69
    assert sum(nats for nats, _ in parts) == pytest.approx(whole[0], rel=1e-6)
