"""Read models from folders of Hugging Face's format. No pickle is opened."""

import re
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer, read_json, read_tokenizer
from interop.hub import SHARDS_GLOB, WEIGHTS_FILE
from interop.settings import read_model_config
from interop.source import CheckpointSource
from training.tensors import open_safetensors

HF_CONFIG_FILE = "config.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
TENSOR_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
# Buffers that older versions of transformers saved with the weights.
BUFFER = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


class StoredTensor(NamedTuple):
    """Where a tensor is stored."""

    shape: list[int]
    path: Path
    stored_name: str


class HFFolder(CheckpointSource):
    """A folder with a config.json, safetensors and tokenizer files."""

    tokenizer_name = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
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
        """Every tensor by the name that transformers gives it."""
        tensors = {}
        prefix = TENSOR_PREFIXES[self.naming]
        for path in self._weight_files():
            with open_safetensors(path) as file:
                for stored_name in file.keys():  # noqa: SIM118  the file is not a dict
                    if BUFFER.search(stored_name):
                        continue
                    tensor = file.get_slice(stored_name)
                    if tensor.get_dtype() not in FLOAT_DTYPES:
                        raise UserError(
                            f"{path} has {stored_name} in {tensor.get_dtype()}, and only "
                            f"{', '.join(FLOAT_DTYPES)} can be read; convert quantized weights "
                            "to one of these"
                        )
                    # The files of the original GPT-2 lack the prefix
                    has_prefix = stored_name.startswith((prefix, "lm_head."))
                    name = stored_name if has_prefix else prefix + stored_name
                    tensors[name] = StoredTensor(list(tensor.get_shape()), path, stored_name)
        return tensors

    def _weight_files(self) -> list[Path]:
        folder = self.path
        if (folder / WEIGHTS_FILE).is_file():
            return [folder / WEIGHTS_FILE]
        shards = sorted(folder.glob(SHARDS_GLOB))
        if shards:
            return shards
        pickles = [path.name for glob in ("*.bin", "*.pt", "*.pth") for path in folder.glob(glob)]
        if pickles:
            raise UserError(
                f"{folder} has its weights in {min(pickles)!r}, a pickle, which is not opened "
                "because it may run code; convert it with transformers: "
                f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}')"
            )
        raise UserError(
            f"{folder} has neither {WEIGHTS_FILE} nor {SHARDS_GLOB}; download the model's weights"
        )
