"""Score a text: the loss of each of its tokens, measured as the validation loss is."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import UserError
from common.text import pluralize
from config import Config
from data.tokenizer import Tokenizer, start_token
from generation.sampling import NON_FINITE_PREDICTIONS
from glass.heads.capture import token_losses
from glass.heads.probes import spell_tokens
from model import GPT
from training.evaluate import NO_TARGET, Windows

MAX_SHOWN_TOKENS = 10_000  # of a text, whose losses a page shows
MAX_ATTENTION_TOKENS = 128  # of a text, whose attention a page shows


class Score(NamedTuple):
    """The losses of a text of N tokens."""

    ids: np.ndarray  # the token that begins a text, and the text, (N + 1,)
    losses: np.ndarray  # of the tokens of the text, in nats, (N,)
    window: int  # tokens that the model reads at once
    num_bytes: int

    def describe(self) -> str:
        """Return the mean loss and the bits per byte in one line."""
        n, loss = len(self.losses), self.losses.mean()
        bits_per_byte = loss * n / math.log(2) / self.num_bytes
        return (
            f"{pluralize(n, 'token')}, {pluralize(self.num_bytes, 'byte')}: "
            f"loss {loss:.4f} nats per token, {bits_per_byte:.4f} bits per byte"
        )

    def attention_tokens(self) -> list[int]:
        """Return the ids of the beginning, whose attention a page shows."""
        return self.ids[: min(self.window, MAX_ATTENTION_TOKENS)].tolist()

    def page_content(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the summary and the losses of the first tokens, as the page shows them."""
        shown = self.losses[:MAX_SHOWN_TOKENS]
        return {
            "summary": self.describe(),
            "tokens": spell_tokens(tokenizer, self.ids[1 : len(shown) + 1]),
            "losses": [round(loss, 4) for loss in shown.tolist()],
            "tokenCount": len(self.losses),
            "window": self.window,
            "vocabSize": tokenizer.vocab_size,
        }


@torch.no_grad()
def score_text(model: GPT, tokenizer: Tokenizer, text: str) -> Score:
    """Compute the loss of each token of a text, in independent windows of block_size tokens.

    The token that begins a text is put before it, so that its first token has a loss, too.

    Raises:
        UserError: If the tokenizer finds no token in the text, or a loss is not finite.
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError(
            "the tokenizer of this model finds no token in the text: name a file with other text"
        )
    # A window of a text that is shorter than the context would be padded to it
    shape = replace(model.config, block_size=min(model.config.block_size, len(ids)))
    device = model.head.weight.device
    config = Config(model=shape, device=str(device), precision="fp32")
    tokens = np.array([start_token(tokenizer), *ids])
    windows = Windows(tokens, tokenizer, config, max_windows=len(tokens))
    losses = []
    with model.evaluating():
        for x, y in zip(
            windows.inputs.split(windows.batch_size), windows.targets.split(windows.batch_size)
        ):
            nats = token_losses(model, model.run_blocks(x.to(device)), y.to(device)).cpu()
            losses.append(nats[y != NO_TARGET].double())
    of_tokens = torch.cat(losses).numpy()
    if not np.isfinite(of_tokens).all():
        raise UserError(NON_FINITE_PREDICTIONS)
    return Score(tokens, of_tokens, model.config.block_size, len(text.encode()))
