"""Modular addition, in which a model generalizes long after it has memorized."""

import numpy as np

from common.text import pluralize
from data.tasks.task import BATCH, VALIDATION, Sequences, Task


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
            a = a[picks]
            b = b[picks]
        plus = np.full_like(a, P)
        equals = np.full_like(a, P + 1)
        tokens = np.stack((a, plus, b, equals, (a + b) % P), axis=1)
        return Sequences(tokens, np.tile([False, False, False, True], (len(a), 1)))

    def _describe_training(self) -> str:
        return f"{pluralize(len(self.training.tokens), 'pair')} to train on"
