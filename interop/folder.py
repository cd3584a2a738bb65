"""Read models from folders of Hugging Face's format. No pickle is opened."""

import os
import re
from pathlib import Path

from torch import Tensor

from common.errors import UserError
from common.files import exists
from common.terminal import print_stderr
from common.torchrun import process_rank
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
from run.run_dir import HF_CONFIG_FILE
from training.safetensors_files import open_safetensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
# What is downloaded: weights, settings and the tokenizer; pickled weights if there are no others.
MODEL_FILES = [WEIGHTS_FILE, "model-*-of-*.safetensors", INDEX_FILE, HF_CONFIG_FILE]
MODEL_FILES += [HF_TOKENIZER_FILE, HF_TOKENIZER_CONFIG_FILE, HF_CHAT_TEMPLATE_FILE]
MODEL_FILES += [HF_GENERATION_FILE]  # the ids that end a text
PICKLED_FILES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"]
SAFETENSORS_FLOATS = ("F64", "F32", "F16", "BF16")
PICKLED_WEIGHTS = re.compile(r"(pytorch_)?model\b.*\.(bin|pt|pth)")
TENSOR_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
# Sizes of GPT-2's vocabulary: its tokens, and with padding that is often added for speed.
GPT2_VOCAB_SIZES = (50257, 50304)
TOKENIZER_FILES = (HF_TOKENIZER_FILE, "vocab.json", "merges.txt", "tokenizer.model")
# Buffers that older versions of transformers saved with the weights.
BUFFER = re.compile(r"\.attn\.(masked_)?bias$|(^|\.)rotary_emb\.\w+$")


class HFFolder(ExternalModel):
    """A folder with a config.json, safetensors and tokenizer files."""

    def __init__(self, path: Path, weights: Path | None = None) -> None:
        """Open a folder, or the model that one of its weight files contains or is a part of."""
        self.path = path
        self._settings = read_json(path / HF_CONFIG_FILE)
        config = config_from_hf(self._settings)
        naming = "llama" if config.is_rotary else "gpt2"
        self._places: dict[str, tuple[Path, str]] = {}  # file of each tensor, and its name there
        files = _find_weights(path)
        if weights and weights.name not in [file.name for file in files]:
            files = [weights]
        shapes: dict[str, list[int]] = {}
        for file in files:
            shapes |= self._list_tensors(file, TENSOR_PREFIXES[naming])

        has_tokenizer = any(exists(path / name) for name in TOKENIZER_FILES)
        if naming == "gpt2" and config.vocab_size in GPT2_VOCAB_SIZES and not has_tokenizer:
            self.tokenizer_name = "gpt2"
        super().__init__(path, config, naming, shapes)

    def _list_tensors(self, path: Path, prefix: str) -> dict[str, list[int]]:
        shapes = {}
        with open_safetensors(path) as file:
            for stored_name in file.keys():  # noqa: SIM118  the file is not a dict
                if BUFFER.search(stored_name):
                    continue
                # The files of the original GPT-2 lack the prefix
                name = WRAPPER_PREFIX.sub("", stored_name)
                if not name.startswith((prefix, "lm_head.")):
                    name = prefix + name
                tensor = file.get_slice(stored_name)
                if tensor.get_dtype() not in SAFETENSORS_FLOATS:
                    raise UserError(
                        f"it has {stored_name:.80} in {tensor.get_dtype()}, and only "
                        f"{', '.join(SAFETENSORS_FLOATS)} can be read: give the model with "
                        "unquantized weights, or a .gguf file of it"
                    )
                shapes[name] = list(tensor.get_shape())
                self._places[name] = path, stored_name
        return shapes

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor that is memory-mapped from its file."""
        path, stored_name = self._places[name]
        with open_safetensors(path) as file:
            return file.get_tensor(stored_name)

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


def _find_weights(folder: Path) -> list[Path]:
    """Return the files of the weights, which may have any name if there is only one."""
    if exists(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if exists(folder / INDEX_FILE):
        weight_map = read_json(folder / INDEX_FILE)["weight_map"]
        return [folder / name for name in sorted({Path(file).name for file in weight_map.values()})]
    names = os.listdir(folder)
    weights = [name for name in names if name.lower().endswith(".safetensors")]
    if len(weights) == 1:
        return [folder / weights[0]]
    for name in names:
        if PICKLED_WEIGHTS.fullmatch(name):
            raise UserError(
                f"its weights are in {name!r}, a pickle, which is not opened because it may run "
                "code: convert it with transformers: "
                f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}')"
            )
    raise UserError(f"it has neither {WEIGHTS_FILE} nor {INDEX_FILE}: download its weights")
