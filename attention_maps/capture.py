"""One forward pass over a probe, with all of it that is looked at; what a snapshot keeps of it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as safe_bytes
from torch import Tensor

from attention_maps.probes import Probes
from common.files import atomic_write
from model import GPT, SelfAttention, store

LOGITS = 1 << 25  # that are made at once, at most
MAPS = ("text", "repeated", "control")
SAVED = 20_000_000  # parameters of a model of which a picture keeps the weights, at most


@dataclass(frozen=True)
class Forward:
    """A forward pass over tokens (B, T), and what its taps stored of each layer.

    residuals: (L + 1, B, T, C), the embeddings and what each block made of them.
    k, v: (L, B, G, T, d).
    heads: (L, B, T, H, d_v), what each head gathered, before W_O.
    weights: (L, B, H, T, T); each row sums to 1, nothing is above the diagonal."""

    tokens: Tensor
    residuals: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    weights: Tensor

    def rows(self, which: slice | Sequence[int]) -> "Forward":
        """The same of some of the B texts."""
        stored = (self.residuals, self.k, self.v, self.heads, self.weights)
        return Forward(self.tokens[which], *(values[:, which] for values in stored))


@torch.no_grad()
def capture(model: GPT, ids: np.ndarray) -> Forward:
    """Run the model on ids (B, T); its mode and torch's random state stay as they are."""
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    stored = {name: [] for name in ("residual", "k", "v", "heads", "weights")}
    taps = {name: partial(store, values) for name, values in stored.items()}
    with model.evaluating():
        model.run_blocks(tokens, taps=taps | {"embedding": taps["residual"]})
    return Forward(tokens, *(torch.stack(values) for values in stored.values()))


def in_float32(model: GPT) -> GPT:
    """The model, or, of one in fewer bits, a copy: differences of losses are small."""
    if torch.finfo(model.head.weight.dtype).bits >= 32:
        return model
    finer = copy.deepcopy(model).float()
    finer.compute_rotary(model.head.weight.device)  # not rounded, as a model in float32 has it
    return finer


@torch.no_grad()
def token_losses(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """-ln p of targets (…, T), of what the last block gives, x (…, T, C): (…, T); nan for -1."""
    found, most = [], max(1, LOGITS // model.config.vocab_size)
    for some, ids in zip(x.flatten(0, -2).split(most), targets.flatten().split(most)):
        logits = model.head(model.norm(some))  # (…, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(F.cross_entropy(logits, ids, ignore_index=-1, reduction="none"))
    return torch.cat(found).view(targets.shape).masked_fill(targets < 0, torch.nan)


def next_tokens(tokens: Tensor) -> Tensor:
    """The token that follows each of tokens (…, T); -1 after the last."""
    return F.pad(tokens[..., 1:], (0, 1), value=-1)


def written(attention: SelfAttention, heads: Tensor) -> Tensor:
    """What each head writes of what it gathered, (…, H, d_v): (…, H, C)."""
    W_O = attention.W_O.weight.unflatten(1, heads.shape[-2:])  # (C, H, d_v)
    return torch.einsum("...hd,chd->...hc", heads, W_O)


@torch.no_grad()
def value_norms(model: GPT, v: Tensor) -> Tensor:
    """‖v_j W_O^h‖ of every token j in every head h, of values v (L, B, G, T, d_v): (L, B, H, T).
    How much a head writes to the residual stream when it looks at a token: times the weight, the
    value-weighted map (Kobayashi et al. 2020, "Attention is Not Only a Weight")."""
    H, d_v = model.config.n_head, model.config.value_dim
    v = v.repeat_interleave(H // v.shape[2], dim=2)  # (L, B, H, T, d_v)
    W = torch.stack([block.attention.W_O.weight for block in model.blocks])
    W = W.unflatten(2, (H, d_v))  # (L, C, H, d_v)
    gram = torch.einsum("lchd,lche->lhde", W, W)  # ‖W v‖² = vᵀ WᵀW v: the small d_v, not C
    squares = torch.einsum("lbhtd,lhde,lbhte->lbht", v, gram, v)
    return squares.clamp(min=0).sqrt()


def arrays(model: GPT, text: Forward, random: Forward) -> dict[str, np.ndarray]:
    """What a snapshot tells of the text, and of random texts, of which the first third repeats,
    the second has what is repeated in another order, and the last, `control`, repeats nothing:

    text (L, H, T, T), repeat, control (L, P, H, T_r, T_r): the maps.
    text_value_norms (L, H, T), repeated_value_norms (L, P, H, T_r): see `value_norms`.
    repeated_loss, reshuffled_loss (P, T_r): nats of the token that follows, nan for the last."""
    found = {"text": text.weights[:, 0], "text_value_norms": value_norms(model, text.v)[:, 0]}
    if len(random.tokens):
        repeat, reshuffled, control = thirds(random)
        losses = (
            token_losses(model, rows.residuals[-1], next_tokens(rows.tokens))
            for rows in (repeat, reshuffled)
        )
        found |= {
            "repeated": repeat.weights,
            "control": control.weights,
            "repeated_value_norms": value_norms(model, repeat.v),
            **dict(zip(("repeated_loss", "reshuffled_loss"), losses)),
        }
    return {name: value.cpu().numpy() for name, value in found.items()}


def thirds(random: Forward) -> list[Forward]:
    """Repeat, reshuffled and control of all random texts."""
    return [random.rows(rows) for rows in np.split(np.arange(len(random.tokens)), 3)]


def save(path: Path, step: int, probes: Probes, arrays: dict[str, np.ndarray]) -> None:
    """Write a snapshot's arrays, the maps as float16, and what they are of, as an .npz."""
    p, small = probes, {name: arrays[name].astype(np.float16) for name in MAPS if name in arrays}
    told = {"text_ids": p.text, "text_tokens": p.words, "window_ids": p.windows}
    if len(p.periods):
        told |= {
            "repeated_ids": p.repeated,
            "reshuffled_ids": p.reshuffled,
            "control_ids": p.control,
            "repeated_tokens": p.repeated_words,
            "repeated_periods": p.periods,
        }
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, step=step, **(told | arrays | small))


def float16_weights(model: GPT) -> dict[str, Tensor]:
    """The weights as float16 on the CPU, tied ones once."""
    return {
        name: (t.detach().half() if t.is_floating_point() else t).cpu()
        for name, t in model.tensors().items()
    }


def save_weights(path: Path, model: GPT) -> None:
    """Write the weights of a small model as float16."""
    if model.num_parameters() <= SAVED:
        with atomic_write(path) as part:
            part.write_bytes(
                safe_bytes(float16_weights(model))
            )  # an OSError where the disk is full
