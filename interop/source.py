"""The interface of the readers of other libraries' checkpoints."""

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from config import GPTConfig
from data.tokenizer import Tokenizer


class CheckpointSource(ABC):
    """A checkpoint in the format of another library.

    Attributes:
        path: Its file or folder.
        naming: How its tensors are named: a key of `interop.names.MODULE_NAMES`.
        tokenizer_name: Value of the setting `tokenizer.name` for its tokenizer.
    """

    path: Path
    naming: str
    tokenizer_name: str

    @abstractmethod
    def read_config(self) -> GPTConfig:
        """Return our settings for its model; raise `UserError` if it has no counterpart."""

    @abstractmethod
    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor of the model, by its name there."""

    @abstractmethod
    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor, shaped as Hugging Face's format has it."""

    @abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer, or None if that is the alphabet of a text."""
