"""Composition: the share of a head's score that depends on an upstream component.

Measured by path patching: an upstream component is mean-ablated in the input of a head's queries,
keys or values, and everything between is recomputed.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_maps import scores
from attention_maps.capture import ForwardPass, residual_writes
from attention_maps.results import CompositionShare, Estimates, Head
from model import GPT, attention_weights, causal_mask

INPUTS = ("queries", "keys", "values")  # of a head, in the order of the rows of readings
MEASURED_SCORES = ("previous_token", "induction")  # scores whose heads are measured
MAX_MEASURED_HEADS = 4  # strongest heads of a score that are measured
MIN_RECORDED_SHARE = 0.05
# Direct shares, which select the components to recompute in a large model, are taken of every
# fourth row.
PRESELECTION_STRIDE = 4


class Component(NamedTuple):
    """A component of the model that writes to the residual stream.

    Attributes:
        name: "embedding", or as L0H1 or L0MLP.
        tap: The tap at which it can be replaced: "embedding", "heads" or "mlp".
        layer: -1 for the embedding.
        head: -1 unless it is a head.
    """

    name: str
    tap: str
    layer: int = -1
    head: int = -1


def components_below(model: GPT, layer: int) -> list[Component]:
    """Return the components that write to the input of a layer, in order."""
    components = [Component("embedding", "embedding")]
    for lower in range(layer):
        for head in range(model.config.n_head):
            components.append(Component(str(Head(lower, head)), "heads", lower, head))
        components.append(Component(f"L{lower}MLP", "mlp", lower))
    return components


class Rows(NamedTuple):
    """Rows on which a score is measured: a forward pass, and the periods if they repeat."""

    forward: ForwardPass
    periods: np.ndarray | None

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
    """Measure on which upstream components the scores of some heads depend.

    A component is replaced by its mean over tokens in the input of the head's queries, keys or
    values. For queries and keys, the share is what the head's score loses. Values do not decide
    where a head attends: their share is that of the squared length of what the head writes, 1 -
    cos² of the angle between its output with and without the component.

    Args:
        model: The model of the passes.
        windows: Pass over windows of the text, for "previous_token".
        random: Pass over the repeated rows, then as many control rows, for "induction".
        periods: Periods of the repeated rows, (P,).
        heads: The heads to measure, by score.
        max_components: Recompute the layers between only for so many components of a score, those
            with the largest direct shares on a quarter of the rows; None for all.

    Returns:
        The shares of each component that has a share of at least 0.05 and two standard errors in
        the queries, keys or values of a head; of those, all three inputs.

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
        components = components_below(model, top)
        if max_components is not None and len(components) > max_components:
            largest = _largest_direct_shares(model, by_layer, rows.thinned())
            components = sorted(components, key=lambda one: largest[one])[-max_components:]
        for component in components:
            for layer, recomputed, direct in _inputs_without(model, rows.forward, component, top):
                if layer in readers:
                    shares += _shares(score, component, readers[layer], recomputed, direct)
    return shares


def _group_by_layer(heads: Sequence[Head]) -> dict[int, list[int]]:
    """Return the heads' numbers by layer, without layer 0, which has no upstream component."""
    by_layer: dict[int, list[int]] = {}
    for head in heads:
        if head.layer > 0:
            by_layer.setdefault(head.layer, []).append(head.number)
    return {layer: sorted(numbers) for layer, numbers in by_layer.items()}


def _shares(
    score: str, component: Component, reader: "Reader", recomputed: Tensor, direct: Tensor
) -> Iterator[CompositionShare]:
    """Yield the shares of a component in each head of a reader in which one is significant."""
    lost = reader.lost_shares(recomputed)  # (3, n)
    is_significant = (lost.mean >= MIN_RECORDED_SHARE) & (lost.mean >= 2 * lost.error)
    significant_heads = np.flatnonzero(is_significant.any(axis=0))
    if not len(significant_heads):
        return
    lost_directly = reader.lost_shares(direct)
    for n in significant_heads:
        for number, name in enumerate(INPUTS):
            yield CompositionShare(
                score=score,
                head=Head(reader.layer, reader.heads[n]),
                input=name,
                upstream=component.name,
                share=lost.at((number, int(n))),
                direct=lost_directly.at((number, int(n))),
            )


