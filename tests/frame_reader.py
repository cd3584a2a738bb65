"""Decode the frames of glass/live/frames.py, as the page does."""

import json
import struct

import numpy as np


def decode_frames(stream: bytes) -> list[tuple[str, object]]:
    """Return the kind and the value of each frame; an incomplete frame at the end is left out."""
    frames = []
    while len(stream) >= 8:
        text_size, binary_size = struct.unpack_from("<II", stream)
        if len(stream) < 8 + text_size + binary_size:
            break
        binary = stream[8 + text_size : 8 + text_size + binary_size]
        ((kind, value),) = json.loads(stream[8 : 8 + text_size]).items()
        frames.append((kind, _with_arrays(value, binary)))
        stream = stream[8 + text_size + binary_size :]
    return frames


def _with_arrays(value, binary):
    if isinstance(value, list):
        return [_with_arrays(item, binary) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.frombuffer(binary, value["array"], value["length"], value["offset"])
    return {key: _with_arrays(item, binary) for key, item in value.items()}
