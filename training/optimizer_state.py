"""Save and load the state of optimizers as named tensors."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from common.errors import UserError
from common.text import printable
from training.optimizers import Muon, RowAdagrad
from training.tensors import copy_rows, open_safetensors

# The fields that each optimizer stores per parameter.
STATE_FIELDS: dict[type[Optimizer], list[str]] = {
    Muon: ["momentum", "row_squares"],
    RowAdagrad: ["row_squares"],
    AdamW: ["step", "exp_avg", "exp_avg_sq"],
}


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
def load_optimizer_tensors(optimizers: list[Optimizer], model: nn.Module, path: Path) -> None:
    """Restore the state that `optimizer_tensors` returned, bit for bit.

    Args:
        optimizers: New optimizers of the model.
        model: The model.
        path: A safetensors file; without tensors if no step was taken before it was saved.

    Raises:
        UserError: If the file holds the state of other parameters or optimizers.
    """
    names = {p: name for name, p in model.named_parameters()}
    with open_safetensors(path) as file:
        saved_keys = set(file.keys())
        if not saved_keys:
            return
        _check_keys(saved_keys, {f"{names[p]}/{field}" for _, p, field in _state_of(optimizers)})
        for optimizer, p, field in _state_of(optimizers):
            key = f"{names[p]}/{field}"
            if field == "step":  # a scalar, which fused AdamW counts on the parameter's device
                optimizer.state[p][field] = file.get_tensor(key).to(p.device)
                continue
            like = p[:, :1] if field == "row_squares" else p
            optimizer.state[p][field] = torch.empty_like(like)
            copy_rows(file, key, optimizer.state[p][field])


def _state_of(optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, Tensor, str]]:
    """Yield (optimizer, parameter, field) of everything that the optimizers store."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for field in STATE_FIELDS[type(optimizer)]:
                    yield optimizer, p, field


def _check_keys(saved: set[str], expected: set[str]) -> None:
    if saved == expected:
        return
    key = min(saved ^ expected)
    problem = "is missing" if key in expected else "is unexpected"
    key = printable(key, one_line=True)[:100]
    raise UserError(
        f"the optimizer state in the checkpoint does not fit this run: {key} {problem}; "
        "start a new run with init_from= to take the weights alone."
    )
