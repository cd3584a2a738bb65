"""Tensors that may be sharded by rows over ranks, and reading them from safetensors files."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from common.errors import UserError
from common.files import read_start
from common.text import pluralize
from config import GPTConfig
from run.run_dir import parse_step
from variants import build_model

# Entry in a safetensors file's metadata: what it contains besides tensors, in JSON.
OTHER_VALUES = "other_values"

Shapes = dict[str, list[int]]  # of tensors by their names


def is_distributed(tensor: Tensor) -> bool:
    """Return whether FSDP2 manages a parameter, so that it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or an unsharded tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which all ranks call together; return others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tensor_shapes(config: GPTConfig) -> Shapes:
    """Return the shapes of what `GPT.tensors` returns, without allocating it."""
    with torch.device("meta"):
        tensors = build_model(config).tensors()
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def require_layers(source: str, found: Shapes, config: GPTConfig) -> None:
    """Raise `UserError` if a source has so few tensors that building its model may take long."""
    if config.n_layer > len(found):
        raise UserError(
            f"{source} has {pluralize(len(found), 'tensor')}, too few for "
            f"{pluralize(config.n_layer, 'layer')}; restore it, or download it again"
        )


def require_same_tensors(source: str, found: Shapes, expected: Shapes) -> None:
    """Raise `UserError`, which names the first difference, unless a source has these tensors."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise UserError(
                f"{source} contains another model: {name:.80} is {found.get(name, 'missing')} in "
                f"the file and {expected.get(name, 'absent')} in the model"
            )


@contextmanager
def open_safetensors(path: Path) -> Iterator:
    """Open a safetensors file for reading; raise `UserError` if it cannot be read."""
    try:
        read_start(path)  # whose errors are clearer
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"{path} cannot be read as safetensors: {reason}") from None


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in a safetensors file, memory-mapped, and its metadata."""
    with open_safetensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


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


def save_values(values: Mapping[str, Any], path: Path) -> None:
    """Write tensors on the CPU, numbers and None to a safetensors file."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    save_file(tensors, path, {OTHER_VALUES: json.dumps(others)} if others else None)


def load_values(path: Path) -> dict[str, Any]:
    """Return what `save_values` wrote; tensors are memory-mapped."""
    tensors, metadata = read_safetensors(path)
    return json.loads(metadata.get(OTHER_VALUES, "{}")) | tensors


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's rows of a complete tensor, if they are those of a sharded parameter."""
    if not is_distributed(parameter) or tensor.shape[:1] != parameter.shape[:1]:
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def apply_to_whole(function: Callable[[Tensor], Tensor], parts: Tensor, like: Tensor) -> Tensor:
    """Apply a function of complete matrices (n, rows, columns) to this rank's rows of them.

    They are sharded by rows as the matrix `like`, or complete. Each rank gathers all of them, and
    keeps its rows of the result; all ranks call it together.
    """
    if not is_distributed(like):
        return function(parts)
    rows, columns = like.shape
    placements = [Shard(1) if placement.is_shard() else placement for placement in like.placements]
    complete = DTensor.from_local(
        parts,
        like.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size((len(parts), rows, columns)),
        stride=(rows * columns, columns, 1),
    ).full_tensor()
    result = distribute_tensor(function(complete), like.device_mesh, placements, src_data_rank=None)
    return result.to_local()
