"""Who feeds whom: a head's score when a part of its input lacks what a head below it wrote."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_maps import scores
from attention_maps.capture import Forward, written
from model import GPT, SelfAttention, attention_weights, causal_mask

PARTS = ("queries", "keys", "values")
SCORES = ("previous_token", "induction")  # whose heads are asked who feeds them
MOST = 4  # heads of a score that are asked, the strongest
ROWS = slice(None, None, 4)  # of the random texts, one of each period: a share is known well by few
LEAST = 0.05  # a smaller share is not recorded

Table = tuple[np.ndarray, np.ndarray]  # shares and standard errors, (3, layers below, H) each


@torch.no_grad()
def wiring(model: GPT, text: Forward, random: Forward, periods: np.ndarray,
           heads: dict[str, list[tuple[int, int]]]) -> dict[tuple[str, int, int], Table]:
    """Who feeds each of the heads (layer, head) of a score: (score, layer, head) → the share of the
    score that is lost where its queries, or keys, or values are computed from the residual stream
    without what a head below wrote (its mean over tokens stands in its place).

    Values do not decide where a head looks. Theirs is the share of what it writes that is lost: of
    its squared length, the part across what it wrote with all of them (1 - cos²), which does not
    see that the norm makes the rest larger. The random texts are those that repeat, with these
    periods, and then as many that do not.
    """
    found = {}
    for score, asked in heads.items():
        own = score == "previous_token"  # read on the text; the others on the random texts
        read = (text, None) if own else (random.rows(ROWS), periods[ROWS])
        for layer in sorted({layer for layer, _ in asked} - {0}):  # nothing is below layer 0
            of = [head for at, head in asked if at == layer]
            share, error = fed(model, layer, of, *read)
            for n, head in enumerate(of):
                found[score, layer, head] = share[..., n], error[..., n]
    return found


def fed(model: GPT, layer: int, of: list[int], whole: Forward, periods: np.ndarray | None
        ) -> Table:
    """Shares and errors (3, layer, H, n) of n heads of a layer, for one kind of score."""
    block, E = model.blocks[layer], whole.residuals[layer]  # (B, T, C)
    rotary = None if model.rotary is None else model.rotary[:, :E.shape[1]]

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return block.attention.project(block.norm_1(x), rotary)

    projected = project(E)
    heads, after = Heads(block.attention, of, projected), []
    before = heads.readings(projected, periods)  # (3, n, R)
    for below in range(layer):
        wrote = written(model.blocks[below].attention, whole.heads[below])  # (B, T, H, C)
        for one in wrote.unbind(2):
            after.append(heads.readings(project(E - one + one.mean(dim=(0, 1))), periods))
    after = np.array(after).reshape(layer, -1, *before.shape)
    return lost(before[:, None, None], after.transpose(2, 0, 1, 3, 4))


class Heads:
    """Heads of a layer at work: what they compute of projections q (B, H, T, d_k), k (B, G, T, d_k)
    and v (B, G, T, d_v)."""

    def __init__(self, layer: SelfAttention, heads: list[int], projected: tuple[Tensor, ...]):
        c = layer.config
        self.heads, self.groups = heads, [head // (c.n_head // c.kv_heads) for head in heads]
        self.q, self.k, v = self.own(projected)
        self.W_O = layer.W_O.weight.unflatten(1, (c.n_head, c.value_dim))[:, heads]  # (C, n, d_v)
        self.mask = causal_mask(v.shape[2], v.shape[2], v.device)
        self.weights = attention_weights(self.q, self.k, self.mask)
        self.wrote = self.output(v)

    def own(self, projected: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected
        return q[:, self.heads], k[:, self.groups], v[:, self.groups]  # (B, n, T, d) each

    def output(self, v: Tensor) -> Tensor:
        """What they write, (B, n, T, C), looking where they look, with values (B, n, T, d_v)."""
        return torch.einsum("bntd,cnd->bntc", self.weights @ v, self.W_O)

    def readings(self, other: tuple[Tensor, ...], periods: np.ndarray | None) -> np.ndarray:
        """(3, n, R): their score with the queries of `other`, and with the keys; cos² of the angle
        between what they write with the values of `other` and with their own."""
        q, k, v = self.own(other)
        maps = torch.stack([attention_weights(q, self.k, self.mask),
                            attention_weights(self.q, k, self.mask)]).float().cpu().numpy()
        cosine = F.cosine_similarity(self.output(v), self.wrote, dim=-1)  # (B, n, T)
        along = cosine.float().square().cpu().numpy()
        if periods is None:
            return np.stack([*scores.previous_token(maps[:, 0]), along[0, :, 1:]])
        P = len(periods)
        of_maps = scores.induction(maps[:, :P], maps[:, P:], periods)  # (2, n, P)
        of_values = [along[r, :, p:2 * p].mean(axis=-1) for r, p in enumerate(periods)]
        return np.stack([*of_maps, np.transpose(of_values)])


def lost(before: np.ndarray, after: np.ndarray) -> Table:
    """The share 1 - Σ after / Σ before over the last axis, and the standard error of that ratio."""
    n, total = before.shape[-1], before.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        left = after.sum(axis=-1) / total
        apart = ((after - left[..., None] * before) ** 2).sum(axis=-1)
        return 1 - left, np.sqrt(apart * n / (n - 1)) / np.abs(total)


def named(tables: dict[tuple[str, int, int], Table]) -> dict[str, float]:
    """The shares as metrics, `wiring/<score>/<head>/<part>/<from>`, and `wiring/<score>_se/…`: all
    three parts where one of them is LEAST or more and twice its error."""
    row = {}
    for (score, layer, head), (share, error) in tables.items():
        told = ((share >= LEAST) & (share >= 2 * error)).any(axis=0)  # (layers below, H)
        for below, h in np.argwhere(told):
            for part, name in enumerate(PARTS):
                key = f"L{layer}H{head}/{name}/L{below}H{h}"
                row[f"wiring/{score}/{key}"] = float(share[part, below, h])
                row[f"wiring/{score}_se/{key}"] = float(error[part, below, h])
    return row
