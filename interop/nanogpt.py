"""Read nanoGPT's ckpt.pt as tensors and numbers only, so that no code in it can run."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import Tokenizer, load_tiktoken
from interop.settings import checked_config
from interop.source import CheckpointSource

GPT2_VOCAB_SIZE = 50257  # a vocabulary of at least this size is GPT-2's
NANOGPT_SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
NANOGPT_DEFAULTS = {"bias": True, "dropout": 0.0}  # older checkpoints do not have these settings
COMPILED_PREFIX = "_orig_mod."  # torch.compile puts it before every name
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_PICKLE_ERROR_CHARS = 200


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
        missing = [name for name in NANOGPT_SETTINGS if name not in settings]
        if missing:
            raise UserError(f"{path} lacks the setting {missing[0]} in its model_args; add it")
        values = {name: settings[name] for name in NANOGPT_SETTINGS}
        values |= {name: settings.get(name, value) for name, value in NANOGPT_DEFAULTS.items()}
        try:
            self._config = checked_config(values)
        except (UserError, ValueError) as e:  # ValueError: a number has too many digits to print
            raise UserError(f"{path} cannot be used: {e}") from None
        self._tensors = {
            str(name).removeprefix(COMPILED_PREFIX): tensor
            for name, tensor in state.items()
            if not str(name).endswith(".attn.bias")  # the causal mask
        }
        for name, tensor in self._tensors.items():
            self._check_tensor(name, tensor)
        is_gpt2 = self._config.vocab_size >= GPT2_VOCAB_SIZE
        self.tokenizer_name = "gpt2" if is_gpt2 else "char"

    def _check_tensor(self, name: str, tensor: Any) -> None:
        """Refuse what is not a plain array of floating-point numbers."""
        if not isinstance(tensor, Tensor):
            raise UserError(f"{self.path} has {name:.80} as {type(tensor).__name__}, not a tensor")
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if tensor.dtype not in FLOAT_DTYPES or not is_plain or not tensor.is_contiguous():
            raise UserError(
                f"{self.path} has {name:.80} in {tensor.dtype} ({tensor.layout}), and only "
                "contiguous tensors of floating-point numbers can be read; save it as float32"
            )

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        return self._config

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor of the model."""
        return {name: list(self.read_tensor(name).shape) for name in self._tensors}

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor; weights of linear layers are transposed, as in GPT-2."""
        tensor = self._tensors[name]
        is_linear = name.endswith(".weight") and ".c_" in name
        return tensor.T if is_linear and tensor.dim() == 2 else tensor

    def read_tokenizer(self) -> Tokenizer | None:
        """Return GPT-2's tokenizer, or None for a model of characters.

        nanoGPT keeps the characters in a pickle, which is not opened; they are those of the text.
        """
        return load_tiktoken("gpt2") if self.tokenizer_name == "gpt2" else None


def _load_tensors(path: Path) -> dict[str, Any]:
    """Load a file of torch.save that contains only tensors, numbers, texts, lists and dicts."""
    try:
        saved = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as e:  # torch and the reader of pickles raise errors of many classes
        cause = f"{type(e).__name__}: {e}".partition("\n")[0][:MAX_PICKLE_ERROR_CHARS]
        raise UserError(
            f"{path} cannot be read without running code in it, or is damaged ({cause}); give the "
            "ckpt.pt of an unmodified nanoGPT"
        ) from None
    return saved if isinstance(saved, dict) else {}
