"""Read models from .gguf files, the format of llama.cpp. Nothing in a file is executed.

Every size in the header is compared with the file's size before memory is allocated.
"""

import math
import mmap
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.settings import show_value
from config import GPTConfig
from data.tokenizer import Tokenizer
from interop.external import ExternalModel
from interop.gguf_tokenizer import read_gguf_tokenizer
from interop.names import GGUF_SETTINGS, ROPE_TENSOR
from interop.settings import HFSettings, config_from_hf
from model import rotary_frequencies

GGUF_MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
# Types of metadata values, as `struct` names them.
SCALAR_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
STRING_TYPE = 8
ARRAY_TYPE = 9
DEFAULT_ALIGNMENT = 32
EMBEDDING_TENSOR = "token_embd.weight"
DEFAULT_ROPE_THETA = 1e4
LLAMA3_TRAINED_LENGTH = 8192  # before its wavelengths were stretched

Metadata = dict[str, Any]  # values of any type by their keys


def require_gguf(name: str) -> None:
    """Raise `UserError` unless the library gguf is installed, which what is named needs."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            f"{name} needs the library gguf, which is not installed: run pip install gguf"
        ) from None


class GGUFFile(ExternalModel):
    """A model in a .gguf file, whose tensors are memory-mapped and dequantized when read."""

    def __init__(self, path: Path) -> None:
        require_gguf(str(path))
        self.path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._metadata, self._tensors = parse_header(self._bytes)
        parts = self._metadata.get("split.count", 1)
        if parts > 1:
            raise UserError(
                f"it is part {self._metadata['split.no'] + 1} of {parts}: join them first: "
                "llama-gguf-split --merge FIRST_PART JOINED.gguf"
            )
        self._architecture = self._metadata["general.architecture"]
        if self._architecture not in GGUF_SETTINGS:
            raise UserError(
                f"general.architecture={show_value(self._architecture)} is not supported: only "
                f"{' or '.join(GGUF_SETTINGS)} is"
            )
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        shapes.pop(ROPE_TENSOR, None)  # a setting, stored as a tensor
        config = config_from_hf(self._read_settings())
        super().__init__(path, config, "gguf" if config.is_rotary else "gguf_gpt2", shapes)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in float32, with its rows in the order of Hugging Face's format."""
        from gguf.quants import dequantize

        stored = self._tensors[name]
        content = np.frombuffer(self._bytes, np.uint8, stored.length, stored.offset)
        rows = math.prod(stored.shape[:-1])
        try:
            numbers = dequantize(content.reshape(rows, -1), stored.type)
        except NotImplementedError as e:
            raise UserError(
                f"{self.path}: {name} is stored in {stored.type.name}, which cannot be read "
                f"({e}): use a file of another quantization, such as Q8_0"
            ) from None
        tensor = torch.from_numpy(np.array(numbers, np.float32)).view(stored.shape)
        is_query = ".attn_q." in name
        if self._architecture != "llama" or not (is_query or ".attn_k." in name):
            return tensor
        # In llama.cpp's Llama, the rows of W_Q and W_K that rotate together are adjacent
        heads = self.config.n_head if is_query else self.config.kv_heads
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def parse_tokenizer(self) -> Tokenizer:
        """Return the tokenizer in the file."""
        return read_gguf_tokenizer(self._metadata)

    def _read_settings(self) -> HFSettings:
        """Return the settings as a config.json has them."""
        settings: HFSettings = {
            theirs: self._read_number(name)
            for name, theirs in GGUF_SETTINGS[self._architecture].items()
        }
        settings |= {
            "model_type": self._architecture,
            "vocab_size": self._tensors[EMBEDDING_TENSOR].shape[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "use_sliding_window": bool(settings.get("sliding_window")),
        }
        if self._architecture == "gpt2":
            return settings
        return settings | self._read_rotary_settings(settings)

    def _read_rotary_settings(self, settings: HFSettings) -> HFSettings:
        """Return the settings of rotary positions, as a config.json has them.

        llama.cpp stretches them linearly unless the file says otherwise.
        """
        factor = settings["factor"] or self._read_number("rope.scale_linear")
        rope_type = settings["rope_type"]
        if rope_type in (None, "linear"):
            rope_type = "linear" if factor else "none"
        rotary = {"factor": factor, "rope_type": rope_type}
        head_dim = settings["head_dim"]
        if not head_dim and settings["num_attention_heads"]:
            head_dim = settings["hidden_size"] // settings["num_attention_heads"]
        rotary_dim = self._read_number("rope.dimension_count")
        if head_dim and rotary_dim:
            rotary["partial_rotary_factor"] = rotary_dim / head_dim
        if ROPE_TENSOR in self._tensors:
            theta = settings["rope_theta"] or DEFAULT_ROPE_THETA
            length = settings["original_max_position_embeddings"] or LLAMA3_TRAINED_LENGTH
            factors = self.read_tensor(ROPE_TENSOR)
            rotary |= read_llama3_rope(factors, theta, head_dim, length)
        return rotary

    def _read_number(self, name: str) -> Any:
        """Return a value, or None. A list of equal ones, one for each block, counts as the one."""
        value = self._metadata.get(f"{self._architecture}.{name}")
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        return value


def read_llama3_rope(factors: Tensor, theta: float, head_dim: int, length: int) -> HFSettings:
    """Return Llama 3's settings if they give the factors (d_k / 2,) of the rotary wavelengths."""
    factor = factors.max().item()
    plain = GPTConfig(1, position="rope", head_dim=head_dim, rope_theta=theta)
    stretched = replace(plain, rope_factor=factor, rope_trained=length)
    expected = rotary_frequencies(plain) / rotary_frequencies(stretched)
    is_equal = factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-2)
    if not is_equal:
        raise UserError(
            f"the tensor {ROPE_TENSOR} does not stretch each rotary wavelength as Llama 3 does, "
            "which is the only way that is supported"
        )
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": length}


