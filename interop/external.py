"""Build our model from a checkpoint of another library."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.terminal import error_sentence, print_stderr
from common.text import pluralize
from common.torchrun import process_rank
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import Tokenizer
from interop.layout import map_tensors
from interop.locate import RunPath, identify
from interop.names import MODULE_NAMES
from interop.source import CheckpointSource
from model import GPT
from training.checkpoint import check_shapes, parameter_shapes
from variants import build_model


class ExternalCheckpoint:
    """A checkpoint of another library, and the `config` with which our model computes the same."""

    def __init__(self, source: CheckpointSource | str | os.PathLike) -> None:
        """Check all that can be checked without reading the weights.

        Raises:
            UserError: It cannot be read, or our model cannot compute the same.
        """
        model = source if isinstance(source, CheckpointSource) else identify(Path(source))
        if isinstance(model, RunPath):
            raise UserError(f"{source} is a run; load it with interop.load")
        self.path = model.path
        self._source = model
        try:
            self.config = model.read_config()
        except (UserError, ValueError, ArithmeticError, TypeError) as e:
            raise UserError(f"{self.path} cannot be used: {error_sentence(e)}") from None
        shapes = dict(model.shapes)
        if self.config.n_layer > len(shapes):  # a model of so many layers would take long to build
            raise UserError(
                f"{self.path} has {pluralize(len(shapes), 'tensor')}, too few for "
                f"{pluralize(self.config.n_layer, 'layer')}; download it again"
            )

        # A tied table may be stored as the embedding, as the head, or as both
        names = {ours: f"{theirs}.weight" for theirs, ours in MODULE_NAMES[model.naming].items()}
        embedding, head = names["token_embedding"], names["head"]
        stored_names: dict[str, str] = {}
        if self.config.tie_embeddings and head in shapes:
            if embedding not in shapes:
                stored_names[embedding] = head
            elif shapes[embedding] == shapes[head] and self._are_equal(embedding, head):
                del shapes[head]
            else:
                self.config = replace(self.config, tie_embeddings=False)

        # Compare the tensors with those of our model
        try:
            our_shapes = parameter_shapes(self.config)
        except RuntimeError as e:  # the number of bytes exceeds 64 bits
            raise UserError(
                f"{self.path} has impossible sizes in its settings ({e}); download it again"
            ) from None
        self._mappings = [
            mapping._replace(name=stored_names.get(mapping.name, mapping.name))
            for mapping in map_tensors(our_shapes, model.naming)
        ]
        self._rows = {name: shape[0] for name, shape in our_shapes.items()}
        check_shapes(self.path, shapes, {mapping.name: mapping.shape for mapping in self._mappings})

    def _are_equal(self, *names: str) -> bool:
        first, second = (self._source.read_tensor(name) for name in names)
        return first.dtype == second.dtype and torch.equal(first, second)

    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None for a character model whose alphabet is not in the file.

        Raises:
            UserError: It cannot be read, or can encode text as tokens that the model lacks.
        """
        vocab_size = self.config.vocab_size
        try:
            tokenizer = self._source.read_tokenizer()
            if isinstance(tokenizer, HFTokenizer):
                tokenizer = tokenizer.limit_special_tokens(vocab_size)
        except UserError:
            raise
        except Exception as e:  # the library raises plain Exceptions
            raise UserError(
                f"{self.path} has no tokenizer that can be read ({e}); download it again"
            ) from None
        if self._source.tokenizer_note and process_rank() == 0:
            print_stderr(f"note: {self._source.tokenizer_note}")
        if tokenizer and tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"{self.path} has a tokenizer of {pluralize(tokenizer.vocab_size, 'token')}, more "
                f"than the {vocab_size:,} of its model; use the tokenizer that belongs to it"
            )
        return tokenizer

    def load(self, dtype: torch.dtype | None = None) -> GPT:
        """Build the model on the CPU, for evaluation, with weights of `dtype` (None: as stored).

        Safetensors of this type are memory-mapped, not copied.
        """
        with torch.device("meta"):
            model = build_model(self.config)
        state = {name: tensor.to(dtype) for name, tensor in self._read_parameters()}
        model.assign(state)
        return model.eval()

    @torch.no_grad()
    def copy_to(self, model: GPT) -> None:
        """Copy the weights into a model of these settings, or of a smaller block_size."""
        parameters = dict(model.named_parameters())
        for name, tensor in self._read_parameters():
            parameters[name].copy_(tensor[: len(parameters[name])])

    def _read_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for mapping in self._mappings:
            tensor = self._source.read_tensor(mapping.name)
            if mapping.is_transposed:
                tensor = tensor.T
            parts = tensor.split([self._rows[name] for name in mapping.parameters])
            for name, part in zip(mapping.parameters, parts):
                yield name, part.contiguous()
