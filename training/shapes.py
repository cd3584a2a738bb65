"""The names and shapes of a model's tensors, and checks that a file has them."""

import torch

from common.errors import UserError
from common.text import pluralize
from config import GPTConfig
from variants import build_model

Shapes = dict[str, list[int]]  # of tensors by their names


def tensor_shapes(config: GPTConfig) -> Shapes:
    """Return the shapes of what `GPT.tensors` returns, without allocating it."""
    with torch.device("meta"):
        tensors = build_model(config).tensors()
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def require_layers(source: str, found: Shapes, config: GPTConfig) -> None:
    """Raise `UserError` if a source has so few tensors that building its model may take long."""
    if config.n_layer > len(found):
        raise UserError(
            f"{source} has {pluralize(len(found), 'tensor')}, too few for "
            f"{pluralize(config.n_layer, 'layer')}: restore it, or download it again"
        )


def require_same_tensors(source: str, found: Shapes, expected: Shapes) -> None:
    """Raise `UserError`, which names the first difference, unless a source has these tensors."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise UserError(
                f"{source} contains another model: {name:.80} is {found.get(name, 'missing')} in "
                f"the file and {expected.get(name, 'absent')} in the model"
            )
