"""Tensors that may be sharded by rows over ranks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def is_distributed(tensor: Tensor) -> bool:
    """Return whether FSDP2 manages a parameter, so that it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or an unsharded tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which all ranks call together; return others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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
