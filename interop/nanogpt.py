"""nanoGPT's ckpt.pt: read as tensors and numbers alone, so that nothing in it can run."""

from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import Tokenizer, load_tiktoken

GPT2_TOKENS = 50257  # from so many on, the vocabulary is GPT-2's
SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")


class NanoGPT:
    """A ckpt.pt, whose linear layers are x Wᵀ as ours are, where GPT-2's are x W."""

    names = "gpt2"

    def __init__(self, path: Path):
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            given = {name: kept["model_args"][name] for name in SETTINGS}
            # torch.compile puts a word before each name.
            self._tensors = {
                name.removeprefix("_orig_mod."): tensor for name, tensor in kept["model"].items()
            }
            self.shapes = {
                name: list(self.tensor(name).shape)
                for name in self._tensors
                if not name.endswith(".attn.bias") and name != "lm_head.weight"
            }
            self._config = OmegaConf.to_object(
                OmegaConf.merge(OmegaConf.structured(GPTConfig(vocab_size=None)), given)
            )
            self._config.check()
        except Exception as e:  # torch and the reader of pickles raise errors of many kinds
            why = f"{type(e).__name__}: {e}".partition("\n")[0][:200]
            raise UserError(
                f"{path} is no checkpoint of nanoGPT's that can be read ({why})"
            ) from None
        self.tokenized = "gpt2" if (self._config.vocab_size or 0) >= GPT2_TOKENS else "char"

    def config(self) -> GPTConfig:
        return self._config

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor.T if name.endswith(".weight") and ".c_" in name else tensor

    def tokenizer(self) -> Tokenizer | None:
        """GPT-2's; None for characters: they are those of the text, in their order, and kept in a
        pickle, which is not opened."""
        return load_tiktoken("gpt2") if self.tokenized == "gpt2" else None
