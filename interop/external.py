"""Build our model from a checkpoint of another library.

A format is a subclass of `ExternalModel`, which `loading` chooses by the content of a file, and a
table in `names` of what it calls the tensors.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.terminal import error_sentence
from common.text import pluralize
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import Tokenizer
from interop.names import MODULE_NAMES, map_tensors
from training.stored_model import (
    Shapes,
    StoredModel,
    require_layers,
    require_same_tensors,
    tensor_shapes,
)


class ExternalModel(StoredModel):
    """A model of another library, whose tensors are those of our model under other names."""

    tokenizer_name = "hf"  # value of the setting `tokenizer.name` for its tokenizer

    def __init__(self, path: Path, config: GPTConfig, naming: str, shapes: Shapes) -> None:
        """Compare the stored tensors, name → shape, with those of our model of these settings.

        `naming` says how they are named: a key of `MODULE_NAMES`.
        """
        self.path = path
        require_layers("it", shapes, config)

        # A tied table may be stored as the embedding, or twice
        shapes = dict(shapes)
        names = {ours: f"{theirs}.weight" for theirs, ours in MODULE_NAMES[naming].items()}
        embedding = names["token_embedding"]
        head = names["head"]
        if config.tie_embeddings and embedding in shapes and head in shapes:
            if torch.equal(self.read_tensor(embedding), self.read_tensor(head)):
                del shapes[head]
            else:
                config = replace(config, tie_embeddings=False)

        self.config = config
        our_shapes = tensor_shapes(config)
        self._mappings = [*map_tensors(our_shapes, naming)]
        self._rows = {name: shape[0] for name, shape in our_shapes.items()}
        expected = {mapping.name: mapping.shape for mapping in self._mappings}
        require_same_tensors("it", shapes, expected)

    @abstractmethod
    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in the shape of Hugging Face's format, with its rows in our order."""

    @abstractmethod
    def parse_tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer without comparing it with the model's vocabulary."""

    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None for a character model whose alphabet is not on the disk.

        Raises:
            UserError: It cannot be read, or can encode text as tokens that the model lacks.
        """
        vocab_size = self.config.vocab_size
        try:
            tokenizer = self.parse_tokenizer()
            if isinstance(tokenizer, HFTokenizer):
                tokenizer = tokenizer.limit_special_tokens(vocab_size)
        except Exception as e:  # the library raises plain Exceptions
            raise UserError(
                f"{self.path} has no tokenizer that can be read: {error_sentence(e)}"
            ) from None
        if tokenizer and tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"{self.path} has a tokenizer of {pluralize(tokenizer.vocab_size, 'token')}, more "
                f"than the {vocab_size:,} of its model: use the tokenizer that belongs to it"
            )
        return tokenizer

    def read_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `GPT.tensors` returns."""
        for mapping in self._mappings:
            tensor = self.read_tensor(mapping.name)
            if mapping.is_transposed:
                tensor = tensor.T
            parts = tensor.split([self._rows[name] for name in mapping.parameters])
            for name, part in zip(mapping.parameters, parts):
                yield name, part.contiguous()
