"""Muon for the blocks' matrices, AdamW for the rest: their parameter groups, schedule and state by
name; one optimizer step, and the watch for steps that are not finite."""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import AdamW, Optimizer

from config import Config, OptimConfig, UserError
from model import autocast
from training.distributed import World
from training.runtime import same_bits, seed_micro_step
from training.tensors import copy_rows, local, opened

# Coefficients of the quintic that Muon iterates (Jordan et al. 2024): steep at 0, so that small
# singular values grow quickly, at the price of ending near 1 rather than at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ROW_MEAN = 0.9  # of the mean square of a row's updates, what stays at a step
SMALLEST_SQUARE = 1e-10  # taken of it: a row without a gradient stays where it is
MOST_SKIPPED = 10  # steps in a row that are not finite, after which on_nonfinite=skip gives up


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of each matrix (n, rows, columns) near 1 (within 0.7 … 1.2).

    Newton–Schulz: matrix products only, computed in `dtype`, for all matrices at once.
    """
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
    `dtype`, divided among the ranks of `mesh`. As with torch's fused AdamW, a step changes nothing
    where the tensor `found_inf` is set and not 0: the device decides, and nobody waits for it.
    """

    def __init__(self, params, lr: float, momentum: float, weight_decay: float,
                 dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None):
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
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            if "row_squares" not in self.state[p]:  # nor has it in checkpoints of older versions
                self.state[p]["row_squares"] = torch.full_like(p[:, :1], usual)
        momenta = [local(self.state[p]["momentum"]) for p in params]
        squares = [local(self.state[p]["row_squares"]) for p in params]  # (rows here, 1) each
        grads, taken = [local(p.grad) for p in params], 1.0  # 0 where the step is left out
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:  # a gradient equal to the momentum leaves that as it is
            taken = 1 - found_inf
            grads = [torch.where(found_inf > 0, m, grad) for m, grad in zip(momenta, grads)]
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, momenta, momentum)
        nesterov = torch.stack(nesterov)  # (matrices, rows here, columns)
        updates = orthogonalize(nesterov, self.dtype) if self.mesh is None else \
            orthogonalize_divided(nesterov, first, self.dtype, self.mesh)
        now = updates.square().mean(dim=-1, keepdim=True)  # (matrices, rows here, 1)
        means = torch.lerp(torch.stack(squares), now, taken * (1 - ROW_MEAN))
        torch._foreach_copy_(squares, list(means.unbind()))
        updates = updates * (taken * (usual / means.clamp(min=SMALLEST_SQUARE)).sqrt())
        weights = [local(p) for p in params]
        torch._foreach_mul_(weights, 1 - lr * weight_decay * taken)
        torch._foreach_add_(weights, list(updates.unbind()),
                            alpha=-lr * math.sqrt(max(1, first.shape[0] / first.shape[1])))


def orthogonalize_divided(matrices: Tensor, like: Tensor, dtype: torch.dtype,
                          mesh: DeviceMesh) -> Tensor:
    """`orthogonalize` of matrices (n, rows here, columns), which are whole on every rank of the
    mesh, or sharded by rows as `like` is: each rank does its share of the n.

    Exchanged are the rows of what is sharded, after which each rank has its share whole; and what
    the matrices become.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = (len(matrices), *like.shape)
    placements = getattr(like, "placements", [Replicate()])
    by_rows = [Shard(1) if place.is_shard() else place for place in placements]
    by_matrix = [Shard(0)] * mesh.ndim

    def sharded(tensor: Tensor, placements: list) -> DTensor:
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape,
                                  stride=(shape[1] * shape[2], shape[2], 1))

    whole = sharded(matrices.to(dtype), by_rows).redistribute(placements=by_matrix).to_local()
    done = sharded(orthogonalize(whole, dtype), by_matrix).redistribute(placements=by_rows)
    return done.to_local().to(matrices.dtype)  # (matrices, rows here, columns)


def build_optimizers(model: nn.Module, optim: OptimConfig, precision: str = "fp32",
                     mesh: DeviceMesh | None = None) -> list[Optimizer]:
    """The optimizers of all parameters, each with the peak rate, which `update` scales.

    Weight decay is for matrices and embeddings. `optim.name=muon`: Muon for the blocks' matrices,
    which it orthogonalises in the run's `precision`, divided among the ranks of `mesh`; AdamW for
    the rest.
    """
    muon = [p for name, p in model.named_parameters()
            if optim.name == "muon" and name.startswith("blocks.") and p.dim() == 2]
    taken = {id(p) for p in muon}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": optim.weight_decay},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    optimizers = [AdamW([group for group in groups if group["params"]], lr=optim.lr,
                        betas=(optim.beta1, optim.beta2), fused=True)]
    if muon:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        optimizers.append(Muon(muon, optim.muon_lr, optim.momentum, optim.weight_decay, dtype,
                               mesh))
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The learning rate over its peak, in the optimizer step that follows `step` others.

    A linear warm-up; then a cosine down to min_lr_ratio (Loshchilov and Hutter 2017), or flat with
    a linear end (warm-up–stable-decay, Hu et al. 2024), or flat. After max_steps it stays.
    """
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


