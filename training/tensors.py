"""Tensors that may be divided among ranks by their rows, read from safetensors files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from common.errors import UserError


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that are here; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, by all ranks at once; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def opened(path: Path) -> Iterator:
    """A safetensors file, to read from while it is open."""
    try:
        if not path.is_file():
            raise OSError("there is no such file")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} cannot be read as safetensors: {e}") from None


def copy_rows(file, name: str, tensor: Tensor) -> None:
    """Copy the first rows of an open safetensors file's tensor; each rank takes its part."""
    rows = file.get_slice(name)[: len(tensor)]
    if hasattr(tensor, "to_local"):
        rows = distribute_tensor(rows, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(rows)
