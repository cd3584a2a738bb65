"""A model on disk: its settings are known, and its weights are read when they are needed.

`interop` has those of runs and of other libraries.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.text import pluralize
from config import GPTConfig
from data.tokenizer import Tokenizer
from model import GPT
from run.checkpoints import Manifest
from run.run_dir import RunDir
from variants import build_model

Shapes = dict[str, list[int]]  # of tensors by their names


class StoredModel(ABC):
    """A model on disk: a run's checkpoint, or a model of another library."""

    path: Path  # its file or folder
    config: GPTConfig
    manifest: Manifest | None = None  # of a run's checkpoint
    run_dir: RunDir | None = None  # of a run

    def __str__(self) -> str:
        return str(self.path)

    @abstractmethod
    def read_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `GPT.tensors` returns; tensors of safetensors are memory-mapped."""

    @abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None for a character model whose alphabet is not on the disk."""

    def build(self, check_canceled: Callable[[], None] = lambda: None) -> GPT:
        """Build the model on the CPU, in evaluation mode; check after each tensor."""
        with torch.device("meta"):
            model = build_model(self.config)
        tensors = {}
        for name, tensor in self.read_tensors():
            check_canceled()
            tensors[name] = tensor
        model.assign(tensors)
        return model.eval()

    @torch.no_grad()
    def copy_to(self, model: GPT) -> None:
        """Copy the weights into a model of these settings, or of a smaller block_size.

        Raises:
            UserError: A weight is not finite.
        """
        destinations = model.tensors()
        for name, tensor in self.read_tensors():
            destination = destinations[name]
            destination.copy_(tensor[: len(destination)])
        check_finite_weights(model, str(self.path))

    def load(self, check_canceled: Callable[[], None] = lambda: None) -> tuple[GPT, Tokenizer]:
        """Return the model as `build` does, and its tokenizer.

        Raises:
            UserError: One of them cannot be read, or a weight is not finite.
        """
        tokenizer = self.read_tokenizer()
        if tokenizer is None:
            raise UserError(
                f"{self.path} does not contain the characters of its vocabulary: train on its text "
                f"with init_from={self.path}, and load that run"
            )
        model = self.build(check_canceled)
        model.token_count, model.begin_of_text = tokenizer.vocab_size, tokenizer.begin_of_text
        model.source = str(self)
        check_finite_weights(model, str(self.path))
        return model, tokenizer


def check_finite_weights(model: GPT, source: str) -> None:
    """Raise `UserError`, which names the source of a model, if a weight is NaN or infinite."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{source}: {name} contains NaN or infinite weights, so the model predicts "
                "nothing: use another checkpoint of it, or download it again"
            )


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
