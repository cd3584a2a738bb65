"""Muon for the blocks' matrices, AdamW for the rest: their parameter groups, schedule, clipping and
state by name; the watch on the loss."""

import math
from collections import defaultdict
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import AdamW, Optimizer

from common.errors import UserError
from config import OptimConfig
from training.processes import World
from training.tensors import copy_rows, local, opened

# Coefficients of the quintic that Muon iterates (Jordan et al. 2024): steep at 0, so that small
# singular values grow quickly, at the price of ending near 1 rather than at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ROW_MEAN = 0.9  # of the mean square of a row's updates, what stays at a step
SMALLEST_SQUARE = 1e-10  # taken of it: a row without a gradient stays where it is


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of each matrix (n, rows, columns) near 1 (within 0.7 … 1.2).
    Newton–Schulz: matrix products only, computed in `dtype`, for all matrices at once."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the smaller Gram matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # all singular values at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), its rows brought to one length
    (NorMuon, Li et al. 2025), with decoupled weight decay.

    A matrix (rows, columns) moves by lr · √max(1, rows/columns) · orthogonal, where each row is
    divided by the root of its running mean square over the mean square that all rows of an
    orthogonal matrix have together. Matrices of one shape are orthogonalised in one batch, in
    `dtype`, divided among the ranks of `mesh`."""

    def __init__(
        self,
        params,
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | None = None,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype, self.mesh = dtype, mesh

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for params in shapes.values():
                self._step(params, group["lr"], group["momentum"], group["weight_decay"])

    def _step(self, params: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """Update matrices of one shape (rows, columns), of which each may be sharded by rows."""
        first = params[0]
        usual = 1 / max(first.shape)  # the mean square of an orthogonal matrix's numbers
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
                self.state[p]["row_squares"] = torch.full_like(p[:, :1], usual)
        momenta = [local(self.state[p]["momentum"]) for p in params]
        squares = [local(self.state[p]["row_squares"]) for p in params]  # (rows here, 1) each
        grads = [local(p.grad) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, momenta, momentum)
        nesterov = torch.stack(nesterov)  # (matrices, rows here, columns)
        updates = (
            orthogonalize(nesterov, self.dtype)
            if self.mesh is None
            else orthogonalize_divided(nesterov, first, self.dtype, self.mesh)
        )
        now = updates.square().mean(dim=-1, keepdim=True)  # (matrices, rows here, 1)
        means = torch.lerp(torch.stack(squares), now, 1 - ROW_MEAN)
        torch._foreach_copy_(squares, list(means.unbind()))
        updates = updates * (usual / means.clamp(min=SMALLEST_SQUARE)).sqrt()
        weights = [local(p) for p in params]
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(
            weights,
            list(updates.unbind()),
            alpha=-lr * math.sqrt(max(1, first.shape[0] / first.shape[1])),
        )


def orthogonalize_divided(
    matrices: Tensor, like: Tensor, dtype: torch.dtype, mesh: DeviceMesh
) -> Tensor:
    """`orthogonalize` of matrices (n, rows here, columns), whole on every rank of the mesh, or
    sharded by rows as `like` is: each rank does its share of the n, whose rows it is sent."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = (len(matrices), *like.shape)
    placements = getattr(like, "placements", [Replicate()])
    by_rows = [Shard(1) if place.is_shard() else place for place in placements]
    by_matrix = [Shard(0)] * mesh.ndim

    def sharded(tensor: Tensor, placements: list) -> DTensor:
        return DTensor.from_local(
            tensor,
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=(shape[1] * shape[2], shape[2], 1),
        )

    whole = sharded(matrices.to(dtype), by_rows).redistribute(placements=by_matrix).to_local()
    done = sharded(orthogonalize(whole, dtype), by_matrix).redistribute(placements=by_rows)
    return done.to_local().to(matrices.dtype)  # (matrices, rows here, columns)


class RowAdagrad(Optimizer):
    """Adagrad (Duchi et al. 2011) with one sum of squares for each row of a table. A row without a
    gradient stays as it is, so that of a sparse one only the rows that it has are touched."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["row_squares"] = torch.zeros_like(p[:, :1])
            weights, squares = local(p), local(self.state[p]["row_squares"])
            grad, rows = local(p.grad), slice(None)
            if grad.is_sparse:
                grad, rows = grad.values(), grad.indices()[0]
            sums = squares[rows] + grad.square().mean(dim=1, keepdim=True)  # (rows, 1)
            squares[rows] = sums
            weights[rows] -= group["lr"] * grad / sums.clamp(min=SMALLEST_SQUARE).sqrt()


def build_optimizers(
    model: nn.Module, optim: OptimConfig, precision: str = "fp32", mesh: DeviceMesh | None = None
) -> list[Optimizer]:
    """The optimizers of all parameters, each with the peak rate, which `set_learning_rates` scales.
    Weight decay is for matrices and embeddings. `optim.name=muon`: Muon for the blocks' matrices,
    in the run's `precision`, divided among the ranks of `mesh`; AdamW for the rest."""
    muon = [
        p
        for name, p in model.named_parameters()
        if optim.name == "muon" and name.startswith("blocks.") and p.dim() == 2
    ]
    tables = [p for name, p in model.named_parameters() if name == "ngrams.table"]
    taken = {id(p) for p in [*muon, *tables]}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers = [
        AdamW(
            [group for group in groups if group["params"]],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            fused=True,
        )
    ]
    if muon:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        optimizers.append(
            Muon(muon, optim.muon_rate, optim.momentum, optim.weight_decay, dtype, mesh)
        )
    if tables:
        optimizers.append(RowAdagrad(tables, optim.lr))
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The learning rate over its peak, in the optimizer step that follows `step` others. A linear
    warm-up; then a cosine down to min_lr_ratio (Loshchilov and Hutter 2017), or flat with a linear
    end (warm-up–stable-decay, Hu et al. 2024), or flat. After max_steps it stays."""
    warmup = optim.warmup(max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    if step >= max_steps:
        return optim.min_lr_ratio
    if optim.schedule == "cosine":
        fraction = (step - warmup) / (max_steps - warmup)
        height = 0.5 * (1 + math.cos(math.pi * fraction))
    else:
        height = min(1.0, (max_steps - step) / (max_steps * optim.decay_share))
    return optim.min_lr_ratio + height * (1 - optim.min_lr_ratio)


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set every learning rate to its peak times the factor."""
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] = group["peak_lr"] * factor


