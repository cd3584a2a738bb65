"""The files of a snapshot: its arrays (.npz) and float16 weights (.safetensors)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from common.files import atomic_write
from generation.scoring import max_logit_rows, token_losses
from glass.heads.measure.capture import ForwardPass, next_tokens, value_norms
from glass.heads.measure.probes import Probes
from model import GPT
from training.tensors import make_stamp

PATTERN_ARRAYS = ("text", "repeated", "control")  # attention patterns, saved as float16
MAX_SAVED_PARAMETERS = 20_000_000  # no weights are saved for larger models


def snapshot_arrays(model: GPT, text: ForwardPass, random: ForwardPass) -> dict[str, np.ndarray]:
    """Return the arrays that a snapshot saves, of a text (1, T) and random rows (3 P, T_r).

    They are attention patterns (…, H, T, T), value norms (…, H, T), losses (P, T_r) in nats, and
    whether the likeliest token is the next one (P, T_r); the last of a row is nan.
    """
    arrays = {"text": text.weights[:, 0], "text_value_norms": value_norms(model, text.v)[:, 0]}
    if P := len(random.tokens) // 3:
        x = random.residuals[-1]
        targets = next_tokens(random.tokens)
        arrays["repeated"] = random.weights[:, :P]
        arrays["control"] = random.weights[:, 2 * P :]
        arrays["repeated_value_norms"] = value_norms(model, random.v[:, :P])
        arrays["repeated_loss"] = token_losses(model, x[:P], targets[:P])
        arrays["reshuffled_loss"] = token_losses(model, x[P : 2 * P], targets[P : 2 * P])
        arrays["repeated_correct"] = _correct_predictions(model, x[:P], targets[:P])
    return {name: value.cpu().numpy() for name, value in arrays.items()}


@torch.no_grad()
def _correct_predictions(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the likeliest next token is the target, else 0; nan where the target is -1."""
    some = x.flatten(0, -2).split(max_logit_rows(model))
    likeliest = torch.cat([model.head(model.norm(rows)).argmax(dim=-1) for rows in some])
    is_correct = likeliest.view(targets.shape) == targets
    return is_correct.float().masked_fill(targets < 0, torch.nan)


def save_snapshot(path: Path, step: int, probes: Probes, arrays: dict[str, np.ndarray]) -> None:
    """Write a snapshot as .npz: the probes and the arrays, with attention patterns as float16."""
    saved: dict[str, Any] = {
        "step": step,
        "text_ids": probes.text,
        "text_tokens": probes.text_tokens,
        "window_ids": probes.windows,
        **arrays,
    }
    if len(probes.periods):
        saved |= {
            "repeated_ids": probes.repeated,
            "reshuffled_ids": probes.reshuffled,
            "control_ids": probes.control,
            "repeated_tokens": probes.repeated_tokens,
            "repeated_periods": probes.periods,
        }
    saved |= {name: arrays[name].astype(np.float16) for name in PATTERN_ARRAYS if name in arrays}
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, **saved)


def save_weights(path: Path, step: int, model: GPT) -> None:
    """Write the weights as float16 safetensors, unless there are over `MAX_SAVED_PARAMETERS`."""
    if model.num_parameters() <= MAX_SAVED_PARAMETERS:
        tensors = float16_weights(model)
        with atomic_write(path) as part:
            part.write_bytes(safetensors_bytes(tensors, make_stamp(step, tensors)))


def float16_weights(model: GPT) -> dict[str, Tensor]:
    """Copy the weights to the CPU as float16. Tied weights appear once."""
    return {
        name: (tensor.detach().half() if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in model.tensors().items()
    }
