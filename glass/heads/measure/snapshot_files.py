"""The files of a snapshot: its arrays (.npz) and float16 weights (.safetensors)."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from common.files import atomic_write
from glass.heads.measure.probes import Probes
from model import GPT
from training.tensors import make_stamp

PATTERN_ARRAYS = ("text", "repeated", "control")  # attention patterns, saved as float16
MAX_SAVED_PARAMETERS = 20_000_000  # no weights are saved for larger models


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
