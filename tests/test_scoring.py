"""The score of a text: its loss as a model reads it from the beginning."""

import re

import pytest
import torch
from models import lively, small

from data.tokenizer import CharTokenizer
from model import GPT
from sample import print_score


def test_a_text_of_characters_is_scored_after_a_line_end(capsys):
    model = lively(GPT(small(vocab_size=3)))
    print_score(model, CharTokenizer("ab\n"), "ab")
    n_tokens, n_bytes, loss, bits_per_byte = map(
        float, re.findall(r"\d+(?:\.\d+)?", capsys.readouterr().out)
    )
    with torch.no_grad():
        logits = model(torch.tensor([[0, 1]]))[0][0]  # of the line end and "a"
    expected = -logits.log_softmax(-1)[[0, 1], [1, 2]].mean().item()
    assert (n_tokens, n_bytes) == (2, 2)
    assert loss == pytest.approx(expected, abs=1e-4)
    assert bits_per_byte == pytest.approx(expected / 0.6931, abs=1e-3)
