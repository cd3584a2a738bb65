"""Write a model as a folder of Hugging Face's format."""

import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UserError
from common.files import list_folder
from common.paths import require_output_folder
from common.terminal import error_sentence
from data.tokenizer import Tokenizer
from interop.folder import WEIGHTS_FILE
from interop.names import map_tensors
from interop.settings import config_to_hf, find_counterpart
from interop.tokenizer_export import export_tokenizer
from kernels import rms_norm
from model import GPT
from run.run_dir import HF_CONFIG_FILE
from training.safetensors_files import save_tensors
from training.stored_model import tensor_shapes

# Our normalization of queries and keys without gains adds nothing to the variance, transformers'
# adds rms_norm_eps. Larger queries and keys make that insignificant, and a power of two is exact.
QK_EXPORT_SCALE = 64


def save_hf(model: GPT, path: str | os.PathLike, tokenizer: Tokenizer | None = None) -> None:
    """Write a model, and its tokenizer, to a new or empty folder, completely or not at all.

    transformers' AutoModelForCausalLM and AutoTokenizer load the folder.

    Raises:
        UserError: transformers has no such model or tokenizer, or the folder cannot be written.
    """
    folder = Path(path)
    settings = config_to_hf(model.config, tokenizer)
    require_empty_folder(folder)
    dtype = str(model.head.weight.dtype).removeprefix("torch.")
    settings |= {"dtype": dtype, "torch_dtype": dtype}  # the newer and the older name
    texts = {} if tokenizer is None else export_tokenizer(tokenizer, model.config.block_size)
    texts[HF_CONFIG_FILE] = json.dumps(settings, indent=1)
    naming = "llama" if model.config.is_rotary else "gpt2"
    _write_folder(folder, texts, export_tensors(model, naming))


def require_empty_folder(folder: Path) -> None:
    """Raise `UserError` unless a folder is empty or missing, and can be written."""
    require_output_folder(f"to={folder}", folder)
    if list_folder(folder):
        raise UserError(f"to={folder} is not empty: name a new or empty folder")


def export_tensors(model: GPT, naming: str) -> dict[str, Tensor]:
    """Return the weights of a model as a library stores them, whose `naming` is in `MODULE_NAMES`.

    Biases and gains that only the model of the other library has are 0 and 1.
    """
    config = model.config
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    table = parameters["token_embedding.weight"]
    if config.norm_embedding:  # transformers cannot normalize embeddings, so the table is normal
        parameters.setdefault("head.weight", table)
        parameters["token_embedding.weight"] = rms_norm(table)

    # Scale queries and keys, and add biases and gains that our model lacks
    shapes = tensor_shapes(find_counterpart(config))
    for name, shape in shapes.items():
        if config.qk_norm is True and re.search("W_[QK]", name):
            parameters[name] = parameters[name] * QK_EXPORT_SCALE
        elif name not in parameters:
            neutral = 0.0 if name.endswith("bias") else 1.0
            parameters[name] = torch.full(shape, neutral, dtype=table.dtype)

    # Join and transpose them
    tensors = {}
    for mapping in map_tensors(shapes, naming):
        tensor = torch.cat([parameters[name] for name in mapping.parameters])
        tensors[mapping.name] = (tensor.T if mapping.is_transposed else tensor).contiguous()
    return tensors


def _write_folder(folder: Path, texts: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write all files; config.json is the last text, as nothing loads a folder without it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except (SafetensorError, OSError) as e:
        shutil.rmtree(folder, ignore_errors=True)  # it was empty
        raise UserError(
            f"to={folder} could not be written ({error_sentence(e)}): free some space there, or "
            "name another folder"
        ) from None
