"""Frames: the values that the server streams to the page, as JSON with binary arrays.

A frame is two little-endian uint32, the sizes in bytes of its JSON and of its binary part, followed
by the two. The JSON is an object with one key, the frame's kind. It stands for a NumPy array as
{"array": its type, "offset": bytes from the beginning of the binary part, "length": elements}.
"""

import json
import struct
import traceback
from typing import Any, Literal

import numpy as np

from common.terminal import explain_error, print_stderr


def encode_frame(kind: Literal["part", "answer", "error"], value: Any) -> bytes:
    """Encode JSON with arrays of float32 or float16, which are flattened, as one frame."""
    binary = bytearray()

    def add_array(array: np.ndarray) -> dict[str, str | int]:
        offset = len(binary)
        binary.extend(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return {"array": array.dtype.name, "offset": offset, "length": array.size}

    text = json.dumps({kind: value}, default=add_array, allow_nan=False).encode()
    return struct.pack("<II", len(text), len(binary)) + text + binary


def encode_error(error: Exception) -> bytes:
    """Return the error frame of an exception, and print the traceback of a bug to stderr."""
    explanation = explain_error(error)
    if explanation is None:
        print_stderr("".join(traceback.format_exception(error)))
        reason = f"{type(error).__name__} in explore.py: see the terminal for the details"
        return encode_frame("error", {"name": "InternalError", "message": reason})
    return encode_frame("error", {"name": type(error).__name__, "message": explanation})
