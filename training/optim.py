"""Muon for the blocks' matrices, AdamW for the rest; their groups and schedules, one update, their state by name."""

import math
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from config import Config, UserError
from model import autocast
from training.distributed import Team
from training.runtime import seed_micro_step

# Coefficients of the quintic that Muon iterates (Jordan et al. 2024): steep at 0, so that small singular
# values grow quickly, at the price of ending near 1 rather than at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SKIPS_IN_A_ROW = 10  # steps that are not finite, one after the other, after which on_nonfinite=skip gives up


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Replace the singular values of each matrix (…, rows, columns) by values near 1 (within 0.7 … 1.2).

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
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), with decoupled weight decay.

    A matrix (rows, columns) moves by lr · √max(1, rows/columns) · orthogonal. Matrices of one shape are
    orthogonalised in one batch. As with torch's fused AdamW, a step changes nothing where the tensor `found_inf`, if
    there is one, is not 0: the device decides, and nobody waits for it.
    """

    def __init__(self, params, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype = torch.float32):
        """`dtype` is what the orthogonalisation is computed in."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        found_inf = getattr(self, "found_inf", None)
        made = 1.0 if found_inf is None else 1 - found_inf  # 1 or 0
        for group in self.param_groups:
            shapes = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for (rows, columns), params in shapes.items():
                for p in params:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                momenta = [self.state[p]["momentum"] for p in params]
                grads = [p.grad for p in params]
                if found_inf is not None:
                    grads = [torch.where(found_inf > 0, momentum, grad) for momentum, grad in zip(momenta, grads)]  # of no effect below
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
                updates = orthogonalize(torch.stack(nesterov), self.dtype) * made  # (matrices, rows, columns)
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * made)
                torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def by_muon(model: nn.Module, config: Config) -> list[nn.Parameter]:
    """The matrices that Muon updates: those of the blocks, where `optim.name` says so."""
    return [p for name, p in model.named_parameters() if config.optim.name == "muon" and name.startswith("blocks.") and p.dim() == 2]


def partition_parameters(model: nn.Module, config: Config, processes: int) -> list[list[nn.Parameter]]:
    """Which parameters each of so many processes updates: the costliest go first, each to the process with the least to do so far."""
    muon = {id(p) for p in by_muon(model, config)}
    cost = {p: p.numel() * (min(p.shape) if id(p) in muon else 1) for p in model.parameters()}  # Newton–Schulz multiplies matrices
    parts, work = [[] for _ in range(processes)], [0] * processes
    for p in sorted(cost, key=cost.get, reverse=True):
        least = work.index(min(work))
        parts[least].append(p)
        work[least] += cost[p]
    return parts


def build_optimizers(model: nn.Module, config: Config, updated: list[nn.Parameter] | None = None) -> list[torch.optim.Optimizer]:
    """The optimizers of a run, of all parameters or those `updated` here; every group carries the peak rate that `set_learning_rate` scales.

    Weight decay is for matrices and embeddings. Muon takes the matrices of the blocks, where `optim.name` says so,
    and orthogonalises in the run's precision.
    """
    c, dtype = config.optim, torch.bfloat16 if config.precision == "bf16" else torch.float32
    here = {id(p) for p in (model.parameters() if updated is None else updated)}
    muon = [p for p in by_muon(model, config) if id(p) in here]
    rest = [p for p in model.parameters() if id(p) in here - {id(p) for p in muon}]
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": c.weight_decay},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    groups, optimizers = [group for group in groups if group["params"]], []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), fused=True))
    if muon:
        optimizers.append(Muon(muon, c.muon_lr, c.momentum, c.weight_decay, dtype))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, config: Config) -> float:
    """The rate of the update after `step` updates, over the peak rate.

    A linear warm-up; then a cosine down to min_lr_ratio (Loshchilov and Hutter 2017), or flat with a linear
    end (warm-up–stable-decay, Hu et al. 2024), or flat. After max_steps it stays where it is.
    """
    c, warmup, end = config.optim, config.warmup_steps, config.max_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if c.schedule == "constant":
        return 1.0
    if step >= end:
        return c.min_lr_ratio
    if c.schedule == "cosine":
        share = (step - warmup) / (end - warmup)
        left = 0.5 * (1 + math.cos(math.pi * share))
    else:
        left = min(1.0, (end - step) / (end * c.decay_share))
    return c.min_lr_ratio + left * (1 - c.min_lr_ratio)


