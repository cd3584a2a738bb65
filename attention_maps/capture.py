"""Exact attention maps of a model on the probes, beside its fused attention and without touching it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attention_maps.probe import Probes
from files import atomic_write
from model import GPT


@dataclass(frozen=True)
class Snapshot:
    """Attention weights at a step, float32: each row sums to 1, nothing above the diagonal.

    text: (L, H, T, T) on the excerpt whose tokens are `words`.
    repeat, control: (L, P, H, T_r, T_r) on the random texts, those with repeats of `periods`, whose tokens are
        `repeat_words`, and those without.
    text_value_norms (L, H, T) and repeat_value_norms (L, P, H, T_r): see `SelfAttention.value_norms`; a map's columns times
        these are the value-weighted map.
    """

    step: int
    text: np.ndarray
    words: list[str]
    text_value_norms: np.ndarray
    repeat: np.ndarray
    repeat_words: list[list[str]]
    repeat_value_norms: np.ndarray
    control: np.ndarray
    periods: np.ndarray

    def save(self, path: Path) -> None:
        """Write text and repeat as float16, with their tokens, to a compressed .npz that needs no pickle."""
        with atomic_write(path) as part, part.open("wb") as f:
            np.savez_compressed(
                f, step=self.step, text=self.text.astype(np.float16), text_tokens=np.array(self.words), text_value_norms=self.text_value_norms,
                repeat=self.repeat.astype(np.float16), repeat_tokens=np.array(self.repeat_words), repeat_value_norms=self.repeat_value_norms,
                repeat_periods=self.periods)


def capture(model: GPT, probes: Probes, step: int) -> Snapshot:
    """The model's maps on the probes, computed in the dtype of its weights. The model and torch's random state stay as they are."""
    (text, text_norms), (repeat, repeat_norms), (control, _) = (maps(model, tokens) for tokens in (probes.text[None], probes.repeat, probes.control))
    return Snapshot(step, text[:, 0], probes.words, text_norms[:, 0], repeat, probes.repeat_words, repeat_norms, control, probes.periods)


@torch.no_grad()
def maps(model: GPT, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weights (L, B, H, T, T) and value norms (L, B, H, T), float32, on tokens (B, T)."""
    weights, norms = [], []
    for attention, x, rotary in model.attention_inputs(torch.from_numpy(tokens).to(model.head.weight.device)):
        weights.append(attention.weights(x, rotary).float().cpu().numpy())
        norms.append(attention.value_norms(x).float().cpu().numpy())
    return np.stack(weights), np.stack(norms)
