"""Exact attention maps of a model on the probes, beside its fused attention and without touching it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attention_maps.probe import Probes
from model import GPT


@dataclass(frozen=True)
class Snapshot:
    """Attention weights at a step, float32: each row sums to 1, nothing above the diagonal.

    text: (L, H, T, T) on the excerpt whose tokens are `words`.
    repeat, control: (L, P, H, T_r, T_r) on the random texts, those with repeats of `periods` and those without.
    """

    step: int
    text: np.ndarray
    words: list[str]
    repeat: np.ndarray
    control: np.ndarray
    periods: np.ndarray

    def save(self, path: Path) -> None:
        """Write text and repeat as float16, with their tokens, to a compressed .npz that needs no pickle."""
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as f:
            np.savez_compressed(f, step=self.step, text=self.text.astype(np.float16), text_tokens=np.array(self.words),
                                repeat=self.repeat.astype(np.float16), repeat_periods=self.periods)
        part.replace(path)


def capture(model: GPT, probes: Probes, step: int) -> Snapshot:
    """The model's maps on the probes, computed in the dtype of its weights. The model and torch's random state stay as they are."""
    device = next(model.parameters()).device

    def maps(tokens: np.ndarray) -> np.ndarray:
        return model.attention_maps(torch.from_numpy(tokens).to(device)).cpu().numpy()  # (L, rows, H, T, T)

    return Snapshot(step, maps(probes.text[None])[:, 0], probes.words, maps(probes.repeat), maps(probes.control), probes.periods)
