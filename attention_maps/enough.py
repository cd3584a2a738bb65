"""Whether a few heads are enough: what is left of what the model does when only they work."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention_maps import scores
from attention_maps.ablation import at_once
from attention_maps.capture import Forward, next_tokens, token_losses
from attention_maps.findings import ENOUGH, Head
from model import GPT


class Alone:
    """A model in which only some heads work; each other one gives its mean over tokens."""

    def __init__(self, model: GPT, windows: Forward, twice: Forward, periods: np.ndarray):
        """windows: of the text; twice: the random texts that repeat, then the reshuffled."""
        self.model, self.windows, self.twice, self.periods = model, windows, twice, periods
        c = model.config
        self.all = [(layer, head) for layer in range(c.n_layer) for head in range(c.n_head)]
        self.gains_of_all = self.gains(self.all)

    def gains(self, heads: list[Head]) -> np.ndarray:
        """The repeat gain of each random text (P,) with these heads alone."""
        repeat, reshuffled = np.split(self.losses(self.twice, heads), 2)
        return scores.repeat_gains(repeat, reshuffled, self.periods)

    @torch.no_grad()
    def losses(self, whole: Forward, heads: list[Head]) -> np.ndarray:
        """The loss (B, T) of the token after each with these heads alone, nan for the last."""
        work = torch.zeros_like(whole.heads[:, 0, 0, :, :1], dtype=torch.bool)
        for head in heads:
            work[head] = True  # (L, H, 1)
        means, found = whole.heads.mean(dim=(1, 2)), []  # (L, H, d_v)
        taps = {"heads": partial(only, work, means)}
        with self.model.evaluating():
            for tokens in whole.tokens.split(at_once(self.model, whole.tokens.shape[1])):
                x = self.model.hidden(tokens, taps=taps)
                found.append(token_losses(self.model, x, next_tokens(tokens)))
        return torch.cat(found).cpu().numpy()

    def share(self, heads: list[Head], rows: slice = slice(None)) -> tuple[float, float]:
        """The share of the repeat gain that these heads keep, and its error, on some rows."""
        return scores.ratio(self.gains(heads)[rows], self.gains_of_all[rows])


def only(work: Tensor, means: Tensor, layer: int, y: Tensor) -> Tensor:
    """A tap, once it has which heads work (L, H, 1) and the means of all (L, H, d_v), of what the
    heads gathered, y (B, T, H, d_v)."""
    return torch.where(work[layer], y, means[layer])


def enough(alone: Alone, named: list[Head]) -> dict[str, float]:
    """The shares of the repeat gain, `enough/gain/<set>`, and of what all heads together take off
    the loss of the text, `enough/loss/<set>`, that are left with a set of heads alone: none, those
    that are named, and these with all of layer 0. Each has its error over texts, `_se`."""
    first = [head for head in alone.all if head[0] == 0]
    sets = {"none": [], "named": named, "named_and_layer_0": sorted({*named, *first})}
    rest = {name: np.nanmean(alone.losses(alone.windows, heads), axis=1)
            for name, heads in (sets | {"all": alone.all}).items()}  # (W,)
    row = {f"enough/named/L{layer}H{head}": 1 for layer, head in named}
    for name, heads in sets.items():
        gain = alone.share(heads)
        loss = scores.ratio(rest["none"] - rest[name], rest["none"] - rest["all"])
        for kind, both in (("gain", gain), ("loss", loss)):
            row |= {f"enough/{kind}{end}/{name}": float(value)
                    for end, value in zip(("", "_se"), both) if np.isfinite(value)}
    return row


def smallest(alone: Alone) -> dict[str, float]:
    """A small set of heads that keeps ENOUGH of the repeat gain, in the order in which they were
    added, `enough/smallest/<head>` → 1, 2, …, and the share that it keeps.

    Heads are ranked by what is lost without each, and added until they are enough; then those are
    left out without which they still are. It is found on half of the random texts, and its share is
    told of the other half: of many sets the best looks better than it is.
    """
    seen, unseen = slice(0, None, 2), slice(1, None, 2)
    left = {head: alone.share([h for h in alone.all if h != head], seen)[0] for head in alone.all}
    found: list[Head] = []
    for head in sorted(alone.all, key=left.get):
        found.append(head)
        if alone.share(found, seen)[0] >= ENOUGH:
            break
    for head in found[::-1]:
        rest = [other for other in found if other != head]
        if alone.share(rest, seen)[0] >= ENOUGH:
            found = rest
    share, error = alone.share(found, unseen)
    row = {f"enough/smallest/L{layer}H{head}": k for k, (layer, head) in enumerate(found, 1)}
    return row | {"enough/gain/smallest": float(share), "enough/gain_se/smallest": float(error)}