def _largest_direct_shares(
    model: GPT, by_layer: dict[int, list[int]], rows: Rows
) -> dict[Component, float]:
    """Return each component's largest direct share in the queries or keys of heads above it."""
    largest: dict[Component, float] = {}
    for layer, heads in by_layer.items():
        reader = Reader(model, layer, heads, rows)
        for component in components_below(model, layer):
            written = _writes_of(model, rows.forward, component)
            x = rows.forward.residuals[layer] - written + _mean_over_tokens(written)
            lost = reader.lost_shares(x).mean  # (3, n)
            share = float(np.nanmax(lost[:2]))  # queries, keys
            largest[component] = max(largest.get(component, 0.0), share)
    return largest


def _writes_of(model: GPT, forward: ForwardPass, component: Component) -> Tensor:
    """Return what a component adds to the residual stream, (B, T, C)."""
    residuals, layer = forward.residuals, component.layer
    if component.tap == "embedding":
        return residuals[0]
    heads = residual_writes(model.blocks[layer].attention, forward.heads[layer])  # (B, T, H, C)
    if component.tap == "heads":
        return heads[:, :, component.head]
    # The MLP, and the bias of W_O, which is its own mean.
    return residuals[layer + 1] - residuals[layer] - heads.sum(dim=2)


def _inputs_without(
    model: GPT, forward: ForwardPass, component: Component, top: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the input of each layer above a component, up to `top`, with the component ablated.

    Yields:
        The layer; its input (B, T, C) with the layers between recomputed; its input with nothing
        else changed.
    """
    residuals, first = forward.residuals, max(0, component.layer)
    rotary = model.rotary_at(0, residuals.shape[2])
    written = _writes_of(model, forward, component)
    mean = _mean_over_tokens(written)
    x = residuals[first]  # (B, T, C)
    if component.tap == "embedding":
        x = mean
        yield 0, x, x
    taps = {component.tap: partial(_mean_ablate, component)}
    for layer in range(first, top):
        with model.evaluating():
            x = model.blocks[layer](x, rotary, taps=taps)
        yield layer + 1, x, residuals[layer + 1] - written + mean


def _mean_ablate(component: Component, layer: int, value: Tensor) -> Tensor:
    """Tap that replaces the output of a component by its mean over tokens.

    The value is that of all heads (B, T, H, d_v), or of an MLP (B, T, C).
    """
    if layer != component.layer:
        return value
    if component.tap == "mlp":
        return _mean_over_tokens(value)
    value = value.clone()
    value[:, :, component.head] = _mean_over_tokens(value[:, :, component.head])
    return value


def _mean_over_tokens(x: Tensor) -> Tensor:
    """Return the mean over rows and tokens of x (B, T, C), repeated for each of them."""
    return x.mean(dim=(0, 1)).expand_as(x)


class Reader:
    """Some heads of a layer, whose queries, keys or values can be given another input."""

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
        self.q, self.k, v = self._project(x)
        self.weights = attention_weights(self.q, self.k, self.mask)
        self.output = self._write(v)
        self.unchanged_readings = self._readings(x)

    def lost_shares(self, x: Tensor) -> Estimates:
        """Return the shares of the readings that are lost with the input x (B, T, C).

        Returns:
            Shares and standard errors (3, n): by `INPUTS` and head.
        """
        kept = scores.ratio(self._readings(x), self.unchanged_readings)
        return Estimates(1 - kept.mean, kept.error)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, n, T, d) of the heads for an input x (B, T, C)."""
        q, k, v = self.block.attention.project(self.block.norm_1(x), self.rotary)
        return q[:, self.heads], k[:, self.groups], v[:, self.groups]

    def _write(self, v: Tensor) -> Tensor:
        """Return what the heads write (B, n, T, C) with unchanged attention and values v."""
        return torch.einsum("bntd,cnd->bntc", self.weights @ v, self.W_O)

    def _readings(self, x: Tensor) -> np.ndarray:
        """Return readings (3, n, R) with queries, keys or values computed from x (B, T, C).

        For queries and keys these are readings of the score; for values cos² of the angle between
        what the heads write with these values and with their own.
        """
        q, k, v = self._project(x)
        patterns = torch.stack(
            [
                attention_weights(q, self.k, self.mask),
                attention_weights(self.q, k, self.mask),
            ]
        )
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