def rate_rises_again(step: int, before: Config, now: Config) -> list[str]:
    """A note for a resumed run whose learning rate is higher than it was when it stopped."""
    old = lr_factor(step, before.optim, before.max_steps)
    new = lr_factor(step, now.optim, now.max_steps)
    if before.optim.schedule != now.optim.schedule or new <= old:
        return []
    return [f"note: the learning rate rises again, from {old:.0%} to {new:.0%} of its peak, "
            f"since it now falls until step {now.max_steps:,}"]


def update(forward: Callable, model: nn.Module, optimizers: list[Optimizer], x: Tensor, y: Tensor,
           config: Config, step: int, world: World | None = None
           ) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step, after `step` others, on a batch x, y (batch_size / processes, T).

    Args:
        forward: the model, the model compiled, or what `shard_model` returns.
        x, y: in host memory.

    Returns:
        The loss over the global batch, in nats per token; the norm of the whole gradient before
        clipping; and for `Watch` whether the loss, each parameter's gradient and that norm are
        finite, (parameters + 2,). Where one is not, the weights and the optimizers' state stay as
        they are. All three are on the device, so that nothing waits for a GPU, and the same in
        every process.
    """
    world = world or World()
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] = group["peak_lr"] * lr_factor(step, config.optim, config.max_steps)
    with same_bits(config.device):
        loss = accumulate_gradients(forward, x, y, config, step, world)
    with torch.no_grad():
        grads = [local(p.grad) for p in model.parameters()]
        norms = torch.stack(torch._foreach_norm(grads))  # (parameters,)
        if world.size > 1:  # replicas have the same rows
            squares = norms.double().square() * (config.shard / world.size)
            *squares, loss = world.sum(torch.cat((squares, loss[None].double()))).unbind()
            norms, loss = torch.stack(squares).sqrt().float(), loss.float()
        grad_norm = norms.norm()
        clip = ((config.optim.grad_clip or math.inf) / (grad_norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, clip)
    finite = torch.cat((loss[None], norms, grad_norm[None])).isfinite()
    for optimizer in optimizers:
        if loss.is_cuda:  # to read `finite` would wait for the device: it decides for itself
            optimizer.found_inf = (~finite.all()).float()
        if loss.is_cuda or finite.all():
            optimizer.step()
        # Gradients averaged whole stay in the buckets of DDP: without them, the micro-steps that
        # are not communicated would make others beside these.
        optimizer.zero_grad(set_to_none=world.size == 1 or config.shard > 1)
    return loss, grad_norm, finite


def accumulate_gradients(forward: Callable, x: Tensor, y: Tensor, config: Config, step: int,
                         world: World) -> Tensor:
    """Add up the gradients of the micro-steps of this process's batch x, y (sequences, T), and
    average them over the processes.

    Returns this process's part of the loss over the global batch, in nats per token.
    """
    sequences = config.micro_batch(world.size)
    if config.device.startswith("cuda"):
        x, y = x.pin_memory(), y.pin_memory()  # copied while the GPU does the step before
    loss = torch.zeros((), device=config.device)
    for micro_step, batch in enumerate(zip(x.split(sequences), y.split(sequences))):
        seed_micro_step(config.seed, step, micro_step, world.rank)
        inputs, targets = (part.to(config.device, non_blocking=True) for part in batch)
        later = world.size > 1 and config.shard == 1 and micro_step + 1 < config.accumulate
        with forward.no_sync() if later else nullcontext():  # averaged at the last one
            with autocast(config.device, config.precision):
                micro_loss = forward(inputs, targets)[1]  # the logits are freed
            (micro_loss / config.accumulate).backward()
        loss += micro_loss.detach() / (config.accumulate * world.size)
    return loss


class NotFinite(UserError):
    """Steps were left out, and it is time to stop; `at_once`: after the first of them."""

    def __init__(self, message: str, at_once: bool):
        super().__init__(message)
        self.at_once = at_once


class Watch:
    """Reads which steps were not finite: stops the run, or counts them, as `on_nonfinite` says.

    A GPU is asked for a step's flags when it has been given the next step, so that it is never
    idle; `counts` asks for all.
    """

    def __init__(self, model: nn.Module, on_nonfinite: str, skipped: int = 0, in_a_row: int = 0):
        """Continue a run's counts: steps left out so far, and just before."""
        self.skipped, self.in_a_row = skipped, in_a_row
        self._stops_at = 1 if on_nonfinite == "stop" else MOST_SKIPPED
        self._names = [name for name, _ in model.named_parameters()]
        self._unread = deque()

    def note(self, step: int, finite: Tensor) -> None:
        """Take the flags that `update` returned, by which `step` steps are done.

        Raises:
            NotFinite: that step or the one before was left out, and it is time to stop.
        """
        event = None
        if finite.is_cuda:
            finite, event = finite.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
        self._unread.append((step, finite, event))
        self._read(but=int(event is not None))

    def counts(self) -> list[int]:
        """Steps left out so far, and just before; waits for all, and raises as `note`."""
        self._read()
        return [self.skipped, self.in_a_row]

    def _read(self, but: int = 0) -> None:
        """Read all flags but the newest so many."""
        while len(self._unread) > but:
            step, finite, event = self._unread.popleft()
            if event is not None:
                event.synchronize()
            if finite.all():
                self.in_a_row = 0
                continue
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if self.in_a_row >= self._stops_at:
                raise NotFinite(self._message(step, finite.tolist()), self._stops_at == 1)

    def _message(self, step: int, finite: list[bool]) -> str:
        what, (loss, *gradients, _) = [], finite
        if not loss:
            what.append("the loss")
        wrong = [name for name, fine in zip(self._names, gradients) if not fine]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            what.append(f"the gradient of {wrong[0]}{more}")
        again = f", and so were the {self.in_a_row - 1} before it" if self._stops_at > 1 else ""
        return (f"step {step}: {' and '.join(what) or 'the norm of the gradient'} is not a finite "
                f"number, so that update was left out{again}")


