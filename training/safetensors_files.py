"""Read and write safetensors files."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import UserError
from common.files import read_start
from common.terminal import error_sentence
from run.run_dir import parse_step

# Entry in a safetensors file's metadata: what it contains besides tensors, in JSON.
OTHER_VALUES = "other_values"


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in a safetensors file, memory-mapped, and its metadata.

    Raises:
        UserError: It cannot be read.
    """
    try:
        read_start(path)  # whose errors are clearer
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} cannot be read as safetensors: {error_sentence(e)}") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, memory-mapped, after verifying the step and hash of a snapshot.

    Checkpoints, which have a manifest, and files of older versions have neither. Raises `UserError`
    if they differ.
    """
    tensors, stamp = read_safetensors(path)
    step = parse_step(path.stem)
    if stamp and stamp != make_stamp(step, tensors):
        raise UserError(
            f"{path} does not have the weights of step {step} as they were saved, because its step "
            "or its sha256 differs: restore it, or choose another step"
        )
    return tensors


def make_stamp(step: int | None, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata by which tensors on the CPU are recognized as those of a step.

    It is one entry, because safetensors writes several in a random order.
    """
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return {"stamp": f"step {step}, sha256 {digest.hexdigest()}"}


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors on the CPU to a safetensors file, which others may read as the umask says."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)  # readable only by its owner
    path.chmod(mode)


def save_values(values: Mapping[str, Any], path: Path) -> None:
    """Write tensors on the CPU, numbers and None to a safetensors file."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    save_tensors(tensors, path, {OTHER_VALUES: json.dumps(others)} if others else None)


def load_values(path: Path) -> dict[str, Any]:
    """Return what `save_values` wrote; tensors are memory-mapped."""
    tensors, metadata = read_safetensors(path)
    return json.loads(metadata.get(OTHER_VALUES, "{}")) | tensors
