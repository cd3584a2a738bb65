"""Divide matrices among ranks: each gets the gradients and sends the updates of those it owns."""

import math

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from training.tensors import is_distributed, local_part

Placements = tuple[Placement, ...]
# DTensor placements of a stack (matrices, rows, columns) on the mesh of `parallel.owners_mesh`:
# groups of owners, copies of the model in a group, and the shards of a copy, if there are any.
# All of the stack, if there are no shards:
COMPLETE: Placements = (Replicate(), Replicate())
# The rows of each shard:
ROWS: Placements = (Replicate(), Replicate(), Shard(1))
# The matrices that each rank owns:
OWNED: Placements = (Replicate(), Shard(0), Shard(0))
# Gradients of a part of the batch, which have to be summed over all ranks, or over the groups:
SUMMANDS: Placements = (Partial(), Partial())
OWNED_SUMMANDS: Placements = (Partial(), Shard(0))


class Owners:
    """Divides stacks of matrices of the same shape among ranks, in their order.

    Of n matrices each rank owns ceil(n / size); the last ranks own fewer or none. There may be
    several groups of such ranks, which do the same.

    Args:
        mesh: The ranks by groups, copies of the model in a group, and shards if there are any; None
            for one process, which owns all matrices.

    Attributes:
        size: Number of ranks of a group.
        rank: Number of this rank in its group.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.size = 1 if mesh is None else mesh.size() // mesh.size(0)
        self.rank = 0 if mesh is None else mesh.get_rank() % self.size
        self._dimensions = 0 if mesh is None else mesh.ndim

    def owned_matrices(self, stack: list[Tensor]) -> list[Tensor]:
        """Return the matrices of a stack that this rank owns."""
        share = self._share(stack)
        return stack[self.rank * share : (self.rank + 1) * share]

    def find_owner(self, stack: list[Tensor], index: int) -> int:
        """Return the rank, in each group, that owns a matrix of a stack, by its index."""
        return index // self._share(stack)

    def collect_gradients(self, stacks: list[list[Tensor]]) -> None:
        """Move the gradient of each matrix to its owner; other ranks have none afterwards.

        Gradients that FSDP2 has not averaged are averaged over the ranks. All ranks call this
        together.
        """
        if self.mesh is None:
            return
        collected = [self._collect(stack) for stack in stacks]  # they travel together
        for stack, gradients in zip(stacks, collected):
            if not is_distributed(stack[0]):
                gradients = gradients / self.mesh.size()
            for p, gradient in zip(self.owned_matrices(stack), gradients.unbind()):
                p.grad = gradient

    def send_updates(self, stack: list[Tensor], updates: Tensor, dtype: torch.dtype) -> Tensor:
        """Send updates from the owners of a stack to all ranks that have its weights.

        Args:
            stack: The matrices, each complete or sharded by rows.
            updates: Of the matrices that this rank owns, (n, rows, columns).
            dtype: Precision of the message.

        Returns:
            This rank's rows of all updates, then padding: (at least len(stack), local rows,
            columns). They arrive asynchronously: the first operation that reads them waits.
        """
        if self.mesh is None:
            return updates
        shape = (self._share(stack), *updates.shape[1:])
        message = torch.zeros(shape, dtype=dtype, device=updates.device)
        message[: len(updates)] = updates
        target = ROWS if is_distributed(stack[0]) else COMPLETE
        return self._redistribute(message, stack, OWNED, target)

    def _share(self, stack: list[Tensor]) -> int:
        """Return the number of matrices of a stack that a rank owns at most."""
        return math.ceil(len(stack) / self.size)

    def _collect(self, stack: list[Tensor]) -> Tensor:
        """Send the gradients of a stack to their owners, and free them.

        Returns:
            The gradients of this rank's matrices, (share, rows, columns), which are sums over the
            ranks if FSDP2 has not averaged them.
        """
        gradients = [local_part(p.grad) for p in stack]
        padding = self.size * self._share(stack) - len(stack)
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
        distributed = DTensor.from_local(
            message,
            self.mesh,
            source[: self._dimensions],
            run_check=False,
            shape=torch.Size((self.size * self._share(stack), rows, columns)),
            stride=(rows * columns, columns, 1),
        )
        for target in targets:
            distributed = distributed.redistribute(
                placements=target[: self._dimensions], async_op=True
            )
        return distributed.to_local()
