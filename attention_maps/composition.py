"""Who feeds whom: a head's score when a part of its input lacks what a part below it wrote."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_maps import scores
from attention_maps.capture import Forward, written
from model import GPT, attention_weights, causal_mask

READ = ("queries", "keys", "values")
SCORES = ("previous_token", "induction")  # whose heads are asked who feeds them
MOST = 4  # heads of a score that are asked, the strongest
LEAST = 0.05  # a smaller share is not recorded

Table = tuple[np.ndarray, np.ndarray]  # shares and their standard errors


class Part(NamedTuple):
    """A part of the model that writes to the residual stream."""

    name: str
    kind: str  # heads, mlp, embedding
    layer: int = -1
    head: int = -1


def parts_below(model: GPT, layer: int) -> list[Part]:
    heads = range(model.config.n_head)
    return [
        Part("embedding", "embedding"),
        *(
            part
            for at in range(layer)
            for part in (
                *(Part(f"L{at}H{head}", "heads", at, head) for head in heads),
                Part(f"L{at}MLP", "mlp", at),
            )
        ),
    ]


@torch.no_grad()
def composition(
    model: GPT,
    windows: Forward,
    random: Forward,
    periods: np.ndarray,
    heads: dict[str, list[tuple[int, int]]],
    most: int | None = None,
) -> dict[str, float]:
    """Who feeds each of the heads (layer, head) of a score, as metrics.

    `composition/<score>/<head>/<read>/<from>` is the share of the head's score that is lost where
    its queries, or keys, or values are computed from a residual stream that lacks what a part below
    wrote: its mean over tokens stands in its place, and the blocks between are computed again.
    `composition/<score>_direct/…` is that share where they are not. Beside each its `_se`. All six
    stand in the row where one of the first three is LEAST or more and twice its error.

    Values do not decide where a head looks. Theirs is the share of what it writes that is lost: of
    its squared length, the part across what it wrote with all of them (1 - cos²), which does not
    see that the norm makes the rest larger. The random texts are those that repeat, with these
    periods, and then as many that do not. Of `most` parts alone, those with the largest direct
    shares on a quarter of the texts, the blocks between are computed again."""
    row = {}
    for score, asked in heads.items():
        above = {
            layer: sorted(head for at, head in asked if at == layer) for layer, _ in asked if layer
        }  # nothing is below layer 0
        if not above:
            continue
        whole, own = (windows, None) if score == "previous_token" else (random, periods)
        readers = {layer: Reader(model, layer, of, whole, own) for layer, of in above.items()}
        parts = parts_below(model, max(above))
        if most is not None and len(parts) > most:
            parts = sorted(parts, key=direct_shares(model, above, whole, own).get)[-most:]
        for part in parts:
            for layer, again, direct in without(model, whole, part, max(above)):
                if layer in readers:
                    share, error = readers[layer].lost(again)  # (3, n)
                    told = ((share >= LEAST) & (share >= 2 * error)).any(axis=0)
                    tables = [(share, error), readers[layer].lost(direct)] if told.any() else []
                    for n in np.flatnonzero(told):
                        key = f"L{layer}H{above[layer][n]}/{{}}/{part.name}"
                        row |= named(f"composition/{score}", key, n, tables)
    return row


def direct_shares(
    model: GPT, above: dict[int, list[int]], whole: Forward, periods: np.ndarray | None
) -> dict[Part, float]:
    """The largest direct share of each part in the queries or keys of the heads of layers `above`
    it, on a quarter of the texts."""
    whole, found = whole.rows(slice(None, None, 4)), {}
    for layer, heads in above.items():
        reader = Reader(model, layer, heads, whole, None if periods is None else periods[::4])
        for part in parts_below(model, layer):
            wrote = written_by(model, whole, part)
            share, _ = reader.lost(whole.residuals[layer] - wrote + mean_of(wrote))  # (3, n)
            found[part] = max(found.get(part, 0), np.nanmax(share[:2]))
    return found


def written_by(model: GPT, whole: Forward, part: Part) -> Tensor:
    """What a part adds to the residual stream: (B, T, C)."""
    E = whole.residuals
    if part.kind == "embedding":
        return E[0]
    heads = written(model.blocks[part.layer].attention, whole.heads[part.layer])  # (B, T, H, C)
    if part.kind == "heads":
        return heads[:, :, part.head]
    # the MLP's, and a bias: the same mean
    return E[part.layer + 1] - E[part.layer] - heads.sum(dim=2)


def without(
    model: GPT, whole: Forward, part: Part, top: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each layer above a part, up to `top`, and what it is given where the part wrote its mean:
    (B, T, C) with the blocks between computed again, and with nothing else changed."""
    E, first = whole.residuals, max(0, part.layer)
    rotary = model.rotary_at(0, E.shape[2])
    x, taps = E[first], {part.kind: partial(averaged, part)}  # (B, T, C)
    wrote = written_by(model, whole, part)
    if part.kind == "embedding":
        x = mean_of(x)
        yield 0, x, x
    for layer in range(first, top):
        with model.evaluating():
            x = model.blocks[layer](x, rotary, taps=taps)
        yield layer + 1, x, E[layer + 1] - wrote + mean_of(wrote)


