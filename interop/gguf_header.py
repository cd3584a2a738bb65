"""Parse the header of a .gguf file: its metadata, and where its tensors are.

Every size in the header is validated against the file's size before memory is allocated.
"""

import math
import mmap
import struct
from typing import Any, NamedTuple, TypeVar

from common.settings import TYPE_WORDS, show_value
from common.text import pluralize

Value = TypeVar("Value", int, float, bool, str)

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
# Types of metadata values, as `struct` names them.
SCALAR_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING_TYPE = 8
ARRAY_TYPE = 9
MAX_LIST_ITEMS = 1 << 22  # a tokenizer's lists have up to a few hundred thousand
MAX_ENTRIES = 1 << 16  # of the metadata, and tensors
MAX_NAME_BYTES = 1 << 10  # of a key or a tensor; llama.cpp's tensors have up to 64
MAX_DIMENSIONS = 4
MIN_ENTRY_BYTES = 12  # a name's length and a value's type
MIN_TENSOR_BYTES = 24  # a name's length, dimensions, type and offset
MIN_STRING_BYTES = 8  # its length
DEFAULT_ALIGNMENT = 32


class Metadata(dict[str, Any]):
    """The metadata of a .gguf file: values of any type by their keys."""

    def read(self, key: str, value_type: type[Value]) -> Value | None:
        """Return a value, or None if the file does not have it.

        A list of equal numbers, one for each block, counts as that number.

        Raises:
            ValueError: The value has another type.
        """
        value = self.get(key)
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]
        if value_type is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not value_type:
            raise self._wrong_type(key, TYPE_WORDS[value_type])
        return value

    def read_list(self, key: str, value_type: type[Value]) -> list[Value] | None:
        """Return a list, or None if the file does not have it.

        Raises:
            ValueError: The value is not a list, or an item has another type.
        """
        values = self.get(key)
        if values is None:
            return None
        if type(values) is not list or any(type(value) is not value_type for value in values):
            raise self._wrong_type(key, f"a list in which every item is {TYPE_WORDS[value_type]}")
        return values

    def _wrong_type(self, key: str, expected: str) -> ValueError:
        return ValueError(f"{key}={show_value(self[key])} is not {expected}")


class StoredGGUFTensor(NamedTuple):
    """Where a tensor is in the file.

    Attributes:
        type: How its numbers are stored, a `gguf.GGMLQuantizationType`.
        shape: Its shape as in PyTorch: rows first.
        offset: Its first byte in the file.
        length: Its length in bytes.
    """

    type: Any
    shape: list[int]
    offset: int
    length: int


class GGUFHeader(NamedTuple):
    """What the header of a .gguf file says.

    Attributes:
        metadata: Values by their keys.
        tensors: Tensors by their names.
    """

    metadata: Metadata
    tensors: dict[str, StoredGGUFTensor]


class _TensorEntry(NamedTuple):
    name: str
    shape: list[int]  # columns first
    type_number: int
    offset: int  # from the start of the tensors


def parse_header(file: mmap.mmap) -> GGUFHeader:
    """Parse the header of a memory-mapped .gguf file.

    Raises:
        ValueError or KeyError: The file is not a .gguf file, or it is damaged.
    """
    reader = _Reader(file)
    if file.read(len(MAGIC)) != MAGIC or reader.read_scalar("I") not in SUPPORTED_VERSIONS:
        raise ValueError("it does not begin like a file of version 2 or 3")
    tensor_count = reader.read_count(MIN_TENSOR_BYTES, MAX_ENTRIES)
    entry_count = reader.read_count(MIN_ENTRY_BYTES, MAX_ENTRIES)
    metadata = Metadata()
    for _ in range(entry_count):
        key = reader.read_name(metadata)
        metadata[key] = reader.read_value(reader.read_scalar("I"))
    entries: dict[str, _TensorEntry] = {}
    for _ in range(tensor_count):
        name = reader.read_name(entries)
        entries[name] = reader.read_tensor_entry(name)

    # The tensors begin at the next multiple of the alignment
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!a:.40}")
    start = -(-file.tell() // alignment) * alignment
    tensors = {name: _locate_tensor(entry, start, len(file)) for name, entry in entries.items()}
    return GGUFHeader(metadata, tensors)


def _locate_tensor(entry: _TensorEntry, start: int, file_size: int) -> StoredGGUFTensor:
    """Return where a tensor is; raise `ValueError` unless all of it is inside the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    quantization = GGMLQuantizationType(entry.type_number)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    length = math.prod(entry.shape) // block_size * block_bytes
    offset = start + entry.offset
    is_empty = not entry.shape or not length
    if is_empty or entry.shape[0] % block_size or offset + length > file_size:
        raise ValueError(f"the tensor {entry.name!a} of shape {entry.shape} is not in the file")
    return StoredGGUFTensor(quantization, entry.shape[::-1], offset, length)


class _Reader:
    """Reads the parts of a header one after the other."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file = file

    def read_scalar(self, format: str) -> Any:
        """Read a number or a truth value of a type of `struct`."""
        return self._read_scalars(format, 1)[0]

    def _read_scalars(self, format: str, count: int) -> list[Any]:
        format = f"<{count}{format}"
        content = self._file.read(struct.calcsize(format))
        if len(content) < struct.calcsize(format):
            raise ValueError("it ends before its header does")
        return list(struct.unpack(format, content))

    def read_count(self, min_bytes: int, max_count: int | None = None) -> int:
        """Read a number of items that take at least `min_bytes` bytes each."""
        count = self.read_scalar("Q")
        remaining = len(self._file) - self._file.tell()
        is_too_many = max_count is not None and count > max_count
        if count * min_bytes > remaining or is_too_many:
            size = pluralize(min_bytes, "byte")
            raise ValueError(f"it claims to have {pluralize(count, 'item')} of at least {size}")
        return count

    def read_text(self, max_bytes: int | None = None) -> str:
        return self._file.read(self.read_count(1, max_bytes)).decode()

    def read_name(self, used: dict[str, Any]) -> str:
        """Read a key or the name of a tensor, which is not among those read before."""
        name = self.read_text(MAX_NAME_BYTES)
        if name in used:
            raise ValueError(f"it has {name!a} twice")
        return name

    def read_value(self, type_number: int) -> Any:
        """Read a scalar, a text, or a list of them."""
        if type_number == STRING_TYPE:
            return self.read_text()
        if type_number != ARRAY_TYPE:
            return self.read_scalar(_scalar_format(type_number))
        item_type = self.read_scalar("I")
        if item_type == STRING_TYPE:
            count = self.read_count(MIN_STRING_BYTES, MAX_LIST_ITEMS)
            return [self.read_text() for _ in range(count)]
        format = _scalar_format(item_type)
        count = self.read_count(struct.calcsize("<" + format), MAX_LIST_ITEMS)
        return self._read_scalars(format, count)

    def read_tensor_entry(self, name: str) -> _TensorEntry:
        dimensions = self.read_scalar("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions:,} dimensions")
        shape = self._read_scalars("Q", dimensions)
        return _TensorEntry(name, shape, self.read_scalar("I"), self.read_scalar("Q"))


def _scalar_format(type_number: int) -> str:
    if type_number not in SCALAR_FORMATS:
        raise ValueError(f"it has a value of the unknown type {type_number}")
    return SCALAR_FORMATS[type_number]
