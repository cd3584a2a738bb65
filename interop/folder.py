"""Read models from folders of Hugging Face's format. No pickle is opened."""

import os
import re
from pathlib import Path

from torch import Tensor

from common.errors import UserError
from common.files import exists
from common.settings import show_value
from config import GPTConfig
from data.hf_tokenizer import HF_TOKENIZER_FILE, read_json, read_tokenizer
from data.tokenizer import Tokenizer, load_tiktoken
from interop.hub import HF_CONFIG_FILE, INDEX_FILE, SHARDS_GLOB, WEIGHTS_FILE
from interop.names import WRAPPER_PREFIX
from interop.settings import config_from_hf
from interop.source import CheckpointSource
from training.tensors import open_safetensors

ADAPTER_CONFIG_FILE = "adapter_config.json"  # of peft
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
PICKLED_WEIGHTS = re.compile(r"(pytorch_)?model\b.*\.(bin|pt|pth)")
TENSOR_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
# Sizes of GPT-2's vocabulary: its tokens, and with padding that is often added for speed.
GPT2_VOCAB_SIZES = (50257, 50304)
TOKENIZER_FILES = (HF_TOKENIZER_FILE, "vocab.json", "merges.txt", "tokenizer.model")
# Buffers that older versions of transformers saved with the weights.
BUFFER = re.compile(r"\.attn\.(masked_)?bias$|(^|\.)rotary_emb\.\w+$")


class HFFolder(CheckpointSource):
    """A folder with a config.json, safetensors and tokenizer files."""

    def __init__(self, path: Path, weights: Path | None = None) -> None:
        """Read the config.json of a folder, and the names and shapes of its tensors.

        If `weights` is one of several files with parts of the weights, it stands for all of them.
        """
        self.path = path
        if (path / ADAPTER_CONFIG_FILE).is_file():
            base = read_json(path / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
            raise UserError(
                f"{path} contains an adapter for the model {show_value(base)}, not a model; merge "
                "them with peft: model.merge_and_unload().save_pretrained(FOLDER), and give that "
                "folder"
            )
        self._settings = read_json(path / HF_CONFIG_FILE)
        self.naming = "gpt2" if self._settings.get("model_type") == "gpt2" else "llama"
        files = _find_weights(path)
        if weights and weights not in files:
            files = [weights]
        if not files:
            raise _missing_weights(path)
        self.shapes = {}
        self._places: dict[str, tuple[Path, str]] = {}  # file of each tensor, and its name there
        for file in files:
            self._list_tensors(file)
        has_tokenizer = any(exists(path / name) for name in TOKENIZER_FILES)
        vocab_size = self._settings.get("vocab_size")
        if self.naming == "gpt2" and vocab_size in GPT2_VOCAB_SIZES and not has_tokenizer:
            self.tokenizer_name = "gpt2"
            self.tokenizer_note = (
                f"{path} has no tokenizer files; with its vocabulary of {vocab_size:,} tokens, "
                "GPT-2's tokenizer is used"
            )

    def _list_tensors(self, path: Path) -> None:
        prefix = TENSOR_PREFIXES[self.naming]
        with open_safetensors(path) as file:
            for stored_name in file.keys():  # noqa: SIM118  the file is not a dict
                if BUFFER.search(stored_name):
                    continue
                # The files of the original GPT-2 lack the prefix
                name = WRAPPER_PREFIX.sub("", stored_name)
                if not name.startswith((prefix, "lm_head.")):
                    name = prefix + name
                if name in self.shapes:
                    raise UserError(f"{self.path} has {name:.80} twice; download it again")
                tensor = file.get_slice(stored_name)
                if tensor.get_dtype() not in FLOAT_DTYPES:
                    raise self._unsupported_dtype(path, stored_name, tensor.get_dtype())
                self.shapes[name] = list(tensor.get_shape())
                self._places[name] = path, stored_name

    def _unsupported_dtype(self, path: Path, name: str, dtype: str) -> UserError:
        quantization = self._settings.get("quantization_config")
        if isinstance(quantization, dict):
            quantization = quantization.get("quant_method")
        method = f" (quantized by {show_value(quantization)})" if quantization else ""
        return UserError(
            f"{path} has {name:.80} in {dtype}{method}, and only {', '.join(FLOAT_DTYPES)} can be "
            "read; give the model with unquantized weights, or a .gguf file of it"
        )

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        return config_from_hf(self._settings)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor that is memory-mapped from its file."""
        path, stored_name = self._places[name]
        with open_safetensors(path) as file:
            return file.get_tensor(stored_name)

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer in the folder, or GPT-2's if it has none and the vocabulary fits."""
        if self.tokenizer_name == "gpt2":
            return load_tiktoken("gpt2")
        return read_tokenizer(self.path, self._settings)


def _find_weights(folder: Path) -> list[Path]:
    if os.path.lexists(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    shards = sorted(path.name for path in folder.glob(SHARDS_GLOB))
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or any(type(name) is not str or Path(name).name != name for name in names):
            raise UserError(
                f"{folder / INDEX_FILE} does not name the files of the weights; download it again"
            )
    elif shards:
        total = shards[-1].rpartition("-of-")[2].removesuffix(".safetensors")
        names = [name for name in shards if name.endswith(f"-of-{total}.safetensors")]
        if total != f"{len(names):0{len(total)}}":
            raise UserError(
                f"{folder} has {len(names)} of the {total} files of its weights; download the "
                "others"
            )
    else:
        names = [name for name in os.listdir(folder) if name.lower().endswith(".safetensors")]
        names = names if len(names) == 1 else []
    files = sorted(folder / name for name in set(names))
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}, a part of the model, is missing; download it")
    return files


def _missing_weights(folder: Path) -> UserError:
    others = sorted(path for path in folder.iterdir() if path.is_file())
    for path in others:
        if PICKLED_WEIGHTS.fullmatch(path.name):
            return pickle_error(path)
    models = [path for path in others if path.suffix.lower() in (".gguf", ".safetensors")]
    advice = f"give {models[0]}" if models else "download the model's weights"
    return UserError(f"{folder} has neither {WEIGHTS_FILE} nor {SHARDS_GLOB}; {advice}")


def pickle_error(path: Path) -> UserError:
    """Build the error for a model whose weights are in a pickle."""
    folder = path.parent
    return UserError(
        f"{folder} has its weights in {path.name!r}, a pickle, which is not opened because it may "
        "run code; convert it with transformers: "
        f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}')"
    )
