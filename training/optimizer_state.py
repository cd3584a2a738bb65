"""Save and load the state of optimizers as named tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from common.errors import UserError
from common.text import pluralize, printable
from training.optimizers import Muon, RowAdagrad
from training.tensors import copy_rows, local_part, open_safetensors

# The fields that each optimizer stores per parameter.
STATE_FIELDS: dict[type[Optimizer], list[str]] = {
    Muon: ["momentum", "row_squares"],
    RowAdagrad: ["row_squares"],
    AdamW: ["step", "exp_avg", "exp_avg_sq"],
}
# Fields with running means of squares.
NEVER_NEGATIVE = ("row_squares", "exp_avg_sq")


def optimizer_tensors(optimizers: list[Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizers' state by parameter and field, such as `head.weight/exp_avg`."""
    names = {p: name for name, p in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for field, tensor in state.items():
                tensors[f"{names[p]}/{field}"] = tensor
    return tensors


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
            key = f"{names[p]}/{field}"
            if field == "step":  # a scalar, which fused AdamW counts on the parameter's device
                _check_tensor(file, key, [])
                state = file.get_tensor(key).to(p.device)
                if state.item() not in range(1, step + 1):
                    _refuse(key, f"is {state.item()} after {pluralize(step, 'step')}")
            else:
                state = torch.empty_like(p[:, :1] if field == "row_squares" else p)
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
                for field in STATE_FIELDS[type(optimizer)]:
                    yield optimizer, p, field


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
