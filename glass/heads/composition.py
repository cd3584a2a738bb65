"""Measure composition: how much a head's score depends on each upstream component.

Method: path patching. The component's output is replaced by its mean in the input of the head's
queries, keys or values, and the layers between are recomputed.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glass.heads import scores
from glass.heads.capture import ForwardPass, residual_writes
from glass.heads.results import CompositionShare, Estimates, Head
from model import GPT, Taps, causal_mask
from variants import gates_of

INPUTS = ("queries", "keys", "values")  # inputs of a head, in the order of array axes
MEASURED_SCORES = ("previous_token", "induction")  # scores whose composition is measured
MAX_MEASURED_HEADS = 4  # the strongest heads per score
MIN_RECORDED_SHARE = 0.05
# Large models: direct shares on every fourth row select the components to recompute.
PRESELECTION_STRIDE = 4


class Component(NamedTuple):
    """A component that writes to the residual stream: the embedding, a head or an MLP."""

    name: str  # "embedding", a head such as "L0H1", or an MLP such as "L0MLP"
    tap: str  # the tap of the model that can replace its output: "embedding", "heads" or "mlp"
    layer: int = -1  # -1 for the embedding
    head: int = -1  # index in the layer; -1 for the embedding or an MLP


def _components_below(model: GPT, layer: int) -> list[Component]:
    components = [Component("embedding", "embedding")]
    for lower in range(layer):
        for head in range(model.config.n_head):
            components.append(Component(str(Head(lower, head)), "heads", lower, head))
        if model.config.mlp != "none":
            components.append(Component(f"L{lower}MLP", "mlp", lower))
    return components


class Rows(NamedTuple):
    """The rows on which a score is measured."""

    forward: ForwardPass  # over W windows of text, or over P repeated and then P control rows
    periods: np.ndarray | None  # of the repeated rows, (P,); None for windows of text

    def thinned(self) -> "Rows":
        """Return every `PRESELECTION_STRIDE`-th row."""
        some = slice(None, None, PRESELECTION_STRIDE)
        return Rows(self.forward.rows(some), None if self.periods is None else self.periods[some])


@torch.no_grad()
def measure_composition(
    model: GPT,
    windows: ForwardPass,
    random: ForwardPass,
    periods: np.ndarray,
    heads: Mapping[str, Sequence[Head]],
    max_components: int | None = None,
) -> list[CompositionShare]:
    """Measure how much the scores of `heads` (by score) depend on each upstream component.

    The component is mean-ablated in the input of a head's queries, keys or values. For queries and
    keys, the share is the part of the head's score that is lost. Values do not decide where a head
    attends, so their share is 1 - cos² of the angle between its output with and without the
    component. The previous-token score is measured on `windows` of the text, the prefix-matching
    score on `random`: P repeated rows with `periods` (P,), then P control rows.

    If `max_components` is given, only so many per score, those with the largest direct shares on a
    quarter of the rows, are propagated through the layers between. Components with at least one
    share of 0.05 and two standard errors are returned.

    Reference: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Wang et al.
    2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023, "Localizing Model Behavior
    with Path Patching".
    """
    shares: list[CompositionShare] = []
    for score, measured in heads.items():
        rows = Rows(windows, None) if score == "previous_token" else Rows(random, periods)
        by_layer = _group_by_layer(measured)
        if not by_layer:
            continue
        top = max(by_layer)
        readers = {layer: Reader(model, layer, by_layer[layer], rows) for layer in by_layer}
        components = _components_below(model, top)
        if max_components is not None and len(components) > max_components:
            largest = _largest_direct_shares(model, by_layer, rows.thinned())
            components = sorted(components, key=lambda one: largest[one])[-max_components:]
        with model.evaluating():
            for component in components:
                inputs = _inputs_without(model, rows.forward, component, top)
                for layer, recomputed, direct in inputs:
                    if layer in readers:
                        shares += _shares(score, component, readers[layer], recomputed, direct)
    return shares


def _group_by_layer(heads: Sequence[Head]) -> dict[int, list[int]]:
    """Return sorted head numbers by layer, without layer 0, which reads the embedding only."""
    by_layer: dict[int, list[int]] = {}
    for head in sorted(heads):
        if head.layer > 0:
            by_layer.setdefault(head.layer, []).append(head.number)
    return by_layer


def _shares(
    score: str, component: Component, reader: "Reader", recomputed: Tensor, direct: Tensor
) -> Iterator[CompositionShare]:
    lost = reader.lost_shares(recomputed)  # (3, n)
    is_significant = (lost.mean >= MIN_RECORDED_SHARE) & (lost.mean >= 2 * lost.error)
    significant_heads = np.flatnonzero(is_significant.any(axis=0))
    if not len(significant_heads):
        return
    lost_directly = lost if direct is recomputed else reader.lost_shares(direct)
    for n in significant_heads:
        head = Head(reader.layer, reader.heads[n])
        for number, name in enumerate(INPUTS):
            share, direct_share = lost.at((number, n)), lost_directly.at((number, n))
            yield CompositionShare(score, head, name, component.name, share, direct_share)


def _largest_direct_shares(
    model: GPT, by_layer: dict[int, list[int]], rows: Rows
) -> dict[Component, float]:
    largest: dict[Component, float] = {}
    for layer, heads in by_layer.items():
        reader = Reader(model, layer, heads, rows)
        for component in _components_below(model, layer):
            written = _writes_of(model, rows.forward, component)
            x = rows.forward.residuals[layer] - written + _mean_over_tokens(written)
            lost = reader.lost_shares(x).mean  # (3, n)
            largest[component] = max(largest.get(component, 0.0), np.nanmax(lost[:2]))  # Q, K
    return largest


def _writes_of(model: GPT, forward: ForwardPass, component: Component) -> Tensor:
    residuals, layer = forward.residuals, component.layer
    if component.tap == "embedding":
        return residuals[0]
    heads = residual_writes(model.blocks[layer].attention, forward.heads[layer])  # (B, T, H, C)
    if component.tap == "heads":
        return heads[:, :, component.head]
    # The MLP and the bias of W_O; mean ablation leaves the constant bias unchanged.
    return residuals[layer + 1] - residuals[layer] - heads.sum(dim=2)


def _inputs_without(
    model: GPT, forward: ForwardPass, component: Component, top: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Mean-ablate a component, and yield each later layer up to `top` with two inputs (B, T, C).

    For the first input the layers between are recomputed, for the second they are not.
    """
    residuals, first = forward.residuals, max(0, component.layer)
    rotary = model.rotary_at(0, residuals.shape[2])
    written = _writes_of(model, forward, component)
    mean = _mean_over_tokens(written)
    x = residuals[first]  # (B, T, C)
    if component.tap == "embedding":
        x = mean
        yield 0, x, x
    if component.tap == "mlp":  # nothing comes between an MLP and the next layer
        first = component.layer + 1
        x = residuals[first] - written + mean
        yield first, x, x
    taps: Taps = {("heads", component.layer): partial(_mean_ablate, component.head)}
    for layer in range(first, top):
        x = model.blocks[layer](x, rotary, taps=taps)
        yield layer + 1, x, residuals[layer + 1] - written + mean


