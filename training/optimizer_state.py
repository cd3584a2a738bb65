"""Save and load the state of optimizers as named tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import UserError
from common.text import pluralize, printable
from training.optimizers import Muon
from training.tensors import copy_rows, full_tensor, local_part, open_safetensors

# The fields that torch's AdamW stores per parameter; our optimizers name theirs.
ADAMW_FIELDS = ("step", "exp_avg", "exp_avg_sq")
# Fields with running means of squares.
NEVER_NEGATIVE = ("row_squares", "exp_avg_sq")


@torch.no_grad()
def optimizer_tensors(
    optimizers: list[Optimizer], model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizers' state by parameter and field, such as `head.weight/exp_avg`.

    Each tensor is complete and comes once, in the order of the names. All ranks take them together.
    """
    names = {p: name for name, p in model.named_parameters()}
    if not any(optimizer.state for optimizer in optimizers):  # before the first step
        return
    states = [(f"{names[p]}/{field}", o, p, field) for o, p, field in _state_of(optimizers)]
    for name, optimizer, p, field in sorted(states, key=lambda state: state[0]):
        yield name, _gather(optimizer, p, field)


@torch.no_grad()
def load_optimizer_tensors(
    optimizers: list[Optimizer], model: nn.Module, path: Path, step: int
) -> None:
    """Restore the state that `optimizer_tensors` returned, bit for bit.

    Raises:
        UserError: If the file holds the state of other parameters or optimizers, or impossible
            values.
    """
    names = {p: name for name, p in model.named_parameters()}
    with open_safetensors(path) as file:
        saved = set(file.keys())
        if not saved and step == 0:
            return
        expected = {f"{names[p]}/{field}" for _, p, field in _state_of(optimizers)}
        if saved != expected:
            key = min(saved ^ expected)
            _refuse(key, "is missing" if key in expected else "is unexpected")
        for optimizer, p, field in _state_of(optimizers):
            if isinstance(optimizer, Muon) and not optimizer.owns(p):
                continue
            key = f"{names[p]}/{field}"
            if field == "step":  # a scalar, which fused AdamW counts on the parameter's device
                _check_tensor(file, key, [])
                state = file.get_tensor(key).to(p.device)
                if state.item() not in range(1, step + 1):
                    _refuse(key, f"is {state.item()} after {pluralize(step, 'step')}")
            else:
                state = _empty_state(optimizer, p, field)
                _check_tensor(file, key, list(state.shape))
                copy_rows(file, key, state)
                values = local_part(state)  # only squares may overflow to infinity
                is_valid = values >= 0 if field in NEVER_NEGATIVE else values.isfinite()
                if not is_valid.all():
                    _refuse(key, "contains impossible values")
            optimizer.state[p][field] = state


def _state_of(optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, Tensor, str]]:
    """Yield (optimizer, parameter, field) of everything that the optimizers store."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for field in getattr(optimizer, "state_fields", ADAMW_FIELDS):
                    yield optimizer, p, field


def _gather(optimizer: Optimizer, p: Tensor, field: str) -> Tensor:
    """Return the complete state of a parameter; all ranks call this together."""
    if not isinstance(optimizer, Muon):
        return full_tensor(optimizer.state[p][field])
    is_owner = optimizer.owns(p)
    state = optimizer.state[p][field] if is_owner else _empty_state(optimizer, p, field)
    return optimizer.share_state(p, state)


def _empty_state(optimizer: Optimizer, p: Tensor, field: str) -> Tensor:
    """Return memory for the state of a parameter, sharded if both are to be."""
    like = p[:, :1] if field == "row_squares" else p
    if isinstance(optimizer, Muon):  # complete, with its owner
        return torch.empty(like.shape, device=like.device)
    return torch.empty_like(like)


def _check_tensor(file: Any, key: str, shape: list[int]) -> None:
    """Refuse a saved tensor of another shape or type, which copying would broadcast or convert."""
    saved = file.get_slice(key)
    if saved.get_shape() != shape or saved.get_dtype() != "F32":
        _refuse(key, f"is {saved.get_dtype()} {saved.get_shape()} instead of F32 {shape}")


def _refuse(key: str, problem: str) -> NoReturn:
    raise UserError(
        "the optimizer state in the checkpoint does not fit this run: "
        f"{printable(key, one_line=True)[:100]} {problem}; "
        "start a new run with init_from= to take the weights alone."
    )
