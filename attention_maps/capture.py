"""Exact attention maps of a model on the probes, beside its fused attention, which stays as it is.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attention_maps.ablation import nats, next_tokens, streams
from attention_maps.probe import Probes
from files import atomic_write
from model import GPT


@dataclass(frozen=True)
class Snapshot:
    """Attention weights at a step, float32: each row sums to 1, nothing above the diagonal.

    text: (L, H, T, T) on the excerpt; repeat, control: (L, P, H, T_r, T_r) on the random texts.
    text_value_norms (L, H, T), repeat_value_norms (L, P, H, T_r): see `SelfAttention.value_norms`;
        a map's columns times these are the value-weighted map.
    repeat_loss (P, T_r): nats of the token that follows, nan for the last.
    """

    step: int
    probes: Probes
    text: np.ndarray
    text_value_norms: np.ndarray
    repeat: np.ndarray
    repeat_value_norms: np.ndarray
    control: np.ndarray
    repeat_loss: np.ndarray

    def save(self, path: Path, **more: np.ndarray) -> None:
        """Write the maps as float16, what they are of, and `more` to an .npz without pickle.

        Not compressed: that would take as long as to capture them, and halve the file at most.
        """
        p = self.probes
        arrays = {
            "step": self.step, **{name: getattr(self, name).astype(np.float16)
                                  for name in ("text", "repeat", "control")},
            "text_value_norms": self.text_value_norms,
            "repeat_value_norms": self.repeat_value_norms, "repeat_loss": self.repeat_loss,
            "text_ids": p.text, "repeat_ids": p.repeat, "control_ids": p.control,
            "text_tokens": p.words, "repeat_tokens": p.repeat_words, "repeat_periods": p.periods}
        with atomic_write(path) as part, part.open("wb") as file:
            np.savez(file, **arrays, **more)


def capture(model: GPT, probes: Probes, step: int) -> Snapshot:
    """The model's maps on the probes, computed in the dtype of its weights.

    The model and torch's random state stay as they are.
    """
    text, text_norms, _ = maps(model, probes.text[None])
    P = len(probes.repeat)
    random, norms, loss = maps(model, np.concatenate([probes.repeat, probes.control]), P)
    return Snapshot(step, probes, text[:, 0], text_norms[:, 0], random[:, :P], norms,
                    random[:, P:], loss)


@torch.no_grad()
def maps(model: GPT, tokens: np.ndarray,
         rows: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights (L, B, H, T, T) on tokens (B, T), and of the first so many rows the value norms
    (L, rows, H, T) and the loss of each next token (rows, T), all float32."""
    weights, norms = [], []
    on_device = torch.from_numpy(tokens).to(model.head.weight.device)
    with model.evaluating():
        E, rotary = streams(model, on_device)
        for block, x in zip(model.blocks, E):
            x = block.norm_1(x)
            weights.append(block.attention.weights(x, rotary).float().cpu().numpy())
            norms.append(block.attention.value_norms(x[:rows]).float().cpu().numpy())
        loss = nats(model, E[-1][:rows], next_tokens(on_device[:rows]))
    return np.stack(weights), np.stack(norms), loss.float().cpu().numpy()
