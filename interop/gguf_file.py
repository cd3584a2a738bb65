"""Read models from .gguf files, the format of llama.cpp. Nothing in a file is executed."""

import math
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import Tokenizer
from interop.gguf_header import parse_header, require_gguf
from interop.gguf_tokenizer import read_gguf_tokenizer
from interop.names import GGUF_SETTINGS, ROPE_TENSOR
from interop.settings import ROPE_SETTINGS, HFSettings, config_from_hf
from interop.source import CheckpointSource
from model import ROPE_HIGH, ROPE_LOW, rotary_frequencies

EMBEDDING_TENSOR = "token_embd.weight"
DEFAULT_ROPE_THETA = 1e4
MAX_FACTOR_ERROR = 0.01  # of the factors that Llama 3's settings give, relative to those in a file
# Settings that are not whole numbers, by their names in a config.json.
SETTING_TYPES: dict[str, type] = {
    "layer_norm_epsilon": float,
    "rms_norm_eps": float,
    "rope_theta": float,
    "factor": float,
    "rope_type": str,
}


class GGUFFile(CheckpointSource):
    """A model in a .gguf file, whose tensors are memory-mapped and dequantized when read."""

    def __init__(self, path: Path) -> None:
        require_gguf(str(path))
        from gguf.quants import dequantize

        self.path = path
        self._dequantize = dequantize
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._metadata, self._tensors = parse_header(self._bytes)
            self._architecture = self._metadata.read("general.architecture", str)
            kind = self._metadata.read("general.type", str)
            n_files = self._metadata.read("split.count", int)
        except (OSError, ValueError, KeyError) as e:
            raise UserError(
                f"{path} is not a .gguf file that can be read ({e}); download it again"
            ) from None
        if kind not in (None, "model"):
            raise UserError(f"{path} contains {kind!a:.40}, not a model; give the model's file")
        if n_files is not None and n_files > 1:
            raise UserError(
                f"{path} is one of {n_files} files of a model; join them with "
                "llama-gguf-split --merge"
            )
        self._require_dequantizable()
        self._is_gpt2 = self._architecture == "gpt2"
        self.naming = "gguf_gpt2" if self._is_gpt2 else "gguf"
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        if not self._is_gpt2:
            self.shapes.pop(ROPE_TENSOR, None)  # a setting, stored as a tensor
        # Names of the settings in a config.json → keys in the file
        names = GGUF_SETTINGS["gpt2" if self._is_gpt2 else "llama"]
        self._keys = {theirs: f"{self._architecture}.{name}" for name, theirs in names.items()}

    def _require_dequantizable(self) -> None:
        from gguf import GGML_QUANT_SIZES

        for stored_type in {tensor.type for tensor in self._tensors.values()}:
            try:
                self._dequantize(np.zeros(GGML_QUANT_SIZES[stored_type][1], np.uint8), stored_type)
            except NotImplementedError as e:
                raise UserError(
                    f"{self.path} has tensors in {stored_type.name}, which cannot be read ({e}); "
                    "use a file of another quantization, such as Q8_0"
                ) from None

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        names_in_file = self._keys | {"model_type": "general.architecture"}
        return config_from_hf(self._read_settings(), names_in_file)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in float32, with its rows in the order of Hugging Face's format."""
        stored = self._tensors[name]
        content = np.frombuffer(self._bytes, np.uint8, stored.length, stored.offset)
        rows = math.prod(stored.shape[:-1])
        numbers = self._dequantize(content.reshape(rows, -1), stored.type)
        tensor = torch.from_numpy(np.array(numbers, np.float32)).view(stored.shape)
        is_query = ".attn_q." in name
        if self._architecture != "llama" or not (is_query or ".attn_k." in name):
            return tensor

        # In llama.cpp's Llama, the rows of W_Q and W_K that rotate together are adjacent
        heads = self._metadata.read(self._keys["num_attention_heads"], int)
        if not is_query:
            heads = self._metadata.read(self._keys["num_key_value_heads"], int) or heads
        assert heads is not None  # read_config requires it
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer in the file."""
        return read_gguf_tokenizer(self.path, self._metadata)

    def _read_settings(self) -> HFSettings:
        settings: HFSettings = {
            name: self._metadata.read(key, SETTING_TYPES.get(name, int))
            for name, key in self._keys.items()
        }

        # What only the tensors tell
        if EMBEDDING_TENSOR not in self._tensors:
            raise ValueError(f"the tensor {EMBEDDING_TENSOR} is missing")
        settings |= {
            "model_type": self._architecture,
            "vocab_size": self._tensors[EMBEDDING_TENSOR].shape[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }
        if self._is_gpt2:
            return settings
        mlp = self._tensors.get("blk.0.ffn_up.weight")
        if settings["intermediate_size"] is None and mlp is not None:
            settings["intermediate_size"] = mlp.shape[0]

        # Rotary positions, which llama.cpp stretches linearly unless the file says otherwise
        rope = f"{self._architecture}.rope"
        if settings["factor"] is None:
            settings["factor"] = self._metadata.read(f"{rope}.scale_linear", float)
        if settings["rope_type"] in (None, "linear"):
            settings["rope_type"] = "linear" if settings["factor"] else "none"
        head_dim, n_head = settings["head_dim"], settings["num_attention_heads"]
        if head_dim is None and n_head and settings["hidden_size"]:
            head_dim = settings["hidden_size"] // n_head
        rotary_dim = self._metadata.read(f"{rope}.dimension_count", int)
        if head_dim and rotary_dim is not None:
            settings["partial_rotary_factor"] = rotary_dim / head_dim
        if ROPE_TENSOR in self._tensors:
            theta = settings["rope_theta"] or DEFAULT_ROPE_THETA
            settings |= infer_llama3_rope(self.read_tensor(ROPE_TENSOR), theta, head_dim or 0)
        return settings


def infer_llama3_rope(factors: Tensor, theta: float, head_dim: int) -> HFSettings:
    """Infer Llama 3's settings from the factors (d_k / 2,) that stretch rotary wavelengths."""
    n_wavelengths = head_dim // 2
    if list(factors.shape) == [n_wavelengths] and (factors.isfinite() & (factors > 0)).all():
        largest = factors.max()
        unstretched_share = (1 / factors - 1 / largest) / (1 - 1 / largest)
        turns = ROPE_LOW + unstretched_share * (ROPE_HIGH - ROPE_LOW)
        wavelengths = 2 * math.pi * theta ** (torch.arange(n_wavelengths) / n_wavelengths)
        is_between = (unstretched_share > 0.01) & (unstretched_share < 0.99)
        trained_length = (turns * wavelengths)[is_between].median()  # NaN if none is between
        if trained_length.isfinite():
            ours = {"rope_factor": largest.item(), "rope_trained": round(trained_length.item())}
            plain = GPTConfig(1, position="rope", head_dim=head_dim, rope_theta=theta)
            inferred = rotary_frequencies(plain) / rotary_frequencies(replace(plain, **ours))
            if torch.allclose(inferred, factors, rtol=MAX_FACTOR_ERROR):
                theirs = {name: ours[our_name] for name, our_name in ROPE_SETTINGS.items()}
                return {"rope_type": "llama3", **theirs}
    raise UserError(
        f"the tensor {ROPE_TENSOR} does not stretch each of the {n_wavelengths} rotary wavelengths "
        "as Llama 3 does, which is the only way that is supported"
    )
