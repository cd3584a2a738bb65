"""Read nanoGPT's ckpt.pt as tensors and numbers only, so that no code in it can run."""

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import Tokenizer, load_tiktoken
from interop.names import WRAPPER_PREFIX
from interop.settings import checked_config
from interop.source import CheckpointSource

GPT2_VOCAB_SIZE = 50257  # a vocabulary of at least this size is GPT-2's
NANOGPT_SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")
NANOGPT_DEFAULTS = {"bias": True, "dropout": 0.0}  # older checkpoints do not have these settings
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class NanoGPTFile(CheckpointSource):
    """A ckpt.pt, in which tensors are named as in GPT-2 and linear layers are ours."""

    naming = "gpt2"

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = _load_tensors(path)
        state, settings = saved.get("model"), saved.get("model_args")
        if not isinstance(state, dict) or not isinstance(settings, dict):
            raise UserError(
                f"{path} is not a checkpoint of nanoGPT, which contains model and model_args; give "
                "nanoGPT's ckpt.pt, or the folder with the model's config.json and safetensors"
            )
        self._settings = NANOGPT_DEFAULTS | settings
        self._tensors = {
            WRAPPER_PREFIX.sub("", name): self._check_tensor(name, tensor)
            for name, tensor in ((str(name), tensor) for name, tensor in state.items())
            if not name.endswith(".attn.bias")  # the causal mask
        }
        self.shapes = {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        vocab_size = (self.shapes.get("transformer.wte.weight") or [0])[0]
        self.tokenizer_name = "gpt2" if vocab_size >= GPT2_VOCAB_SIZE else "char"

    def _check_tensor(self, name: str, tensor: Any) -> Tensor:
        """Refuse what is not a plain array of numbers; transpose linear layers, as in GPT-2."""
        if not isinstance(tensor, Tensor):
            raise UserError(f"{self.path} has {name:.80} as {type(tensor).__name__}, not a tensor")
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if tensor.dtype not in FLOAT_DTYPES or not is_plain or not tensor.is_contiguous():
            raise UserError(
                f"{self.path} has {name:.80} in {tensor.dtype} ({tensor.layout}), and only "
                "contiguous tensors of floating-point numbers can be read; save it as float32"
            )
        is_linear = name.endswith(".weight") and ".c_" in name
        return tensor.T if is_linear and tensor.dim() == 2 else tensor

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        missing = [name for name in NANOGPT_SETTINGS if name not in self._settings]
        if missing:
            raise UserError(f"the setting {missing[0]} is missing in model_args; add it")
        return checked_config({name: self._settings[name] for name in NANOGPT_SETTINGS}, {})

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor as GPT-2 has it."""
        return self._tensors[name]

    def read_tokenizer(self) -> Tokenizer | None:
        """Return GPT-2's tokenizer; None for characters, which nanoGPT keeps in a pickle."""
        return load_tiktoken("gpt2") if self.tokenizer_name == "gpt2" else None


def _load_tensors(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as e:  # torch and the reader of pickles raise errors of many classes
        code = re.search(r"GLOBAL (\S+)", str(e))
        cause = f"contains code ({code[1]:.80}), which is not run" if code else "cannot be read"
        raise UserError(
            f"{path} {cause}; give the undamaged ckpt.pt of an unmodified nanoGPT"
        ) from None
    return saved if isinstance(saved, dict) else {}
