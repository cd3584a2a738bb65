"""A folder of Hugging Face's format: its settings, weights and tokenizer. No pickle is opened."""

import re
from functools import cached_property
from pathlib import Path

from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer, read_json, read_tokenizer
from interop.hub import SHARDS, WEIGHTS
from interop.settings import model_config
from training.tensors import open_safetensors

CONFIG = "config.json"
DTYPES = ("F64", "F32", "F16", "BF16")
# What older versions kept beside the weights.
DERIVED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


class Folder:
    """A folder's config.json and what is beside it. `names`: how its tensors are called."""

    tokenized = "hf"

    def __init__(self, path: Path):
        self.path, self._settings = path, read_json(path / CONFIG)
        self.names = "gpt2" if self._settings.get("model_type") == "gpt2" else "llama"

    def config(self) -> GPTConfig:
        return model_config(self.path / CONFIG, lambda: self._settings)

    def tokenizer(self) -> HFTokenizer:
        return read_tokenizer(self.path, self._settings)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of each tensor, by transformers' name, its shape."""
        return {name: shape for name, (shape, *_) in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """A tensor, mapped from its file."""
        _, path, stored = self._tensors[name]
        with open_safetensors(path) as file:
            return file.get_tensor(stored)

    @cached_property
    def _tensors(self) -> dict[str, tuple[list[int], Path, str]]:
        """Of each tensor, by transformers' name: its shape, its file and its name there."""
        found = {}
        prefix = {"gpt2": "transformer.", "llama": "model."}[self.names]
        for path in self._files():
            with open_safetensors(path) as file:
                for stored in file.keys():  # noqa: SIM118  it is no dict
                    # GPT-2's own files lack the prefix.
                    named = stored.startswith((prefix, "lm_head."))
                    kept = file.get_slice(stored)
                    if DERIVED.search(stored):
                        continue
                    if kept.get_dtype() not in DTYPES:
                        raise UserError(
                            f"{path} holds {stored} in {kept.get_dtype()}, and what is read is "
                            f"{', '.join(DTYPES)}: convert quantised weights first"
                        )
                    tensor = stored if named else prefix + stored
                    found[tensor] = list(kept.get_shape()), path, stored
        return found

    def _files(self) -> list[Path]:
        folder = self.path
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        if files := sorted(folder.glob(SHARDS)):
            return files
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
        if pickles:
            raise UserError(
                f"{folder} holds {pickles[0]!r}, a pickle, which may run code and is not read: "
                "convert it with transformers, AutoModelForCausalLM.from_pretrained('"
                f"{folder}').save_pretrained('{folder}')"
            )
        raise UserError(f"{folder} holds no {WEIGHTS}, nor {SHARDS}")