def rate_rises_again(step: int, before: Config, now: Config) -> list[str]:
    """What is to be said where a run that goes on after `step` updates has a larger share of the peak rate than it had."""
    old, new = lr_factor(step, before), lr_factor(step, now)
    if before.optim.schedule != now.optim.schedule or new <= old:
        return []
    return [f"note: the learning rate rises again, from {old:.0%} to {new:.0%} of its peak, since it "
            f"now falls until step {now.max_steps:,}"]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def update(forward: Callable, model: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor, y: Tensor,
           config: Config, step: int, team: Team | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One update of the model after `step` others, from a batch x, y (batch_size / processes, T) in host memory, in micro-steps.

    `forward` is the model, or the model compiled. Returns the loss over the global batch, in nats per token; the norm of the whole
    gradient before clipping; and what `Watch` takes: whether the loss, each parameter's gradient and that norm are finite,
    (parameters + 2,). Where one is not, the weights and the optimizers' state stay as they are. All three stay on the
    device, so that nothing waits for a GPU, and are the same in every process of the team. The gradients are summed over the
    processes once, after the last micro-step.
    """
    team = team or Team()
    set_learning_rate(optimizers, lr_factor(step, config))
    parts = config.accumulate * team.size
    rows = config.batch_size // parts
    if config.device.startswith("cuda"):
        x, y = x.pin_memory(), y.pin_memory()  # copied while the GPU is still busy with the step before
    zero = torch.zeros((), device=config.device)
    loss = zero.clone()
    for micro_step, (xs, ys) in enumerate(zip(x.split(rows), y.split(rows))):
        seed_micro_step(config.seed, step, micro_step, team.rank)
        with autocast(config.device, config.precision):
            micro_loss = forward(xs.to(config.device, non_blocking=True), ys.to(config.device, non_blocking=True))[1]  # the logits may go
        (micro_loss / parts).backward()
        loss += micro_loss.detach() / parts
    team.reduce_gradients()  # what another process updates has no gradient here from now on
    here = [p for p in model.parameters() if p.grad is not None]
    norm_of = dict(zip(here, torch._foreach_norm([p.grad for p in here]) if here else ()))
    sums = team.sum(torch.stack([*(norm_of.get(p, zero) for p in model.parameters()), loss]))
    norms, loss = sums[:-1], sums[-1]  # (parameters,)
    grad_norm = norms.norm()
    torch.nn.utils.clip_grads_with_norm_(here, config.optim.grad_clip or math.inf, grad_norm)
    finite = torch.cat((loss[None], norms, grad_norm[None])).isfinite()
    on_gpu = loss.is_cuda  # where reading `finite` would wait for the device: there the optimizers are told to do nothing
    for optimizer in optimizers:
        if on_gpu:
            optimizer.found_inf = (~finite.all()).float()
        if on_gpu or finite.all():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    team.broadcast_weights()
    return loss, grad_norm, finite


class NotFinite(UserError):
    """Updates were left out, and it is time to stop; `at_once`: after the first of them."""

    def __init__(self, message: str, at_once: bool):
        super().__init__(message)
        self.at_once = at_once


class Watch:
    """Reads what `update` says of each step, and stops the run, or counts the steps left out, as `on_nonfinite` says.

    A GPU is asked for a step's flags when it has been given the next step, so that it never stands still; `read` asks for all.
    """

    def __init__(self, model: nn.Module, config: Config, skipped: int = 0, in_a_row: int = 0):
        """Go on with the counts of a run that is resumed: steps left out so far, and just before."""
        self.skipped, self.in_a_row = skipped, in_a_row
        self._stops_at = 1 if config.on_nonfinite == "stop" else SKIPS_IN_A_ROW
        self._names = [name for name, _ in model.named_parameters()]
        self._noted = deque()

    def note(self, step: int, finite: Tensor) -> None:
        """Take what the update that ends step `step` returned.

        Raises:
            NotFinite: that step or the one before was left out, and it is time to stop.
        """
        event = None
        if finite.is_cuda:
            finite, event = finite.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
        self._noted.append((step, finite, event))
        self.read(but=int(event is not None))

    def counts(self) -> list[int]:
        """Steps left out so far, and just before; reads all, and raises as `note`."""
        self.read()
        return [self.skipped, self.in_a_row]

    def read(self, but: int = 0) -> None:
        """Read all that was noted, but the newest so many; raises as `note`."""
        while len(self._noted) > but:
            step, finite, event = self._noted.popleft()
            if event is not None:
                event.synchronize()
            loss, *gradients, _ = finite.tolist()
            if finite.all():
                self.in_a_row = 0
                continue
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if self.in_a_row >= self._stops_at:
                wrong = [self._names[i] for i, fine in enumerate(gradients) if not fine]
                what = ["the loss"] * (not loss) + [f"the gradient of {wrong[0]}" + f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)] * bool(wrong)
                again = (f", and so were the {self.in_a_row - 1} before it" if self._stops_at > 1 else "")
                raise NotFinite(f"step {step}: {' and '.join(what) or 'the norm of the gradient'} is not a finite number, "
                                f"so that update was left out{again}", self._stops_at == 1)


def optimizer_tensors(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """The optimizers' state, each tensor under its parameter's name and its own: `blocks.0….weight/exp_avg`."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": tensor for optimizer in optimizers
            for p, state in optimizer.state.items() for key, tensor in state.items()}


def load_optimizer_tensors(optimizers: list[torch.optim.Optimizer], model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, bit for bit, of what these optimizers update.

    Raises:
        UserError: a tensor is missing, not one of theirs, or of another shape or dtype.
    """
    params = dict(model.named_parameters())
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    fields = {Muon: ("momentum",), torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq")}
    expected = {f"{name}/{field}": (p if field != "step" else torch.zeros(()))
                for name, p in params.items() if p in owner and tensors  # none: no update was made yet
                for field in fields[type(owner[p])]}
    of_others = {name for name, p in params.items() if p not in owner}
    here = {key: tensor for key, tensor in tensors.items() if key.rpartition("/")[0] not in of_others}
    for key in sorted(here.keys() | expected.keys()):
        found, fits = here.get(key), expected.get(key)
        if found is None or fits is None or (found.shape, found.dtype) != (fits.shape, fits.dtype):
            raise UserError("the optimizer's state in the checkpoint is not this run's: "
                            f"{ascii(key)[1:-1][:100]} is {_kind(found)} there, {_kind(fits)} here; "
                            "a new run with init_from= takes its weights alone")
    for key, tensor in here.items():
        name, _, field = key.rpartition("/")
        # AdamW keeps its step count on the CPU or beside the parameter, and either works where it counts.
        owner[params[name]].state[params[name]][field] = tensor.to(params[name].device)


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
