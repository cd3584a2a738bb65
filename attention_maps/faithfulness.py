"""Measure the faithfulness of a circuit: the behavior that remains if it works alone."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention_maps import scores
from attention_maps.ablation import rows_per_pass
from attention_maps.capture import ForwardPass, next_tokens, token_losses
from attention_maps.results import Faithfulness, Head
from model import GPT, Taps


class IsolatedHeads:
    """Run a model with only some heads active; all other heads output their mean over tokens."""

    def __init__(self, model: GPT, forward: ForwardPass, periods: np.ndarray) -> None:
        """Take a pass over P repeated, then P reshuffled rows, and the repeats' periods (P,)."""
        self.model, self.forward, self.periods = model, forward, periods
        shape = model.config.n_layer, model.config.n_head
        self.all_heads = [Head(*index) for index in np.ndindex(shape)]

    def copying_gains(self, heads: list[Head]) -> np.ndarray:
        """Return the copying gain of each repeated row in nats, (P,), with only `heads` active."""
        repeated, reshuffled = np.split(self.losses(heads), 2)
        return scores.copying_gains(repeated, reshuffled, self.periods)

    @torch.no_grad()
    def losses(self, heads: list[Head]) -> np.ndarray:
        """Return next-token losses (B, T) in nats with only `heads` active; the last is nan."""
        forward = self.forward
        works = torch.zeros_like(forward.heads[:, 0, 0, :, :1], dtype=torch.bool)  # (L, H, 1)
        for head in heads:
            works[head] = True
        means = forward.heads.mean(dim=(1, 2))  # (L, H, d_v)
        taps: Taps = {"heads": partial(_ablate_others, works, means)}
        losses = []
        with self.model.evaluating():
            for tokens in forward.tokens.split(rows_per_pass(self.model, forward.tokens.shape[1])):
                x = self.model.run_blocks(tokens, taps=taps)
                losses.append(token_losses(self.model, x, next_tokens(tokens)))
        return torch.cat(losses).cpu().numpy()


def _ablate_others(works: Tensor, means: Tensor, layer: int, y: Tensor) -> Tensor:
    """Tap: replace the outputs y (B, T, H, d_v) of inactive heads by their means (L, H, d_v)."""
    return torch.where(works[layer], y, means[layer])


def measure_faithfulness(
    copying_gains: Callable[[list[Head]], np.ndarray], all_heads: list[Head], circuit: list[Head]
) -> Faithfulness:
    """Measure the share of the copying gain that remains with only the heads of a circuit active.

    `copying_gains` returns the gains (P,) with only the given heads active, such as
    `IsolatedHeads.copying_gains`. With `all_heads` of the model active, the share is 1.

    Reference: Wang et al. 2022, "Interpretability in the Wild"; Hanna et al. 2024, "Have Faith in
    Faithfulness".
    """
    gains_of_all = copying_gains(all_heads)
    layer_0 = [head for head in all_heads if head.layer == 0]
    none, alone, with_layer_0 = (
        scores.ratio(copying_gains(heads), gains_of_all).at(())
        for heads in ([], circuit, sorted({*circuit, *layer_0}))
    )
    return Faithfulness(tuple(circuit), none, alone, with_layer_0)
