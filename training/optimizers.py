"""Optimizers: Muon for the blocks' matrices, row-wise Adagrad for n-grams, AdamW for the others."""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from config import OptimConfig
from kernels import DTYPES
from training.sharding import apply_to_whole, is_distributed, local_part
from training.world import World

# Coefficients of Muon's quintic iteration (Jordan et al. 2024). The polynomial is steep at 0, so
# that small singular values grow quickly; in exchange they end near 1 instead of exactly at 1.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Added to the norm of a matrix by which it is divided, so that a matrix of zeros stays.
MIN_MATRIX_NORM = 1e-7
# Share of a row's running mean square that is kept at each step (NorMuon).
ROW_SQUARES_DECAY = 0.9
# Lower bound of a mean square before its root is taken, so that a row without a gradient stays.
MIN_MEAN_SQUARE = 1e-10


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of matrices (n, rows, columns) near 1 (0.7 to 1.2).

    Newton–Schulz iteration computes in `dtype`; the result has the dtype of the input. In fp16,
    whose range small gradients leave, the matrices are normalized before they are converted.

    Reference: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices
    if dtype == torch.float16:
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + MIN_MATRIX_NORM)
    x = x.to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT  # gives the smaller of the two Gram matrices
    # All singular values become at most 1.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + MIN_MATRIX_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.mT
    return x.to(matrices.dtype)


class Muon(Optimizer):
    """Nesterov momentum with an orthogonalized, row-normalized update and decoupled weight decay.

    A matrix (rows, columns) moves by lr · √max(1, rows/columns) · the orthogonalized momentum. Each
    row of that update is first divided by the root of its running mean square, relative to the mean
    square that every row of an orthogonal matrix has on average. Matrices of the same shape form a
    stack, which is orthogonalized in one batch, in `dtype`.

    Reference: Jordan et al. 2024 (Muon); Li et al. 2025 (NorMuon, the row normalization).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without torch's closure
        """Update all matrices, and free their gradients."""
        stacks = defaultdict(list)
        for p in self.param_groups[0]["params"]:
            stacks[p.shape].append(p)
        for stack in stacks.values():
            self._update(stack)

    def _update(self, stack: list[Tensor]) -> None:
        """Update this rank's rows of matrices of one shape."""
        (group,) = self.param_groups
        momentum = group["momentum"]
        rows, columns = stack[0].shape
        orthogonal_mean_square = 1 / max(rows, columns)
        for p in stack:
            if not self.state[p]:
                row_squares = torch.full_like(p[:, :1], orthogonal_mean_square)
                self.state[p] = {"momentum": torch.zeros_like(p), "row_squares": row_squares}

        # Nesterov momentum
        momenta = [local_part(self.state[p]["momentum"]) for p in stack]
        grads = [local_part(p.grad) for p in stack]
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        nesterov = torch.stack(torch._foreach_lerp(grads, momenta, momentum))  # (n, rows, columns)
        for p in stack:
            p.grad = None

        # Orthogonalization
        updates = apply_to_whole(partial(orthogonalize, dtype=self.dtype), nesterov, stack[0])

        # Row normalization
        squares = [local_part(self.state[p]["row_squares"]) for p in stack]
        new_squares = updates.square().mean(dim=-1, keepdim=True)  # (n, rows, 1)
        mean_squares = torch.lerp(torch.stack(squares), new_squares, 1 - ROW_SQUARES_DECAY)
        torch._foreach_copy_(squares, list(mean_squares.unbind()))
        updates *= (orthogonal_mean_square / mean_squares.clamp(min=MIN_MEAN_SQUARE)).sqrt()

        # Weight decay and step
        weights = [local_part(p) for p in stack]
        step_size = group["lr"] * math.sqrt(max(1, rows / columns))
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(updates.unbind()), alpha=-step_size)


class RowAdagrad(Optimizer):
    """Adagrad with one sum of squared gradients per row of a table (Duchi et al. 2011).

    A row without a gradient does not change; of a sparse gradient only its rows are touched.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without torch's closure
        """Update the rows that have a gradient."""
        (group,) = self.param_groups
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["row_squares"] = torch.zeros_like(p[:, :1])
            weights = local_part(p)
            row_squares = local_part(self.state[p]["row_squares"])
            grad = local_part(p.grad)
            rows: slice | Tensor = slice(None)
            if grad.is_sparse:
                rows = grad.indices()[0]
                grad = grad.values()
            sums = row_squares[rows] + grad.square().mean(dim=1, keepdim=True)  # (rows, 1)
            row_squares[rows] = sums
            weights[rows] -= group["lr"] * grad / sums.clamp(min=MIN_MEAN_SQUARE).sqrt()


def build_optimizers(model: nn.Module, optim: OptimConfig, precision: str) -> list[Optimizer]:
    """Build the optimizers that together update every parameter of a placed model once.

    Only matrices and embeddings get weight decay. Muon orthogonalizes in `precision`. Each
    parameter group stores its peak learning rate as `peak_lr`, which `schedule.set_learning_rates`
    scales.
    """
    named = list(model.named_parameters())
    tables = [p for name, p in named if name == "ngrams.table"]
    in_blocks = [p for name, p in named if name.startswith("blocks.") and p.dim() == 2]
    matrices = {"adamw": [], "muon": in_blocks}[optim.name]
    assigned = {id(p) for p in [*tables, *matrices]}
    others = [p for p in model.parameters() if id(p) not in assigned]

    decayed = [p for p in others if p.dim() >= 2]
    undecayed = [p for p in others if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        # torch updates DTensors and others by different calls
        {"params": [p for p in undecayed if is_distributed(p)], "weight_decay": 0.0},
        {"params": [p for p in undecayed if not is_distributed(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (optim.beta1, optim.beta2)
    optimizers: list[Optimizer] = [AdamW(groups, lr=optim.lr, betas=betas, fused=True)]
    if matrices:
        rates = (optim.muon_lr_multiple * optim.lr, optim.momentum, optim.weight_decay)
        optimizers.append(Muon(matrices, *rates, DTYPES[precision]))
    if tables:
        optimizers.append(RowAdagrad(tables, optim.lr))

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, world: World, loss_scale: float) -> Tensor:
    """Divide gradients by `loss_scale`, then limit their joint norm to `max_norm`; 0: no limit.

    Returns the norm of each parameter's gradient before clipping, (parameters,), on the device.
    """
    params = list(model.parameters())
    grads = [_gradient_values(p) for p in params]
    norms = world.join_norms(_norms(grads), params) / loss_scale
    factor = ((max_norm or math.inf) / (norms.norm() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor / loss_scale)
    return norms


def _gradient_values(p: Tensor) -> Tensor:
    """Return this rank's part of a gradient; of a sparse one, the rows that it has."""
    if p.grad.is_sparse:
        p.grad = p.grad.coalesce()  # adds up the gradients of a row that occurs several times
        return p.grad.values()
    return local_part(p.grad)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, (n,), which is 0 if it is empty, such as a rank's part."""
    # Among the norms of many gradients, torch can confuse those after an empty one on a GPU.
    norms = iter(torch._foreach_norm([tensor for tensor in tensors if tensor.numel() > 0]))
    zero = tensors[0].new_zeros(())
    return torch.stack([next(norms) if tensor.numel() > 0 else zero for tensor in tensors])
