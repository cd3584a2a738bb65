"""Muon for several ranks: each gets the gradients and sends the updates of the matrices it owns."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from config import ResolvedConfig
from training.optimizers import Muon
from training.tensors import is_distributed, local_part
from training.world import count_owners

Placements = tuple[Placement, ...]
# DTensor placements of a stack (matrices, rows, columns) on the mesh of `owners_mesh`: groups of
# owners, copies of the model in a group, and the shards of a copy, if there are any.
# All of the stack, if there are no shards:
COMPLETE: Placements = (Replicate(), Replicate())
# The rows of each shard:
ROWS: Placements = (Replicate(), Replicate(), Shard(1))
# The matrices that each rank owns:
OWNED: Placements = (Replicate(), Shard(0), Shard(0))
# Gradients of a part of the batch, which have to be summed over all ranks, or over the groups:
SUMMANDS: Placements = (Partial(), Partial())
OWNED_SUMMANDS: Placements = (Partial(), Shard(0))


def owners_mesh(config: ResolvedConfig, size: int) -> DeviceMesh:
    """Return the mesh (groups of owners, copies of the model in a group, shards) of the ranks.

    It has no third dimension if the model is not sharded.
    """
    owners = count_owners(config, size)
    shape: tuple[int, ...] = (size // owners, owners // config.shard, config.shard)
    names: tuple[str, ...] = ("group", "copy", "shard")
    dimensions = 2 if config.shard == 1 else 3
    return init_device_mesh(config.device, shape[:dimensions], mesh_dim_names=names[:dimensions])


class DistributedMuon(Muon):
    """Muon whose matrices are divided among ranks.

    Each matrix has an owner: the only rank of a group that gets its gradient, stores its state and
    computes its update, which the others receive in `dtype`. Of the n matrices of a stack each rank
    owns ceil(n / ranks), in their order; the last ranks own fewer or none. There may be several
    groups of such ranks, which do the same.

    Args:
        params: The matrices, each complete or sharded by rows.
        settings: Those of `Muon`.
        mesh: The ranks, from `owners_mesh`.
    """

    def __init__(self, params: Iterable[Tensor], *settings: Any, mesh: DeviceMesh) -> None:
        super().__init__(params, *settings)
        self._mesh = mesh
        self._group_size = mesh.size() // mesh.size(0)
        self._rank = mesh.get_rank() % self._group_size

    def owns(self, p: Tensor) -> bool:
        """Return whether this rank stores the state of a matrix."""
        return self._find_owner(p) == self._rank

    def share_state(self, p: Tensor, state: Tensor) -> Tensor:
        """Return a part of the state of a matrix that its owner passes, on all ranks.

        The others pass a tensor of the same shape, which is overwritten.
        """
        dist.broadcast(state, self._find_owner(p))  # from the first group to all ranks
        return state

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Move the gradient of each matrix to its owner; other ranks have none afterwards.

        Gradients that FSDP2 has not averaged are averaged over the ranks. All ranks call this
        together, after the backward pass.
        """
        stacks = self.stacks()
        collected = [self._collect(stack) for stack in stacks]  # they travel together
        for stack, gradients in zip(stacks, collected):
            if not is_distributed(stack[0]):
                gradients = gradients / self._mesh.size()
            for p, gradient in zip(self._owned(stack), gradients.unbind()):
                p.grad = gradient

    def compute_updates(self, stack: list[Tensor]) -> Tensor:
        """Compute the updates of this rank's matrices, and exchange them with the other ranks.

        Returns:
            This rank's rows of all updates, then padding: (at least len(stack), local rows,
            columns). They arrive asynchronously: the first operation that reads them waits.
        """
        owned = self._owned(stack)
        shape = (self._share(stack), *stack[0].shape)
        message = torch.zeros(shape, dtype=self.dtype, device=stack[0].device)
        if owned:
            message[: len(owned)] = super().compute_updates(owned)
        target = ROWS if is_distributed(stack[0]) else COMPLETE
        return self._redistribute(message, stack, OWNED, target)

    def _share(self, stack: list[Tensor]) -> int:
        """Return the number of matrices of a stack that a rank owns at most."""
        return math.ceil(len(stack) / self._group_size)

    def _owned(self, stack: list[Tensor]) -> list[Tensor]:
        """Return the matrices of a stack that this rank owns."""
        share = self._share(stack)
        return stack[self._rank * share : (self._rank + 1) * share]

    def _find_owner(self, p: Tensor) -> int:
        """Return the rank, in each group, that owns a matrix."""
        (stack,) = [stack for stack in self.stacks() if stack[0].shape == p.shape]
        index = next(index for index, other in enumerate(stack) if other is p)
        return index // self._share(stack)

    def _collect(self, stack: list[Tensor]) -> Tensor:
        """Send the gradients of a stack to their owners, and free them.

        Returns:
            The gradients of this rank's matrices, (share, rows, columns), which are sums over the
            ranks if FSDP2 has not averaged them.
        """
        gradients = [local_part(p.grad) for p in stack]
        padding = self._group_size * self._share(stack) - len(stack)
        message = torch.stack(gradients + padding * [torch.zeros_like(gradients[0])])
        for p in stack:
            p.grad = None
        if is_distributed(stack[0]):
            return self._redistribute(message, stack, ROWS, OWNED)
        return self._redistribute(message, stack, SUMMANDS, OWNED_SUMMANDS, OWNED)

    def _redistribute(
        self, message: Tensor, stack: list[Tensor], source: Placements, *targets: Placements
    ) -> Tensor:
        """Move a padded stack between placements, without waiting for the last message."""
        rows, columns = stack[0].shape
        dimensions = self._mesh.ndim
        distributed = DTensor.from_local(
            message,
            self._mesh,
            source[:dimensions],
            run_check=False,
            shape=torch.Size((self._group_size * self._share(stack), rows, columns)),
            stride=(rows * columns, columns, 1),
        )
        for target in targets:
            distributed = distributed.redistribute(placements=target[:dimensions], async_op=True)
        return distributed.to_local()
