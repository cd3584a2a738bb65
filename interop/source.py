"""The interface of the readers of other libraries' checkpoints."""

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from config import GPTConfig
from data.tokenizer import Tokenizer


class CheckpointSource(ABC):
    """A checkpoint in the format of another library.

    Attributes:
        path: File or folder of the checkpoint.
        naming: How the tensors are named: a key of `interop.names.MODULE_NAMES`.
        tokenizer_name: Value of the setting `tokenizer.name` for the tokenizer.
        shapes: Shape of each tensor by its name in the checkpoint.
    """

    path: Path
    naming: str
    tokenizer_name = "hf"
    shapes: dict[str, list[int]]

    @abstractmethod
    def read_config(self) -> GPTConfig:
        """Return the settings with which our model computes the same; see `config_from_hf`."""

    @abstractmethod
    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in the shape and order of rows that Hugging Face's format has."""

    @abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None if the tokens are the characters of a text elsewhere."""
