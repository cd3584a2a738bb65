"""Activation patching: copy activations of one forward pass into another, and read a prediction.

Two texts of equal length differ in some tokens: a clean one and a corrupted one. Patching from the
clean into the corrupted pass (denoising) finds activations that suffice to restore the clean
prediction; the other direction (noising) finds those that it needs.

    source, base = capture(model, clean_ids), capture(model, corrupted_ids)  # ids (1, T)
    patching = Patching(model, source, base, Contrast(position=T - 1, answer=7, wrong=9))
    for cells, logit_differences in patching.patch_components():
        ...  # cells (n, 2): layer and head, or layer and n_head for the MLP

Reference: Vig et al. 2020, "Causal Mediation Analysis for Interpreting Neural NLP"; Meng et al.
2022, "Locating and Editing Factual Associations in GPT"; Heimersheim & Nanda 2024, "How to Use and
Interpret Activation Patching".
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.text import pluralize
from generation import KVCache
from glass.heads.ablation import rows_per_pass
from glass.heads.cached_pass import rewind_cache
from glass.heads.capture import ForwardPass
from glass.heads.interventions import NO_INTERVENTIONS, Interventions, chain_taps
from glass.heads.results import parse_head
from kernels import in_float32_or_finer
from model import GPT, Taps

# Larger passes are no faster on a CPU, and their first results come later.
MAX_TOKENS_PER_STREAMED_PASS = 256


@dataclass(frozen=True)
class Patch:
    """An activation that is copied from the source into the base pass.

    It is written L3T5 (the residual stream before block 3 at token 5), L2H1 (the output of head 1
    of layer 2 at all tokens) or L2MLP (the output of the MLP of layer 2 at all tokens).
    """

    kind: Literal["residual", "head", "mlp"]
    layer: int
    index: int  # token of a residual patch, number of a head, 0 for an MLP

    def __str__(self) -> str:
        if self.kind == "mlp":
            return f"L{self.layer}MLP"
        return f"L{self.layer}{'T' if self.kind == 'residual' else 'H'}{self.index}"


def parse_patch(name: str) -> Patch | None:
    """Parse a name such as L3T5, L2H1 or L2MLP; None if it does not name a patch."""
    if head := parse_head(name):
        return Patch("head", *head)
    if match := re.fullmatch(r"L(\d{1,3})T(\d{1,7})", name, re.ASCII):
        return Patch("residual", int(match[1]), int(match[2]))
    if match := re.fullmatch(r"L(\d{1,3})MLP", name, re.ASCII):
        return Patch("mlp", int(match[1]), 0)
    return None


class Contrast(NamedTuple):
    """The prediction that is read: logit(answer) - logit(wrong) after the token at `position`."""

    position: int
    answer: int
    wrong: int


class CellValues(NamedTuple):
    """Logit differences with one more activation patched, for n activations (cells)."""

    cells: np.ndarray  # layer and column (n, 2): a token, or a head, or n_head for the MLP
    logit_differences: np.ndarray  # (n,)


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
    ) -> None:
        """Run the base with the `kept` patches, which belong to all runs like the interventions."""
        T = contrast.position + 1
        if (length := min(source.tokens.shape[1], base.tokens.shape[1])) < T:
            raise ValueError(
                f"contrast.position={contrast.position} is not in a text of {length} tokens; "
                f"choose at most {length - 1}"
            )
        self.model, self.contrast, self.interventions = model, contrast, interventions
        self.source, base = source.first_tokens(T), base.first_tokens(T)
        self._tokens = base.tokens  # (1, T)
        differing = (source.tokens[0, :T] != base.tokens[0]).nonzero()
        # Patches of earlier tokens cannot change anything.
        self.first_differing = int(differing[0, 0]) if len(differing) else T
        self._kept: list[tuple[Patch, Tensor]] = []  # with the values that are copied
        for patch in kept:
            self._require(patch)
            if not self._is_after_prediction(patch):
                self._kept.append((patch, self._source_values(patch)))
        self._cache = KVCache(model.config, 1, T, base.k.device, base.k.dtype)
        self._residuals = self._run_base(base.residuals[0])  # with kept patches, (L + 1, 1, T, C)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits (V,) of the next token, of the base with the kept patches."""
        return self.model.head(self.model.norm(self._residuals[-1, 0, -1]))

    def logit_difference(self) -> float:
        """Return logit(answer) - logit(wrong) of the base with the kept patches."""
        x = self._residuals[-1, 0, -1]
        return measure_logit_difference(self.model, x, self.contrast).item()

    def patch_residuals(self) -> Iterator[CellValues]:
        """Yield cells (layer, token): the input of the layer is patched at one token."""
        T, first = self.contrast.position + 1, self.first_differing
        for layer in range(self.model.config.n_layer):
            if first > 0:
                unchanged = np.full(first, self.logit_difference())
                yield _make_cell_values(layer, range(first), unchanged)
            start = first
            while start < T:
                tokens = range(start, min(T, start + self._cells_per_pass(start)))
                yield _make_cell_values(layer, tokens, self._patch_residuals(layer, tokens))
                start = tokens.stop

    def patch_components(self) -> Iterator[CellValues]:
        """Yield cells (layer, head or n_head for the MLP): an output is patched at all tokens."""
        c = self.model.config
        columns = range(c.n_head if c.mlp == "none" else c.n_head + 1)
        if self.first_differing > self.contrast.position:
            unchanged = np.full(len(columns), self.logit_difference())
            for layer in range(c.n_layer):
                yield _make_cell_values(layer, columns, unchanged)
            return
        rows = self._cells_per_pass(self.first_differing)
        for layer in range(c.n_layer):
            for start in range(0, len(columns), rows):
                some = columns[start : start + rows]
                yield _make_cell_values(layer, some, self._patch_components(layer, some))

    def _cells_per_pass(self, start: int) -> int:
        length = self.contrast.position + 1 - start
        streamed = max(1, MAX_TOKENS_PER_STREAMED_PASS // length)
        return min(streamed, rows_per_pass(self.model, length))

    def _require(self, patch: Patch) -> None:
        c = self.model.config
        has_component = {
            "residual": True,
            "head": patch.index < c.n_head,
            "mlp": c.mlp != "none",
        }
        if patch.layer >= c.n_layer or not has_component[patch.kind]:
            mlps = "no MLPs" if c.mlp == "none" else "MLPs"
            raise ValueError(
                f"there is no {patch} to patch: the model has "
                f"{pluralize(c.n_layer, 'layer')}, {pluralize(c.n_head, 'head')} in each and {mlps}"
            )

    def _is_after_prediction(self, patch: Patch) -> bool:
        return patch.kind == "residual" and patch.index > self.contrast.position

    # --- activations ------------------------------------------------------------------------------

    @torch.no_grad()
    def _source_values(self, patch: Patch) -> Tensor:
        """Return what is copied: (C,) of a residual patch, (T, d_v) of a head, (T, C) of an MLP."""
        if patch.kind == "residual":
            return self.source.residuals[patch.layer, 0, patch.index]
        heads = self.source.heads[patch.layer, 0]  # (T, H, d_v)
        if patch.kind == "head":
            return heads[:, patch.index]
        block = self.model.blocks[patch.layer]
        x = self.source.residuals[patch.layer, 0] + block.attention.W_O(heads.flatten(1))
        with self.model.evaluating():
            return block.mlp(block.norm_2(x))

    def _kept_taps(self, start: int) -> Taps:
        """Return the taps that apply the kept patches to the tokens from `start` on.

        The layer at which a run begins does not tap its input, which is already patched.
        """
        all_taps: list[Taps] = []
        for patch, values in self._kept:
            if patch.kind == "head":
                tap = partial(_replace_head, patch.index, values[start:])
                all_taps.append({("heads", patch.layer): tap})
            elif patch.kind == "mlp":
                all_taps.append({("mlp", patch.layer): values[start:].expand_as})
            elif patch.layer > 0 and patch.index >= start:
                tap = partial(_replace_token, patch.index - start, values)
                all_taps.append({("residual", patch.layer - 1): tap})
        return chain_taps(*all_taps)

    # --- runs -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run_base(self, embedding: Tensor) -> Tensor:
        """Run the base from its embedding (1, T, C); return the residuals (L + 1, 1, T, C)."""
        c = self.model.config
        embedding = embedding.clone()
        for patch, values in self._kept:
            if patch.kind == "residual" and patch.layer == 0:
                embedding[:, patch.index] = values
        residuals = [embedding]
        record: Taps = {("residual", layer): residuals.append for layer in range(c.n_layer)}
        taps = chain_taps(self._kept_taps(0), self.interventions.taps(), record)
        mask = self.interventions.mask(embedding.shape[1], embedding.device)
        with self.model.evaluating():
            self.model.run_blocks(self._tokens, self._cache, mask, taps, entry=(0, embedding))
        return torch.stack(residuals)

    @torch.no_grad()
    def _patch_residuals(self, layer: int, tokens: range) -> np.ndarray:
        start, n = tokens.start, len(tokens)
        x = self._residuals[layer, :, start:].repeat(n, 1, 1)  # (n, S, C)
        rows = torch.arange(n)
        x[rows, rows] = self.source.residuals[layer, 0, tokens.start : tokens.stop]
        return self._run(layer, x, {}, start)

    @torch.no_grad()
    def _patch_components(self, layer: int, columns: range) -> np.ndarray:
        start, H = self.first_differing, self.model.config.n_head
        x = self._residuals[layer, :, start:].expand(len(columns), -1, -1)  # (n, S, C)
        heads = [column for column in columns if column < H]
        taps: Taps = {}
        if heads:
            source_heads = self.source.heads[layer, 0, start:]  # (S, H, d_v)
            taps["heads", layer] = partial(_replace_heads_of_rows, heads, source_heads)
        if H in columns:
            mlp = self._source_values(Patch("mlp", layer, 0))[start:]  # (S, C)
            taps["mlp", layer] = partial(_replace_row, columns.index(H), mlp)
        return self._run(layer, x, taps, start)

    def _run(self, layer: int, x: Tensor, taps: Taps, start: int) -> np.ndarray:
        """Run n rows from a layer's input x (n, S, C) on; return their logit differences (n,)."""
        n = len(x)
        cache = KVCache(
            self.model.config, n, self._tokens.shape[1], x.device, self._cache.keys.dtype
        )
        cache.keys[layer:, :, :, :start] = self._cache.keys[layer:, :, :, :start]
        cache.values[layer:, :, :, :start] = self._cache.values[layer:, :, :, :start]
        rewind_cache(self.model, cache, self._residuals, start)

        tokens = self._tokens[:, start:].expand(n, -1)
        mask = self.interventions.mask(self._tokens.shape[1], x.device, start)
        taps = chain_taps(taps, self._kept_taps(start), self.interventions.taps())
        with self.model.evaluating():
            x = self.model.run_blocks(tokens, cache, mask, taps, entry=(layer, x))
        return measure_logit_difference(self.model, x[:, -1], self.contrast).cpu().numpy()


def _make_cell_values(layer: int, columns: range, logit_differences: np.ndarray) -> CellValues:
    return CellValues(np.array([(layer, column) for column in columns]), logit_differences)


def _replace_head(head: int, values: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y[:, :, head] = values
    return y


def _replace_token(token: int, values: Tensor, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, token] = values
    return x


def _replace_row(row: int, values: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y[row] = values
    return y


def _replace_heads_of_rows(heads: Sequence[int], values: Tensor, y: Tensor) -> Tensor:
    """Tap: replace in y (n, S, H, d_v) head heads[r] in row r by its values (S, H, d_v)."""
    y = y.clone()
    for row, head in enumerate(heads):
        y[row, :, head] = values[:, head]
    return y
