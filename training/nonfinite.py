"""Refuse weights, losses and gradients that are not finite."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.errors import SharedError, UserError


def check_finite_weights(model: nn.Module, source: str) -> None:
    """Raise `UserError`, which names the source of a model, if a weight is NaN or infinite."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{source}: {name} contains NaN or infinite weights, so the model predicts "
                "nothing; use another checkpoint of it, or download it again"
            )


class PendingCheck(NamedTuple):
    """A check whose result may still be on its way from the GPU."""

    step: int
    is_finite: Tensor  # (1 + parameters,), boolean: the loss, then each gradient
    copied: torch.cuda.Event | None  # None: the result is on the CPU already


class NonFiniteGuard:
    """Raises `UserError` if the loss or a gradient is NaN or infinite.

    On a CPU it raises before the update of that step. On a GPU, reading the result at once would
    make Python wait. There the update is made, and the result is read before the next update, and
    by `flush` before anything is evaluated or saved: weights that became NaN are never saved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._pending: PendingCheck | None = None

    def check(self, step: int, loss: Tensor, gradient_norms: Tensor) -> None:
        """Check the loss () and the gradient norms (parameters,) of the step after `step` others.

        There are no gradient norms, (0,), if the step was skipped because fp16 overflowed.
        """
        self.flush()
        is_finite = torch.cat((loss[None], gradient_norms)).isfinite()
        if not is_finite.is_cuda:
            self._pending = PendingCheck(step, is_finite, None)
            self.flush()
            return
        is_finite = is_finite.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()  # right after the copy, so that later work of the GPU is not waited for
        self._pending = PendingCheck(step, is_finite, copied)

    def flush(self) -> None:
        """Wait for the last check and raise `UserError` if a value was not finite."""
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
            f"step {pending.step + 1}: {quantity} is not a finite number, so the run ends; "
            "continue from the last checkpoint with run_dir=PATH resume=auto and a lower optim.lr"
        )
