"""Muon for several processes, each with the complete model or with some rows of it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from training.optimizers import Muon


class OwnerMuon(Muon):
    """Muon whose matrices are divided among ranks that each have the complete model.

    Each matrix has an owner: the only rank that gets its gradient, stores its state and computes
    its update, which the others receive in `dtype`. Of the n matrices of a stack each rank owns
    ceil(n / size), in their order; the last ranks own fewer or none, and send padding.
    """

    def __init__(self, params: Iterable[Tensor], *settings: Any, rank: int, size: int) -> None:
        super().__init__(params, *settings)
        self._rank = rank
        self._size = size

    def owns(self, p: Tensor) -> bool:
        """Return whether this rank stores the state of a matrix."""
        return self._find_owner(p) == self._rank

    def share_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a matrix, which its owner sends, on all ranks."""
        state = self.state.get(p, {}) or self.initial_state(p)  # of other ranks': overwritten
        for tensor in state.values():
            dist.broadcast(tensor, self._find_owner(p))
        return state

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradient of each matrix on its owner; other ranks have none afterwards."""
        for stack in self.stacks():
            gradients = [p.grad for p in stack]
            for p in stack:
                p.grad = None
            share = self._share(stack)
            padding = self._size * share - len(stack)
            message = torch.stack(gradients + padding * [torch.zeros_like(gradients[0])])
            sums = torch.empty_like(message[:share])  # (share, rows, columns)
            dist.reduce_scatter(sums, list(message.chunk(self._size)))
            for p, mean in zip(self._owned(stack), sums.div_(self._size).unbind()):
                p.grad = mean

    def compute_updates(self, stack: list[Tensor]) -> Tensor:
        """Return the updates of all matrices, then padding: (at least len(stack), rows, columns).

        This rank computes those of its own matrices.
        """
        share, owned, like = self._share(stack), self._owned(stack), stack[0]
        message = torch.zeros((share, *like.shape), dtype=self.dtype, device=like.device)
        if owned:
            message[: len(owned)] = super().compute_updates(owned)
        updates = message.new_empty(self._size * share, *like.shape)
        dist.all_gather(list(updates.chunk(self._size)), message)
        return updates

    def _share(self, stack: list[Tensor]) -> int:
        """Return the number of matrices of a stack that a rank owns at most."""
        return math.ceil(len(stack) / self._size)

    def _owned(self, stack: list[Tensor]) -> list[Tensor]:
        share = self._share(stack)
        return stack[self._rank * share : (self._rank + 1) * share]

    def _find_owner(self, p: Tensor) -> int:
        (stack,) = [stack for stack in self.stacks() if stack[0].shape == p.shape]
        index = next(index for index, other in enumerate(stack) if other is p)
        return index // self._share(stack)


class ShardedMuon(Muon):
    """Muon for matrices, momentum and squares sharded by rows, all of which each rank gathers."""

    def orthogonalize(self, momenta: Tensor, stack: list[Tensor]) -> Tensor:
        """Return this rank's rows of the orthogonalized momenta: (n, local rows, columns)."""
        rows, columns = stack[0].shape
        mesh = stack[0].device_mesh
        placements = [
            Shard(1) if placement.is_shard() else placement for placement in stack[0].placements
        ]
        complete = DTensor.from_local(
            momenta,
            mesh,
            placements,
            run_check=False,
            shape=torch.Size((len(stack), rows, columns)),
            stride=(rows * columns, columns, 1),
        ).full_tensor()
        updates = super().orthogonalize(complete, stack)
        return distribute_tensor(updates, mesh, placements, src_data_rank=None).to_local()
