"""What a text's score is, and how it looks."""

import re

import torch
from models import lively, small

from data.tokenizer import CharTokenizer, train_bpe
from model import GPT
from sample import show_score

BYTES = train_bpe([""], 257)  # a token for each byte
TEXT = "a line\nsigns: é日😀\n"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def shown(capsys, text, tokenizer):
    show_score(lively(GPT(small(vocab_size=tokenizer.vocab_size))), tokenizer, text)
    return capsys.readouterr().out


def test_a_text_by_characters_is_scored_from_the_line_end_that_it_would_begin_with(capsys):
    out = shown(capsys, "ab", CharTokenizer("ab\n"))
    with torch.no_grad():
        logits = lively(GPT(small(vocab_size=3)))(torch.tensor([[0, 1]]))[0][0]
    expected = -logits.log_softmax(-1)[[0, 1], [1, 2]].mean()
    assert out.startswith(f"2 tokens, 2 bytes: loss {expected:.4f} nats per token")
