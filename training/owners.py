"""Divide matrices among ranks: each gets the gradients and sends the updates of those it owns."""

import math

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from training.tensors import is_distributed, local_part


class Owners:
    """Divides stacks of matrices of the same shape among ranks, in their order.

    A rank owns the same number of matrices of a stack as the others; the last ranks own fewer if
    the ranks do not divide the stack.

    Args:
        mesh: The ranks; None for one process, which owns all matrices.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_rank()
        self._dimensions = 0 if mesh is None else mesh.ndim

    def own(self, stack: list[Tensor]) -> list[Tensor]:
        """Return the matrices of a stack that this rank owns."""
        share = self._share(stack)
        return stack[self.rank * share : (self.rank + 1) * share]

    def owner(self, stack: list[Tensor], index: int) -> int:
        """Return the rank that owns a matrix of a stack, by its index."""
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
                gradients = gradients / self.size
            for p, gradient in zip(self.own(stack), gradients.unbind()):
                p.grad = gradient

    def send_updates(self, stack: list[Tensor], updates: Tensor, dtype: torch.dtype) -> Tensor:
        """Send updates from the owners of a stack to all ranks that have its weights.

        Args:
            stack: The matrices, each complete or sharded by rows.
            updates: Of the matrices that this rank owns, (n, rows, columns).
            dtype: Precision of the message.

        Returns:
            This rank's rows of all updates, then padding: (at least len(stack), local rows,
            columns). Several ranks wait for them when they are first read.
        """
        if self.mesh is None:
            return updates
        shape = (self._share(stack), *updates.shape[1:])
        message = torch.zeros(shape, dtype=dtype, device=updates.device)
        message[: len(updates)] = updates
        return self._redistribute(message, stack, self._by_owner(), self._by_rows(stack))

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
        placements = self._by_rows(stack)
        if not is_distributed(stack[0]):
            placements = [Partial()] * self._dimensions
        return self._redistribute(message, stack, placements, self._by_owner())

    def _by_owner(self) -> list[Placement]:
        """Return the placements of a stack of which each rank has the matrices that it owns."""
        return [Shard(0)] * self._dimensions

    def _by_rows(self, stack: list[Tensor]) -> list[Placement]:
        """Return the placements of a stack of which each rank has the rows of its weights."""
        if not is_distributed(stack[0]):
            return [Replicate()] * self._dimensions
        return [
            Shard(1) if placement.is_shard() else placement for placement in stack[0].placements
        ]

    def _redistribute(
        self,
        message: Tensor,
        stack: list[Tensor],
        source: list[Placement],
        target: list[Placement],
    ) -> Tensor:
        """Move a padded stack from one placement to another, without waiting for it."""
        rows, columns = stack[0].shape
        whole = DTensor.from_local(
            message,
            self.mesh,
            source,
            run_check=False,
            shape=torch.Size((self.size * self._share(stack), rows, columns)),
            stride=(rows * columns, columns, 1),
        )
        return whole.redistribute(placements=target, async_op=True).to_local()
