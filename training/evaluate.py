"""Validation: always the same windows, leaving the model and the random state as they were."""

import lzma
import math

import numpy as np
import torch

from config import DataConfig
from data.tokenizer import Tokenizer
from model import GPT
from training.distributed import Team
from training.runtime import autocast

LOGITS = 1 << 24


class Validation:
    """The validation split in non-overlapping windows of block_size, the last one filled up.

    Of a split with more than `data.val_max_tokens` as many windows, spread evenly over all of it;
    or, for a run begun when that was the way, the first tokens (`data.val_windows`).
    """

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, block_size: int, device: str,
                 precision: str, team: Team | None = None, data: DataConfig | None = None):
        """tokens (N,) with N ≥ 2, of which all but the first are predicted; a team divides the
        windows among its processes."""
        data, self.of = data or DataConfig(val_max_tokens=len(tokens)), len(tokens) - 1
        if data.val_windows == "first":
            tokens = tokens[:data.val_max_tokens]
        windows = math.ceil((len(tokens) - 1) / block_size)
        most = max(1, math.ceil((data.val_max_tokens - 1) / block_size))
        starts = np.linspace(0, windows - 1, min(windows, most)).round().astype(int) * block_size
        inputs = np.zeros((len(starts), block_size), np.int64)
        targets = np.full((len(starts), block_size), -1, np.int64)  # -1: nothing to predict
        for row, start in enumerate(starts):
            window = tokens[start:start + block_size + 1]
            inputs[row, :len(window) - 1], targets[row, :len(window) - 1] = window[:-1], window[1:]
        self.inputs, self.targets = torch.from_numpy(inputs), torch.from_numpy(targets)
        # Windows that go through the model at once: enough to keep it busy, with logits of 64 MB
        # at most where one fits.
        self.rows = max(1, min(8192, LOGITS // tokenizer.vocab_size) // block_size)
        self.device, self.precision, self.team = device, precision, team or Team()
        token_bytes = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.text = b"".join(token_bytes[id] for id in targets[targets >= 0].tolist())

    def evaluate(self, model: GPT) -> tuple[float, float]:
        """The loss in nats per token, and in bits per byte of UTF-8 text, which compares across vocabularies."""
        self.team.order("evaluate")
        nats, predicted = self.team.total(*self.share(model))
        return nats / predicted, nats / math.log(2) / len(self.text)

    @torch.no_grad()
    def share(self, model: GPT) -> tuple[float, int]:
        """The sum of the loss over the tokens that fall to this process, in nats, and their number."""
        training = model.training
        model.eval()
        nats, count, windows = 0.0, 0, len(self.inputs)
        mine = slice(windows * self.team.rank // self.team.size, windows * (self.team.rank + 1) // self.team.size)
        for x, y in zip(self.inputs[mine].split(self.rows), self.targets[mine].split(self.rows)):
            with autocast(self.device, self.precision):
                _, loss = model(x.to(self.device), y.to(self.device))
            predicted = int((y >= 0).sum())
            if predicted:
                nats, count = nats + loss.item() * predicted, count + predicted
        model.train(training)
        return nats, count

    def extent(self) -> str:
        """How much of the split is predicted, in words."""
        return f"{int((self.targets >= 0).sum()):,} of {self.of:,} validation tokens"

    def xz(self) -> float:
        """Bits per byte that `xz -9` needs for the text that is predicted: a model that needs more has learned little."""
        return 8 * len(lzma.compress(self.text, preset=9)) / max(1, len(self.text))

    def excerpt(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Inputs and targets of about so many tokens, in whole windows spread evenly over all, on
        the device, and how many windows go through the model at once."""
        windows = len(self.inputs)
        some = min(windows, max(1, tokens // self.inputs.shape[1]))
        chosen = np.linspace(0, windows - 1, some).round().astype(int)
        return self.inputs[chosen].to(self.device), self.targets[chosen].to(self.device), self.rows
