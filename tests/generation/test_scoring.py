"""The losses of a text's tokens, as a model reads it from the beginning."""

import numpy as np
import pytest
import torch
from models import lively, small

from config import Config
from data.tokenizer import CharTokenizer
from generation import scoring
from generation.scoring import score_tokens
from model import GPT
from training.evaluate import Windows
from training.world import World

ALPHABET = CharTokenizer("ab\n")
IDS = ALPHABET.encode("\n" + "abbaabab\n" * 5)


def losses_by_hand(model, ids, block_size):
    """The loss of every token but the first, predicted one by one."""
    losses = []
    for i, id in enumerate(ids[1:]):
        start = i // block_size * block_size  # of the token's window
        window = torch.tensor([ids[start : i + 1]])
        if model.begin_of_text is not None:
            window[0, 0] = model.begin_of_text
        with torch.no_grad():
            logits = model(window)[0][0, -1]
        losses.append(-logits.log_softmax(-1)[id].item())
    return losses


@pytest.mark.parametrize("begin_of_text", [None, 2])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_every_token_is_scored_once_in_windows_of_the_context(length, begin_of_text, monkeypatch):
    model, ids = lively(GPT(small(vocab_size=3))).train(), IDS[: length + 1]
    model.begin_of_text = begin_of_text
    losses = score_tokens(model, ids)
    assert model.training
    assert losses == pytest.approx(losses_by_hand(model.eval(), ids, 16), abs=1e-5)
    # In small parts, as of a long text and a large vocabulary
    monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", 1)
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 5 * 3)
    assert score_tokens(model, ids) == pytest.approx(losses, abs=1e-6)


def test_the_mean_is_the_validation_loss_of_the_text():
    model = lively(GPT(small(vocab_size=3)))
    config = Config(model=model.config, device="cpu", precision="fp32")
    windows = Windows(np.array(IDS), ALPHABET, config, World())
    assert score_tokens(model, IDS).mean() == pytest.approx(
        windows.measure(model)["loss"], abs=1e-6
    )
