"""Parse the header of a .gguf file: its metadata, and where its tensors are.

Every size in the header is validated against the file's size before memory is allocated.
"""

import math
import mmap
import struct
from typing import Any, NamedTuple, TypeVar

from common.errors import UserError
from common.settings import TYPE_WORDS, show_value

Value = TypeVar("Value", int, float, bool, str)

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
# Types of metadata values, as `struct` names them.
SCALAR_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
STRING_TYPE = 8
ARRAY_TYPE = 9
MAX_ITEMS = 1 << 22  # of a list, or bytes of a text; tokenizers have up to a few hundred thousand
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


def require_gguf(name: str) -> None:
    """Raise `UserError` unless the library gguf is installed, which what is named needs."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            f"{name} needs the library gguf, which is not installed; run pip install gguf"
        ) from None


class Metadata(dict[str, Any]):
    """The metadata of a .gguf file: values of any type by their keys."""

    def read(self, key: str, value_type: type[Value]) -> Value | None:
        """Return a value of this type, or None if the file does not have it.

        A list of equal numbers, one for each block, counts as that number.
        """
        value = self.get(key)
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]
        if value_type is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not value_type:
            raise ValueError(f"{key}={show_value(self[key])} is not {TYPE_WORDS[value_type]}")
        return value

    def read_list(self, key: str, value_type: type[Value]) -> list[Value] | None:
        """Return a list of values of this type, or None if the file does not have it."""
        values = self.get(key)
        if values is None:
            return None
        if type(values) is not list or any(type(value) is not value_type for value in values):
            expected = f"a list in which every item is {TYPE_WORDS[value_type]}"
            raise ValueError(f"{key}={show_value(values)} is not {expected}")
        return values


class StoredGGUFTensor(NamedTuple):
    """Location, shape and quantization type of a tensor in the file."""

    type: Any  # a gguf.GGMLQuantizationType
    shape: list[int]  # as in PyTorch: rows first
    offset: int  # of its first byte in the file
    length: int  # in bytes


def parse_header(file: mmap.mmap) -> tuple[Metadata, dict[str, StoredGGUFTensor]]:
    """Return the metadata in a memory-mapped .gguf file, and its tensors by their names.

    Raises:
        ValueError or KeyError: The file is not a .gguf file, or it is damaged.
    """
    if file.read(len(MAGIC)) != MAGIC or _read_scalar(file, "I") not in SUPPORTED_VERSIONS:
        raise ValueError("it does not begin like a file of version 2 or 3")
    tensor_count = _read_count(file)
    entry_count = _read_count(file)
    metadata = Metadata()
    for _ in range(entry_count):
        key = _read_name(file, metadata)
        metadata[key] = _read_value(file, _read_scalar(file, "I"))
    tensors: dict[str, StoredGGUFTensor] = {}
    for _ in range(tensor_count):
        name = _read_name(file, tensors)
        tensors[name] = _read_tensor_entry(file)

    # The tensors begin at the next multiple of the alignment
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!a:.40}")
    start = -(-file.tell() // alignment) * alignment
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(offset=start + tensor.offset)
        if tensor.length == 0 or tensors[name].offset + tensor.length > len(file):
            raise ValueError(f"the tensor {name!a:.80} of shape {tensor.shape} is not in the file")
    return metadata, tensors


def _read_tensor_entry(file: mmap.mmap) -> StoredGGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    dimensions = _read_scalar(file, "I")
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {dimensions:,} dimensions")
    shape = _read_scalars(file, "Q", dimensions)[::-1]
    quantization = GGMLQuantizationType(_read_scalar(file, "I"))
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    if not shape or shape[-1] % block_size:
        raise ValueError(f"a tensor in {quantization.name} has the shape {shape}")
    length = math.prod(shape) // block_size * block_bytes
    return StoredGGUFTensor(quantization, shape, _read_scalar(file, "Q"), length)


def _read_scalar(file: mmap.mmap, format: str) -> Any:
    return _read_scalars(file, format, 1)[0]


def _read_scalars(file: mmap.mmap, format: str, count: int) -> list[Any]:
    format = f"<{count}{format}"
    content = file.read(struct.calcsize(format))
    if len(content) < struct.calcsize(format):
        raise ValueError("it ends before its header does")
    return list(struct.unpack(format, content))


def _read_count(file: mmap.mmap) -> int:
    """Read a number of items or bytes, each of which takes at least a byte of the file."""
    count = _read_scalar(file, "Q")
    if count > min(len(file) - file.tell(), MAX_ITEMS):
        raise ValueError(f"it claims that something in it has the length {count:,}")
    return count


def _read_text(file: mmap.mmap) -> str:
    return file.read(_read_count(file)).decode()


def _read_name(file: mmap.mmap, used: dict[str, Any]) -> str:
    name = _read_text(file)
    if name in used:
        raise ValueError(f"it has {name!a:.80} twice")
    return name


def _read_value(file: mmap.mmap, type_number: int) -> Any:
    if type_number == STRING_TYPE:
        return _read_text(file)
    if type_number in SCALAR_FORMATS:
        return _read_scalar(file, SCALAR_FORMATS[type_number])
    item_type = _read_scalar(file, "I")
    if type_number != ARRAY_TYPE or item_type not in (STRING_TYPE, *SCALAR_FORMATS):
        raise ValueError("it has a value of an unknown type")
    count = _read_count(file)
    if item_type == STRING_TYPE:
        return [_read_text(file) for _ in range(count)]
    return _read_scalars(file, SCALAR_FORMATS[item_type], count)
