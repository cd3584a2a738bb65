"""Read a file that torch has saved as tensors and numbers only, so that no code in it can run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.files import read_start

TORCH_MAGIC = b"PK\3\4"  # a zip archive, which torch can map into memory
TORCH_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_torch_file(path: Path) -> dict[str, Any]:
    """Return what is saved by names in a file; tensors are memory-mapped unless torch was < 1.6."""
    is_mapped = read_start(path).startswith(TORCH_MAGIC)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as e:  # torch and the reader of pickles raise errors of many classes
        code = re.search(r"GLOBAL (\S+)", str(e))
        cause = f"contains code ({code[1]:.80}), which is not run" if code else "is damaged"
        raise UserError(f"{path.name} {cause}: give the file as it was published") from None
    return saved if isinstance(saved, dict) else {}


def check_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` unless these are plain arrays of numbers, of a size that their file has."""
    for name, tensor in tensors.items():
        is_plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.is_cpu
        if not is_plain or tensor.dtype not in TORCH_FLOATS or not tensor.is_contiguous():
            kind = f"in {tensor.dtype}" if is_plain else f"as {type(tensor).__name__}"
            raise UserError(
                f"it has {name:.80} {kind}, and only contiguous tensors in float64, float32, "
                "float16 and bfloat16 can be read: give the model with unquantized weights, or a "
                ".gguf file of it"
            )
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if n_bytes > 2 * path.stat().st_size:  # only the embedding and the head share memory
        raise UserError(f"its tensors, of {n_bytes:,} bytes, share memory: save a copy of each")
