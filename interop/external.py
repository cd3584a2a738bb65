"""Build our model from a checkpoint of another library."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from data.tokenizer import Tokenizer
from interop.folder import HF_CONFIG_FILE, HFFolder
from interop.gguf_file import GGUFFile
from interop.layout import map_tensors
from interop.nanogpt import NanoGPTFile
from interop.source import CheckpointSource
from model import GPT
from training.checkpoint import check_shapes, parameter_shapes

HEAD_TENSORS = {"lm_head.weight", "output.weight"}  # of a head that is not the embedding


def is_external(path: Path) -> bool:
    """Whether a path is a checkpoint of another library, rather than a run.

    It is one if it is a .gguf file, a .pt file, or a folder with a config.json but no config.yaml.
    """
    if path.suffix in (".gguf", ".pt"):
        return True
    return (path / HF_CONFIG_FILE).is_file() and not (path / "config.yaml").is_file()


class ExternalCheckpoint:
    """A checkpoint of another library whose tensors fit our model.

    Attributes:
        path: Its file or folder.
        config: Our settings for its model.
        tokenizer_name: Value of the setting `tokenizer.name` for its tokenizer.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Check all that can be checked without reading the weights.

        Args:
            path: A folder of Hugging Face's format, a .gguf file or nanoGPT's ckpt.pt.

        Raises:
            UserError: It cannot be read, or our model has no counterpart.
        """
        self.path = Path(path)
        self._source = _open_source(self.path)
        self.tokenizer_name = self._source.tokenizer_name
        self.config = self._source.read_config()
        shapes = self._source.tensor_shapes()
        if self.config.n_layer > len(shapes):  # a model of so many layers would take long to build
            raise UserError(
                f"{self.path} has {len(shapes):,} tensors, too few for {self.config.n_layer:,} "
                "layers; download it again"
            )
        if HEAD_TENSORS & shapes.keys():
            self.config = replace(self.config, tie_embeddings=False)
        our_shapes = parameter_shapes(self.config)
        self._rows = {name: shape[0] for name, shape in our_shapes.items()}
        self._mappings = list(map_tensors(our_shapes, self._source.naming))
        expected = {mapping.name: mapping.shape for mapping in self._mappings}
        check_shapes(self.path, shapes, expected)

    def read_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer beside the weights, or None if that is the alphabet of a text.

        Raises:
            UserError: It cannot be read, or has more tokens than the model.
        """
        try:
            tokenizer = self._source.read_tokenizer()
        except UserError:
            raise
        except Exception as e:  # the library raises plain Exceptions
            raise UserError(
                f"{self.path} has no tokenizer that can be read ({e}); download it again"
            ) from None
        vocab_size = self.config.vocab_size
        if tokenizer and vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"{self.path} has a tokenizer of {tokenizer.vocab_size:,} tokens, more than the "
                f"{vocab_size:,} of its model; use the tokenizer that belongs to it"
            )
        return tokenizer

    def load(self, dtype: torch.dtype | None = None) -> GPT:
        """Build the model on the CPU, for evaluation.

        Args:
            dtype: Data type of the weights. None: as stored. Safetensors of this type are
                memory-mapped, not copied.
        """
        with torch.device("meta"):
            model = GPT(self.config)
        state = {name: tensor.to(dtype) for name, tensor in self._read_parameters()}
        model.load_state_dict(state, strict=False, assign=True)
        if self.config.tie_embeddings:
            model.head.weight = model.token_embedding.weight
        model.compute_rotary()
        return model.eval()

    @torch.no_grad()
    def copy_to(self, model: GPT) -> None:
        """Copy the weights into a model of these settings, or of a smaller block_size."""
        parameters = dict(model.named_parameters())
        for name, tensor in self._read_parameters():
            parameters[name].copy_(tensor[: len(parameters[name])])

    def _read_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by name."""
        for mapping in self._mappings:
            tensor = self._source.read_tensor(mapping.name)
            if mapping.is_transposed:
                tensor = tensor.T
            parts = tensor.split([self._rows[name] for name in mapping.parameters])
            for name, part in zip(mapping.parameters, parts):
                yield name, part.contiguous()


def _open_source(path: Path) -> CheckpointSource:
    if path.suffix == ".gguf":
        return GGUFFile(path)
    if path.suffix == ".pt":
        return NanoGPTFile(path)
    return HFFolder(path)
