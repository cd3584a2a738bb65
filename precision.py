"""The floating-point formats in which matrices are multiplied."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: str, precision: str) -> torch.autocast:
    """Return the context in which a forward pass runs in a precision, a key of `DTYPES`."""
    is_enabled = precision != "fp32"
    return torch.autocast(device.partition(":")[0], DTYPES[precision], enabled=is_enabled)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32, also where training multiplies them in TF32.

    TF32 has 10 bits after the leading one instead of 23.
    """
    training_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(training_precision)
