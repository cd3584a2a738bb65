"""The losses of the steps of a run: their mean for the record, and their check."""

import torch
from torch import Tensor, nn

from training.nonfinite import NonFiniteGuard


class Losses:
    """Sums the losses of the steps on the device without waiting for it, and checks them.

    The mean is that of the steps since the last reading. See `NonFiniteGuard` for when a value that
    is not finite raises `UserError`.
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self._guard = NonFiniteGuard(model)
        self._sum = torch.zeros((), device=device)
        self._steps = 0

    def add(self, step: int, loss: Tensor, gradient_norms: Tensor) -> None:
        """Add the loss () of the step after `step` others; see `NonFiniteGuard.check`."""
        self._guard.check(step, loss, gradient_norms)
        self._sum += loss
        self._steps += 1

    def require_finite(self) -> None:
        """Wait for the device; raise `UserError` if a value of the last step was not finite."""
        self._guard.flush()

    def read_mean(self) -> float:
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
