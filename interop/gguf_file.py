"""Read models from .gguf files, the format of llama.cpp. Nothing in a file is executed."""

import math
import mmap
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from torch import Tensor

from attention import ROPE_HIGH, ROPE_LOW
from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer
from interop.gguf_header import parse_header
from interop.names import GGUF_SETTINGS
from interop.settings import HFSettings, read_model_config
from interop.source import CheckpointSource

ROPE_TENSOR = "rope_freqs.weight"  # factors by which Llama 3 stretches the rotary wavelengths
CONTROL_TOKEN = 3  # types of tokens in tokenizer.ggml.token_type
USER_DEFINED_TOKEN = 4
TOKENIZER_PREFIX = "tokenizer.ggml."
# Of Llama 3 and Qwen 2: how text is split before merging, without the number of digits in a group.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT_GROUPS = {"llama-bpe": "{1,3}", "qwen2": ""}


class GGUFFile(CheckpointSource):
    """A model in a .gguf file, whose tensors are memory-mapped and dequantized when read."""

    tokenizer_name = "hf"

    def __init__(self, path: Path) -> None:
        """Read the header of a file.

        Raises:
            UserError: The library gguf is not installed, or the file is damaged.
        """
        try:
            from gguf.quants import dequantize
        except ImportError:
            raise UserError(
                f"{path} needs the library gguf, which is not installed; run pip install gguf"
            ) from None
        self.path = path
        self._dequantize = dequantize
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = parse_header(self._bytes)
        except (OSError, ValueError, KeyError, struct.error) as e:
            raise UserError(
                f"{path} is not a .gguf file that can be read ({e}); download it again"
            ) from None
        self._metadata, self._tensors = header
        self._architecture = self._metadata.get("general.architecture")
        self.naming = "gguf_gpt2" if self._architecture == "gpt2" else "gguf"

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        return read_model_config(self.path, self._hf_settings)

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor except the rotary factors."""
        return {name: tensor.shape for name, tensor in self._tensors.items() if name != ROPE_TENSOR}

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in float32, with its rows in the order of Hugging Face's format."""
        stored = self._tensors[name]
        content = np.frombuffer(self._bytes, np.uint8, stored.length, stored.offset)
        rows = math.prod(stored.shape[:-1])
        try:
            numbers = self._dequantize(content.reshape(rows, -1), stored.type)
        except NotImplementedError as e:
            raise UserError(
                f"{self.path} has {name} in {stored.type.name}, which cannot be read ({e}); "
                "use a file of another quantization, such as Q8_0"
            ) from None
        tensor = torch.from_numpy(np.array(numbers, np.float32)).view(stored.shape)
        if self._architecture == "llama":
            return self._unpair_rotary_rows(name, tensor)
        return tensor

    def read_tokenizer(self) -> HFTokenizer:
        """Return the byte-level BPE tokenizer in the file.

        Raises:
            UserError: The tokenizer is of another kind, or splits text in an unknown way.
        """
        settings = self._tokenizer_settings()
        split = settings.get("pre")
        tokens, token_types = settings["tokens"], settings["token_type"]

        # Build the vocabulary and the merges
        ids = {token: id for id, token in enumerate(tokens)}
        merges = [tuple(pair.split(" ", 1)) for pair in settings["merges"]]
        library = Library(models.BPE(ids, merges, ignore_merges=split == "llama-bpe"))
        library.pre_tokenizer = self._build_pre_tokenizer(split)
        library.decoder = decoders.ByteLevel()
        if split == "qwen2":
            library.normalizer = normalizers.NFC()

        # Mark the tokens that the merges do not make
        for token_type in (USER_DEFINED_TOKEN, CONTROL_TOKEN):
            is_special = token_type == CONTROL_TOKEN
            added = [
                AddedToken(token, special=is_special, normalized=False)
                for token, type_of_token in zip(tokens, token_types)
                if type_of_token == token_type
            ]
            library.add_tokens(added)

        # Put begin-of-text before each text
        if settings.get("add_bos_token", split == "llama-bpe"):
            begin = settings["bos_token_id"]
            library.post_processor = processors.TemplateProcessing(
                single=[tokens[begin], "$A"], special_tokens=[(tokens[begin], begin)]
            )
        return HFTokenizer(library.to_str(), settings.get("eos_token_id"))

    def _hf_settings(self) -> HFSettings:
        """The model's settings as a config.json would have them."""
        names = GGUF_SETTINGS["gpt2" if self._architecture == "gpt2" else "llama"]
        settings: HFSettings = {
            theirs: self._metadata.get(f"{self._architecture}.{name}")
            for name, theirs in names.items()
        }
        if ROPE_TENSOR in self._tensors:
            theta = settings["rope_theta"] or 1e4
            settings |= infer_llama3_rope(self.read_tensor(ROPE_TENSOR), theta)
        embedding = self._tensors.get("token_embd.weight")
        vocab_size = embedding.shape[0] if embedding else None
        width = embedding.shape[-1] if embedding else 0
        heads = self._metadata.get(f"{self._architecture}.attention.head_count") or 1
        head_dim: float = settings.get("head_dim") or width / heads
        rotary_dim: float = self._metadata.get(
            f"{self._architecture}.rope.dimension_count", head_dim
        )
        return settings | {
            "model_type": self._architecture,
            "vocab_size": vocab_size,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "partial_rotary_factor": rotary_dim / head_dim,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }

    def _unpair_rotary_rows(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of Llama's W_Q and W_K, where rows that rotate together are adjacent."""
        key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
        if key is None:
            return tensor
        query_heads = self._metadata["llama.attention.head_count"]
        heads = self._metadata.get(f"llama.attention.{key}") or query_heads
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def _tokenizer_settings(self) -> dict[str, Any]:
        settings = {
            key.removeprefix(TOKENIZER_PREFIX): value for key, value in self._metadata.items()
        }
        if settings.get("model") != "gpt2":
            raise UserError(
                f"{self.path} has a tokenizer of type {settings.get('model')}, and only byte-level "
                "BPE (gpt2) can be read; use the model's Hugging Face folder instead"
            )
        return settings

    def _build_pre_tokenizer(self, split: str | None) -> pre_tokenizers.PreTokenizer:
        """The rule by which a family of models splits text before merging."""
        byte_level = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
        if split == "gpt-2":
            return pre_tokenizers.Sequence([byte_level()])
        if split == "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, byte_level()])
        if split not in DIGIT_GROUPS:
            supported = ", ".join(["gpt-2", "smollm", *DIGIT_GROUPS])
            raise UserError(
                f"{self.path} splits text by the rule {split}, and only {supported} are supported; "
                "use the model's Hugging Face folder instead"
            )
        pattern = Regex(WORD_PATTERN.format(digits=DIGIT_GROUPS[split]))
        words = pre_tokenizers.Split(pattern, "isolated")
        return pre_tokenizers.Sequence([words, byte_level(use_regex=False)])


def infer_llama3_rope(factors: Tensor, theta: float) -> HFSettings:
    """Infer Llama 3's settings from the factors by which it stretches rotary wavelengths.

    Args:
        factors: Factor of each wavelength: (d_k / 2,).
        theta: Base of the wavelengths.

    Returns:
        The largest factor, and the context length of training; see `rotary_frequencies`.

    Raises:
        UserError: The wavelengths are stretched in another way.
    """
    largest = factors.max()
    unstretched_share = (1 / factors - 1 / largest) / (1 - 1 / largest)
    turns = ROPE_LOW + unstretched_share * (ROPE_HIGH - ROPE_LOW)
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(factors)) / len(factors))
    is_between = (unstretched_share > 0.01) & (unstretched_share < 0.99)
    if not is_between.any():
        raise UserError(
            f"{ROPE_TENSOR} stretches wavelengths in another way than Llama 3, which is not "
            "supported"
        )
    trained_length = (turns * wavelengths)[is_between].median()
    return {
        "rope_type": "llama3",
        "factor": largest.item(),
        "original_max_position_embeddings": round(trained_length.item()),
    }
