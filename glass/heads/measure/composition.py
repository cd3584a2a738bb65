"""Measure composition: how much a head's score depends on each upstream component.

Method: path patching. The component's output is replaced by its mean in the input of the head's
queries, keys or values, and the layers between are recomputed.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glass.heads.measure import scores
from glass.heads.measure.capture import ForwardPass
from glass.heads.measure.components import Component, components
from glass.heads.measure.interventions import replace_heads
from glass.heads.measure.results import CompositionShare, Estimates, Head
from model import GPT, Context, Taps, causal_mask
from variants import gates_of

INPUTS = ("queries", "keys", "values")  # inputs of a head, in the order of array axes
MEASURED_SCORES = ("previous_token", "induction")  # scores whose composition is measured
MAX_MEASURED_HEADS = 4  # the strongest heads per score
MIN_RECORDED_SHARE = 0.05
# Large models: direct shares on every fourth row select the components to recompute.
PRESELECTION_STRIDE = 4


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

    Of each score, only the `max_components` with the largest direct shares on a quarter of the rows
    are measured. Components with at least one share of 0.05 and two standard errors are returned.

    Reference: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Wang et al.
    2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023, "Localizing Model Behavior
    with Path Patching".
    """
    shares: list[CompositionShare] = []
    for score, measured in heads.items():
        is_on_windows = score == "previous_token"
        forward, of_rows = (windows, None) if is_on_windows else (random, periods)
        readers = _make_readers(model, measured, forward, of_rows)
        if not readers:
            continue
        selected = None
        if max_components is not None:
            largest = _largest_direct_shares(model, measured, forward, of_rows)
            selected = sorted(largest, key=largest.__getitem__)[-max_components:]
        top = max(readers)
        for component, written in _upstream_components(model, forward, top):
            if selected is None or component in selected:
                inputs = _inputs_without(model, forward, component, written, top)
                for layer, recomputed, direct in inputs:
                    if layer in readers:
                        shares += _shares(score, component, readers[layer], recomputed, direct)
    return shares


def _make_readers(
    model: GPT, heads: Sequence[Head], forward: ForwardPass, periods: np.ndarray | None
) -> dict[int, "Reader"]:
    """Return the readers by layer, without layer 0, which reads the embedding only."""
    by_layer: dict[int, list[int]] = {}
    for layer, number in sorted(heads):
        by_layer.setdefault(layer, []).append(number)
    by_layer.pop(0, None)
    return {n: Reader(model, n, by_layer[n], forward, periods) for n in by_layer}


def _upstream_components(
    model: GPT, forward: ForwardPass, top: int
) -> Iterator[tuple[Component, Tensor]]:
    kinds = ("embedding", "head") if model.config.mlp == "none" else ("embedding", "head", "MLP")
    for component, written in components(model, forward, top):
        if component.kind in kinds:
            yield component, written


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
            yield CompositionShare(score, head, name, str(component), share, direct_share)


def _largest_direct_shares(
    model: GPT, heads: Sequence[Head], forward: ForwardPass, periods: np.ndarray | None
) -> dict[Component, float]:
    some = slice(None, None, PRESELECTION_STRIDE)
    forward, periods = forward.rows(some), None if periods is None else periods[some]
    readers = _make_readers(model, heads, forward, periods)
    largest = {}
    for component, written in _upstream_components(model, forward, max(readers)):
        largest[component] = 0.0
        for layer, reader in readers.items():
            if component.layer < layer:
                lost = reader.lost_shares(_without(forward, layer, written)).mean  # (3, n)
                largest[component] = max(largest[component], np.nanmax(lost[:2]))  # Q, K
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
    if component.kind == "head":
        x = forward.residuals[first]
        mean = forward.heads[first].mean(dim=(0, 1))  # (H, d_v)
        taps = replace_heads(first, [[component.number]], mean)
    else:  # nothing comes between the embedding or an MLP and the next layer
        first += 1
        x, taps = _without(forward, first, written), Taps()
        yield first, x, x
    context = Context(model.rotary_at(0, x.shape[1]), taps=taps)
    for layer in range(first, top):
        with model.evaluating():
            x = model.blocks[layer](x, context)
        yield layer + 1, x, _without(forward, layer + 1, written)


class Reader:
    """Recompute n heads of one layer with a patched input to their queries, keys or values.

    A reading is a head's score on one of R rows: W windows of text, or P repeated rows, if there
    are `periods` (P,).
    """

    def __init__(
        self,
        model: GPT,
        layer: int,
        heads: list[int],
        forward: ForwardPass,
        periods: np.ndarray | None,
    ) -> None:
        c = model.config
        self.layer, self.heads, self.periods = layer, heads, periods
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
