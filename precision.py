"""The floating-point formats in which matrices are multiplied."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def autocast(device: str, precision: str) -> torch.autocast:
    """Return the context in which a forward pass runs in a precision, a key of `DTYPES`."""
    is_enabled = precision != "fp32"
    return torch.autocast(device.partition(":")[0], DTYPES[precision], enabled=is_enabled)
