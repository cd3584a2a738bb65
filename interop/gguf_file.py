"""A .gguf file, llama.cpp's format: its model's settings, weights and tokenizer. Nothing in it
runs, and each size that it claims is held against the file before memory is taken."""

import math
import mmap
import struct
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from torch import Tensor

from attention import ROPE_HIGH, ROPE_LOW
from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer
from interop.settings import NAMES, model_config

SCALARS = {
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
}  # types of values, as `struct` names them
STRING, ARRAY = 8, 9  # the others
MOST_ITEMS, MOST_NAMES = 1 << 22, 1 << 16  # of a list; of values and of tensors
ROPE = "rope_freqs.weight"  # by how much Llama 3's wavelengths are stretched
CONTROL, OF_USERS = 3, 4  # types of tokens
# How text is split before BPE, but for the digits that stand together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Header:
    """The header of a .gguf: `values`, what it says of itself, and `tensors`, name → type, shape
    (rows, columns), first byte, bytes. A ValueError, KeyError or struct.error for another file."""

    def __init__(self, file: mmap.mmap):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._file = file
        if file.read(4) != b"GGUF" or self.number("I") not in (2, 3):
            raise ValueError("it does not begin as one of version 2 or 3 does")
        tensors, values = self.count(24, MOST_NAMES), self.count(12, MOST_NAMES)
        self.values = {self.text(): self.value(self.number("I")) for _ in range(values)}
        told = [
            (
                self.text(),
                [self.number("Q") for _ in range(self.dimensions())],
                self.number("I"),
                self.number("Q"),
            )
            for _ in range(tensors)
        ]
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align}")
        start, self.tensors = -(-file.tell() // align) * align, {}
        for name, shape, number, offset in told:
            kind = GGMLQuantizationType(number)
            per, size = GGML_QUANT_SIZES[kind]
            length = math.prod(shape) // per * size
            if not (shape and length) or shape[0] % per or start + offset + length > len(file):
                raise ValueError(f"{name!a} of the shape {shape} is not in it")
            self.tensors[name] = kind, shape[::-1], start + offset, length

    def number(self, kind: str):
        """The next number, of a type of `struct`."""
        return struct.unpack("<" + kind, self._file.read(struct.calcsize("<" + kind)))[0]

    def count(self, size: int, most: int | None = None) -> int:
        """The next count, of what takes `size` bytes each, at least."""
        count = self.number("Q")
        if count * size > len(self._file) - self._file.tell() or count > (most or count):
            raise ValueError(f"it claims {count:,} of what would take {size} bytes each")
        return count

    def dimensions(self) -> int:
        if (count := self.number("I")) > 4:
            raise ValueError(f"a tensor has {count:,} dimensions")
        return count

    def text(self) -> str:
        return self._file.read(self.count(1)).decode()

    def value(self, kind: int):
        """The next value of a type: a number, a text or a list of one of them."""
        if kind == ARRAY:
            kind = self.number("I")
            size = 8 if kind == STRING else struct.calcsize("<" + self.scalar(kind))
            return [self.value(kind) for _ in range(self.count(size, MOST_ITEMS))]
        return self.text() if kind == STRING else self.number(self.scalar(kind))

    def scalar(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"it has a value of the type {kind}")
        return SCALARS[kind]


class GGUF:
    """A model in a .gguf. `names`: how its tensors are called; `shapes`, of each."""

    tokenized = "hf"

    def __init__(self, path: Path):
        """Reads the header alone; raises `UserError` where it is none, or of another model."""
        try:
            from gguf.quants import dequantize
        except ImportError:
            raise UserError(
                f"{path} needs the library gguf, which is not installed: pip install gguf"
            ) from None
        self.path, self._dequantize = path, dequantize
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = Header(self._bytes)
        except (OSError, ValueError, KeyError, struct.error) as e:
            raise UserError(f"{path} is no .gguf that can be read: {e}") from None
        self.values, self._tensors = header.values, header.tensors
        self.family = self.values.get("general.architecture")
        self.names = "gguf_gpt2" if self.family == "gpt2" else "gguf"
        self.shapes = {
            name: shape for name, (_, shape, *_) in self._tensors.items() if name != ROPE
        }

    def config(self) -> GPTConfig:
        return model_config(self.path, self._settings)

    def _settings(self) -> dict:
        """As config.json of Hugging Face's format has them."""
        of = NAMES["gguf"]["gpt2" if self.family == "gpt2" else "llama"]
        found = {theirs: self.values.get(f"{self.family}.{name}") for name, theirs in of.items()}
        if ROPE in self._tensors:
            found |= stretched(self.tensor(ROPE), found["rope_theta"] or 1e4)
        embedding = self.shapes.get("token_embd.weight", [None, 0])
        heads = self.values.get(f"{self.family}.attention.head_count") or 1
        width = found.get("head_dim") or embedding[-1] / heads
        turned = self.values.get(f"{self.family}.rope.dimension_count", width)
        return found | {
            "model_type": self.family,
            "vocab_size": embedding[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "partial_rotary_factor": turned / width,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }

    def tensor(self, name: str) -> Tensor:
        """A tensor in float32, its rows in Hugging Face's order."""
        kind, shape, first, length = self._tensors[name]
        data = np.frombuffer(self._bytes, np.uint8, length, first)
        try:
            numbers = self._dequantize(data.reshape(math.prod(shape[:-1]), -1), kind)
        except NotImplementedError as e:
            raise UserError(
                f"{self.path} holds {name} in {kind.name}, which is not read: {e}"
            ) from None
        tensor = torch.from_numpy(np.array(numbers, np.float32)).view(shape)
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
        if self.family == "llama" and heads:  # here the numbers that turn together are neighbours
            heads = (
                self.values.get(f"llama.attention.{heads}")
                or self.values["llama.attention.head_count"]
            )
            tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    def tokenizer(self) -> HFTokenizer:
        """Its byte-level BPE, for those ways of splitting text that are known."""
        prefix = "tokenizer.ggml."
        told = {key.removeprefix(prefix): value for key, value in self.values.items()}
        if told.get("model") != "gpt2":
            raise UserError(
                f"{self.path} has a tokenizer of the kind {told.get('model')}; what is "
                "read is byte-level BPE, gpt2, and not SentencePiece's, llama"
            )
        pre, tokens, types = told.get("pre"), told["tokens"], told["token_type"]
        merges = [tuple(pair.split(" ", 1)) for pair in told["merges"]]
        library = Library(
            models.BPE(
                {token: id for id, token in enumerate(tokens)},
                merges,
                ignore_merges=pre == "llama-bpe",
            )
        )
        library.pre_tokenizer = self._split(pre)
        library.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            library.normalizer = normalizers.NFC()
        for kind, is_special in ((OF_USERS, False), (CONTROL, True)):
            library.add_tokens(
                [
                    AddedToken(token, special=is_special, normalized=False)
                    for token, of in zip(tokens, types)
                    if of == kind
                ]
            )
        if told.get("add_bos_token", pre == "llama-bpe"):
            begin = told["bos_token_id"]
            library.post_processor = processors.TemplateProcessing(
                single=[tokens[begin], "$A"], special_tokens=[(tokens[begin], begin)]
            )
        return HFTokenizer(library.to_str(), told.get("eos_token_id"))

    def _split(self, pre: str | None) -> pre_tokenizers.PreTokenizer:
        by_bytes = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
        parts = {"gpt-2": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}
        if pre in parts:
            return pre_tokenizers.Sequence([*parts[pre], by_bytes()])
        digits = {"llama-bpe": "{1,3}", "qwen2": ""}
        if pre not in digits:
            raise UserError(
                f"{self.path} splits text as {pre} does; what is known is "
                f"{', '.join([*parts, *digits])}"
            )
        words = pre_tokenizers.Split(Regex(WORDS.format(digits[pre])), "isolated")
        return pre_tokenizers.Sequence([words, by_bytes(use_regex=False)])


def stretched(factors: Tensor, theta: float) -> dict:
    """Llama 3's settings by which wavelengths are stretched so, (d_k/2) times each: the largest
    factor, and the length that those between were trained on (see `rotary_frequencies`)."""
    most = factors.max()
    kept = (1 / factors - 1 / most) / (1 - 1 / most)
    turns = ROPE_LOW + kept * (ROPE_HIGH - ROPE_LOW)
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(factors)) / len(factors))
    between = (kept > 0.01) & (kept < 0.99)
    if not between.any():
        raise UserError(f"{ROPE} stretches wavelengths in another way than Llama 3")
    return {
        "rope_type": "llama3",
        "factor": most.item(),
        "original_max_position_embeddings": round((turns * wavelengths)[between].median().item()),
    }
