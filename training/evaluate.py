"""What a model has learned: its loss on windows of a text. Leaves the model and the random state as
they were."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from data.tokenizer import Tokenizer
from data.tokens import Tokens
from model import GPT, autocast
from training.processes import World, reshard

TOKENS, LOGITS = 8192, 1 << 24  # that go through the model, and are made (64 MB), at once, at most


def splits_of(text: Tokens, config: Config, world: World) -> tuple["Windows", "Windows"]:
    """The windows of the validation split on which loss is measured, and as many of the training
    split."""
    val = Windows(text.val, text.tokenizer, config, world)
    return val, Windows(text.train, text.tokenizer, config, world, len(val.inputs))


def evaluate(
    model: GPT, splits: tuple["Windows", "Windows"], last: bool = False
) -> dict[str, float]:
    """The validation loss in nats per token, and in bits per byte of UTF-8, to compare across
    vocabularies; at the last step the loss on the training split too, measured alike."""
    val, train = splits
    loss = val.loss(model)
    row = {"val/loss": loss, "val/bits_per_byte": loss * val.predicted / math.log(2) / val.bytes}
    return row | ({"train/eval_loss": train.loss(model)} if last else {})


class Windows:
    """A split in non-overlapping windows of block_size, the last one filled up. Of a split with
    more than `data.val_max_tokens` as many windows, spread evenly over all of it."""

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        config: Config,
        world: World | None = None,
        most: int | None = None,
    ):
        """tokens (N,) with N ≥ 2, of which all but the first are predicted; the windows, if given
        `most` in all, are divided among the ranks of the world."""
        block_size = config.model.block_size
        windows = math.ceil((len(tokens) - 1) / block_size)
        most = most or max(1, math.ceil((config.data.val_max_tokens - 1) / block_size))
        starts = np.linspace(0, windows - 1, min(windows, most)).round().astype(int) * block_size
        inputs = np.zeros((len(starts), block_size), np.int64)
        targets = np.full((len(starts), block_size), -1, np.int64)  # -1: nothing to predict
        for row, start in enumerate(starts):
            window = tokens[start : start + block_size + 1]
            inputs[row, : len(window) - 1], targets[row, : len(window) - 1] = (
                window[:-1],
                window[1:],
            )
        self.inputs, self.targets = torch.from_numpy(inputs), torch.from_numpy(targets)
        # Windows that go through the model at once: enough to keep it busy, with logits of 64 MB
        # at most where one fits.
        self.rows = max(1, min(TOKENS, LOGITS // tokenizer.vocab_size) // block_size)
        self.device, self.precision = config.device, config.precision
        self.world = world or World()
        token_bytes = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.predicted = int((targets >= 0).sum())
        self.bytes = sum(len(token_bytes[id]) for id in targets[targets >= 0].tolist())

    def loss(self, model: GPT) -> float:
        """The mean loss in nats per token."""
        sums = self.world.sum(torch.tensor(self.local_loss(model), dtype=torch.float64))
        nats, predicted = sums.tolist()
        return nats / predicted

    @torch.no_grad()
    def local_loss(self, model: GPT) -> tuple[float, int]:
        """The sum of the loss over the tokens that fall to this rank, in nats; their number. Each
        rank has as many windows: the passes through a sharded model are those of all together."""
        nats, count, world = 0.0, 0, self.world
        each = math.ceil(len(self.inputs) / world.size)
        mine = [
            F.pad(windows, (0, 0, 0, each * world.size - len(windows)), value=fill)[
                world.rank * each : (world.rank + 1) * each
            ].split(self.rows)
            for windows, fill in ((self.inputs, 0), (self.targets, -1))
        ]
        with forward_only(model, world.size > 1):
            for x, y in zip(*mine):
                world.check_stop()
                with autocast(self.device, self.precision):
                    _, loss = model(x.to(self.device), y.to(self.device))
                predicted = int((y >= 0).sum())
                if predicted:
                    nats, count = nats + loss.item() * predicted, count + predicted
        return nats, count

    def excerpt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of about so many tokens, or more, in windows spread evenly."""
        windows = len(self.inputs)
        some = min(windows, max(16, tokens // self.inputs.shape[1]))  # errors are of windows
        chosen = np.linspace(0, windows - 1, some).round().astype(int)
        return self.inputs[chosen].to(self.device), self.targets[chosen].to(self.device)


@contextmanager
def forward_only(model: GPT, sharded: bool) -> Iterator[None]:
    """The model in evaluation; a sharded one uncompiled, and at the end sharded again."""
    eager = torch.compiler.set_stance("force_eager") if sharded else nullcontext()
    try:
        with model.evaluating(), eager:
            yield
    finally:
        reshard(model)
