"""Hugging Face checkpoints in and out: GPT-2, Llama, Qwen 2 and Qwen 3 by shape, in safetensors;
neither way needs transformers or runs a pickle."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from config import GPTConfig, TokenizerConfig, UserError, is_hf, read_config
from data.hf_tokenizer import HFTokenizer, read_json, read_tokenizer
from data.tokenizer import Tokenizer, hf_files, load_tokenizer
from interop.hub import SHARDS, WEIGHTS, fetched, folder_of
from interop.nanogpt import NanoGPT
from interop.settings import CONFIG, counterpart, family_of, hf_settings, model_config
from kernels import rms_norm
from model import GPT, rotary_table
from training import checkpoint as saved
from training.tensors import opened

DTYPES = ("F64", "F32", "F16", "BF16")
# Their modules and ours. Where several of ours are one of theirs, the rows stand one below another.
TOP = {"gpt2": {"transformer.wte": "token_embedding", "transformer.wpe": "position_embedding",
                "transformer.ln_f": "norm", "lm_head": "head"},
       "llama": {"model.embed_tokens": "token_embedding", "model.norm": "norm", "lm_head": "head"}}
BLOCK = {"gpt2": {"ln_1": "norm_1", "attn.c_attn": "attention.W_Q attention.W_K attention.W_V",
                  "attn.c_proj": "attention.W_O", "ln_2": "norm_2", "mlp.c_fc": "mlp.W_in",
                  "mlp.c_proj": "mlp.W_out"},
         "llama": {"input_layernorm": "norm_1", "self_attn.q_proj": "attention.W_Q",
                   "self_attn.k_proj": "attention.W_K", "self_attn.v_proj": "attention.W_V",
                   "self_attn.q_norm": "attention.norm_q", "self_attn.k_norm": "attention.norm_k",
                   "self_attn.o_proj": "attention.W_O", "post_attention_layernorm": "norm_2",
                   "mlp.gate_proj": "mlp.W_gate", "mlp.up_proj": "mlp.W_in",
                   "mlp.down_proj": "mlp.W_out"}}
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
# Where queries and keys are normalised without gains, their size counts for nothing but the number
# that the norm adds: so much larger, that does not count either. A power of two changes no digits.
LARGER = 64
# What older versions kept beside the weights.
DERIVED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def load_hf(path: str | os.PathLike) -> GPT:
    """The model in a folder of Hugging Face's format, for evaluation, on the CPU, in float32."""
    return Checkpoint(path).load(torch.float32)


def load_model(folder: Path, which: str | int = "best", log=print) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of a run, as `load_run`, or of a folder of Hugging Face's or a
    name on the hub, whose weights stay in its files, mapped and as fine as they are there."""
    folder = folder_of(folder)
    if folder.suffix == ".pt":
        checkpoint = NanoGPT(folder)
        if (tokenizer := checkpoint.tokenizer()) is None:
            raise UserError(f"{folder} is of characters that a pickle beside it has, which is not "
                            "opened: go on with it on its text, python train.py init_from=")
        model = GPT(checkpoint.config)
        copy_nanogpt(checkpoint, model)
        return model.eval(), tokenizer
    if not is_hf(folder):
        return saved.load_run(folder, which, log)[:2]
    checkpoint = Checkpoint(folder)
    return checkpoint.load(), checkpoint.tokenizer()


def starting_config(init_from: str) -> tuple[str, GPTConfig, TokenizerConfig]:
    """`init_from`, of the hub with its commit, and its model's and tokenizer's settings."""
    init_from = fetched(init_from)
    folder = folder_of(init_from)
    if folder.suffix == ".pt":
        checkpoint = NanoGPT(folder)
        return init_from, checkpoint.config, checkpoint.tokenizer_config
    if is_hf(folder):
        return init_from, Checkpoint(folder).config, TokenizerConfig(name="hf")
    source = read_config(folder / "config.yaml")
    return init_from, source.model, source.tokenizer


def starting_point(folder: Path, log=print) -> tuple[Tokenizer | None, Callable[[GPT], None]]:
    """The tokenizer that a run starts from, None for that of its text, and what copies the weights
    into its model."""
    folder = folder_of(folder)
    if folder.suffix == ".pt":
        nanogpt = NanoGPT(folder)
        return nanogpt.tokenizer(), partial(copy_nanogpt, nanogpt)
    if is_hf(folder):
        checkpoint = Checkpoint(folder)
        return checkpoint.tokenizer(), checkpoint.copy_to
    trained, _ = saved.find_checkpoint(folder, "best", log)
    tokenizer = load_tokenizer(trained / saved.TOKENIZER)
    return tokenizer, lambda model: saved.load_weights(model, trained / saved.MODEL)


@torch.no_grad()
def copy_nanogpt(checkpoint: NanoGPT, model: GPT) -> None:
    """Copy nanoGPT's weights into a model of its configuration, or a smaller block_size."""
    params, shapes = dict(model.named_parameters()), saved.parameter_shapes(checkpoint.config)
    sizes = {name: shape[0] for name, shape in shapes.items()}
    for name, tensor in checkpoint.weights(layout(shapes, "gpt2"), sizes):
        params[name].copy_(tensor[:len(params[name])])


