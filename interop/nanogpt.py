"""Read nanoGPT's ckpt.pt as tensors and numbers only, so that no code in it can run."""

from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import Tokenizer, load_tiktoken
from interop.source import CheckpointSource

GPT2_VOCAB_SIZE = 50257  # a vocabulary of at least this size is GPT-2's
NANOGPT_SETTINGS = (
    "vocab_size",
    "block_size",
    "n_layer",
    "n_head",
    "n_embd",
    "bias",
    "dropout",
)
COMPILED_PREFIX = "_orig_mod."  # torch.compile puts it before every name
MAX_PICKLE_ERROR_CHARS = 200


class NanoGPTFile(CheckpointSource):
    """A ckpt.pt, in which tensors are named as in GPT-2 and linear layers are ours."""

    naming = "gpt2"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            self._tensors: dict[str, Tensor] = {
                name.removeprefix(COMPILED_PREFIX): tensor
                for name, tensor in saved["model"].items()
            }
            self._shapes = {
                name: list(self.read_tensor(name).shape)
                for name in self._tensors
                if not name.endswith(".attn.bias") and name != "lm_head.weight"
            }
            settings = {name: saved["model_args"][name] for name in NANOGPT_SETTINGS}
            schema = OmegaConf.structured(GPTConfig)
            self._config: GPTConfig = OmegaConf.to_object(OmegaConf.merge(schema, settings))
            self._config.check()
        except Exception as e:  # torch and the reader of pickles raise errors of many classes
            cause = f"{type(e).__name__}: {e}".partition("\n")[0][:MAX_PICKLE_ERROR_CHARS]
            raise UserError(
                f"{path} is not a checkpoint of nanoGPT that can be read ({cause}); "
                "give the ckpt.pt of an unmodified nanoGPT"
            ) from None
        vocab_size = self._config.vocab_size or 0
        self.tokenizer_name = "gpt2" if vocab_size >= GPT2_VOCAB_SIZE else "char"

    def read_config(self) -> GPTConfig:
        """Return our settings for the model."""
        return self._config

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor of the model."""
        return self._shapes

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor; weights of linear layers are transposed, as in GPT-2."""
        tensor = self._tensors[name]
        is_linear = name.endswith(".weight") and ".c_" in name
        return tensor.T if is_linear else tensor

    def read_tokenizer(self) -> Tokenizer | None:
        """Return GPT-2's tokenizer, or None for a model of characters.

        nanoGPT keeps the characters in a pickle, which is not opened; they are those of the text.
        """
        return load_tiktoken("gpt2") if self.tokenizer_name == "gpt2" else None
