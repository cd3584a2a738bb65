"""Capture one forward pass over a probe, and save the arrays of a snapshot."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from attention_maps.probes import Probes
from common.files import atomic_write
from model import GPT, SelfAttention, Taps, store

MAX_LOGITS = 1 << 25  # computed at once: 128 MB in float32
PATTERNS = ("text", "repeated", "control")  # arrays of attention patterns, saved as float16
MAX_SAVED_PARAMETERS = 20_000_000  # larger models are not saved beside an attention grid


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass over tokens (B, T) computed in each layer.

    Attributes:
        tokens: Input ids (B, T).
        residuals: Residual stream (L + 1, B, T, C): the embeddings, then after each block.
        k: Keys (L, B, G, T, d_k).
        v: Values (L, B, G, T, d_v).
        heads: Weighted sum of values of each head, before W_O, (L, B, T, H, d_v).
        weights: Attention patterns (L, B, H, T, T): rows sum to 1, zero above the diagonal.
    """

    tokens: Tensor
    residuals: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    weights: Tensor

    def rows(self, which: slice | Sequence[int]) -> "ForwardPass":
        """Return the same for some of the B rows."""
        return ForwardPass(
            self.tokens[which],
            self.residuals[:, which],
            self.k[:, which],
            self.v[:, which],
            self.heads[:, which],
            self.weights[:, which],
        )


@torch.no_grad()
def capture(model: GPT, ids: np.ndarray) -> ForwardPass:
    """Run the model on ids (B, T) without changing its mode or torch's random state."""
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    stored: dict[str, list[Tensor]] = {
        name: [] for name in ("residual", "k", "v", "heads", "weights")
    }
    taps: Taps = {name: partial(store, values) for name, values in stored.items()}
    taps["embedding"] = taps["residual"]
    with model.evaluating():
        model.run_blocks(tokens, taps=taps)
    residuals, k, v, heads, weights = (torch.stack(values) for values in stored.values())
    return ForwardPass(tokens, residuals, k, v, heads, weights)


def in_float32(model: GPT) -> GPT:
    """Return the model in float32: a copy if it has fewer bits, since effects on loss are small."""
    if torch.finfo(model.head.weight.dtype).bits >= 32:
        return model
    model_copy = copy.deepcopy(model).float()
    model_copy.compute_rotary(model.head.weight.device)  # anew, not from rounded values
    return model_copy