# --- the header -----------------------------------------------------------------------------------


class StoredGGUFTensor(NamedTuple):
    """Location, shape and quantization type of a tensor in the file."""

    type: Any  # a gguf.GGMLQuantizationType
    shape: list[int]  # as in PyTorch: rows first
    offset: int  # of its first byte in the file
    length: int  # in bytes


def parse_header(file: mmap.mmap) -> tuple[Metadata, dict[str, StoredGGUFTensor]]:
    """Return the metadata in a memory-mapped .gguf file, and its tensors by their names.

    Raises:
        Exception: Of many classes, if the file is damaged.
    """
    if (
        file.read(len(GGUF_MAGIC)) != GGUF_MAGIC
        or _read_scalar(file, "I") not in SUPPORTED_VERSIONS
    ):
        raise ValueError("it does not begin like a .gguf file of version 2 or 3")
    tensor_count = _read_count(file)
    entry_count = _read_count(file)
    metadata = {}
    for _ in range(entry_count):
        key = _read_text(file)
        metadata[key] = _read_value(file, _read_scalar(file, "I"))
    entries = [_read_tensor_entry(file) for _ in range(tensor_count)]

    # The tensors begin at the next multiple of the alignment
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    start = -(-file.tell() // alignment) * alignment
    tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in entries}
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:  # a small file could expand to a huge model
            raise ValueError(f"its tensor {name:.80} overlaps another one")
        end = tensor.offset + tensor.length
        if end > len(file):
            raise ValueError(f"it ends before its tensor {name:.80} of shape {tensor.shape}")
    return metadata, tensors


def _read_tensor_entry(file: mmap.mmap) -> tuple[str, StoredGGUFTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = _read_text(file)
    shape = list(_read_many(file, "Q", _read_scalar(file, "I")))[::-1]
    quantization = GGMLQuantizationType(_read_scalar(file, "I"))
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    length = math.prod(shape) // block_size * block_bytes
    return name, StoredGGUFTensor(quantization, shape, _read_scalar(file, "Q"), length)


def _read_value(file: mmap.mmap, type_number: int) -> Any:
    if type_number == STRING_TYPE:
        return _read_text(file)
    if type_number != ARRAY_TYPE:
        return _read_scalar(file, SCALAR_FORMATS[type_number])
    item_type = _read_scalar(file, "I")
    count = _read_count(file)
    if item_type == STRING_TYPE:
        return [_read_text(file) for _ in range(count)]
    return list(_read_many(file, SCALAR_FORMATS[item_type], count))


def _read_text(file: mmap.mmap) -> str:
    return file.read(_read_count(file)).decode()


def _read_count(file: mmap.mmap) -> int:
    """Read a number of items or bytes, each of which takes at least a byte of the file."""
    count = _read_scalar(file, "Q")
    if count > len(file) - file.tell():
        raise ValueError(f"it claims that something in it has the length {count:,}")
    return count


def _read_scalar(file: mmap.mmap, format: str) -> Any:
    return _read_many(file, format, 1)[0]


def _read_many(file: mmap.mmap, format: str, count: int) -> tuple[Any, ...]:
    format = f"<{count}{format}"
    return struct.unpack(format, file.read(struct.calcsize(format)))
