"""Read a text with a model, and keep what is known of the tokens before an edit."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from generation.sampling import NON_FINITE_PREDICTIONS
from generation.scoring import max_logit_rows
from glass.heads.cached_pass import CachedPass
from glass.heads.capture import ForwardPass, value_norms
from glass.heads.interventions import Interventions
from glass.heads.logit_attribution import PREDICTED_TOKENS
from kernels import in_float32_or_finer
from model import GPT


class Predictions(NamedTuple):
    """Predictions after each of T tokens."""

    log_normalizers: Tensor  # log Σ exp of the logits, (T,)
    next_ids: Tensor  # the most probable next tokens, (T, 5), or fewer in a tiny vocabulary


class Reading:
    """A cached forward pass, with the predictions and value norms of the text read last.

    Only what belongs to tokens from the first change on is computed anew.
    """

    def __init__(self, model: GPT, interventions: Interventions, gram: Tensor) -> None:
        """Take a model, the heads to ablate, and its `output_gram`."""
        self.model = model
        self._gram = gram
        self._cached_pass = CachedPass(model, interventions.ablated)
        self._predicted = 0  # tokens whose predictions are known
        self._measured = 0  # tokens whose value norms are known
        device = model.head.weight.device
        self._predictions = Predictions(
            torch.empty(0, device=device), torch.empty(0, 0, dtype=torch.int64, device=device)
        )
        self._norms = torch.empty(model.config.n_layer, model.config.n_head, 0, device=device)
        self._largest = torch.empty(0, device=device)  # of each query, (T,)
        self.forward: ForwardPass

    def read(self, ids: list[int], hidden: tuple[int, ...]) -> ForwardPass:
        """Run the model on a text; the result is valid until the next call."""
        self.forward = self._cached_pass.read(ids, hidden)
        self._predicted = min(self._predicted, self._cached_pass.first_changed)
        self._measured = min(self._measured, self._cached_pass.first_changed)
        return self.forward

    def final_states(self, start: int = 0) -> Tensor:
        """Return the normalized residual stream after the last block, of tokens from `start` on."""
        return self.model.norm(self.forward.residuals[-1, 0, start:])

    def predict(self) -> Predictions:
        """Compute the predictions after each token; raise `UserError` if they are not finite."""
        start = self._predicted
        known = Predictions(*(values[:start] for values in self._predictions))
        if start == self.forward.tokens.shape[1]:
            return known
        normalizers, next_ids = [known.log_normalizers], [known.next_ids]
        for states in self.final_states(start).split(max_logit_rows(self.model)):
            logits = in_float32_or_finer(self.model.head(states))  # (n, V)
            count = min(PREDICTED_TOKENS, logits.shape[-1])
            normalizers.append(logits.logsumexp(dim=-1))
            next_ids.append(logits.topk(count).indices)
        if start == 0:
            del normalizers[0], next_ids[0]  # of another type and width
        self._predictions = Predictions(torch.cat(normalizers), torch.cat(next_ids))
        if not self._predictions.log_normalizers.isfinite().all():
            raise UserError(NON_FINITE_PREDICTIONS)
        self._predicted = len(self._predictions.log_normalizers)
        return self._predictions

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities (T, k) of some next tokens (T, k) after each token."""
        log_normalizers = self.predict().log_normalizers
        return select_logits(self.model, self.final_states(), ids) - log_normalizers[:, None]

    def losses(self) -> np.ndarray:
        """Return the loss in nats of the token after each one, (T,); nan after the last."""
        following = self.forward.tokens[0].roll(-1)
        losses = -self.log_probabilities(following[:, None])[:, 0]
        losses[-1] = torch.nan
        return to_float32(losses)

    def measure_norms(self) -> tuple[Tensor, float]:
        """Return ‖v_j W_O‖ (L, H, T) and its largest product with an attention weight."""
        start, weights = self._measured, self.forward.weights[:, 0]  # (L, H, T, T)
        new_norms = value_norms(self.model, self.forward.v[:, :, :, start:], self._gram)[:, 0]
        norms = torch.cat((self._norms[..., :start], new_norms), dim=-1)  # (L, H, T)
        largest = [self._largest[:start]]
        if start < weights.shape[-1]:
            of_layers = [
                (A[:, start:] * n[:, None]).amax(dim=(0, 2)) for A, n in zip(weights, norms)
            ]
            largest.append(torch.stack(of_layers).amax(dim=0))
        self._norms, self._largest = norms, torch.cat(largest)
        self._measured = norms.shape[-1]
        return norms, self._largest.max().item()


def select_logits(model: GPT, states: Tensor, ids: Tensor) -> Tensor:
    """Return the logits of ids (…, k) at states (…, C), rounded as `model.head` rounds them."""
    rows = in_float32_or_finer(model.head.weight[ids])  # (…, k, C)
    logits = torch.einsum("...kc,...c->...k", rows, in_float32_or_finer(states))
    return in_float32_or_finer(logits.to(states.dtype))


def to_float32(values: Tensor) -> np.ndarray:
    """Convert values to a NumPy array in float32."""
    return values.float().cpu().numpy()