def max_logit_rows(model: GPT) -> int:
    """Return for how many tokens logits are computed at once."""
    vocab_size = len(model.head.weight)
    return max(1, MAX_LOGITS // vocab_size)


@torch.no_grad()
def token_losses(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every target in nats.

    Args:
        model: Provides the final norm and the output layer.
        x: Residual stream after the last block, (…, T, C).
        targets: Ids (…, T); -1 for none.

    Returns:
        -ln p of the targets, (…, T); nan where the target is -1.
    """
    rows = max_logit_rows(model)
    losses = []
    for some, ids in zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows)):
        logits = model.head(model.norm(some))  # (rows, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, ids, ignore_index=-1, reduction="none"))
    return torch.cat(losses).view(targets.shape).masked_fill(targets < 0, torch.nan)


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the token that follows each of tokens (…, T); -1 after the last."""
    return F.pad(tokens[..., 1:], (0, 1), value=-1)


def residual_writes(attention: SelfAttention, heads: Tensor) -> Tensor:
    """Return what each head adds to the residual stream: heads (…, H, d_v) → (…, H, C)."""
    W_O = attention.W_O.weight.unflatten(1, heads.shape[-2:])  # (C, H, d_v)
    return torch.einsum("...hd,chd->...hc", heads, W_O)


@torch.no_grad()
def value_norms(model: GPT, v: Tensor) -> Tensor:
    """Return ‖v_j W_O‖ for every token j and head: v (L, B, G, T, d_v) → (L, B, H, T).

    It is how much a head writes to the residual stream when it attends to a token. Times the
    attention weight, it gives the value-weighted attention map.

    Reference: Kobayashi et al. 2020, "Attention is Not Only a Weight".
    """
    H, d_v = model.config.n_head, model.config.value_dim
    v = v.repeat_interleave(H // v.shape[2], dim=2)  # (L, B, H, T, d_v)
    W_O = torch.stack([block.attention.W_O.weight for block in model.blocks])
    W_O = W_O.unflatten(2, (H, d_v))  # (L, C, H, d_v)
    gram = torch.einsum("lchd,lche->lhde", W_O, W_O)  # ‖W v‖² = vᵀ WᵀW v: of size d_v, not C
    squares = torch.einsum("lbhtd,lhde,lbhte->lbht", v, gram, v)
    return squares.clamp(min=0).sqrt()


def split_random_rows(random: ForwardPass) -> tuple[ForwardPass, ForwardPass, ForwardPass]:
    """Split the pass over all random rows into the repeated, reshuffled and control rows."""
    repeated, reshuffled, control = np.split(np.arange(len(random.tokens)), 3)
    return random.rows(repeated), random.rows(reshuffled), random.rows(control)


def snapshot_arrays(model: GPT, text: ForwardPass, random: ForwardPass) -> dict[str, np.ndarray]:
    """Return the arrays that a snapshot saves of its forward passes.

    Args:
        model: The model of both passes.
        text: Pass over the text, one row.
        random: Pass over the repeated, reshuffled and control rows, P each; P may be 0.

    Returns:
        `text` (L, H, T, T), `repeated` and `control` (L, P, H, T_r, T_r): attention patterns.
        `text_value_norms` (L, H, T), `repeated_value_norms` (L, P, H, T_r): see `value_norms`.
        `repeated_loss`, `reshuffled_loss` (P, T_r): loss of the next token, nan for the last.
    """
    arrays = {
        "text": text.weights[:, 0],
        "text_value_norms": value_norms(model, text.v)[:, 0],
    }
    if len(random.tokens):
        repeated, reshuffled, control = split_random_rows(random)
        arrays["repeated"] = repeated.weights
        arrays["control"] = control.weights
        arrays["repeated_value_norms"] = value_norms(model, repeated.v)
        for name, rows in (("repeated_loss", repeated), ("reshuffled_loss", reshuffled)):
            arrays[name] = token_losses(model, rows.residuals[-1], next_tokens(rows.tokens))
    return {name: value.cpu().numpy() for name, value in arrays.items()}


def save_snapshot(path: Path, step: int, probes: Probes, arrays: dict[str, np.ndarray]) -> None:
    """Write a snapshot as an .npz: its arrays, attention patterns as float16, and the probes."""
    saved: dict[str, Any] = {
        "step": step,
        "text_ids": probes.text,
        "text_tokens": probes.text_tokens,
        "window_ids": probes.windows,
    }
    if len(probes.periods):
        saved |= {
            "repeated_ids": probes.repeated,
            "reshuffled_ids": probes.reshuffled,
            "control_ids": probes.control,
            "repeated_tokens": probes.repeated_tokens,
            "repeated_periods": probes.periods,
        }
    saved |= arrays
    for name in PATTERNS:
        if name in arrays:
            saved[name] = arrays[name].astype(np.float16)
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, **saved)


def float16_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights as float16 on the CPU; tied weights once."""
    weights = {}
    for name, tensor in model.tensors().items():
        if tensor.is_floating_point():
            tensor = tensor.detach().half()
        weights[name] = tensor.cpu()
    return weights


def save_weights(path: Path, model: GPT) -> None:
    """Write the weights as float16, unless the model has over `MAX_SAVED_PARAMETERS`."""
    if model.num_parameters() <= MAX_SAVED_PARAMETERS:
        with atomic_write(path) as part:
            part.write_bytes(safetensors_bytes(float16_weights(model)))
