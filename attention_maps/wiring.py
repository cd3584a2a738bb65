"""Who feeds whom: a head's score when a part of its input lacks what a head below it wrote."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_maps import scores
from attention_maps.ablation import streams
from attention_maps.card import gathered
from attention_maps.probe import Probes
from model import GPT, SelfAttention, attention, causal_mask

PARTS = ("queries", "keys", "values")
SCORES = ("previous_token", "induction")  # whose heads are asked who feeds them
MOST = 4  # heads of a score that are asked, the strongest
ROWS = slice(None, None, 4)  # of the random texts, one of each period: a share is known well by few
LEAST = 0.05  # a smaller share is not recorded

Table = tuple[np.ndarray, np.ndarray]  # shares and standard errors, (3, layers below, H) each


@torch.no_grad()
def wiring(model: GPT, probes: Probes, heads: dict[str, list[tuple[int, int]]],
           between: Callable[[], None] = lambda: None) -> dict[tuple[str, int, int], Table]:
    """Who feeds each of the heads (layer, head) of a score: (score, layer, head) → the share of the
    score that is lost where its queries, or keys, or values are computed from the residual stream
    without what a head below wrote (its mean over tokens stands in its place).

    Values do not decide where a head looks. Theirs is the share of what it writes that is lost: of
    its squared length, the part across what it wrote with all of them (1 - cos²), which does not
    see that the norm makes the rest larger. `between` is called before each head, and may raise.
    """
    found, device = {}, model.head.weight.device
    for score, asked in heads.items():
        own = score == "previous_token"  # read on the text; the others on the random texts
        ids = probes.text[None] if own else np.concatenate(
            [probes.repeat[ROWS], probes.control[ROWS]])
        layers = sorted({layer for layer, _ in asked} - {0})  # nothing is below layer 0
        if not layers:
            continue
        with model.evaluating():
            E, rotary = streams(model, torch.from_numpy(ids).to(device))
            z = [gathered(block.attention, block.norm_1(x), rotary)
                 for block, x in zip(model.blocks, E)]  # (B, T, H, d_v) each
            for layer in layers:
                of = [head for at, head in asked if at == layer]
                tables = fed(model, layer, of, E[layer], z, rotary, score, probes.periods[ROWS],
                             between)
                found |= {(score, layer, head): table for head, table in zip(of, tables)}
    return found


def fed(model: GPT, layer: int, of: list[int], E: Tensor, z: list[Tensor], rotary: Tensor | None,
        score: str, periods: np.ndarray, between: Callable[[], None]) -> list[Table]:
    """The table of each head in `of`, all of them of one layer, which gets E (B, T, C)."""
    block, (H, d_v) = model.blocks[layer], z[0].shape[2:]
    whole = block.attention.project(block.norm_1(E), rotary)
    heads = [Head(block.attention, head, whole) for head in of]
    before = [head.readings(whole, score, periods) for head in heads]  # (3, n) each
    after = []  # for each head below, of each in `heads`
    for below in range(layer):
        W_O = model.blocks[below].attention.W_O.weight.split(d_v, dim=1)  # H of (C, d_v)
        for h in range(H):
            between()
            wrote = z[below][:, :, h] @ W_O[h].T  # (B, T, C)
            without = block.norm_1(E - wrote + wrote.mean(dim=(0, 1)))
            other = block.attention.project(without, rotary)
            after.append([head.readings(other, score, periods) for head in heads])
    after = np.array(after).reshape(layer, H, len(of), 3, -1)
    return [lost(one[:, None, None], after[:, :, k].transpose(2, 0, 1, 3))
            for k, one in enumerate(before)]


class Head:
    """A head at work: what it computes of projections q (B, H, T, d_k), k (B, G, T, d_k) and
    v (B, G, T, d_v)."""

    def __init__(self, layer: SelfAttention, head: int, whole: tuple[Tensor, ...]):
        self.head, self.group = head, head // (layer.config.n_head // layer.config.kv_heads)
        self.q, self.k, v = self.own(whole)
        self.W_O = layer.W_O.weight.split(v.shape[-1], dim=1)[head]  # (C, d_v)
        self.mask = causal_mask(v.shape[1], v.shape[1], v.device)
        z, self.weights = attention(self.q, self.k, v, self.mask)
        self.wrote = z @ self.W_O.T  # (B, T, C)

    def own(self, projected: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected
        return q[:, self.head], k[:, self.group], v[:, self.group]  # (B, T, d) each

    def readings(self, other: tuple[Tensor, ...], score: str, periods: np.ndarray) -> np.ndarray:
        """(3, n): its score with the queries of `other`, and with the keys; cos² of the angle
        between what it writes with the values of `other` and with its own."""
        q, k, v = self.own(other)
        maps = torch.stack([attention(q, self.k, v, self.mask)[1],
                            attention(self.q, k, v, self.mask)[1]]).float().cpu().numpy()
        cosine = F.cosine_similarity(self.weights @ v @ self.W_O.T, self.wrote, dim=-1)  # (B, T)
        along = cosine.float().square().cpu().numpy()
        if score == "previous_token":
            return np.stack([*scores.previous_token(maps[:, 0]), along[0, 1:]])
        P = len(periods)
        of_maps = scores.induction(maps[:, :P, None], maps[:, P:, None], periods)[:, 0]  # (2, P)
        of_values = [along[r, p:2 * p].mean() for r, p in enumerate(periods)]
        return np.stack([*of_maps, of_values])


def lost(before: np.ndarray, after: np.ndarray) -> Table:
    """The share 1 - Σ after / Σ before over the last axis, and its standard error, that of a ratio.
    """
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
