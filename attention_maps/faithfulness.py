"""Whether a few heads are enough: what is left of what the model does when only they work."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention_maps import scores
from attention_maps.ablation import at_once
from attention_maps.capture import Forward, next_tokens, token_losses
from attention_maps.findings import Head
from model import GPT


class Alone:
    """A model in which only some heads work; each other one gives its mean over tokens."""

    def __init__(self, model: GPT, twice: Forward, periods: np.ndarray):
        """twice: the random texts that repeat, then the reshuffled."""
        self.model, self.twice, self.periods = model, twice, periods
        c = model.config
        self.all = [(layer, head) for layer in range(c.n_layer) for head in range(c.n_head)]
        self.gains_of_all = self.gains(self.all)

    def gains(self, heads: list[Head]) -> np.ndarray:
        """The repeat gain of each random text (P,) with these heads alone."""
        repeat, reshuffled = np.split(self.losses(heads), 2)
        return scores.copying_gains(repeat, reshuffled, self.periods)

    @torch.no_grad()
    def losses(self, heads: list[Head]) -> np.ndarray:
        """The loss (B, T) of the token after each with these heads alone, nan for the last."""
        whole = self.twice
        work = torch.zeros_like(whole.heads[:, 0, 0, :, :1], dtype=torch.bool)
        for head in heads:
            work[head] = True  # (L, H, 1)
        means, found = whole.heads.mean(dim=(1, 2)), []  # (L, H, d_v)
        taps = {"heads": partial(only, work, means)}
        with self.model.evaluating():
            for tokens in whole.tokens.split(at_once(self.model, whole.tokens.shape[1])):
                x = self.model.run_blocks(tokens, taps=taps)
                found.append(token_losses(self.model, x, next_tokens(tokens)))
        return torch.cat(found).cpu().numpy()

    def share(self, heads: list[Head]) -> tuple[float, float]:
        """The share of the repeat gain that these heads keep, and its error."""
        return scores.ratio(self.gains(heads), self.gains_of_all)


def only(work: Tensor, means: Tensor, layer: int, y: Tensor) -> Tensor:
    """A tap, once it has which heads work (L, H, 1) and the means of all (L, H, d_v), of what the
    heads gathered, y (B, T, H, d_v)."""
    return torch.where(work[layer], y, means[layer])


def enough(alone: Alone, named: list[Head]) -> dict[str, float]:
    """The shares of the repeat gain, `faithfulness/<set>`, that are left with a set of heads alone:
    none, those that are named, and these with all of layer 0; `_se` is the error over texts."""
    first = [head for head in alone.all if head[0] == 0]
    sets = {"none": [], "circuit": named, "circuit_and_layer_0": sorted({*named, *first})}
    row = {f"circuit/L{layer}H{head}": 1 for layer, head in named}
    for name, heads in sets.items():
        row |= {
            f"faithfulness{end}/{name}": float(value)
            for end, value in zip(("", "_se"), alone.share(heads))
            if np.isfinite(value)
        }
    return row