def learning_rates(optimizers: list[Optimizer]) -> dict[str, float]:
    """The rates now, as a row of metrics has them."""
    return {
        "train/muon_lr" if isinstance(optimizer, Muon) else "train/lr": optimizer.param_groups[0][
            "lr"
        ]
        for optimizer in optimizers
    }


@torch.no_grad()
def clip_gradients(model: nn.Module, largest: float, world: World, shard: int = 1) -> Tensor:
    """Scale the gradients of all ranks so that their norm is at most `largest` (0: any); return the
    norm of each parameter's before that, (parameters,), on the device."""
    for p in model.parameters():
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # a row that was used twice once
    grads = [local(p.grad) for p in model.parameters()]
    grads = [grad.values() if grad.is_sparse else grad for grad in grads]
    norms = torch.stack(torch._foreach_norm(grads))
    if world.size > 1:  # replicas have the same rows
        squares = norms.double().square() * (shard / world.size)
        norms = world.sum(squares).sqrt().float()
    clip = ((largest or math.inf) / (norms.norm() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, clip)
    return norms


class LossWatch:
    """Keeps the mean loss of the steps since it was last asked for, on the device. Stops a run
    whose loss or gradients are not finite, before that step is taken; on a GPU, which is not waited
    for, before the step after it, and before anything is saved."""

    def __init__(self, model: nn.Module):
        self._names = [name for name, _ in model.named_parameters()]
        self._sum, self._steps = torch.zeros((), device=next(model.parameters()).device), 0
        self._unread: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def mean(self) -> float:
        """The mean loss of the steps since this was last asked for."""
        total, steps = self.state()
        self.restore((0.0, 0))
        return total / steps

    def state(self) -> tuple[float, int]:
        """The sum of the losses, and how many they are."""
        return self._sum.item(), self._steps

    def restore(self, state: tuple[float, int]) -> None:
        self._sum.fill_(state[0])
        self._steps = state[1]

    def check(self, step: int, loss: Tensor, norms: Tensor) -> None:
        """Look at the loss () and each gradient's norm (parameters,) after `step` steps."""
        self.flush()
        self._sum += loss
        self._steps += 1
        finite, copied = torch.cat((loss[None], norms)).isfinite(), None
        if finite.is_cuda:
            finite, copied = finite.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record()  # after the copy, which waits for no later work of the device
        self._unread = step, finite, copied
        if copied is None:
            self.flush()

    def flush(self) -> None:
        """Look at what has not been looked at yet."""
        if self._unread is None:
            return
        (step, finite, copied), self._unread = self._unread, None
        if copied:
            copied.synchronize()
        if finite.all():
            return
        loss, *fine = finite.tolist()
        first = next((name for name, is_fine in zip(self._names, fine) if not is_fine), "")
        what = f"the gradient of {first}" if loss else "the loss"
        raise UserError(
            f"step {step + 1}: {what} is not a finite number, so the run stops before "
            "that update: go on from its last checkpoint with resume=auto and a lower "
            "optim.lr"
        )


# What each optimizer keeps of a parameter.
FIELDS = {
    Muon: ["momentum", "row_squares"],
    RowAdagrad: ["row_squares"],
    AdamW: ["step", "exp_avg", "exp_avg_sq"],
}


def optimizer_tensors(optimizers: list[Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """The optimizers' state, by parameter and field: `blocks.0….weight/exp_avg`."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": tensor
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for key, tensor in state.items()
    }


@torch.no_grad()
def load_optimizer_tensors(optimizers: list[Optimizer], model: nn.Module, path: Path) -> None:
    """Put back what `optimizer_tensors` gave, bit for bit, from a safetensors file."""
    names = {p: name for name, p in model.named_parameters()}
    with opened(path) as file:
        there = set(file.keys())
        states = {
            f"{names[p]}/{field}": (optimizer.state[p], field, p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if there
            for field in FIELDS[type(optimizer)]
        }  # none after no step
        if there != states.keys():
            odd = min(there ^ states.keys())
            raise UserError(
                "the optimizer's state in the checkpoint is not this run's: "
                f"{ascii(odd)[1:-1][:100]} is {'not ' * (odd in states)}there; "
                "a new run with init_from= takes its weights alone"
            )
        for key, (state, field, p) in states.items():
            if field == "step":  # works on the CPU and beside the parameter, where it counts on
                state[field] = file.get_tensor(key).to(p.device)
            else:
                state[field] = torch.empty_like(p[:, :1] if field == "row_squares" else p)
                copy_rows(file, key, state[field])
