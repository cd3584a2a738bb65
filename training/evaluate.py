"""Validation: the whole split, always the same way, leaving the model and the random state as they were."""

import lzma
import math

import numpy as np
import torch

from data.tokenizer import Tokenizer
from model import GPT
from training.distributed import Team
from training.runtime import autocast

LOGITS = 1 << 24


class Validation:
    """The validation split in non-overlapping windows of block_size, the last one filled up."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, block_size: int, device: str, precision: str, team: Team | None = None):
        """tokens (N,) with N ≥ 2, of which all but the first are predicted; a team divides the windows among its processes."""
        windows = math.ceil((len(tokens) - 1) / block_size)
        inputs, targets = np.zeros(windows * block_size, np.int64), np.full(windows * block_size, -1, np.int64)
        inputs[:len(tokens) - 1], targets[:len(tokens) - 1] = tokens[:-1], tokens[1:]
        self.inputs = torch.from_numpy(inputs.reshape(windows, block_size))
        self.targets = torch.from_numpy(targets.reshape(windows, block_size))  # -1: nothing to predict
        # Windows that go through the model at once: enough to keep it busy, with logits of 64 MB at most where one fits.
        self.rows = max(1, min(8192, LOGITS // tokenizer.vocab_size) // block_size)
        self.device, self.precision, self.team = device, precision, team or Team()
        self._token_bytes = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.bytes = int(np.array([len(b) for b in self._token_bytes])[tokens[1:]].sum())  # of the text that is predicted

    def evaluate(self, model: GPT) -> tuple[float, float]:
        """The loss in nats per token, and in bits per byte of UTF-8 text, which compares across vocabularies."""
        self.team.order("evaluate")
        nats, predicted = self.team.total(*self.share(model))
        return nats / predicted, nats / math.log(2) / self.bytes

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

    def xz(self) -> float:
        """Bits per byte that `xz -9` needs for the text that is predicted: a model that needs more has learned little."""
        text = b"".join(self._token_bytes[id] for id in self.targets.flatten().tolist() if id >= 0)
        return 8 * len(lzma.compress(text, preset=9)) / max(1, len(text))

    def excerpt(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Inputs and targets of whole windows of about so many tokens, on the device, and how many go through the model at once."""
        windows = max(1, tokens // self.inputs.shape[1])
        return self.inputs[:windows].to(self.device), self.targets[:windows].to(self.device), self.rows
