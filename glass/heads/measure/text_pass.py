"""Compute losses, head effects and patches of a text that a model has read."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.text import VISIBLE_SPACES
from config import GPTConfig
from data.tokenizer import Tokenizer
from generation.decoder import cut, window_start
from generation.sampling import NON_FINITE_PREDICTIONS, Sampling, draw_tokens
from generation.scoring import max_logit_rows
from glass.heads.measure.ablation import iterate_head_effects
from glass.heads.measure.capture import ForwardPass, allocate_pass, output_gram, record, value_norms
from glass.heads.measure.interventions import NO_INTERVENTIONS, Interventions
from glass.heads.measure.logit_attribution import PREDICTED_TOKENS
from glass.heads.measure.patching import Contrast, Patch, Patching, measure_logit_difference
from glass.heads.measure.probes import spell_tokens
from kernels import in_float32_or_finer
from model import GPT

MAX_ATTENTION_WEIGHTS = 1 << 26  # of one text in all heads: 256 MB in float32
CAPACITY_STEP = 64  # tokens by which the buffers of a pass grow


class TextPass:
    """The forward pass over the text that a model has read last, and measurements of it.

    Some outputs are ablated. `read` computes only from the first token that differs on, also after
    a pass that failed.
    """

    forward: ForwardPass

    def __init__(self, model: GPT, interventions: Interventions = NO_INTERVENTIONS) -> None:
        self.model = model
        self.interventions = interventions  # while the model read the text
        self.first_changed = 0  # first token that the last read computed anew
        self.ids: list[int] = []  # of the text, whose activations the buffers hold
        self._buffers = allocate_pass(model, 1, CAPACITY_STEP)
        device = model.head.weight.device
        count = min(PREDICTED_TOKENS, model.head.out_features)
        self._log_normalizers = torch.empty(0, device=device)
        self._next_ids = torch.empty(0, count, dtype=torch.int64, device=device)

    def read(self, ids: Sequence[int], hidden: Sequence[int] = ()) -> None:
        """Run the model on at most block_size ids, with some tokens hidden from later ones.

        `forward` is valid until the next call, which overwrites its tensors.
        """
        start = self._find_first_change(ids, hidden)
        if len(ids) > self._buffers.tokens.shape[1]:
            self._grow(len(ids), start)
        self.ids = list(ids[:start])
        self._log_normalizers = self._log_normalizers[:start]
        self._next_ids = self._next_ids[:start]
        self.interventions = self.interventions._replace(hidden=tuple(hidden))
        self.first_changed = start
        self.forward = self._buffers.first_tokens(len(ids))
        if start < len(ids):
            self.forward.tokens[0, start:] = torch.tensor(ids[start:])
            record(self.model, self.forward, self.interventions, start=start)
        self.ids = list(ids)

    def _find_first_change(self, ids: Sequence[int], hidden: Sequence[int]) -> int:
        if self.model.config.smear_keys:  # they cannot be continued
            return 0
        changed = set(hidden) ^ set(self.interventions.hidden)
        end = min(len(self.ids), len(ids), *(j + 1 for j in changed))
        for t in range(end):
            if ids[t] != self.ids[t]:
                return t
        return end

    def _grow(self, length: int, kept: int) -> None:
        capacity = -(-length // CAPACITY_STEP) * CAPACITY_STEP
        old = self._buffers.first_tokens(kept)
        self._buffers = allocate_pass(self.model, 1, capacity)
        for name, values in vars(self._buffers.first_tokens(kept)).items():
            values.copy_(getattr(old, name))

    @torch.no_grad()
    def final_states(self, start: int = 0) -> Tensor:
        """Return the normalized residual stream after the last block, of tokens from `start` on."""
        return self.model.norm(self.forward.residuals[-1, 0, start:])

    @torch.no_grad()
    def logits(self, start: int = 0) -> Tensor:
        """Return the logits (T - start, V) after each token from `start` on."""
        return self.model.head(self.final_states(start))

    @torch.no_grad()
    def predict(self) -> tuple[Tensor, Tensor]:
        """Return log Σ exp of the logits (T,), and the likeliest next tokens (T, 5)."""
        states = self.final_states(len(self._next_ids))
        for rows in states.split(max_logit_rows(self.model)):
            logits = in_float32_or_finer(self.model.head(rows))  # (n, V)
            next_ids = logits.topk(self._next_ids.shape[1]).indices
            self._log_normalizers = torch.cat((self._log_normalizers, logits.logsumexp(dim=-1)))
            self._next_ids = torch.cat((self._next_ids, next_ids))
        if not self._log_normalizers.isfinite().all():
            raise UserError(NON_FINITE_PREDICTIONS)
        return self._log_normalizers, self._next_ids

    @torch.no_grad()
    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities (T, k) of some next tokens (T, k) after each token."""
        log_normalizers, _ = self.predict()
        states = in_float32_or_finer(self.final_states())  # (T, C)
        rows = in_float32_or_finer(self.model.head.weight[ids])  # (T, k, C)
        logits = torch.einsum("tkc,tc->tk", rows, states)
        rounded = logits.to(self.model.head.weight.dtype)  # as `head` rounds them
        return in_float32_or_finer(rounded) - log_normalizers[:, None]

    def losses(self) -> np.ndarray:
        """Return the loss in nats of the token after each one, (T,); nan after the last."""
        following = self.forward.tokens[0].roll(-1)
        losses = -self.log_probabilities(following[:, None])[:, 0]
        losses[-1] = torch.nan
        return to_float32(losses)

    def measure_norms(self) -> tuple[Tensor, float]:
        """Return ‖v_j W_O‖ (L, H, T) and its largest product with an attention weight."""
        norms = value_norms(self.model, self.forward.v, self._gram)[:, 0]
        largest_weights = self.forward.weights[:, 0].amax(dim=-2)  # on each key, (L, H, T)
        return norms, (largest_weights * norms).amax().item()

    @cached_property
    def _gram(self) -> Tensor:
        return output_gram(self.model)

    def head_effects(self, i: int) -> Iterator[np.ndarray]:
        """Yield, for each layer, the loss increases (H,) of the token after i by its ablations."""
        forward = self.forward.first_tokens(i + 1)
        target = self.forward.tokens[:, i + 1 : i + 2]
        for increases in iterate_head_effects(self.model, forward, target, self.interventions):
            yield increases[:, 0]

    def logit_difference(self, contrast: Contrast) -> float:
        """Return logit(answer) - logit(wrong) of a prediction."""
        x = self.forward.residuals[-1, 0, contrast.position]
        return measure_logit_difference(self.model, x, contrast).item()

    def patch_into(
        self,
        base: "TextPass",
        contrast: Contrast,
        tokenizer: Tokenizer,
        kept: Sequence[Patch] = (),
    ) -> Patching:
        """Return the patching of activations of this pass into `base`.

        Both must have been read with the same interventions; of means, those of `base` apply. An
        error shows how the tokenizer split both texts.
        """
        if len(self.ids) != len(base.ids):
            splits = ("|".join(spell_tokens(tokenizer, ids)) for ids in (self.ids, base.ids))
            source_split, base_split = (split.translate(VISIBLE_SPACES) for split in splits)
            raise UserError(
                f"the texts have {len(self.ids)} and {len(base.ids)} tokens, {source_split} and "
                f"{base_split}: choose a clean and a corrupted text with equal numbers of tokens"
            )
        return Patching(self.model, self.forward, base.forward, contrast, kept, base.interventions)

    def continue_text(
        self, tokenizer: Tokenizer, max_new_tokens: int, temperature: float, seed: int
    ) -> Iterator[int]:
        """Yield the tokens that follow the text, which this pass reads with its interventions.

        Beyond `max_tokens` the text is cut as a `Decoder` cuts it.
        """
        maximum = max_tokens(self.model.config)
        prompt = self.forward.tokens.clone()  # (1, T)
        # Place that is never cut
        first = 0 if int(prompt[0, 0]) == tokenizer.begin_of_text else None
        hidden = self.interventions.hidden

        @torch.inference_mode(False)  # later calls change the pass's tensors in place
        @torch.no_grad()
        def next_logits(tokens: Tensor) -> Tensor:
            places = torch.arange(tokens.shape[1])[None]  # (1, T)
            start = window_start(tokens.shape[1], maximum)
            kept = cut(places, start, first)[0].tolist()
            still_hidden = [k for k, place in enumerate(kept) if place in hidden]
            self.read(tokens[0, kept].tolist(), still_hidden)
            return self.logits(-1)  # (1, V)

        sampling = Sampling(temperature, vocab_size=tokenizer.vocab_size)
        for token in draw_tokens(next_logits, prompt, max_new_tokens, sampling, [seed]):
            yield int(token)


def max_tokens(config: GPTConfig) -> int:
    """Return the maximum number of tokens of a text: its attention maps must not be too large."""
    fitting = math.isqrt(MAX_ATTENTION_WEIGHTS // (config.n_layer * config.n_head))
    return max(1, min(config.block_size, fitting))


def to_float32(values: Tensor) -> np.ndarray:
    """Convert values to a NumPy array in float32."""
    return values.float().cpu().numpy()
