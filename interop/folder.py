"""Read models from folders of Hugging Face's format."""

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.files import exists
from common.launcher import process_rank
from common.terminal import print_stderr
from config import GPTConfig
from data.hf_tokenizer import (
    HF_CHAT_TEMPLATE_FILE,
    HF_GENERATION_FILE,
    HF_TOKENIZER_CONFIG_FILE,
    HF_TOKENIZER_FILE,
    read_json,
    read_tokenizer,
)
from data.tokenizer import Tokenizer, load_tiktoken
from interop.external import ExternalModel
from interop.names import WRAPPER_PREFIX
from interop.settings import config_from_hf
from interop.torch_file import check_tensors, read_torch_file
from run.run_dir import HF_CONFIG_FILE
from training.safetensors_files import read_safetensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
# What is downloaded: weights, settings and the tokenizer; pickled weights if there are no others.
MODEL_FILES = [WEIGHTS_FILE, "model-*-of-*.safetensors", INDEX_FILE, HF_CONFIG_FILE]
MODEL_FILES += [HF_TOKENIZER_FILE, HF_TOKENIZER_CONFIG_FILE, HF_CHAT_TEMPLATE_FILE]
MODEL_FILES += [HF_GENERATION_FILE]  # the ids that end a text
PICKLED_FILES = [PICKLED_FILE, "pytorch_model-*-of-*.bin", PICKLED_INDEX_FILE]
TENSOR_PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "llama": "model."}
# Sizes of GPT-2's vocabulary: its tokens, and with padding that is often added for speed.
GPT2_VOCAB_SIZES = (50257, 50304)
TOKENIZER_FILES = (HF_TOKENIZER_FILE, "vocab.json", "merges.txt", "tokenizer.model")
# Buffers that older versions of transformers saved with the weights.
BUFFER = re.compile(r"\.(attn|attention)\.(masked_)?bias$|(^|\.)rotary_emb\.\w+$")


class HFFolder(ExternalModel):
    """A folder with a config.json, weights and tokenizer files."""

    def __init__(self, path: Path, weights: Path | None = None) -> None:
        """Open a folder, or the model that one of its weight files contains or is a part of."""
        self.path = path
        self._settings = read_json(path / HF_CONFIG_FILE)
        config = config_from_hf(self._settings)
        family = self._settings["model_type"]
        naming = family if family in TENSOR_PREFIXES else "llama"
        files = _find_weights(path)
        if weights and weights.name not in [file.name for file in files]:
            files = [weights]
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            self._tensors |= _read_tensors(file, TENSOR_PREFIXES[naming])
        shapes = {name: list(tensor.shape) for name, tensor in self._tensors.items()}

        has_tokenizer = any(exists(path / name) for name in TOKENIZER_FILES)
        if naming == "gpt2" and config.vocab_size in GPT2_VOCAB_SIZES and not has_tokenizer:
            self.tokenizer_name = "gpt2"
        super().__init__(path, config, naming, shapes)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor that is memory-mapped from its file."""
        tensor = self._tensors[name]
        return _reorder_rows(tensor, self.config) if ".query_key_value." in name else tensor

    def parse_tokenizer(self) -> Tokenizer:
        """Return the tokenizer in the folder, or GPT-2's if it has none and the vocabulary fits."""
        if self.tokenizer_name != "gpt2":
            return read_tokenizer(self.path / HF_TOKENIZER_FILE, self._settings)
        if process_rank() == 0:
            print_stderr(
                f"note: {self.path} has no tokenizer files; with its vocabulary of "
                f"{self.config.vocab_size:,} tokens, GPT-2's tokenizer is used"
            )
        return load_tiktoken("gpt2")


def _reorder_rows(tensor: Tensor, config: GPTConfig) -> Tensor:
    """Put the rows of all queries before those of all keys and values, which alternate in GPT-NeoX.

    It turns the first channels of a head in two halves, we turn the first channels of its halves.
    """
    d_k, pairs = config.key_dim, config.rotary_dim // 2
    turning, others = torch.arange(d_k).split((2 * pairs, d_k - 2 * pairs))
    channels = torch.cat((turning.view(2, -1), others.view(2, -1)), dim=1).flatten()
    q, k, v = tensor.unflatten(0, (config.n_head, 3, d_k)).unbind(dim=1)  # (H, d_k, …)
    return torch.cat((q[:, channels], k[:, channels], v)).flatten(0, 1)


def _find_weights(folder: Path) -> list[Path]:
    """Return the files of the weights; safetensors may have any name if there is only one."""
    named = [name for name in os.listdir(folder) if name.lower().endswith(".safetensors")]
    for file, index in ((WEIGHTS_FILE, INDEX_FILE), (PICKLED_FILE, PICKLED_INDEX_FILE)):
        if exists(folder / file):
            return [folder / file]
        if exists(folder / index):
            names = {Path(name).name for name in read_json(folder / index)["weight_map"].values()}
            return [folder / name for name in sorted(names)]
        if len(named) == 1:
            return [folder / named[0]]
    raise UserError(f"it has neither {WEIGHTS_FILE} nor {PICKLED_FILE}: add its weights")


def _read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """Return the weights in a file by their names in the model."""
    is_pickled = path.suffix == Path(PICKLED_FILE).suffix
    saved = read_torch_file(path) if is_pickled else read_safetensors(path)[0]
    weights = {name: tensor for name, tensor in saved.items() if not BUFFER.search(name)}
    check_tensors(weights, path)
    named = {}
    for stored_name, tensor in weights.items():
        # The files of the original GPT-2 lack the prefix
        name = WRAPPER_PREFIX.sub("", stored_name)
        name = name.replace("embed_out.", "lm_head.")  # in older files of GPT-NeoX
        has_prefix = name.startswith((prefix, "lm_head."))
        named[name if has_prefix else prefix + name] = tensor
    return named
