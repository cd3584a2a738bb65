"""Measure composition: how much a head's score depends on each upstream component.

Method: path patching. The component's output is replaced by its mean in the input of the head's
queries, keys or values, and the layers between are recomputed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.statistics import ratio_with_error
from glass.heads.measure import scores
from glass.heads.measure.capture import ForwardPass
from glass.heads.measure.components import Component, iterate_components
from glass.heads.measure.interventions import replace_heads
from model import GPT, Context, Taps, causal_mask
from run.row import Head, Row

INPUTS = ("queries", "keys", "values")  # inputs of a head, in the order of array axes
MAX_MEASURED_HEADS = 4  # the strongest heads per score
MIN_RECORDED_SHARE = 0.05
# Large models: direct shares on every fourth row select the components to recompute.
PRESELECTION_STRIDE = 4


@dataclass(frozen=True)
class ScoredRows:
    """A pass over the rows on which a score is measured; the score has R readings on them.

    The previous-token score has one on each window of text. The prefix-matching score has one on
    each of P repeated rows, which P control rows follow.
    """

    forward: ForwardPass
    periods: np.ndarray | None = None  # of the repeated rows, (P,); None for windows of text

    def every(self, stride: int) -> "ScoredRows":
        """Select one in `stride` rows."""
        some = slice(None, None, stride)
        periods = None if self.periods is None else self.periods[some]
        return ScoredRows(self.forward.rows(some), periods)

    def read_patterns(self, A: np.ndarray) -> np.ndarray:
        """Read the score of n heads from each of k patterns, (k, B, n, T, T) → (k, n, R)."""
        if self.periods is None:
            return scores.previous_token(A).mean(axis=-1).swapaxes(1, 2)
        P = len(self.periods)
        return scores.induction(A[:, :P], A[:, -P:], self.periods)

    def average(self, values: np.ndarray) -> np.ndarray:
        """Average values over the tokens on which the score is read, (B, n, T) → (n, R)."""
        if self.periods is None:
            return values[..., 1:].mean(axis=-1).T
        second_occurrences = (
            values[row, :, period : 2 * period] for row, period in enumerate(self.periods)
        )
        return np.transpose([some.mean(axis=-1) for some in second_occurrences])


@torch.no_grad()
def measure_composition(
    model: GPT,
    score: str,
    heads: Sequence[Head],
    rows: ScoredRows,
    max_components: int | None = None,
) -> Row:
    """Measure how much the score of some heads depends on each upstream component.

    The component is mean-ablated in the input of a head's queries, keys or values. For queries and
    keys, the share is the part of the head's score that is lost. Values do not decide where a head
    attends, so their share is 1 - cos² of the angle between its output with and without the
    component. At most `max_components` are measured, those with the largest direct shares on a
    quarter of the rows.

    Returns:
        The shares `composition/<score>/<head>/<input>/<upstream>`, and those without recomputation
        of the layers between, `composition/<score>_direct/…`, of the components with at least one
        share of 0.05 and two standard errors.

    Reference: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Wang et al.
    2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023, "Localizing Model Behavior
    with Path Patching".
    """
    row = Row()
    layers = _group_by_layer(model, heads, rows)
    if not layers:
        return row
    top = max(layers)
    selected = None
    if max_components is not None:
        largest = _largest_direct_shares(model, heads, rows.every(PRESELECTION_STRIDE))
        selected = sorted(largest, key=largest.__getitem__)[-max_components:]
    for component, written in _upstream_components(model, rows.forward, top):
        if selected is None or component in selected:
            inputs = _inputs_without(model, rows.forward, component, written, top)
            for layer, recomputed, direct in inputs:
                if layer in layers:
                    row |= _measure_shares(score, component, layers[layer], recomputed, direct)
    return row


def _group_by_layer(
    model: GPT, heads: Sequence[Head], rows: ScoredRows
) -> dict[int, "DownstreamHeads"]:
    """Return the heads of each layer, without layer 0, which reads the embedding only."""
    later = sorted(head for head in heads if head.layer > 0)
    return {
        layer: DownstreamHeads(model, layer, [head.number for head in group], rows)
        for layer, group in groupby(later, key=lambda head: head.layer)
    }


def _upstream_components(
    model: GPT, forward: ForwardPass, top: int
) -> Iterator[tuple[Component, Tensor]]:
    kinds = ("embedding", "head") if model.config.mlp == "none" else ("embedding", "head", "MLP")
    for component, written in iterate_components(model, forward, top):
        if component.kind in kinds:
            yield component, written


def _measure_shares(
    score: str,
    component: Component,
    heads: "DownstreamHeads",
    recomputed: Tensor,
    direct: Tensor,
) -> Row:
    """Measure the shares of one component in the score of the heads of one layer."""
    row = Row()
    shares, errors = heads.lost_shares(recomputed)  # (3, n)
    is_significant = (shares >= MIN_RECORDED_SHARE) & (shares >= 2 * errors)
    significant_heads = np.flatnonzero(is_significant.any(axis=0))
    if not len(significant_heads):
        return row
    direct_shares, direct_errors = shares, errors
    if direct is not recomputed:
        direct_shares, direct_errors = heads.lost_shares(direct)
    for n in significant_heads:
        head = Head(heads.layer, heads.numbers[n])
        for number, name in enumerate(INPUTS):
            place = f"{head}/{name}/{component}"
            share = shares[number, n], errors[number, n]
            direct_share = direct_shares[number, n], direct_errors[number, n]
            row.put(f"composition/{score}", share, place)
            row.put(f"composition/{score}_direct", direct_share, place)
    return row


def _largest_direct_shares(
    model: GPT, heads: Sequence[Head], rows: ScoredRows
) -> dict[Component, float]:
    """Return the largest share of each component in the queries or keys of a head."""
    layers = _group_by_layer(model, heads, rows)
    largest = {}
    for component, written in _upstream_components(model, rows.forward, max(layers)):
        largest[component] = 0.0
        for layer, downstream in layers.items():
            if component.layer < layer:
                x = _without(rows.forward, layer, written)
                shares, _ = downstream.lost_shares(x)  # (3, n)
                of_queries_and_keys = shares[:2]
                largest[component] = max(largest[component], np.nanmax(of_queries_and_keys))
    return largest


def _without(forward: ForwardPass, layer: int, written: Tensor) -> Tensor:
    """Return a layer's input (B, T, C) in which what was written is replaced by its mean."""
    return forward.residuals[layer] - written + written.mean(dim=(0, 1))


