"""How near a model's predictions are to two tables of the training text: which tokens come how
often, and which follow which.

The distances are those by which Hoogland et al. 2024 (arXiv 2402.02364) tell stages of training: a
model learns unigrams, then bigrams, and then leaves them as it uses the context.
"""

import numpy as np
import torch

from attention_maps import scores
from attention_maps.ablation import log_probabilities
from attention_maps.capture import LOGITS, Forward
from attention_maps.probe import frequencies, pieces
from model import GPT


class Tables:
    """The share of each token in the training text, and after each of some tokens."""

    def __init__(self, train: np.ndarray, windows: np.ndarray, vocab_size: int):
        """windows (W, T): the predictions that are looked at, as many as the memory is for."""
        self.rows = max(1, LOGITS // vocab_size // windows.shape[1])
        known, place = np.unique(windows[:self.rows], return_inverse=True)
        pairs = np.zeros((len(known), vocab_size), np.float32)
        for piece in pieces(train):
            here = np.isin(piece[:-1], known)
            np.add.at(pairs, (np.searchsorted(known, piece[:-1][here]), piece[1:][here]), 1)
        unigrams = frequencies(train, vocab_size)[None].astype(np.float32)
        # name → shares (n, V), and the place among these of each token that is looked at
        self.tables = {"from_unigrams": (shares(unigrams), np.zeros(place.size, int)),
                       "from_bigrams": (shares(pairs), place.ravel())}

    @torch.no_grad()
    def distances(self, model: GPT, windows: Forward) -> dict[str, float]:
        """KL(table‖prediction) in nats, the mean over tokens, with its error over windows, as
        metrics: `probe/from_unigrams`, `probe/from_bigrams`. Without tokens that were never seen
        in training."""
        E, found = windows.residuals[-1, :self.rows], {}  # (W, T, C)
        log_p = log_probabilities(model, E).flatten(0, 1)  # (W · T, V)
        for name, (table, place) in self.tables.items():
            table = torch.from_numpy(table).to(log_p)[place]  # (W · T, V)
            kl = (table.xlogy(table) - table * log_p).sum(dim=-1)
            found[name] = scores.mean_and_error(kl.view(E.shape[:2]).cpu().numpy())[0]  # (W,)
        return scores.probed(found)


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts (…, V) that sum to 1, nan where there are none."""
    with np.errstate(invalid="ignore"):
        return counts / counts.sum(axis=-1, keepdims=True)
