"""The model that a page explores, and what is known of the text that it has read."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from data.tokenizer import Tokenizer
from generation.sampling import NON_FINITE_PREDICTIONS
from generation.scoring import max_logit_rows
from glass.heads.cached_pass import CachedPass
from glass.heads.capture import ForwardPass, output_gram, value_norms
from glass.heads.interventions import NO_INTERVENTIONS, Interventions
from glass.heads.logit_attribution import PREDICTED_TOKENS
from glass.heads.probes import spell_token
from glass.heads.results import Head
from glass.page.write import ExploredModel
from kernels import in_float32_or_finer
from model import GPT

MAX_READINGS = 3  # cached passes, such as those with and without interventions


class CachedReading:
    """A cached forward pass, with the predictions of the text read last.

    Only what belongs to tokens from the first change on is computed anew.
    """

    forward: ForwardPass

    def __init__(self, model: GPT, ablated: Sequence[Head]) -> None:
        self.model = model
        self._gram = output_gram(model)
        self._cached_pass = CachedPass(model, ablated)
        device, count = model.head.weight.device, min(PREDICTED_TOKENS, model.head.out_features)
        self._log_normalizers = torch.empty(0, device=device)
        self._next_ids = torch.empty(0, count, dtype=torch.int64, device=device)

    def read(self, ids: Sequence[int], hidden: Sequence[int]) -> None:
        """Run the model on a text; `forward` is valid until the next call."""
        self.forward = self._cached_pass.read(ids, hidden)
        end = self._cached_pass.first_changed
        self._log_normalizers, self._next_ids = self._log_normalizers[:end], self._next_ids[:end]

    def final_states(self, start: int = 0) -> Tensor:
        """Return the normalized residual stream after the last block, of tokens from `start` on."""
        return self.model.norm(self.forward.residuals[-1, 0, start:])

    def predict(self) -> tuple[Tensor, Tensor]:
        """Return log Σ exp of the logits (T,), and the likeliest next tokens (T, 5).

        Raises:
            UserError: If a prediction is not finite.
        """
        states = self.final_states(len(self._next_ids))
        for rows in states.split(max_logit_rows(self.model)):
            logits = in_float32_or_finer(self.model.head(rows))  # (n, V)
            next_ids = logits.topk(self._next_ids.shape[1]).indices
            self._log_normalizers = torch.cat((self._log_normalizers, logits.logsumexp(dim=-1)))
            self._next_ids = torch.cat((self._next_ids, next_ids))
        if not self._log_normalizers.isfinite().all():
            raise UserError(NON_FINITE_PREDICTIONS)
        return self._log_normalizers, self._next_ids

    def _log_probabilities(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities (T, k) of some next tokens (T, k) after each token."""
        log_normalizers, _ = self.predict()
        states = in_float32_or_finer(self.final_states())  # (T, C)
        rows = in_float32_or_finer(self.model.head.weight[ids])  # (T, k, C)
        logits = torch.einsum("tkc,tc->tk", rows, states)
        rounded = logits.to(self.model.head.weight.dtype)  # as `head` rounds them
        return in_float32_or_finer(rounded) - log_normalizers[:, None]

    def measure_predictions(self, ids: Tensor) -> dict[str, Any]:
        """Return the probabilities of some next tokens (T, k), and the loss after each token.

        Losses (T,) are in nats; nan after the last token.
        """
        following = self.forward.tokens[0].roll(-1)
        losses = -self._log_probabilities(following[:, None])[:, 0]
        losses[-1] = torch.nan
        chances = self._log_probabilities(ids).exp()
        return {"chances": chances.tolist(), "losses": to_float32(losses)}

    def measure_norms(self) -> tuple[Tensor, float]:
        """Return ‖v_j W_O‖ (L, H, T) and its largest product with an attention weight."""
        norms = value_norms(self.model, self.forward.v, self._gram)[:, 0]
        largest_weights = self.forward.weights[:, 0].amax(dim=-2)  # on each key, (L, H, T)
        return norms, (largest_weights * norms).amax().item()


class Session:
    """A model and its tokenizer, as the requests of a page use them.

    Only one thread at a time calls `read`.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        explored: ExploredModel,
        followed_run: Path | None = None,
        check_canceled: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the model in evaluation mode.

        `followed_run` is the run whose newest checkpoint is shown, or None, and `check_canceled` is
        called before each block, and whenever composition measures a head.
        """
        self.model, self.tokenizer = model.eval(), tokenizer
        self.explored = explored
        self.followed_run = followed_run
        self._find_reading = lru_cache(MAX_READINGS)(
            lambda ablated, has_hidden, role: CachedReading(model, ablated)
        )

        def check(*_: object) -> None:  # a closure is not copied with the model
            check_canceled()

        for module in (*(block.norm_1 for block in model.blocks), model.head):
            module.register_forward_pre_hook(check)

    def read(
        self,
        ids: Sequence[int],
        interventions: Interventions = NO_INTERVENTIONS,
        role: str = "",
    ) -> CachedReading:
        """Run the model on a text, or on what has changed since a text that is cached.

        The result is valid until the next call with the same role.
        """
        ablated, hidden = interventions
        reading = self._find_reading(ablated, bool(hidden), role)
        reading.read(ids, hidden)
        return reading

    def spell_tokens(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of some tokens, by id."""
        return {id: spell_token(self.tokenizer, id) for id in ids}


def to_float32(values: Tensor) -> np.ndarray:
    """Convert values to a NumPy array in float32."""
    return values.float().cpu().numpy()
