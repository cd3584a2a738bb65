"""Read nanoGPT's ckpt.pt as tensors and numbers only, so that no code in it can run."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from data.tokenizer import Tokenizer, load_tiktoken
from interop.external import ExternalModel
from interop.names import WRAPPER_PREFIX
from interop.settings import checked_config

GPT2_VOCAB_SIZE = 50257  # a vocabulary of at least this size is GPT-2's
NANOGPT_SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")
NANOGPT_DEFAULTS = {"bias": True, "dropout": 0.0}  # older checkpoints do not have these settings
TORCH_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class NanoGPTFile(ExternalModel):
    """A ckpt.pt, in which tensors are named as in GPT-2 and linear layers are ours."""

    def __init__(self, path: Path) -> None:
        saved = _load_tensors(path)
        if not {"model", "model_args"} <= saved.keys():
            raise UserError(
                "it is not a checkpoint of nanoGPT, which contains model and model_args: give "
                "nanoGPT's ckpt.pt, or the folder with the model's config.json and safetensors"
            )
        settings = NANOGPT_DEFAULTS | saved["model_args"]
        config = checked_config({name: settings[name] for name in NANOGPT_SETTINGS})
        self._tensors = {
            WRAPPER_PREFIX.sub("", name): _checked_tensor(name, tensor)
            for name, tensor in saved["model"].items()
            if not name.endswith(".attn.bias")  # the causal mask
        }
        n_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        if n_bytes > 2 * path.stat().st_size:  # only the embedding and the head share memory
            raise UserError(f"its tensors, of {n_bytes:,} bytes, share memory: save a copy of each")
        shapes = {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        self.tokenizer_name = "gpt2" if config.vocab_size >= GPT2_VOCAB_SIZE else "char"
        super().__init__(path, config, "gpt2", shapes)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor as GPT-2 has it."""
        return self._tensors[name]

    def parse_tokenizer(self) -> Tokenizer | None:
        """Return GPT-2's tokenizer; None for characters, which nanoGPT keeps in a pickle."""
        return load_tiktoken("gpt2") if self.tokenizer_name == "gpt2" else None


def _checked_tensor(name: str, tensor: Any) -> Tensor:
    """Refuse what is not a plain array of numbers; transpose linear layers, as in GPT-2."""
    is_plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.is_cpu
    if not is_plain or tensor.dtype not in TORCH_FLOATS or not tensor.is_contiguous():
        raise UserError(
            f"{name:.80} is not a contiguous tensor of floating-point numbers, the only kind that "
            "can be read: save it as float32"
        )
    is_linear = name.endswith(".weight") and ".c_" in name
    return tensor.T if is_linear and tensor.dim() == 2 else tensor


def _load_tensors(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch and the reader of pickles raise errors of many classes
        code = re.search(r"GLOBAL (\S+)", str(e))
        cause = f"it contains code ({code[1]:.80}), which is not run" if code else "it is damaged"
        raise UserError(f"{cause}: give the undamaged ckpt.pt of an unmodified nanoGPT") from None
    return saved if isinstance(saved, dict) else {}
