"""The interface of the readers of other libraries' checkpoints."""

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from config import GPTConfig
from data.tokenizer import Tokenizer


class CheckpointSource(ABC):
    """A checkpoint in the format of another library."""

    path: Path  # its file or folder
    naming: str  # of its tensors: a key of `interop.names.MODULE_NAMES`
    shapes: dict[str, list[int]]  # of its tensors, by their names
    tokenizer_name = "hf"  # value of the setting `tokenizer.name` for its tokenizer
    tokenizer_note = ""  # to be printed when the tokenizer is read

    @abstractmethod
    def read_config(self) -> GPTConfig:
        """Return the settings with which our model computes the same; see `config_from_hf`."""

    @abstractmethod
    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in the shape and order of rows that Hugging Face's format has."""

    @abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None for a character model whose alphabet is not in the file."""
