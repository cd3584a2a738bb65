"""What a text's score is, and how it looks."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import configs, few, lively, random_tokens, seeds, small

import sample
import training.evaluate
from config import Config
from data.tokenizer import CharTokenizer, first_token, train_bpe
from decoding import window_start
from model import GPT
from sample import show_score
from training.evaluate import Windows, surprise

BYTES = train_bpe([""], 257)  # a token for each byte
TEXT = "a line\nsigns: é日😀\n"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@few
@given(config=configs, block=st.integers(2, 16), count=st.integers(2, 80),
       at_once=st.sampled_from([1, 23 * 8, 1 << 24]),
       rows=st.integers(1, 3), seed=seeds)
def test_a_token_is_as_surprising_as_it_is_to_the_model_that_generates(
        config, block, count, at_once, rows, seed):
    config.block_size = block
    model, tokens = lively(GPT(config).double(), seed), random_tokens(count, seed=seed)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        expected = [-model(tokens[None, window_start(n, block):n])[0][0, -1].log_softmax(
            -1)[tokens[n]] for n in range(1, count)]
        patched.setattr(training.evaluate, "LOGITS", at_once)
        patched.setattr(training.evaluate, "TOKENS", rows * block)
        got = torch.cat(list(surprise(model, tokens)))
    torch.testing.assert_close(got, torch.stack(expected).float(), atol=1e-5, rtol=1e-5)


def test_within_one_block_the_loss_is_that_of_validation():
    model = lively(GPT(small(vocab_size=257, block_size=64)))
    ids = torch.tensor([first_token(BYTES), *BYTES.encode(TEXT)])
    config = Config(device="cpu", precision="fp32", model=model.config)
    loss = Windows(ids.numpy(), BYTES, config).loss(model)
    assert torch.cat(list(surprise(model, ids))).mean().item() == pytest.approx(loss, abs=1e-6)


def shown(capsys, monkeypatch, *, text=TEXT, tokenizer=BYTES, **env):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    show_score(lively(GPT(small(vocab_size=tokenizer.vocab_size))), tokenizer, text)
    return capsys.readouterr().out


def test_in_a_terminal_all_of_the_text_is_shown_in_colour_with_a_legend(capsys, monkeypatch):
    out = shown(capsys, monkeypatch, FORCE_COLOR="1", COLORTERM="truecolor")
    plain = ANSI.sub("", out)
    assert plain.replace("↵", "").startswith(TEXT)
    assert "bits per token   1 to 3    3 to 6    6 to 10    10 and more" in plain
    assert "48;2;255;" in out
    assert plain.splitlines()[-1].startswith(f"{len(TEXT.encode())} tokens, {len(TEXT.encode())} "
                                             f"bytes: loss")
    assert all(len(line) <= 80 for line in plain.splitlines())


def test_a_character_of_several_tokens_has_the_surprise_of_all_of_them(capsys, monkeypatch):
    bits = []
    monkeypatch.setattr(sample, "add_coloured", lambda view, text, b: bits.append((text, b)))
    shown(capsys, monkeypatch, text="aé日", FORCE_COLOR="1")
    ids = torch.tensor([first_token(BYTES), *BYTES.encode("aé日")])
    losses = torch.cat(list(surprise(lively(GPT(small(vocab_size=257))), ids))) / math.log(2)
    assert [text for text, _ in bits] == ["a", "é", "日"]
    expected = [part.sum().item() for part in losses.split([1, 2, 3])]
    assert [b for _, b in bits] == pytest.approx(expected, abs=1e-5)


def test_a_text_by_characters_is_scored_from_the_line_end_that_it_would_begin_with(
        capsys, monkeypatch):
    out = shown(capsys, monkeypatch, text="ab", tokenizer=CharTokenizer("ab\n"))
    with torch.no_grad():
        logits = lively(GPT(small(vocab_size=3)))(torch.tensor([[0, 1]]))[0][0]
    expected = -logits.log_softmax(-1)[[0, 1], [1, 2]].mean()
    assert out.startswith(f"2 tokens, 2 bytes: loss {expected:.4f} nats per token")
