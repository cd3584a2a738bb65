"""Record the activations of a forward pass, and save the arrays of a snapshot."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from common.files import atomic_write
from generation.scoring import max_logit_rows, token_losses
from glass.heads.probes import Probes
from model import GPT, SelfAttention, Taps

PATTERNS = ("text", "repeated", "control")  # arrays of attention patterns, saved as float16
MAX_SAVED_PARAMETERS = 20_000_000  # no weights are saved for larger models


@dataclass(frozen=True)
class ForwardPass:
    """Activations of one forward pass over B rows of T tokens, in L layers with H heads."""

    tokens: Tensor  # (B, T)
    residuals: Tensor  # the embeddings, then the output of each block, (L + 1, B, T, C)
    k: Tensor  # (L, B, G, T, d_k) for G key/value heads
    v: Tensor  # (L, B, G, T, d_v)
    heads: Tensor  # output of each head before W_O, (L, B, T, H, d_v)
    weights: Tensor  # attention patterns, zero above the diagonal, (L, B, H, T, T)

    def rows(self, which: slice | Sequence[int]) -> "ForwardPass":
        """Select some of the B rows in every array."""
        by_layer = (self.residuals, self.k, self.v, self.heads, self.weights)
        return ForwardPass(self.tokens[which], *(values[:, which] for values in by_layer))

    def first_tokens(self, length: int) -> "ForwardPass":
        """Select the first `length` tokens in every array."""
        return ForwardPass(
            self.tokens[:, :length],
            self.residuals[:, :, :length],
            self.k[:, :, :, :length],
            self.v[:, :, :, :length],
            self.heads[:, :, :length],
            self.weights[:, :, :, :length, :length],
        )


@torch.no_grad()
def capture(model: GPT, ids: np.ndarray) -> ForwardPass:
    """Run the model on ids (B, T) and record the activations; its mode does not change."""
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    names, layers = ("residual", "k", "v", "heads", "weights"), range(model.config.n_layer)
    stored: dict[str, list[Tensor]] = {name: [] for name in names}
    taps: Taps = {(name, layer): stored[name].append for name in names for layer in layers}
    taps["embedding", 0] = stored["residual"].append
    with model.evaluating():
        model.run_blocks(tokens, taps=taps)
    return ForwardPass(tokens, *(torch.stack(stored[name]) for name in names))


def in_float32(model: GPT) -> GPT:
    """Return the model, or a float32 copy if lower precision would hide small effects."""
    if torch.finfo(model.head.weight.dtype).bits >= 32:
        return model
    return copy.deepcopy(model).float()


@torch.no_grad()
def correct_predictions(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the likeliest next token is the target, else 0; see `token_losses`."""
    some = x.flatten(0, -2).split(max_logit_rows(model))
    likeliest = torch.cat([model.head(model.norm(rows)).argmax(dim=-1) for rows in some])
    is_correct = likeliest.view(targets.shape) == targets
    return is_correct.float().masked_fill(targets < 0, torch.nan)


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the id after each token of (…, T); -1 after the last."""
    return F.pad(tokens[..., 1:], (0, 1), value=-1)


def residual_writes(attention: SelfAttention, heads: Tensor) -> Tensor:
    """Return what each head adds to the residual stream: heads (…, H, d_v) → (…, H, C)."""
    W_O = attention.W_O.weight.unflatten(1, heads.shape[-2:])  # (C, H, d_v)
    return torch.einsum("...hd,chd->...hc", heads, W_O)


@torch.no_grad()
def value_norms(model: GPT, v: Tensor, gram: Tensor | None = None) -> Tensor:
    """Return ‖v_j W_O‖ (L, B, H, T) for each head and token j, from values v (L, B, G, T, d_v).

    This is the norm of a head's output, before gates, if it attends to token j only. The
    value-weighted attention map is the attention weight times this norm.

    Reference: Kobayashi et al. 2020, "Attention is Not Only a Weight".
    """
    v = v.repeat_interleave(model.config.n_head // v.shape[2], dim=2)  # (L, B, H, T, d_v)
    gram = output_gram(model) if gram is None else gram
    squares = torch.einsum("lbhtd,lhde,lbhte->lbht", v, gram, v)  # ‖W v‖² = vᵀ (WᵀW) v
    return squares.clamp(min=0).sqrt()


@torch.no_grad()
def output_gram(model: GPT) -> Tensor:
    """Return WᵀW (L, H, d_v, d_v) of the part W of W_O that each head's output is multiplied by."""
    of_layers = []
    for block in model.blocks:
        W_O = block.attention.W_O.weight.unflatten(1, (model.config.n_head, -1))  # (C, H, d_v)
        of_layers.append(torch.einsum("chd,che->hde", W_O, W_O))
    return torch.stack(of_layers)


def split_random_rows(random: ForwardPass) -> tuple[ForwardPass, ForwardPass, ForwardPass]:
    """Split the pass over all random rows into repeated, reshuffled and control rows."""
    repeated, reshuffled, control = np.split(np.arange(len(random.tokens)), 3)
    return random.rows(repeated), random.rows(reshuffled), random.rows(control)


def snapshot_arrays(model: GPT, text: ForwardPass, random: ForwardPass) -> dict[str, np.ndarray]:
    """Return the arrays that a snapshot saves, of a text (1, T) and random rows (3 P, T_r).

    Returns:
        Attention patterns `text` (L, H, T, T), `repeated` and `control` (L, P, H, T_r, T_r).
        `text_value_norms` (L, H, T) and `repeated_value_norms` (L, P, H, T_r): see `value_norms`.
        Next-token losses `repeated_loss`, `reshuffled_loss` (P, T_r) in nats, and whether the
        likeliest token is the next one, `repeated_correct` (P, T_r); the last of a row is nan.
    """
    arrays = {"text": text.weights[:, 0], "text_value_norms": value_norms(model, text.v)[:, 0]}
    if len(random.tokens):
        repeated, reshuffled, control = split_random_rows(random)
        arrays["repeated"] = repeated.weights
        arrays["control"] = control.weights
        arrays["repeated_value_norms"] = value_norms(model, repeated.v)
        for name, rows in (("repeated_loss", repeated), ("reshuffled_loss", reshuffled)):
            arrays[name] = token_losses(model, rows.residuals[-1], next_tokens(rows.tokens))
        arrays["repeated_correct"] = correct_predictions(
            model, repeated.residuals[-1], next_tokens(repeated.tokens)
        )
    return {name: value.cpu().numpy() for name, value in arrays.items()}


def save_snapshot(path: Path, step: int, probes: Probes, arrays: dict[str, np.ndarray]) -> None:
    """Write a snapshot as .npz: the probes and the arrays, with attention patterns as float16."""
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
    saved |= {name: arrays[name].astype(np.float16) for name in PATTERNS if name in arrays}
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, **saved)


def float16_weights(model: GPT) -> dict[str, Tensor]:
    """Copy the weights to the CPU as float16. Tied weights appear once."""
    return {
        name: (tensor.detach().half() if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in model.tensors().items()
    }


def save_weights(path: Path, model: GPT) -> None:
    """Write the weights as float16 safetensors, unless there are over `MAX_SAVED_PARAMETERS`."""
    if model.num_parameters() <= MAX_SAVED_PARAMETERS:
        with atomic_write(path) as part:
            part.write_bytes(safetensors_bytes(float16_weights(model)))
