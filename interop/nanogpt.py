"""nanoGPT's ckpt.pt: read as tensors and numbers alone, so that nothing in it can run."""

from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from config import GPTConfig, TokenizerConfig, UserError
from data.tokenizer import Tokenizer, of_tiktoken

GPT2_TOKENS = 50257  # from so many on, the vocabulary is GPT-2's
SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")


class NanoGPT:
    """A ckpt.pt, whose weights fit its own settings by name and shape."""

    def __init__(self, path: Path):
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            given = {name: kept["model_args"][name] for name in SETTINGS}
            schema = OmegaConf.structured(GPTConfig(vocab_size=None))
            self.config = OmegaConf.to_object(OmegaConf.merge(schema, given))
            self.config.check()
            # torch.compile puts a word before each name.
            self._tensors = {name.removeprefix("_orig_mod."): tensor
                             for name, tensor in kept["model"].items()}
        except Exception as e:  # torch and the reader of pickles raise errors of many kinds
            why = f"{type(e).__name__}: {e}".partition("\n")[0][:200]
            raise UserError(f"{path} is no checkpoint of nanoGPT's that can be read ({why})"
                            ) from None
        self.path = path

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        by_gpt2 = (self.config.vocab_size or 0) >= GPT2_TOKENS
        return TokenizerConfig(name="gpt2" if by_gpt2 else "char")

    def tokenizer(self) -> Tokenizer | None:
        """GPT-2's; None for characters: they are those of the text, in their order, and kept in a
        pickle, which is not opened."""
        return of_tiktoken("gpt2") if self.tokenizer_config.name == "gpt2" else None

    def weights(self, layout: Iterator, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by name, of the `layout` of GPT-2's and the rows of each of ours."""
        for theirs, ours, transposed, shape in layout:
            tensor = self._tensors.get(theirs)
            wanted = shape[::-1] if transposed else shape  # its linear layers are x Wᵀ, as ours
            if tensor is None or list(tensor.shape) != wanted:
                found = "missing" if tensor is None else list(tensor.shape)
                raise UserError(f"{self.path} holds another model: {theirs} is {found}, and "
                                f"{wanted} in its settings")
            yield from zip(ours, tensor.split([sizes[name] for name in ours]))