class Checkpoint:
    """A folder of Hugging Face's format, whose tensors fit its config.json by name and shape."""

    def __init__(self, path: str | os.PathLike):
        """Checks all that can be without reading the weights; raises as `load_hf`."""
        self.folder = Path(path)
        self.config = model_config(self.folder)
        self.family = "gpt2" if family_of(self.config) == "gpt2" else "llama"
        shapes, self._files = find_tensors(self.folder, self.family)
        if "lm_head.weight" in shapes:  # which may differ from the embedding
            self.config = replace(self.config, tie_embeddings=False)
        self._layout = list(layout(saved.parameter_shapes(self.config), self.family))
        expected = {theirs: shape for theirs, _, _, shape in self._layout}
        saved.check_shapes(self.folder, shapes, expected)

    def tokenizer(self) -> HFTokenizer:
        """The tokenizer beside the weights; it may have fewer tokens than the model, not more."""
        tokenizer = read_tokenizer(self.folder, read_json(self.folder / CONFIG))
        if tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(f"{self.folder} has a tokenizer of {tokenizer.vocab_size:,} tokens, "
                            f"more than its model's {self.config.vocab_size:,}")
        return tokenizer

    def load(self, dtype: torch.dtype | None = None) -> GPT:
        """The model, for evaluation; what has the dtype, or all for None, is mapped, not copied."""
        with torch.device("meta"):
            model = GPT(self.config)
        model.load_state_dict({name: t.to(dtype) for name, t in self._weights()},
                              strict=False, assign=True)
        if self.config.tie_embeddings:
            model.head.weight = model.token_embedding.weight
        if model.rotary is not None:
            model.rotary = rotary_table(self.config.block_size, self.config)
        return model.eval()

    @torch.no_grad()
    def copy_to(self, model: GPT) -> None:
        """Copy the weights into a model of this configuration, or a smaller block_size."""
        params = dict(model.named_parameters())
        for name, tensor in self._weights():
            params[name].copy_(tensor[:len(params[name])])

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by name, mapped from the files."""
        sizes = {name: shape[0] for name, shape in saved.parameter_shapes(self.config).items()}
        for theirs, ours, transposed, _ in self._layout:
            path, stored = self._files[theirs]
            with opened(path) as file:
                tensor = file.get_tensor(stored)
            parts = (tensor.T if transposed else tensor).split([sizes[name] for name in ours])
            yield from zip(ours, (part.contiguous() for part in parts))


def layout(shapes: dict[str, list[int]], family: str
           ) -> Iterator[tuple[str, list[str], bool, list[int]]]:
    """Yield each tensor of a checkpoint: its name there, those of our parameters that it joins,
    whether it is transposed, its shape.

    `shapes` are of our parameters, by name: what is not among them is not in the checkpoint.
    """
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    modules = dict(TOP[family])
    for layer in range(layers):
        modules |= {f"{LAYERS[family]}.{layer}.{theirs}":
                    " ".join(f"blocks.{layer}.{name}" for name in ours.split())
                    for theirs, ours in BLOCK[family].items()}
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in ours.split()]
            if names[0] in shapes:
                shape = [sum(shapes[name][0] for name in names), *shapes[names[0]][1:]]
                # GPT-2's linear layers are x W, not x Wᵀ.
                transposed = kind == "weight" and ".c_" in theirs
                yield f"{theirs}.{kind}", names, transposed, shape[::-1] if transposed else shape


def find_tensors(folder: Path, family: str
                 ) -> tuple[dict[str, list[int]], dict[str, tuple[Path, str]]]:
    """Of each tensor in a folder's files, by transformers' name: its shape, file and name there."""
    files = [path for path in [folder / WEIGHTS] if path.is_file()] or sorted(folder.glob(SHARDS))
    if not files:
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
        if pickles:
            raise UserError(
                f"{folder} holds {pickles[0]!r}, a pickle, which may run code and is not read: "
                "convert it with transformers, AutoModelForCausalLM.from_pretrained('"
                f"{folder}').save_pretrained('{folder}')")
        raise UserError(f"{folder} holds no {WEIGHTS}, nor {SHARDS}")
    shapes, places = {}, {}
    prefix = LAYERS[family].split(".")[0] + "."
    for path in files:
        with opened(path) as file:
            for stored in file.keys():  # noqa: SIM118  it is no dict
                # GPT-2's own files lack the prefix.
                tensor = stored if stored.startswith((prefix, "lm_head.")) else prefix + stored
                kept = file.get_slice(stored)
                if DERIVED.search(tensor):
                    continue
                if kept.get_dtype() not in DTYPES:
                    raise UserError(
                        f"{path} holds {stored} in {kept.get_dtype()}, and what is read is "
                        f"{', '.join(DTYPES)}: convert quantised weights first")
                shapes[tensor], places[tensor] = list(kept.get_shape()), (path, stored)
    return shapes, places


def save_hf(model: GPT, path: str | os.PathLike, tokenizer: Tokenizer | None = None) -> None:
    """Write a folder, whole or not at all, for transformers' AutoModelForCausalLM."""
    folder = Path(path)
    settings = hf_settings(model.config, tokenizer)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} is there already, and no empty folder: name a new one")
    files = {} if tokenizer is None else hf_files(tokenizer, model.config.block_size)
    tensors = {name: (t.T if transposed else t).contiguous()
               for name, t, transposed in hf_tensors(model)}
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
