"""Modular addition, in which a model generalizes long after it has memorized."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.text import pluralize
from data.tasks.task import BATCH, VALIDATION, Sequences, Task

if TYPE_CHECKING:
    from model import GPT

NUM_FREQUENCIES = 6  # a trained model uses about five (Nanda et al. 2023)


class ModularAddition(Task):
    """Write additions a+b=c with c = (a + b) mod P, of which only c counts.

    Unordered pairs are split into training and validation, so a+b and b+a are on the same side. A
    batch cycles through a random order of the training pairs; the other streams hold all.

    Reference: Power et al. 2022, "Grokking"; Nanda et al. 2023, "Progress measures for grokking".
    """

    signs = "+="

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        P = self.data.num_symbols
        pairs = np.stack(np.triu_indices(P), axis=1)
        order = self.rules.permutation(len(pairs))
        num_training = round(self.data.train_share * len(pairs))
        is_validation = stream == VALIDATION
        chosen = pairs[order[num_training:] if is_validation else order[:num_training]]
        mirrored = chosen[chosen[:, 0] < chosen[:, 1], ::-1]
        a, b = np.concatenate((chosen, mirrored)).T
        if stream == BATCH:
            picks = np.resize(random.permutation(len(a)), n)
            a, b = a[picks], b[picks]
        plus, equals = np.full_like(a, P), np.full_like(a, P + 1)
        tokens = np.stack((a, plus, b, equals, (a + b) % P), axis=1)
        return Sequences(tokens, np.tile([False, False, False, True], (len(a), 1)))

    def measure(self, model: "GPT", is_last: bool = False) -> dict[str, float]:
        """Measure the training pairs too, and the structure of the number embeddings."""
        metrics = super().measure(model, is_last)
        training = self.measure_sequences(model, self.training, is_last)
        metrics |= {f"task/train_{name}": value for name, value in training.items()}
        ids = torch.from_numpy(self.symbol_ids[: self.data.num_symbols])
        embeddings = model.token_embedding.weight.detach().cpu()[ids]
        return metrics | {"task/fourier_share": fourier_share(embeddings)}

    def _describe_training(self) -> str:
        return f"{pluralize(len(self.training.tokens), 'pair')} to train on"


def fourier_share(embeddings: Tensor) -> float:
    """Return the share of the six strongest frequencies in number embeddings (P, C).

    The share is that of the squared length, without the mean over the numbers. If it were spread
    evenly, it would be 6 / ⌊P / 2⌋.

    Reference: Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability".
    """
    power = torch.fft.rfft(embeddings.double(), dim=0).abs().square().sum(-1)[1:]
    strongest = power.topk(min(NUM_FREQUENCIES, len(power))).values
    return (strongest.sum() / power.sum()).item()
