"""What a model has learned, leaving it and the random state as they were: its loss on the whole
validation split, how surprising each token of a text is to it, and a text as it begins one."""

import lzma
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenizer import Tokenizer, prompt_ids
from decoding import Text, write
from model import GPT, Decoder
from training.distributed import Team
from training.runtime import autocast

TOKENS, LOGITS = 8192, 1 << 24  # that go through the model, and are made (64 MB), at once, at most


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
        self.rows = max(1, min(TOKENS, LOGITS // tokenizer.vocab_size) // block_size)
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


@torch.inference_mode()
def surprise(model: GPT, tokens: Tensor) -> Iterator[Tensor]:
    """Yield, some at a time, -ln p of each of tokens (N + 1,) but the first: N numbers, in nats.

    Each is predicted from what `decoding.stream` would see, the tokens since its `window_start`:
    windows of block_size that start a quarter of it apart, of which the first predicts all its
    tokens and the others the last quarter.
    """
    N, block = len(tokens) - 1, model.config.block_size
    stride, width = max(1, block // 4), min(block, N)
    windows = 1 + math.ceil((N - width) / stride)
    padded = F.pad(tokens, (0, (windows - 1) * stride + width - N))
    inputs = padded[:-1].unfold(0, width, stride)  # (windows, width)
    targets = padded[1:].unfold(0, width, stride)
    most = max(1, LOGITS // model.config.vocab_size)  # positions
    rows = max(1, TOKENS // width)
    pieces = [(inputs[:1], targets[:1])]
    pieces += [(inputs[row:row + rows], targets[row:row + rows, -stride:])
               for row in range(1, windows, rows)]
    for x, y in pieces:
        hidden = model.norm(model.hidden(x)[:, -y.shape[1]:]).flatten(0, 1)  # (predicted, C)
        for h, target in zip(hidden.split(most), y.flatten().split(most)):
            nats = F.cross_entropy(model.head(h).float(), target, reduction="none")[:N]
            N -= len(nats)
            yield nats


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int,
                temperature: float = 0.8) -> str:
    """A text as the model begins one, always the same for the same weights and seed."""
    text = Text(tokenizer, prompt_ids(tokenizer, ""), seed)
    decoder = Decoder(model, model.make_cache(1, 1 + max_new_tokens))
    for _ in write(decoder, [text], max_new_tokens, temperature=temperature):
        pass
    return text.text
