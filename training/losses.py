"""Sum the losses of steps, and require that losses and gradient norms are finite."""

from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.errors import SharedError


class PendingCheck(NamedTuple):
    """A check whose result may still be on its way from the GPU."""

    step: int
    is_finite: Tensor  # (1 + parameters,), boolean: the loss, then each gradient
    copied: torch.cuda.Event | None  # None: the result is on the CPU already


class Losses:
    """Sums the losses of the steps on the device, and raises `UserError` if one is not finite.

    On a CPU, a loss or gradient that is NaN or infinite raises before the update of that step. On a
    GPU, reading the result at once would make Python wait. There the update is made, and the result
    is read before the next update, and by `require_finite` before anything is evaluated or saved:
    weights that became NaN are never saved.
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self.gradient_norms = torch.zeros(0)  # of each parameter in the last step, (parameters,)
        self._names = [name for name, _ in model.named_parameters()]
        self._pending: PendingCheck | None = None
        self._sum = torch.zeros((), device=device)
        self._steps = 0

    def add(self, step: int, loss: Tensor, gradient_norms: Tensor, is_skipped: bool) -> None:
        """Add the loss () and the gradient norms (parameters,) of the step after `step` others.

        Those of a step that is skipped, because fp16 overflowed, need not be finite.
        """
        self.require_finite()
        values = loss[None] if is_skipped else torch.cat((loss[None], gradient_norms))
        is_finite = values.isfinite()
        copied = None
        if is_finite.is_cuda:
            is_finite = is_finite.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()  # right after the copy, so that later work of the GPU is not waited for
        self._pending = PendingCheck(step, is_finite, copied)
        if copied is None:
            self.require_finite()
        self.gradient_norms = gradient_norms
        self._sum += loss
        self._steps += 1

    def require_finite(self) -> None:
        """Wait for the device; raise `UserError` if a value of the last step was not finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.copied:
            pending.copied.synchronize()
        loss_is_finite, *gradients_are_finite = pending.is_finite.tolist()
        if loss_is_finite and all(gradients_are_finite):
            return
        quantity = "the loss"
        if loss_is_finite:
            quantity = f"the gradient of {self._names[gradients_are_finite.index(False)]}"
        raise SharedError(
            f"step {pending.step + 1}: {quantity} is not a finite number, so the run ends: "
            "continue from the last checkpoint with run_dir=PATH resume=auto and a lower optim.lr"
        )

    def read_metrics(self) -> dict[str, float]:
        """Return the mean loss since the last reading, and the last step's gradient norm.

        The norm is left out if fp16 overflowed and the step was skipped.
        """
        total, steps = self.state()
        self.restore((0.0, 0))
        metrics = {"train/loss": total / steps}
        norm = self.gradient_norms.norm().item()
        return metrics | {"train/grad_norm": norm} if isfinite(norm) else metrics

    def state(self) -> tuple[float, int]:
        """Return the sum of the losses since the last reading and their number."""
        return self._sum.item(), self._steps

    def restore(self, state: tuple[float, int]) -> None:
        """Continue from what `state` returned."""
        total, self._steps = state
        self._sum.fill_(total)
