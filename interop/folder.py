"""Read models from folders of Hugging Face's format. No pickle is opened."""

import os
import re
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from common.errors import UserError
from common.settings import show_value
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer, read_json, read_tokenizer
from interop.hub import INDEX_FILE, SHARDS_GLOB, WEIGHTS_FILE
from interop.settings import read_model_config
from interop.source import CheckpointSource
from training.tensors import open_safetensors

HF_CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"  # of peft
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
PICKLE_SUFFIXES = {".bin", ".pt", ".pth"}
TENSOR_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
# Buffers that older versions of transformers saved with the weights.
BUFFER = re.compile(r"\.attn\.(masked_)?bias$|(^|\.)rotary_emb\.\w+$")
# What torch.compile and data-parallel training put before every name.
WRAPPER_PREFIX = re.compile(r"^(_orig_mod\.|module\.)+")


class StoredTensor(NamedTuple):
    """Where a tensor is stored."""

    shape: list[int]
    path: Path
    stored_name: str


class HFFolder(CheckpointSource):
    """A folder with a config.json, safetensors and tokenizer files."""

    tokenizer_name = "hf"

    def __init__(self, path: Path, weights: Path | None = None) -> None:
        """Read the config.json of a folder.

        Args:
            path: The folder.
            weights: The file with the weights; None: those that Hugging Face's format names. One
                of several files with parts of the weights stands for all of them.

        Raises:
            UserError: The folder contains an adapter, or its config.json cannot be read.
        """
        self.path = path
        self._weights = weights
        if (path / ADAPTER_CONFIG_FILE).is_file():
            base = read_json(path / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
            raise UserError(
                f"{path} contains an adapter for the model {show_value(base)}, not a model; merge "
                "them with peft: model.merge_and_unload().save_pretrained(FOLDER), and give that "
                "folder"
            )
        self._settings = read_json(path / HF_CONFIG_FILE)
        self.naming = "gpt2" if self._settings.get("model_type") == "gpt2" else "llama"

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        return read_model_config(self.path / HF_CONFIG_FILE, lambda: self._settings)

    def read_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer in the folder."""
        return read_tokenizer(self.path, self._settings)

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor, by the name that transformers gives it."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor that is memory-mapped from its file."""
        stored = self._tensors[name]
        with open_safetensors(stored.path) as file:
            return file.get_tensor(stored.stored_name)

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        """Where each tensor is, by the name that transformers gives it."""
        tensors: dict[str, StoredTensor] = {}
        prefix = TENSOR_PREFIXES[self.naming]
        for path in self._weight_files():
            with open_safetensors(path) as file:
                for stored_name in file.keys():  # noqa: SIM118  the file is not a dict
                    if BUFFER.search(stored_name):
                        continue
                    # The files of the original GPT-2 lack the prefix
                    name = WRAPPER_PREFIX.sub("", stored_name)
                    if not name.startswith((prefix, "lm_head.")):
                        name = prefix + name
                    if name in tensors:
                        raise UserError(f"{self.path} has {name:.80} twice; download it again")
                    tensor = file.get_slice(stored_name)
                    self._check_dtype(path, stored_name, tensor.get_dtype())
                    tensors[name] = StoredTensor(list(tensor.get_shape()), path, stored_name)
        return tensors

    def _check_dtype(self, path: Path, name: str, dtype: str) -> None:
        if dtype in FLOAT_DTYPES:
            return
        quantization = self._settings.get("quantization_config")
        if isinstance(quantization, dict):
            quantization = quantization.get("quant_method")
        method = f" (quantized by {show_value(quantization)})" if quantization else ""
        raise UserError(
            f"{path} has {name:.80} in {dtype}{method}, and only {', '.join(FLOAT_DTYPES)} can be "
            "read; give the model with unquantized weights, or a .gguf file of it"
        )

    def _weight_files(self) -> list[Path]:
        """Return the safetensors files of the model.

        Raises:
            UserError: There are none, or some are missing.
        """
        files = self._complete_weights()
        if self._weights is not None and self._weights not in files:
            return [self._weights]
        if files:
            return files
        others = sorted(path for path in self.path.iterdir() if path.is_file())
        for path in others:
            if path.suffix in PICKLE_SUFFIXES:
                raise pickle_error(path)
        gguf = [path for path in others if path.suffix.lower() == ".gguf"]
        advice = f"give {gguf[0]}" if gguf else "download the model's weights"
        raise UserError(f"{self.path} has neither {WEIGHTS_FILE} nor {SHARDS_GLOB}; {advice}")

    def _complete_weights(self) -> list[Path]:
        """Return the files that make up the model, by their names or by the index of the shards."""
        folder = self.path
        if os.path.lexists(folder / WEIGHTS_FILE):
            return [folder / WEIGHTS_FILE]
        if (folder / INDEX_FILE).is_file():
            weight_map = read_json(folder / INDEX_FILE).get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not names or any(type(name) is not str or Path(name).name != name for name in names):
                raise UserError(
                    f"{folder / INDEX_FILE} does not name the files of the weights; download it "
                    "again"
                )
        else:
            names = [path.name for path in folder.glob(SHARDS_GLOB)]
            if names:
                ending = "-of-" + max(names).rpartition("-of-")[2]
                names = [name for name in names if name.endswith(ending)]
                total = ending.removeprefix("-of-").removesuffix(".safetensors")
                if total != f"{len(names):0{len(total)}}":
                    raise UserError(
                        f"{folder} has {len(names)} of the {total} files of its weights; download "
                        "the others"
                    )
            else:
                names = [n for n in os.listdir(folder) if n.lower().endswith(".safetensors")]
                names = names if len(names) == 1 else []
        files = sorted(folder / name for name in set(names))
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}, a part of the model, is missing; download it")
        return files


def pickle_error(path: Path) -> UserError:
    """Build the error for a model whose weights are in a pickle."""
    folder = path.parent
    return UserError(
        f"{folder} has its weights in {path.name!r}, a pickle, which is not opened because it may "
        "run code; convert it with transformers: "
        f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}')"
    )
