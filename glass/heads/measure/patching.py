"""Activation patching: copy activations of one forward pass into another, and read a prediction.

Two texts of equal length differ in some tokens: a clean one and a corrupted one. Patching from the
clean into the corrupted pass (denoising) finds activations that suffice to restore the clean
prediction; the other direction (noising) finds those that it needs. docs/attention.md has examples.

Reference: Vig et al. 2020, "Causal Mediation Analysis for Interpreting Neural NLP"; Meng et al.
2022, "Locating and Editing Factual Associations in GPT"; Heimersheim & Nanda 2024, "How to Use and
Interpret Activation Patching".
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glass.heads.measure.ablation import rows_per_pass
from glass.heads.measure.capture import ForwardPass, capture, rerun
from glass.heads.measure.interventions import (
    NO_INTERVENTIONS,
    Interventions,
    chain_taps,
    replace_at,
    replace_heads,
)
from kernels import in_float32_or_finer
from model import GPT, Taps

# Larger passes are no faster on a CPU, and their first results come later.
MAX_TOKENS_PER_STREAMED_PASS = 256

Kind = Literal["residual", "head", "mlp"]


@dataclass(frozen=True)
class Patch:
    """An activation that is copied from the source into the base pass.

    It is written L3T5 (the residual stream before block 3 at token 5), L2H1 (the output of head 1
    of layer 2 at all tokens) or L2MLP (the output of the MLP of layer 2 at all tokens).
    """

    kind: Kind
    layer: int
    index: int  # token of a residual patch, number of a head, 0 for an MLP


def parse_patch(name: str) -> Patch | None:
    """Parse a name such as L3T5, L2H1 or L2MLP; None if it does not name a patch."""
    match = re.fullmatch(r"L(\d{1,3})(T|H|MLP)(\d{0,7})", name, re.ASCII)
    if match is None or (match[2] == "MLP") == bool(match[3]):
        return None
    kinds: dict[str, Kind] = {"T": "residual", "H": "head", "MLP": "mlp"}
    return Patch(kinds[match[2]], int(match[1]), int(match[3] or 0))


class Contrast(NamedTuple):
    """The prediction that is read: logit(answer) - logit(wrong) after the token at `position`."""

    position: int
    answer: int
    wrong: int


# Layer and column (n, 2) of n activations: a token, a head, or n_head for the MLP; and the metric
# with each of them patched, (n,).
CellValues = tuple[np.ndarray, np.ndarray]


@torch.no_grad()
def measure_logit_difference(model: GPT, x: Tensor, contrast: Contrast) -> Tensor:
    """Return logit(answer) - logit(wrong) (…) for final residual streams x (…, C)."""
    x = in_float32_or_finer(model.norm(x))
    answer, wrong = model.head.weight[[contrast.answer, contrast.wrong]].to(x.dtype)
    return x @ (answer - wrong)


class Patching:
    """Patches of a base pass with activations of a source pass, over one text each.

    The two texts have the same number of tokens up to the prediction. Only these tokens are run,
    from the first one that differs on. The two passes must not change while cells are computed.
    """

    def __init__(
        self,
        model: GPT,
        source: ForwardPass,
        base: ForwardPass,
        contrast: Contrast,
        kept: Sequence[Patch] = (),
        interventions: Interventions = NO_INTERVENTIONS,
        metric: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepare the base with the `kept` patches, which apply in every run, as interventions do.

        `metric` is a function of the logits (n, V) of the prediction that returns n values; None:
        the difference of the logits that `contrast` names.
        """
        T = contrast.position + 1
        length = min(source.tokens.shape[1], base.tokens.shape[1])
        if length < T:
            raise ValueError(
                f"contrast.position={contrast.position} is not in a text of {length} tokens; "
                f"choose at most {length - 1}"
            )
        self.model = model
        self.contrast = contrast
        self.metric = metric
        self.interventions = interventions
        self.source = source.first_tokens(T)
        self.base = base.first_tokens(T)
        differing = (self.source.tokens != self.base.tokens)[0].nonzero()
        # Patches of earlier tokens cannot change anything. The last one is always run.
        self.first_differing = int(differing[0, 0]) if len(differing) else T - 1
        self._kept = [patch for patch in kept if patch.kind != "residual" or patch.index < T]
        if self._kept:
            ids = self.base.tokens.cpu().numpy()
            self.base = capture(model, ids, interventions, self._kept_taps(0))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits (V,) of the next token, of the base with the kept patches."""
        return self.model.head(self.model.norm(self.base.residuals[-1, 0, -1]))

    def value(self) -> float:
        """Return the metric of the base with the kept patches."""
        return self._read(self.base.residuals[-1, :, -1]).item()

    def patch_residuals(self) -> Iterator[CellValues]:
        """Yield cells (layer, token): the input of the layer is patched at one token."""
        T = self.contrast.position + 1
        first = self.first_differing
        for layer in range(self.model.config.n_layer):
            if first > 0:
                yield _make_cell_values(layer, range(first), np.full(first, self.value()))
            start = first
            while start < T:
                tokens = range(start, min(T, start + self._cells_per_pass(start)))
                yield _make_cell_values(layer, tokens, self._patch_residuals(layer, tokens))
                start = tokens.stop

    def patch_components(self) -> Iterator[CellValues]:
        """Yield cells (layer, head or n_head for the MLP): an output is patched at all tokens."""
        c = self.model.config
        columns = range(c.n_head if c.mlp == "none" else c.n_head + 1)
        rows = self._cells_per_pass(self.first_differing)
        for layer in range(c.n_layer):
            for first in range(0, len(columns), rows):
                some = columns[first : first + rows]
                yield _make_cell_values(layer, some, self._patch_components(layer, some))

    def _cells_per_pass(self, start: int) -> int:
        length = self.contrast.position + 1 - start
        streamed = max(1, MAX_TOKENS_PER_STREAMED_PASS // length)
        return min(streamed, rows_per_pass(self.model, length))

    @torch.no_grad()
    def _read(self, x: Tensor) -> Tensor:
        """Return the metric (n,) of the final residual streams x (n, C) of the prediction."""
        if self.metric is None:
            return measure_logit_difference(self.model, x, self.contrast)
        return self.metric(in_float32_or_finer(self.model.head(self.model.norm(x))))

    @torch.no_grad()
    def _patch_residuals(self, layer: int, tokens: range) -> np.ndarray:
        n = len(tokens)
        x = self.base.residuals[layer, :, tokens.start :].repeat(n, 1, 1)  # (n, S, C)
        rows = torch.arange(n)
        x[rows, rows] = self.source.residuals[layer, 0, tokens.start : tokens.stop]
        return self._run(layer, x, {}, tokens.start)

    @torch.no_grad()
    def _patch_components(self, layer: int, columns: range) -> np.ndarray:
        """Patch one head in each row, and in the row after the last head the MLP."""
        start = self.first_differing
        H = self.model.config.n_head
        x = self.base.residuals[layer, :, start:].expand(len(columns), -1, -1)  # (n, S, C)
        heads = [[column] if column < H else [] for column in columns]
        taps = replace_heads(layer, heads, self.source.heads[layer, :, start:])
        if H in columns:
            mlp = self._source_mlp(layer)[start:]  # (S, C)
            taps["mlp", layer] = partial(replace_at, (columns.index(H),), mlp)
        return self._run(layer, x, taps, start)

    def _run(self, layer: int, x: Tensor, taps: Taps, start: int) -> np.ndarray:
        """Run n rows from a layer's input x (n, S, C) on; return their metrics (n,)."""
        is_hidden = self.interventions.is_hidden(self.contrast.position + 1, x.device)
        taps = chain_taps(taps, self._kept_taps(start), self.interventions.taps())
        x = rerun(self.model, self.base, start, (layer, x), taps, is_hidden)
        return self._read(x[:, -1]).cpu().numpy()

    def _kept_taps(self, start: int) -> Taps:
        """Return the taps that apply the kept patches to the tokens from `start` on.

        The layer at which a run begins does not tap its input, which is already patched.
        """
        return chain_taps(*(self._taps_of(patch, start) for patch in self._kept))

    def _taps_of(self, patch: Patch, start: int) -> Taps:
        layer = patch.layer
        if patch.kind == "head":
            outputs = self.source.heads[layer, :, start:]
            return replace_heads(layer, [[patch.index]], outputs)
        if patch.kind == "mlp":
            outputs = self._source_mlp(layer)[start:]
            return {("mlp", layer): partial(replace_at, (), outputs)}
        if patch.index < start:
            return {}
        key = ("residual", layer - 1) if layer else ("embedding", 0)
        at = slice(None), patch.index - start
        return {key: partial(replace_at, at, self.source.residuals[layer, 0, patch.index])}

    @torch.no_grad()
    def _source_mlp(self, layer: int) -> Tensor:
        """Return the output (T, C) of an MLP in the source pass."""
        block = self.model.blocks[layer]
        x = self.source.residuals[layer, 0]  # (T, C)
        update = block.attention.W_O(self.source.heads[layer, 0].flatten(1))
        with self.model.evaluating():
            return block.run_mlp(x, x + update)


def _make_cell_values(layer: int, columns: range, values: np.ndarray) -> CellValues:
    return np.array([(layer, column) for column in columns]), values
