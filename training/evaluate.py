"""Loss of a model on the windows of a text, without changing the model or the random state."""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from data.batches import NO_TARGET
from data.synthetic import Sequences, Task
from data.tokenizer import Tokenizer
from data.tokens import SEPARATOR, Tokens
from generation.scoring import cut_windows
from kernels import autocast
from model import GPT
from training.task_metrics import measure_task
from training.world import World

MAX_BATCH_TOKENS = 8192  # per forward pass: enough to keep a processor busy
MAX_BATCH_LOGITS = 1 << 24  # per forward pass: 64 MB in float32
MIN_SCORED_WINDOWS = 8  # with fewer, the error of the in-context score would be unreliable
# Equal parts of a window; the in-context score compares the second with the last one. In a window
# of 512 tokens their middles are the 48th and the 496th token; Olsson et al. compare the 50th and
# the 500th.
WINDOW_PARTS = 16


class LossSums(NamedTuple):
    """Sums over windows, which may be added up over ranks."""

    nats: float
    separator_nats: float  # of the tokens between documents
    scored_windows: float  # windows with an in-context score
    scores: float  # nats per token
    squared_scores: float


class Windows:
    """Tokens (N,) in windows of block_size, as `cut_windows` cuts them, or the sequences of a task.

    There are as many as hold `data.val_max_tokens`, or `max_windows`. The ranks of `world` share
    them. `inputs` and `targets` are (windows, T); targets may be NO_TARGET. `num_bytes` is the
    UTF-8 size of the text that the predicted tokens stand for, by `token_bytes`, which is
    `Tokens.val_bytes`; it is 0 without them.
    """

    def __init__(
        self,
        tokens: np.ndarray | Sequences,
        tokenizer: Tokenizer,
        config: Config,
        world: World,
        max_windows: int | None = None,
        token_bytes: np.ndarray | None = None,
    ) -> None:
        block_size = config.model.block_size
        if max_windows is None:
            max_windows = max(1, math.ceil((config.data.val_max_tokens - 1) / block_size))
        if isinstance(tokens, Sequences):
            inputs, targets = tokens.inputs, tokens.targets
        else:
            inputs, targets = cut_windows(tokens, block_size, tokenizer.begin_of_text, max_windows)
        self.inputs = torch.from_numpy(inputs)
        self.targets = torch.from_numpy(targets)
        max_tokens = min(MAX_BATCH_TOKENS, MAX_BATCH_LOGITS // tokenizer.vocab_size)
        self.batch_size = max(1, max_tokens // block_size)
        self.device = config.device
        self.precision = config.precision
        self.world = world
        has_target = targets != NO_TARGET
        self.num_targets = int(has_target.sum())
        target_bytes = np.zeros_like(targets)
        if token_bytes is not None:
            _, target_bytes = cut_windows(token_bytes, block_size, None, max_windows)
        is_separator = has_target & (target_bytes == SEPARATOR)
        self.is_separator = torch.from_numpy(is_separator)
        self.num_bytes = int(target_bytes[has_target & ~is_separator].sum())

    def measure(self, model: GPT) -> dict[str, float]:
        """Return the loss and the in-context score, in nats per token, and the bits per byte.

        All ranks call this together. A score of few windows is not given.
        """
        local_sums = torch.tensor(self.local_loss(model), dtype=torch.float64)
        sums = LossSums(*self.world.sum(local_sums).tolist())
        metrics = {"loss": sums.nats / self.num_targets}
        if self.num_bytes:
            text_nats = sums.nats - sums.separator_nats
            metrics["bits_per_byte"] = text_nats / math.log(2) / self.num_bytes
        n = sums.scored_windows
        if n >= MIN_SCORED_WINDOWS:
            score = sums.scores / n
            variance = max(0.0, sums.squared_scores - n * score**2) / (n - 1)
            metrics["in_context_score"] = score
            metrics["in_context_score_se"] = math.sqrt(variance / n)
        return metrics

    @torch.no_grad()
    def local_loss(self, model: GPT) -> LossSums:
        """Return the sums over this rank's windows, of which every rank has equally many."""
        share = [tensor.split(self.batch_size) for tensor in self._rank_share()]
        nats = 0.0
        separator_nats = 0.0
        scores: list[float] = []
        with self.world.evaluating(model):
            for x, y, is_separator in zip(*share):
                self.world.check_stop()
                num_targets = int((y != NO_TARGET).sum())
                y = y.to(self.device)
                with autocast(self.device, self.precision):
                    logits, loss = model(x.to(self.device), y)
                if num_targets:
                    nats += loss.item() * num_targets
                    scores += in_context_scores(logits, y).tolist()
                if is_separator.any():
                    chosen = is_separator.to(self.device)
                    chosen_logits = logits[chosen].float()  # (separators, V)
                    loss = F.cross_entropy(chosen_logits, y[chosen], reduction="sum")
                    separator_nats += loss.item()
        known = np.array([score for score in scores if not math.isnan(score)])
        return LossSums(nats, separator_nats, len(known), known.sum(), (known**2).sum())

    def _rank_share(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's inputs, targets and separators, padded to the same number on all."""
        world = self.world
        share = math.ceil(len(self.inputs) / world.size)
        padding = (0, 0, 0, share * world.size - len(self.inputs))
        rows = slice(world.rank * share, (world.rank + 1) * share)
        inputs = F.pad(self.inputs, padding, value=0)
        targets = F.pad(self.targets, padding, value=NO_TARGET)
        is_separator = F.pad(self.is_separator, padding, value=False)
        return inputs[rows], targets[rows], is_separator[rows]


def in_context_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the in-context score of each window in nats per token, (B,), in float64.

    It is the mean loss of early positions, the second sixteenth of the window, minus that of late
    ones, the last sixteenth. It is nan if one of the two has no targets, as in a window that ends
    early or has fewer than 16 tokens.

    Reference: Olsson et al. 2022, "In-context Learning and Induction Heads"; they subtract the
    early loss from the late one.
    """
    T = targets.shape[1]
    size = T // WINDOW_PARTS
    means = []
    for part in (slice(size, 2 * size), slice(T - size, T)):
        y = targets[:, part]  # (B, size)
        nats = F.cross_entropy(
            logits[:, part].flatten(0, 1).float(),
            y.flatten(),
            ignore_index=NO_TARGET,
            reduction="none",
        )
        means.append(nats.view(y.shape).double().sum(1) / (y != NO_TARGET).sum(1))  # (B,)
    return means[0] - means[1]


def make_windows(text: Tokens, config: Config, world: World) -> tuple[Windows, Windows]:
    """Cut the validation split into windows, and the training split into as many."""
    val, train = text.val, text.train
    if text.task:
        val, train = text.task.validation, text.task.training
    validation = Windows(val, text.tokenizer, config, world, token_bytes=text.val_bytes)
    max_windows = len(validation.inputs)
    training = Windows(train, text.tokenizer, config, world, max_windows)
    return validation, training


def evaluate(
    model: GPT, validation: Windows, task: Task | None = None, training: Windows | None = None
) -> dict[str, float]:
    """Measure the validation loss, and that of `training` if it is given, as at the last step.

    Returns `Windows.measure` as `val/…`, at the last step `train/eval_loss` in nats per token, and
    on rank 0 the metrics of a task.
    """
    metrics = {f"val/{name}": value for name, value in validation.measure(model).items()}
    if training:
        metrics["train/eval_loss"] = training.measure(model)["loss"]
    if task:
        world = validation.world
        plain_model = world.plain_copy(model)  # None on the other ranks
        metrics |= measure_task(task, plain_model, training is not None) if plain_model else {}
        world.wait()
    return metrics
