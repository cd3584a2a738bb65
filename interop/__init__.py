"""Checkpoints of others in and out: GPT-2, Llama, Qwen 2 and Qwen 3 by shape, from safetensors or a
.gguf, to safetensors; neither way needs transformers or runs a pickle."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cli.config_file import read_config
from common.errors import UserError
from config import GPTConfig, TokenizerConfig
from data.tokenizer import Tokenizer, load_tokenizer
from interop.folder import CONFIG, Folder
from interop.gguf_file import GGUF
from interop.hub import WEIGHTS, fetched, folder_of
from interop.nanogpt import NanoGPT
from interop.settings import NAMES, counterpart, family_of, hf_settings
from interop.tokenizer_export import export_tokenizer
from kernels import rms_norm
from model import GPT
from training import checkpoint as saved

# Where queries and keys are normalised without gains, their size counts for nothing but the number
# that the norm adds: so much larger, that does not count either. A power of two changes no digits.
LARGER = 64


def load_hf(path: str | os.PathLike) -> GPT:
    """The model in a folder of Hugging Face's format, or a .gguf, on the CPU, in float32."""
    return Checkpoint(path).load(torch.float32)


def load(name: str | os.PathLike, which: str | int = "best", log=print) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of a run, as `load_run`; of a folder of Hugging Face's format, a
    .gguf or nanoGPT's ckpt.pt; or of a name on the hub. For evaluation, on the CPU; safetensors are
    mapped and stay as fine as they are in their files. Raises `UserError` where there is none."""
    path = folder_of(fetched(str(name)))
    if not of_others(path):
        return saved.load_run(path, which, log)[:2]
    checkpoint = Checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{path} is of characters that a pickle beside it has, which is not "
            "opened: go on with it on its text, python train.py init_from="
        )
    return checkpoint.load(), tokenizer


def of_others(path: Path) -> bool:
    """Whether a path is of a .gguf, a ckpt.pt, or a folder of Hugging Face's format: with a
    config.json, where a run has a config.yaml."""
    is_folder = (path / CONFIG).is_file() and not (path / "config.yaml").is_file()
    return path.suffix in (".gguf", ".pt") or is_folder


def starting_config(init_from: str) -> tuple[str, GPTConfig, TokenizerConfig]:
    """`init_from`, of the hub with its commit, and its model's and tokenizer's settings."""
    init_from = fetched(init_from)
    path = folder_of(init_from)
    if of_others(path):
        checkpoint = Checkpoint(path)
        return init_from, checkpoint.config, TokenizerConfig(name=checkpoint.tokenized)
    source = read_config(path / "config.yaml")
    return init_from, source.model, source.tokenizer


def starting_point(path: Path, log=print) -> tuple[Tokenizer | None, Callable[[GPT], None]]:
    """The tokenizer that a run starts from, None for that of its text, and what copies the weights
    into its model."""
    path = folder_of(path)
    if of_others(path):
        checkpoint = Checkpoint(path)
        return checkpoint.tokenizer(), checkpoint.copy_to
    trained, _ = saved.find_checkpoint(path, "best", log)
    tokenizer = load_tokenizer(trained / saved.TOKENIZER)
    return tokenizer, lambda model: saved.load_weights(model, trained / saved.MODEL)


class Checkpoint:
    """A model of others, in a folder of Hugging Face's format, a .gguf or a ckpt.pt, whose tensors
    fit its settings by name and shape."""

    def __init__(self, path: str | os.PathLike):
        """Checks all that can be without reading the weights; raises as `load_hf`."""
        self.path = Path(path)
        self._source = {".gguf": GGUF, ".pt": NanoGPT}.get(self.path.suffix, Folder)(self.path)
        self.config, shapes = self._source.config(), self._source.shapes
        if self.config.n_layer > len(shapes):  # of which a model would take long to make
            raise UserError(f"{self.path} holds too few tensors for {self.config.n_layer:,} layers")
        if {"lm_head.weight", "output.weight"} & shapes.keys():  # it may differ from the embedding
            self.config = replace(self.config, tie_embeddings=False)
        self.tokenized = self._source.tokenized  # the setting tokenizer.name
        own = saved.parameter_shapes(self.config)
        self._layout = list(layout(own, self._source.names))
        self._rows = {name: shape[0] for name, shape in own.items()}
        expected = {theirs: shape for theirs, _, _, shape in self._layout}
        saved.check_shapes(self.path, shapes, expected)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the weights, with fewer tokens than the model or as many; None where
        it is that of a text."""
        try:
            tokenizer = self._source.tokenizer()
        except UserError:
            raise
        except Exception as e:  # the library has no class of its own
            raise UserError(f"{self.path} holds no tokenizer that can be read: {e}") from None
        if tokenizer and tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(
                f"{self.path} has a tokenizer of {tokenizer.vocab_size:,} tokens, "
                f"more than its model's {self.config.vocab_size:,}"
            )
        return tokenizer

    def load(self, dtype: torch.dtype | None = None) -> GPT:
        """The model, for evaluation; what has the dtype, or all for None, is mapped, not copied."""
        with torch.device("meta"):
            model = GPT(self.config)
        model.load_state_dict(
            {name: t.to(dtype) for name, t in self._weights()}, strict=False, assign=True
        )
        if self.config.tie_embeddings:
            model.head.weight = model.token_embedding.weight
        model.compute_rotary()
        return model.eval()

    @torch.no_grad()
    def copy_to(self, model: GPT) -> None:
        """Copy the weights into a model of this configuration, or a smaller block_size."""
        params = dict(model.named_parameters())
        for name, tensor in self._weights():
            params[name].copy_(tensor[: len(params[name])])

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by name."""
        for theirs, ours, transposed, _ in self._layout:
            tensor = self._source.tensor(theirs)
            parts = (tensor.T if transposed else tensor).split([self._rows[name] for name in ours])
            yield from zip(ours, (part.contiguous() for part in parts))


def layout(
    shapes: dict[str, list[int]], family: str
) -> Iterator[tuple[str, list[str], bool, list[int]]]:
    """Yield each tensor of a checkpoint: its name there, those of our parameters that it joins,
    whether it is transposed, its shape.

    `shapes` are of our parameters, by name: what is not among them is not in the checkpoint."""
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    names = NAMES["modules"][family]
    modules = dict(names["top"])
    for layer in range(layers):
        modules |= {
            f"{names['layers']}.{layer}.{theirs}": " ".join(
                f"blocks.{layer}.{name}" for name in ours.split()
            )
            for theirs, ours in names["block"].items()
        }
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in ours.split()]
            if names[0] in shapes:
                shape = [sum(shapes[name][0] for name in names), *shapes[names[0]][1:]]
                # GPT-2's linear layers are x W, not x Wᵀ.
                transposed = kind == "weight" and ".c_" in theirs
                yield f"{theirs}.{kind}", names, transposed, shape[::-1] if transposed else shape


def save_hf(model: GPT, path: str | os.PathLike, tokenizer: Tokenizer | None = None) -> None:
    """Write a folder, whole or not at all, for transformers' AutoModelForCausalLM."""
    folder = Path(path)
    settings = hf_settings(model.config, tokenizer)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} is there already, and no empty folder: name a new one")
    files = {} if tokenizer is None else export_tokenizer(tokenizer, model.config.block_size)
    tensors = {
        name: (t.T if transposed else t).contiguous() for name, t, transposed in hf_tensors(model)
    }
    settings["dtype"] = settings["torch_dtype"] = str(model.head.weight.dtype)[6:]
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name, text in {**files, CONFIG: json.dumps(settings, indent=1)}.items():
            (part / name).write_text(text, encoding="utf-8")
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        # The library makes the weights readable to their owner alone.
        shutil.copymode(part / CONFIG, part / WEIGHTS)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except SafetensorError as e:
        raise UserError(f"to={folder} could not be written: {e}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def hf_tensors(model: GPT) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield a checkpoint's tensors: name, tensor as ours are, whether it is transposed there."""
    config, family = model.config, family_of(model.config)
    params = {name: p.detach().cpu() for name, p in model.named_parameters()}
    table = params["token_embedding.weight"]
    if config.norm_embedding:  # theirs then differs from the head
        params = {"head.weight": table, **params, "token_embedding.weight": rms_norm(table)}
    shapes = saved.parameter_shapes(counterpart(config))
    for name, shape in shapes.items():
        if config.qk_norm is True and re.search("W_[QK]", name):
            params[name] = params[name] * LARGER
        elif name not in params:  # a bias, or a gain
            params[name] = torch.full(shape, float(not name.endswith("bias")), dtype=table.dtype)
    for theirs, ours, transposed, _ in layout(shapes, "gpt2" if family == "gpt2" else "llama"):
        yield theirs, torch.cat([params[name] for name in ours]), transposed