def optimizer_tensors(optimizers: list[Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """The optimizers' state, by parameter and field: `blocks.0….weight/exp_avg`."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": tensor for optimizer in optimizers
            for p, state in optimizer.state.items() for key, tensor in state.items()}


@torch.no_grad()
def load_optimizer_tensors(optimizers: list[Optimizer], model: nn.Module, path: Path) -> None:
    """Put back what `optimizer_tensors` gave, bit for bit, from a safetensors file; of what is
    sharded, the rows that are here.

    Raises:
        UserError: the file cannot be read; a tensor is missing, not one of theirs, or of another
            shape.
    """
    names = {p: name for name, p in model.named_parameters()}
    fields = {Muon: ["momentum", "row_squares"], AdamW: ["step", "exp_avg", "exp_avg_sq"]}
    with opened(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  not a dict
        if not any(key.endswith("/row_squares") for key in slices):  # of an older version
            fields[Muon].remove("row_squares")
        states = {f"{names[p]}/{field}": (optimizer.state[p], field, p) for optimizer in optimizers
                  for group in optimizer.param_groups for p in group["params"] if slices
                  for field in fields[type(optimizer)]}  # none after no step
        for key in sorted(slices.keys() | states.keys()):
            there = here = "missing"
            if key in slices:
                there = f"{slices[key].get_shape()} of {slices[key].get_dtype()}"
            if key in states:
                _, field, p = states[key]
                here = f"{[] if field == 'step' else list(shaped_as(field, p).shape)} of F32"
            if there != here:
                raise UserError("the optimizer's state in the checkpoint is not this run's: "
                                f"{ascii(key)[1:-1][:100]} is {there} there, {here} here; "
                                "a new run with init_from= takes its weights alone")
        for key, (state, field, p) in states.items():
            if field == "step":  # works on the CPU and beside the parameter, where it counts on
                state[field] = file.get_tensor(key).to(p.device)
            else:
                state[field] = torch.empty_like(shaped_as(field, p))
                copy_rows(file, key, state[field])


def shaped_as(field: str, p: Tensor) -> Tensor:
    """What a field of the state of a parameter has the shape of."""
    return p[:, :1] if field == "row_squares" else p
