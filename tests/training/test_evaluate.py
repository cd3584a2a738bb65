import lzma
import math

import numpy as np
import pytest
import torch

from config import GPTConfig
from data.tokenizer import CharTokenizer
from model import GPT
from training.evaluate import Validation


def test_bits_per_byte_are_those_computed_by_hand_and_xz_reads_the_same_text():
    tokenizer = CharTokenizer("aé\n")
    text = "aéa\n" * 30 + "é"
    model = GPT(GPTConfig(vocab_size=3, block_size=7, n_layer=1, n_head=1, n_embd=4))
    with torch.no_grad():
        model.head.weight.zero_()  # every token is then equally likely
    validation = Validation(np.array(tokenizer.encode(text)), tokenizer, 7, "cpu", "fp32")
    loss, bits = validation.evaluate(model)
    predicted = text[1:].encode()
    assert loss == pytest.approx(math.log(3), abs=1e-6)
    assert bits == pytest.approx(len(text[1:]) * math.log2(3) / len(predicted), abs=1e-6)
    assert validation.xz() == 8 * len(lzma.compress(predicted, preset=9)) / len(predicted)
