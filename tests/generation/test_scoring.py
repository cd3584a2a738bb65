"""The score of a text: the losses of its tokens, as a model reads it from the beginning."""

import math

import numpy as np
import pytest
import torch
from conftest import wait_until
from models import lively, small

import cli.sample_config
from data.tokenizer import CharTokenizer, train_bpe
from generation.scoring import MAX_SHOWN_TOKENS, score_text
from sample import write_score
from variants import build_model

ALPHABET = CharTokenizer("ab\n")
LINE_END = ALPHABET.encode("\n")


def losses_by_hand(model, ids, block_size):
    """The loss of every token of a text after a line end, predicted one by one."""
    losses = []
    for i, id in enumerate(ids):
        start = i // block_size * block_size  # of the token's window
        context = [*LINE_END, *ids][start : i + 1]
        with torch.no_grad():
            logits = model(torch.tensor([context]))[0][0, -1]
        losses.append(-logits.log_softmax(-1)[id].item())
    return losses


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_every_token_is_scored_once_in_windows_of_the_context(length):
    model = lively(build_model(small(vocab_size=3))).train()
    text = "abbaabab\n" * 5
    score = score_text(model, ALPHABET, text[:length])
    expected = losses_by_hand(model.eval(), ALPHABET.encode(text[:length]), 16)
    assert score.losses == pytest.approx(expected, abs=1e-5)
    assert score.ids.tolist() == [*LINE_END, *ALPHABET.encode(text[:length])]


def test_the_summary_is_of_all_tokens_though_a_page_shows_the_first(capsys):
    model = lively(build_model(small(vocab_size=3)))
    text = "ab\n" * (MAX_SHOWN_TOKENS // 3 + 8)
    score = score_text(model, ALPHABET, text)
    content = score.page_content(ALPHABET)
    assert len(content["tokens"]) == len(content["losses"]) == MAX_SHOWN_TOKENS
    assert "".join(content["tokens"]) == text[:MAX_SHOWN_TOKENS]
    assert content["tokenCount"] == len(text)
    loss = np.mean(score.losses)
    assert f"{loss:.4f}" in score.describe() and f"{loss / math.log(2):.4f}" in score.describe()


def test_a_page_of_a_score_shows_and_names_the_loss_of_every_token(tmp_path, open_page, capsys):
    text = "the glass model reads\nthe <b>glass</b> é"
    tokenizer = train_bpe([text] * 20, 280)
    model = lively(build_model(small(vocab_size=tokenizer.vocab_size)))
    path = tmp_path / "page.html"
    config = cli.sample_config.SampleConfig(score=f"{tmp_path}/poem.txt", attention=str(path))
    write_score(config, model, tokenizer, text)
    score = score_text(model, tokenizer, text)
    assert capsys.readouterr().out == f"{score.describe()}\n"

    tab = open_page(path)
    tokens = tab.locator("#losses-text .token")
    assert tokens.count() == len(score.losses)
    assert tab.input_value("#typed") == text
    assert "poem.txt" in tab.inner_text("#title")
    assert score.describe() in tab.inner_text("#losses-summary")
    least_expected = int(score.losses.argmax())
    tokens.nth(least_expected).hover()
    assert f"{score.losses.max():.3f} nats" in tab.inner_text("#tip")
    tokens.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    wait_until(tab, f"document.querySelector('#tip').innerText.includes('{score.losses[1]:.3f}')")
    # The attention is that of the beginning, in which the losses were measured.
    stored = tab.evaluate("JSON.parse(document.querySelector('#data').textContent)")
    attended = stored["probes"][0]["tokens"]
    assert attended[1:] == stored["losses"]["tokens"]
