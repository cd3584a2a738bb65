"""Loss scaling, which keeps the gradients of a run in fp16 within the range of the format."""

from torch import Tensor

# Factor of the loss at the start, as in torch.amp.GradScaler.
INITIAL_LOSS_SCALE = 2.0**16
# Steps without an overflow after which the factor is doubled.
GROWTH_INTERVAL = 2000
# The factor is not lowered any further: gradients that overflow without scaling are too large.
MIN_LOSS_SCALE = 1.0


class LossScaler:
    """Multiplies the loss, so that small gradients do not underflow in fp16.

    When a gradient overflows, the step is skipped and the factor, a power of two, is halved. After
    many steps without an overflow it is doubled. Unlike in torch.amp.GradScaler, one decision, by
    norms that all ranks have computed together, serves all optimizers and ranks. Without fp16 the
    factor is 1 and no step is skipped.

    Reference: Micikevicius et al. 2018, "Mixed Precision Training".
    """

    def __init__(self, precision: str) -> None:
        self.is_enabled = precision == "fp16"
        self.factor = INITIAL_LOSS_SCALE if self.is_enabled else 1.0
        self.steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss () to call `backward` on."""
        return loss * self.factor if self.is_enabled else loss

    def has_overflowed(self, gradient_norms: Tensor) -> bool:
        """Return whether a gradient overflowed, so that the step has to be skipped.

        In fp16 this waits for the device. The answer is False without fp16, and at the smallest
        factor, where gradients that are not finite are an error.
        """
        if not self.is_enabled or self.factor <= MIN_LOSS_SCALE:
            return False
        return not bool(gradient_norms.isfinite().all())

    def update(self, has_overflowed: bool) -> None:
        """Adapt the factor after a step."""
        if not self.is_enabled:
            return
        if has_overflowed:
            self.factor, self.steps = self.factor / 2, 0
            return
        self.steps += 1
        if self.steps == GROWTH_INTERVAL:
            self.factor, self.steps = self.factor * 2, 0

    def state(self) -> tuple[float, int] | None:
        """Return the factor and the number of steps, None without fp16."""
        return (self.factor, self.steps) if self.is_enabled else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Continue from what `state` returned; None, in runs of other precisions, is ignored."""
        if self.is_enabled and state is not None:
            self.factor, self.steps = state
