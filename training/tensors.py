"""Tensors that may be sharded by rows over ranks, and reading them from safetensors files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from common.errors import UserError
from common.files import read_start


def is_distributed(tensor: Tensor) -> bool:
    """Return whether FSDP2 manages a parameter, so that it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or an unsharded tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which all ranks call together; return others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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


def copy_rows(file: Any, name: str, tensor: Tensor) -> None:
    """Copy the first rows of a tensor in an open safetensors file into `tensor`, or its shard."""
    rows = file.get_slice(name)[: len(tensor)]
    if hasattr(tensor, "to_local"):
        rows = distribute_tensor(rows, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(rows)
