"""Read nanoGPT's ckpt.pt."""

from pathlib import Path

from torch import Tensor

from common.errors import UserError
from data.tokenizer import Tokenizer, load_tiktoken
from interop.external import ExternalModel
from interop.names import WRAPPER_PREFIX
from interop.settings import checked_config
from interop.torch_file import check_tensors, read_torch_file

GPT2_VOCAB_SIZE = 50257  # a vocabulary of at least this size is GPT-2's
# Settings that older checkpoints, or all of them, do not have.
NANOGPT_DEFAULTS = {"bias": True, "dropout": 0.0, "mlp": "gelu_exact"}
NANOGPT_SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", *NANOGPT_DEFAULTS)


class NanoGPTFile(ExternalModel):
    """A ckpt.pt, in which tensors are named as in GPT-2 and linear layers are ours."""

    def __init__(self, path: Path) -> None:
        saved = read_torch_file(path)
        if not {"model", "model_args"} <= saved.keys():
            raise UserError(
                "it is not a checkpoint of nanoGPT, which contains model and model_args: give "
                "nanoGPT's ckpt.pt, or the folder with the model's config.json and safetensors"
            )
        settings = NANOGPT_DEFAULTS | saved["model_args"]
        config = checked_config({name: settings[name] for name in NANOGPT_SETTINGS})
        self._tensors = {
            WRAPPER_PREFIX.sub("", name): tensor
            for name, tensor in saved["model"].items()
            if not name.endswith(".attn.bias")  # the causal mask
        }
        check_tensors(self._tensors, path)
        shapes = {name: list(self.read_tensor(name).shape) for name in self._tensors}
        self.tokenizer_name = "gpt2" if config.vocab_size >= GPT2_VOCAB_SIZE else "char"
        super().__init__(path, config, "gpt2", shapes)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor as GPT-2 has it, which transposes linear layers."""
        tensor = self._tensors[name]
        is_linear = name.endswith(".weight") and ".c_" in name
        return tensor.T if is_linear else tensor

    def parse_tokenizer(self) -> Tokenizer | None:
        """Return GPT-2's tokenizer; None for characters, which nanoGPT keeps in a pickle."""
        return load_tiktoken("gpt2") if self.tokenizer_name == "gpt2" else None
