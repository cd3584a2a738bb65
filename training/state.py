"""The state of a training run: what a step changes and a checkpoint saves."""

import torch
from torch import Tensor


class MeanLoss:
    """Mean training loss since the last reading, summed on the device without waiting for it.

    Args:
        device: The device of the losses.
    """

    def __init__(self, device: torch.device | str):
        self._sum = torch.zeros((), device=device)
        self._steps = 0

    def add(self, loss: Tensor) -> None:
        """Add the loss () of one step."""
        self._sum += loss
        self._steps += 1

    def read(self) -> float:
        """Return the mean loss of the steps since the last reading."""
        total, steps = self.state()
        self.restore((0.0, 0))
        return total / steps

    def state(self) -> tuple[float, int]:
        """Return the sum of the losses since the last reading and their number."""
        return self._sum.item(), self._steps

    def restore(self, state: tuple[float, int]) -> None:
        """Continue from what `state` returned."""
        total, self._steps = state
        self._sum.fill_(total)
