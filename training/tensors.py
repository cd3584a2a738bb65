"""Tensors that may be divided among ranks by their rows, read from safetensors files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from config import UserError


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that are here; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, by all ranks at once; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def rows_here(tensor: Tensor) -> slice:
    """Which rows of a tensor are here, all of one that is not sharded."""
    if not hasattr(tensor, "to_local"):
        return slice(0, len(tensor))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


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
    """Copy from an open safetensors file into a tensor, of a sharded one the rows that are here."""
    here = local(tensor)
    if here.numel():
        here.copy_(file.get_slice(name)[rows_here(tensor)])
