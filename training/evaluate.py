"""Loss of a model on the windows of a text, without changing the model or the random state."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from data.tokenizer import Tokenizer
from data.tokens import Tokens
from model import GPT, autocast
from training.processes import World, reshard

# Tokens per forward pass: enough to keep a processor busy.
MAX_BATCH_TOKENS = 8192
# Logits per forward pass: 64 MB in float32.
MAX_BATCH_LOGITS = 1 << 24
# Target of a position that has nothing to predict.
NO_TARGET = -1


class Windows:
    """A token array in non-overlapping windows of block_size; the last one is padded.

    If the array is longer than allowed, the windows are spread evenly over all of it.

    Args:
        tokens: Token ids (N,), N ≥ 2; all but the first are predicted.
        tokenizer: Gives the bytes of each token.
        config: Settings of block size, device, precision and `data.val_max_tokens`.
        world: Ranks that share the windows; None for one process.
        max_windows: Largest number of windows; None for `data.val_max_tokens` tokens.

    Attributes:
        inputs: Token ids, (windows, T).
        targets: The token after each input, or NO_TARGET, (windows, T).
        num_targets: Number of predicted tokens.
        num_bytes: Bytes of UTF-8 of the predicted tokens.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        config: Config,
        world: World | None = None,
        max_windows: int | None = None,
    ) -> None:
        block_size = config.model.block_size
        if max_windows is None:
            max_windows = max(1, math.ceil((config.data.val_max_tokens - 1) / block_size))
        windows = math.ceil((len(tokens) - 1) / block_size)
        chosen = np.linspace(0, windows - 1, min(windows, max_windows)).round().astype(int)
        inputs = np.zeros((len(chosen), block_size), np.int64)
        targets = np.full((len(chosen), block_size), NO_TARGET, np.int64)
        for row, start in enumerate(chosen * block_size):
            window = tokens[start : start + block_size + 1]
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        self.inputs = torch.from_numpy(inputs)
        self.targets = torch.from_numpy(targets)
        self.batch_size = max(
            1, min(MAX_BATCH_TOKENS, MAX_BATCH_LOGITS // tokenizer.vocab_size) // block_size
        )
        self.device = config.device
        self.precision = config.precision
        self.world = world or World()
        predicted = targets[targets != NO_TARGET].tolist()
        token_lengths = [len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size)]
        self.num_targets = len(predicted)
        self.num_bytes = sum(token_lengths[id] for id in predicted)

    def loss(self, model: GPT) -> float:
        """Return the mean loss in nats per token; all ranks call this together."""
        sums = self.world.sum(torch.tensor(self.local_loss(model), dtype=torch.float64))
        nats, count = sums.tolist()
        return nats / count

    @torch.no_grad()
    def local_loss(self, model: GPT) -> tuple[float, int]:
        """Return the summed loss in nats over this rank's windows, and their predicted tokens.

        Each rank runs the same number of forward passes, because those of a sharded model are run
        by all ranks together.
        """
        inputs, targets = self._rank_share()
        nats, count = 0.0, 0
        with _forward_only(model, self.world.size > 1):
            for x, y in zip(inputs.split(self.batch_size), targets.split(self.batch_size)):
                self.world.check_stop()
                with autocast(self.device, self.precision):
                    _, loss = model(x.to(self.device), y.to(self.device))
                num_targets = int((y != NO_TARGET).sum())
                if num_targets:
                    nats += loss.item() * num_targets
                    count += num_targets
        return nats, count

    def _rank_share(self) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets, padded so that all ranks have the same number."""
        world = self.world
        share = math.ceil(len(self.inputs) / world.size)
        padding = (0, 0, 0, share * world.size - len(self.inputs))
        rows = slice(world.rank * share, (world.rank + 1) * share)
        inputs = F.pad(self.inputs, padding, value=0)
        targets = F.pad(self.targets, padding, value=NO_TARGET)
        return inputs[rows], targets[rows]

    def excerpt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of evenly spread windows of roughly `tokens` tokens.

        There are at least 16 windows if the text has them, because standard errors are computed
        over windows. They are on the device.
        """
        windows = len(self.inputs)
        num_chosen = min(windows, max(16, tokens // self.inputs.shape[1]))
        chosen = np.linspace(0, windows - 1, num_chosen).round().astype(int)
        return self.inputs[chosen].to(self.device), self.targets[chosen].to(self.device)


class Splits(NamedTuple):
    """The windows on which a run is evaluated."""

    validation: Windows
    training: Windows


def make_splits(text: Tokens, config: Config, world: World) -> Splits:
    """Cut the validation split into windows, and the training split into as many."""
    validation = Windows(text.val, text.tokenizer, config, world)
    num_windows = len(validation.inputs)
    training = Windows(text.train, text.tokenizer, config, world, max_windows=num_windows)
    return Splits(validation, training)


def evaluate(model: GPT, splits: Splits, is_last: bool = False) -> dict[str, float]:
    """Measure the validation loss; at the last step of a run the training split's too.

    Returns:
        `val/loss` in nats per token, `val/bits_per_byte` (comparable across tokenizers), and at
        the last step `train/eval_loss` in nats per token.
    """
    validation = splits.validation
    loss = validation.loss(model)
    bits = loss * validation.num_targets / math.log(2)
    metrics = {"val/loss": loss, "val/bits_per_byte": bits / validation.num_bytes}
    if is_last:
        metrics["train/eval_loss"] = splits.training.loss(model)
    return metrics


@contextmanager
def _forward_only(model: GPT, is_distributed: bool) -> Iterator[None]:
    """Put a model into evaluation mode; with several ranks run it uncompiled and reshard it."""
    eager = torch.compiler.set_stance("force_eager") if is_distributed else nullcontext()
    try:
        with model.evaluating(), eager:
            yield
    finally:
        reshard(model)