def _inputs_without(
    model: GPT, forward: ForwardPass, component: Component, written: Tensor, top: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Mean-ablate a component, and yield each later layer up to `top` with two inputs (B, T, C).

    The layers between are recomputed for the first input, but not for the second.
    """
    first = component.layer
    taps: Taps = {}
    if component.kind == "head":
        x = forward.residuals[first]
        mean = forward.heads[first].mean(dim=(0, 1))  # (H, d_v)
        taps = replace_heads(first, [[component.number]], mean)
    else:
        # Nothing comes between the embedding or an MLP and the next layer.
        first += 1
        x = _without(forward, first, written)
        yield first, x, x
    context = Context(model.rotary_at(0, x.shape[1]), taps=taps)
    for layer in range(first, top):
        with model.evaluating():
            x = model.blocks[layer](x, context)
        yield layer + 1, x, _without(forward, layer + 1, written)


class DownstreamHeads:
    """The measured heads of one layer, with another input to their queries, keys or values.

    There are n heads, with R readings each: those of their score for queries and keys, and for
    values cos² of the angle between their output and the unpatched one.
    """

    def __init__(self, model: GPT, layer: int, numbers: list[int], rows: ScoredRows) -> None:
        self.layer = layer
        self.numbers = numbers
        self.rows = rows
        self.config = model.config
        self.block = model.blocks[layer]
        x = rows.forward.residuals[layer]  # (B, T, C)
        T = x.shape[1]
        self.rotary = model.rotary_at(0, T)
        self.mask = causal_mask(T, T, x.device)
        self.gates: Tensor | float = 1.0
        if self.config.gate_dim:
            gates = self.block.attention.gates(self.block.norm_1(x))
            self.gates = gates[:, :, numbers].transpose(1, 2)  # (B, n, T, 1 or d_v)

        self.q, self.k, v = self._project(x)
        self.weights = self._attend(self.q, self.k)
        self.output = self._write(v)
        self.unpatched_readings = self._read(x)

    def lost_shares(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the shares lost with input x (B, T, C) in each of `INPUTS`, and errors, (3, n)."""
        kept, errors = ratio_with_error(self._read(x), self.unpatched_readings)
        return 1 - kept, errors

    def _read(self, x: Tensor) -> np.ndarray:
        """Return readings (3, n, R) with queries, keys or values computed from x (B, T, C)."""
        q, k, v = self._project(x)
        patterns = torch.stack([self._attend(q, self.k), self._attend(self.q, k)])
        attended = self.rows.read_patterns(patterns.float().cpu().numpy())  # (2, n, R)
        cosine = F.cosine_similarity(self._write(v), self.output, dim=-1)  # (B, n, T)
        written = self.rows.average(cosine.float().square().cpu().numpy())  # (n, R)
        return np.stack([*attended, written])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q (B, H, T, d_k), k (B, G, T, d_k) and the heads' values (B, n, T, d_v)."""
        q, k, v = self.block.attention.project(self.block.norm_1(x), self.rotary)
        heads_per_group = self.config.n_head // self.config.kv_heads
        return q, k, v[:, [number // heads_per_group for number in self.numbers]]

    def _attend(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute the heads' patterns (B, n, T, T)."""
        return self.block.attention.weights(q, k, self.mask)[:, self.numbers]

    def _write(self, v: Tensor) -> Tensor:
        """Compute the heads' outputs (B, n, T, C) from values v, unpatched patterns and gates."""
        W_O = self.block.attention.W_O.weight.unflatten(1, (self.config.n_head, -1))  # (C, H, d_v)
        return torch.einsum("bntd,cnd->bntc", self.weights @ v * self.gates, W_O[:, self.numbers])