def _mean_ablate(head: int, outputs: Tensor) -> Tensor:
    outputs = outputs.clone()
    outputs[:, :, head] = _mean_over_tokens(outputs[:, :, head])
    return outputs


def _mean_over_tokens(x: Tensor) -> Tensor:
    return x.mean(dim=(0, 1)).expand_as(x)


class Reader:
    """Recompute n heads of one layer with a patched input to their queries, keys or values.

    A reading is a head's score on one of R rows: W windows of text, or P repeated rows.
    """

    def __init__(self, model: GPT, layer: int, heads: list[int], rows: Rows) -> None:
        c, forward = model.config, rows.forward
        self.layer, self.heads, self.periods = layer, heads, rows.periods
        self.groups = [head // (c.n_head // c.kv_heads) for head in heads]
        self.block = model.blocks[layer]
        T = forward.tokens.shape[1]
        self.rotary = model.rotary_at(0, T)
        self.mask = causal_mask(T, T, forward.tokens.device)
        W_O = self.block.attention.W_O.weight
        self.W_O = W_O.unflatten(1, (c.n_head, c.value_dim))[:, heads]  # (C, n, d_v)
        x = forward.residuals[layer]
        gates = gates_of(self.block.attention, self.block.norm_1(x))
        self.gates: Tensor | float = 1.0
        if gates is not None:
            self.gates = gates[:, :, heads].transpose(1, 2)  # (B, n, T, 1 or d_v)
        self.q, self.k, v = self._project(x)
        self.weights = self._attend(self.q, self.k)
        self.output = self._write(v)
        self.unchanged_readings = self._readings(x)

    def lost_shares(self, x: Tensor) -> Estimates:
        """Return the shares (3, n) lost with layer input x (B, T, C) in each of `INPUTS`."""
        kept = scores.ratio(self._readings(x), self.unchanged_readings)
        return Estimates(1 - kept.mean, kept.error)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q (B, H, T, d_k), k (B, G, T, d_k) and the heads' values (B, n, T, d_v)."""
        q, k, v = self.block.attention.project(self.block.norm_1(x), self.rotary)
        return q, k, v[:, self.groups]

    def _attend(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute the heads' patterns (B, n, T, T)."""
        return self.block.attention.weights(q, k, self.mask)[:, self.heads]

    def _write(self, v: Tensor) -> Tensor:
        """Compute the heads' outputs (B, n, T, C) from values v, unpatched patterns and gates."""
        return torch.einsum("bntd,cnd->bntc", self.weights @ v * self.gates, self.W_O)

    def _readings(self, x: Tensor) -> np.ndarray:
        """Return readings (3, n, R) with queries, keys or values recomputed from x (B, T, C).

        For values, a reading is cos² of the angle between the patched and the unpatched output.
        """
        q, k, v = self._project(x)
        patterns = torch.stack([self._attend(q, self.k), self._attend(self.q, k)])
        A = patterns.float().cpu().numpy()  # (2, B, n, T, T)
        cosine = F.cosine_similarity(self._write(v), self.output, dim=-1)  # (B, n, T)
        squared_cosine = cosine.float().square().cpu().numpy()
        if self.periods is None:
            attended = scores.previous_token(A).mean(axis=-1).swapaxes(1, 2)  # (2, n, W)
            written = squared_cosine[..., 1:].mean(axis=-1).T  # (n, W)
        else:
            P = len(self.periods)
            attended = scores.induction(A[:, :P], A[:, -P:], self.periods)  # (2, n, P)
            written = np.transpose(
                [
                    squared_cosine[row, :, period : 2 * period].mean(axis=-1)
                    for row, period in enumerate(self.periods)
                ]
            )  # (n, P)
        return np.stack([*attended, written])