def averaged(part: Part, layer: int, value: Tensor) -> Tensor:
    """A tap, once it has a part, that puts the mean over tokens for what the part gives there:
    of all heads (B, T, H, d_v), of an MLP (B, T, C)."""
    if layer != part.layer:
        return value
    if part.kind == "mlp":
        return mean_of(value)
    value = value.clone()
    value[:, :, part.head] = mean_of(value[:, :, part.head])
    return value


def mean_of(x: Tensor) -> Tensor:
    """The mean over tokens of x (B, T, C), for each of them."""
    return x.mean(dim=(0, 1)).expand_as(x)


class Reader:
    """Heads of a layer at work, on texts whose residual streams are known."""

    def __init__(
        self, model: GPT, layer: int, heads: list[int], whole: Forward, periods: np.ndarray | None
    ):
        """periods: of the texts that repeat, for induction; None for the token before."""
        c, self.block, self.periods = model.config, model.blocks[layer], periods
        self.rotary = model.rotary_at(0, whole.tokens.shape[1])
        self.heads, self.groups = heads, [head // (c.n_head // c.kv_heads) for head in heads]
        self.q, self.k, v = self.project(whole.residuals[layer])
        W_O = self.block.attention.W_O.weight
        self.W_O = W_O.unflatten(1, (c.n_head, c.value_dim))[:, heads]  # (C, n, d_v)
        self.mask = causal_mask(v.shape[2], v.shape[2], v.device)
        self.weights = attention_weights(self.q, self.k, self.mask)
        self.wrote = self.output(v)
        self.before = self.readings(whole.residuals[layer])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, n, T, d) of n heads, of a residual stream x (B, T, C)."""
        q, k, v = self.block.attention.project(self.block.norm_1(x), self.rotary)
        return q[:, self.heads], k[:, self.groups], v[:, self.groups]

    def output(self, v: Tensor) -> Tensor:
        """What they write, (B, n, T, C), looking where they look, with values (B, n, T, d_v)."""
        return torch.einsum("bntd,cnd->bntc", self.weights @ v, self.W_O)

    def readings(self, x: Tensor) -> np.ndarray:
        """(3, n, R): their score with the queries of another residual stream x (B, T, C), and with
        its keys; cos² of the angle between what they write with its values and with their own."""
        q, k, v = self.project(x)
        maps = (
            torch.stack(
                [attention_weights(q, self.k, self.mask), attention_weights(self.q, k, self.mask)]
            )
            .float()
            .cpu()
            .numpy()
        )
        cosine = F.cosine_similarity(self.output(v), self.wrote, dim=-1)  # (B, n, T)
        along = cosine.float().square().cpu().numpy()
        if self.periods is None:
            looks = scores.previous_token(maps).mean(axis=-1).swapaxes(1, 2)  # (2, n, W)
            return np.stack([*looks, along[..., 1:].mean(axis=-1).T])
        P = len(self.periods)
        looks = scores.induction(maps[:, :P], maps[:, -P:], self.periods)  # (2, n, P)
        moves = [along[r, :, p : 2 * p].mean(axis=-1) for r, p in enumerate(self.periods)]
        return np.stack([*looks, np.transpose(moves)])

    def lost(self, x: Tensor) -> Table:
        """The shares of their readings that are lost with x (B, T, C), and errors: (3, n) each."""
        left, error = scores.ratio(self.readings(x), self.before)
        return 1 - left, error


def named(score: str, key: str, n: int, tables: list[Table]) -> dict[str, float]:
    """The shares of the nth head, computed again and direct, as metrics."""
    return {
        f"{score}{end}{se}/{key.format(name)}": float(table[read, n])
        for end, both in zip(("", "_direct"), tables)
        for se, table in zip(("", "_se"), both)
        for read, name in enumerate(READ)
    }
