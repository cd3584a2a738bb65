"""Hugging Face checkpoints in and out: GPT-2, Llama and Qwen 2 by shape, in safetensors; neither
way needs transformers or runs a pickle.

    python -m interop run_dir=runs/mine to=out/       a run's best model, for transformers, vLLM, …
    python sample.py init_from=FOLDER prompt="…"      text from a model of others
    python train.py init_from=FOLDER data.path=…      fine-tune it
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import GPTConfig, UserError, is_hf, knobs, read_config
from data.hf_tokenizer import HFTokenizer, read_json, read_tokenizer
from data.tokenizer import Tokenizer, hf_files
from model import GPT, ROPE_HIGH, ROPE_LOW, parameter_shapes
from training.checkpoint import (
    MODEL,
    check_model,
    find_checkpoint,
    load_run,
    load_weights,
    saved_tokenizer,
)
from training.runtime import memory_here

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
INDEX = "model.safetensors.index.json"
LONGEST = 1 << 22  # tokens of context, beyond which a table of rotary angles would fill the memory
DTYPES = ("F64", "F32", "F16", "BF16")
# Their modules and ours. Where several of ours are one of theirs, the rows stand one below another.
TOP = {"gpt2": {"transformer.wte": "token_embedding", "transformer.wpe": "position_embedding",
                "transformer.ln_f": "norm", "lm_head": "head"},
       "llama": {"model.embed_tokens": "token_embedding", "model.norm": "norm", "lm_head": "head"}}
BLOCK = {"gpt2": {"ln_1": "norm_1", "attn.c_proj": "attention.W_O",
                  "attn.c_attn": "attention.W_Q attention.W_K attention.W_V",
                  "ln_2": "norm_2", "mlp.c_fc": "mlp.W_in", "mlp.c_proj": "mlp.W_out"},
         "llama": {"input_layernorm": "norm_1", "self_attn.q_proj": "attention.W_Q",
                   "self_attn.k_proj": "attention.W_K", "self_attn.v_proj": "attention.W_V",
                   "self_attn.o_proj": "attention.W_O", "post_attention_layernorm": "norm_2",
                   "mlp.gate_proj": "mlp.W_gate", "mlp.up_proj": "mlp.W_in",
                   "mlp.down_proj": "mlp.W_out"}}
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
# What older versions kept beside the weights.
DERIVED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def load_hf(path: str | os.PathLike) -> GPT:
    """The model in a folder of Hugging Face's format, in evaluation mode, on the CPU, in float32.

    Raises:
        UserError: it is no GPT-2, Llama or Qwen 2, has settings that we have not, or lacks weights.
    """
    return Checkpoint(path).load()


def load_model(folder: Path, which: str | int = "best", say=print) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of a run, as `load_run`, or of a folder of Hugging Face's."""
    if not is_hf(folder):
        return load_run(folder, which, say)[:2]
    checkpoint = Checkpoint(folder)
    tokenizer = checkpoint.tokenizer()
    return checkpoint.load(), tokenizer


def starting_point(folder: Path, say=print) -> tuple[Tokenizer, Callable[[GPT], None]]:
    """What a run starts from: the tokenizer, and what copies the weights, of a run's best model or
    of a folder in Hugging Face's format."""
    if is_hf(folder):
        checkpoint = Checkpoint(folder)
        return checkpoint.tokenizer(), checkpoint.copy_to
    trained, _ = find_checkpoint(folder, "best", say)
    source = read_config(folder / "config.yaml").model
    check_model(trained, source)
    tokenizer = saved_tokenizer(trained)
    return tokenizer, lambda model: load_weights(model, trained / MODEL)


class Checkpoint:
    """A folder of Hugging Face's format, whose tensors fit its config.json by name and shape."""

    def __init__(self, path: str | os.PathLike):
        """Checks all that can be without reading the weights; raises as `load_hf`."""
        self.folder = Path(path)
        self._settings = read_json(self.folder / CONFIG)
        self.config = model_config(self.folder)
        self.family = "gpt2" if self._settings["model_type"] == "gpt2" else "llama"
        self._shapes, self._files = _tensors(self.folder, self.family)
        if self.config.n_layer > len(self._shapes):  # said before anything of that size is made
            raise UserError(f"{self.folder} has {len(self._shapes)} tensors, too few for the "
                            f"{self.config.n_layer} layers of its {CONFIG}")
        tensors = layout(parameter_shapes(self.config), self.family)
        expected = {theirs: shape for theirs, _, _, shape in tensors}
        also = {"lm_head.weight"} & self._shapes.keys() if self.config.tie_embeddings else set()
        expected |= {name: [self.config.vocab_size, self.config.n_embd] for name in also}
        wrong = [f"{name}: {self._shapes.get(name, 'missing')} in the file, "
                 f"{expected.get(name, 'absent')} by {CONFIG}"
                 for name in sorted(expected.keys() | self._shapes.keys())
                 if self._shapes.get(name) != expected.get(name)]
        if wrong:
            raise UserError(f"{self.folder} does not hold the model of its {CONFIG}: "
                            f"{'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}")
        needed, there_is = 4 * sum(map(math.prod, expected.values())), memory_here("cpu")
        if there_is and needed > there_is:
            raise UserError(f"{self.folder} needs {needed / 1e9:,.1f} GB of memory in float32, and "
                            f"this machine has {there_is / 1e9:,.1f} GB: take a smaller model")

    def tokenizer(self) -> HFTokenizer:
        """The tokenizer beside the weights; it may have fewer tokens than the model, not more.

        Raises:
            UserError: there is none that fits.
        """
        tokenizer = read_tokenizer(self.folder, self._settings)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(f"{self.folder} has a tokenizer of {tokenizer.vocab_size:,} tokens, "
                            f"more than its model's {self.config.vocab_size:,}")
        return tokenizer

    def load(self) -> GPT:
        """The model, in evaluation mode; raises as `copy_to`."""
        model = GPT(self.config)
        self.copy_to(model)
        return model.eval()

    @torch.no_grad()
    def copy_to(self, model: GPT) -> None:
        """Copy the weights into a model of this configuration, or of a smaller block_size, whose
        positions are the first of ours.

        Raises:
            UserError: a file cannot be read.
        """
        params = dict(model.named_parameters())
        for theirs, ours, transposed, _ in layout(parameter_shapes(self.config), self.family):
            tensor = self._read(theirs)
            if theirs == "transformer.wpe.weight":
                tensor = tensor[:model.config.block_size]
            rows = [params[name].shape[0] for name in ours]
            parts = (tensor.T if transposed else tensor).split(rows)
            for name, part in zip(ours, parts):
                params[name].copy_(part)
        if self.config.tie_embeddings and "lm_head.weight" in self._shapes and not torch.equal(
                self._read("lm_head.weight").to(model.head.weight), model.head.weight):
            raise UserError(f"{self.folder} has an lm_head.weight that differs from the embedding, "
                            f"though its {CONFIG} says that they are one: "
                            'set "tie_word_embeddings" to false there')

    def _read(self, name: str) -> Tensor:
        path, stored = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(stored)
        except (SafetensorError, OSError) as e:
            raise UserError(f"{path} cannot be read as safetensors: {e}") from None


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


def _tensors(folder: Path, family: str) -> tuple[dict[str, list[int]], dict[str, tuple[Path, str]]]:
    """The shapes of the tensors in a folder's files, by transformers' names, and where each is."""
    if (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        files = sorted(set(map(str, where.values()))) if isinstance(where, dict) else []
        outside = [name for name in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)]
        if outside or not files:
            name = ascii(outside[0])[:60] if outside else "no file"
            raise UserError(f"{folder / INDEX} names {name}, "
                            "where a .safetensors file beside it was expected")
    else:
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
        if pickles:
            raise UserError(
                f"{folder} holds {pickles[0]!r}, a pickle, which may run code and is not read: "
                "convert it with transformers, AutoModelForCausalLM.from_pretrained('"
                f"{folder}').save_pretrained('{folder}')")
        raise UserError(f"{folder} holds no {WEIGHTS}, nor {INDEX}")
    shapes, places = {}, {}
    prefix = LAYERS[family].split(".")[0] + "."
    for name in files:
        path = folder / name
        try:
            if not path.is_file():
                raise OSError("there is no such file")
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118  it is no dict
                    # GPT-2's own files lack the prefix.
                    prefixed = stored.startswith((prefix, "lm_head."))
                    tensor = stored if prefixed else prefix + stored
                    if DERIVED.search(tensor):
                        continue
                    if not re.fullmatch(r"[\w.]+", stored):
                        raise UserError(f"{path} holds a tensor named {stored[:60]!r}, "
                                        "which is none of a model's")
                    if tensor in shapes:
                        raise UserError(f"{folder} holds the tensor {stored} twice")
                    kept = file.get_slice(stored)
                    if kept.get_dtype() not in DTYPES:
                        raise UserError(
                            f"{path} holds {stored} in {kept.get_dtype()}, and what is read is "
                            f"{', '.join(DTYPES)}: convert quantised weights first")
                    shapes[tensor], places[tensor] = list(kept.get_shape()), (path, stored)
        except (SafetensorError, OSError) as e:
            raise UserError(f"{path} cannot be read as safetensors: {e}") from None
    return shapes, places


# --- config.json ----------------------------------------------------------------------------------


def model_config(folder: Path) -> GPTConfig:
    """Our configuration for the config.json of a folder.

    Raises:
        UserError: it is of no family that we have, or something in it is missing, of a wrong type,
            or beyond our model.
    """
    settings = read_json(folder / CONFIG)
    try:
        families = {"gpt2": _from_gpt2, "llama": _from_llama, "qwen2": _from_llama}
        read = families.get(str(settings.get("model_type")))
        if read is None:
            raise UserError(f"its model_type is {_shown(settings.get('model_type'))}; "
                            "what can be read is gpt2, llama and qwen2")
        if settings.get("quantization_config") is not None:
            raise UserError("its weights are quantised, which is not read")
        config = read(settings)
        config.check()
    except (UserError, ArithmeticError) as e:
        raise UserError(f"{folder / CONFIG} cannot be used: {e}") from None
    for name, follows in (("n_kv_head", "kv_heads"), ("head_dim", "key_dim"),
                          ("mlp_hidden", "hidden_dim")):
        without = replace(config, **{name: None})
        if getattr(without, follows) == getattr(config, follows):  # it would be so anyway
            config = replace(config, **{name: None})
    return config


def _from_gpt2(settings: dict) -> GPTConfig:
    _only(settings, activation_function=("gelu_new", "gelu_pytorch_tanh"),
          scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,),
          add_cross_attention=(False,))
    C = _number(settings, "n_embd")
    return GPTConfig(vocab_size=_number(settings, "vocab_size"), n_embd=C,
                     block_size=_number(settings, "n_positions", below=LONGEST),
                     n_layer=_number(settings, "n_layer"), n_head=_number(settings, "n_head"),
                     mlp_hidden=_number(settings, "n_inner", 4 * C),
                     norm_eps=_number(settings, "layer_norm_epsilon", 1e-5, whole=False), bias=True,
                     tie_embeddings=_flag(settings, "tie_word_embeddings", True))


def _from_llama(settings: dict) -> GPTConfig:
    _only(settings, hidden_act=("silu", "swish"), use_sliding_window=(False,),
          partial_rotary_factor=(1, 1.0))
    heads = _number(settings, "num_attention_heads")
    block_size = _number(settings, "max_position_embeddings", below=LONGEST)
    C = _number(settings, "hidden_size")
    attention, mlp = _flag(settings, "attention_bias", False), _flag(settings, "mlp_bias", False)
    if mlp and not attention:
        raise UserError("mlp_bias is true and attention_bias is not: our model has no such setting")
    rope = {}
    for key in ("rope_scaling", "rope_parameters"):  # the last counts
        rope = rope if settings.get(key) is None else settings[key]
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling is {_shown(rope)}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    _only({"rope_type": kind, **rope}, rope_type=("default", "linear", "llama3"),
          partial_rotary_factor=(1, 1.0))
    scaling = {}
    if kind != "default":
        scaling["rope_factor"] = float(_number(rope, "factor", whole=False))
    if kind == "llama3":
        for key, ours in (("low_freq_factor", ROPE_LOW), ("high_freq_factor", ROPE_HIGH)):
            factor = _number(rope, key, whole=False)
            if factor != ours:
                raise UserError(f"{key} is {factor}; what our model has is {ours}")
        scaling["rope_trained"] = _number(rope, "original_max_position_embeddings", block_size)
    bias = True if mlp else "attention" if attention else False
    return GPTConfig(vocab_size=_number(settings, "vocab_size"), block_size=block_size, n_embd=C,
                     n_layer=_number(settings, "num_hidden_layers"), n_head=heads,
                     n_kv_head=_number(settings, "num_key_value_heads", heads),
                     head_dim=_number(settings, "head_dim", max(1, C // heads)), mlp="swiglu",
                     mlp_hidden=_number(settings, "intermediate_size"), norm="rmsnorm",
                     norm_eps=_number(settings, "rms_norm_eps", 1e-6, whole=False), position="rope",
                     rope_theta=float(_number({**settings, **rope}, "rope_theta", 10000.0,
                                              whole=False)),
                     **scaling, bias="qkv" if settings["model_type"] == "qwen2" else bias,
                     tie_embeddings=_flag(settings, "tie_word_embeddings", False))


def _number(settings: dict, key: str, default: float | None = None, *, whole: bool = True,
            below: int = 1 << 31):
    """A number above 0 out of JSON, where a missing one and null are the default."""
    value = default if settings.get(key) is None else settings[key]
    if value is None:
        raise UserError(f"{key} is missing")
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not (0 < value <= below and math.isfinite(value)):
        kind = "whole number" if whole else "number"
        raise UserError(f"{key} is {_shown(value)}, not a {kind} above 0 and up to {below:,}")
    return value


def _flag(settings: dict, key: str, default: bool) -> bool:
    value = default if settings.get(key) is None else settings[key]
    if not isinstance(value, bool):
        raise UserError(f"{key} is {_shown(value)}, not true or false")
    return value


def _only(settings: dict, **taken: tuple) -> None:
    """Refuse a setting that our model has no counterpart of; one that is missing or null has the
    first value."""
    for key, values in taken.items():
        value = values[0] if settings.get(key) is None else settings[key]
        if not any(value == one and isinstance(value, type(one)) for one in values):
            ours = dict.fromkeys(json.dumps(one) for one in values)
            raise UserError(f"{key} is {_shown(value)}; what our model has is {' or '.join(ours)}")


def _shown(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# --- out ------------------------------------------------------------------------------------------


def save_hf(model: GPT, path: str | os.PathLike, tokenizer: Tokenizer | None = None,
            card: str | None = None) -> None:
    """Write a folder that transformers loads with AutoModelForCausalLM and, where a tokenizer is
    given, AutoTokenizer.

    Written whole or not at all; `card` is the text of its README.md.

    Raises:
        UserError: transformers has no such model, the settings that stand in the way named; or the
            folder is not new or empty.
    """
    folder = Path(path)
    family, settings = hf_settings(model.config, tokenizer)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        is_folder = folder.is_dir() and not folder.is_symlink()
        raise UserError(f"to={folder} is {'not an empty folder' if is_folder else 'not a folder'}: "
                        "name a new one")
    if not folder.parent.is_dir():
        raise UserError(f"to={folder} is in a folder that does not exist: "
                        f"make {folder.parent} first")
    files = {} if tokenizer is None else hf_files(tokenizer, model.config.block_size)
    params = {name: p.detach().cpu() for name, p in model.named_parameters()}
    tensors = {}
    # transformers' GPT-2 always has biases: where ours has none, they are zeros.
    full = replace(model.config, bias=True) if family == "gpt2" else model.config
    shapes = parameter_shapes(full)
    dtype = model.head.weight.dtype
    for theirs, ours, transposed, _ in layout(shapes, family):
        joined = torch.cat([params[name] if name in params
                            else torch.zeros(shapes[name], dtype=dtype) for name in ours])
        tensors[theirs] = (joined.T if transposed else joined).contiguous()
    settings["dtype"] = settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        files |= {CONFIG: json.dumps(settings, indent=1)} | ({CARD: card} if card else {})
        for name, text in files.items():
            (part / name).write_text(text, encoding="utf-8")
        # The library makes the weights readable to their owner alone.
        shutil.copymode(part / CONFIG, part / WEIGHTS)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except (OSError, SafetensorError) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"to={folder} could not be written: {why}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def hf_settings(config: GPTConfig, tokenizer: Tokenizer | None = None) -> tuple[str, dict]:
    """The family of the layout, and config.json, by which transformers builds a model.

    Raises:
        UserError: it has none like it; the settings that stand in the way are named.
    """
    c = config
    ends = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        begin = tokenizer.begin_of_text
        begin = tokenizer.end_of_text if begin is None else begin
        ends = {"bos_token_id": begin, "eos_token_id": tokenizer.end_of_text}
    learned = c.position == "learned"
    same = {"norm": "layernorm", "mlp": "gelu"} if learned else {"norm": "rmsnorm", "mlp": "swiglu"}
    free = {"vocab_size", "block_size", "n_layer", "n_head", "n_embd", "mlp_hidden", "norm_eps",
            "dropout", "tie_embeddings", "position", "bias"}
    free |= {name for name, _, _ in knobs(c) if name.startswith("rope_")}
    free |= {"n_kv_head", "head_dim", "value_head_dim"}  # looked at below
    neutral = GPTConfig(vocab_size=None)
    odd = [name for name, _, value in knobs(c)
           if name not in free and value != same.get(name, getattr(neutral, name))]
    differ = {"value_head_dim": c.value_dim != c.key_dim}
    if learned:
        differ |= {"n_kv_head": c.kv_heads != c.n_head, "bias": isinstance(c.bias, str),
                   "head_dim": c.key_dim * c.n_head != c.n_embd}
    else:
        differ["n_embd"] = c.n_embd % c.n_head != 0
    odd += [name for name, differs in differ.items() if differs]
    if odd:
        kind = "GPT-2" if learned else "Llama"
        settings = [f"model.{name}={getattr(c, name)}" for name in odd]
        raise UserError(f"transformers has no counterpart of this model, by model.position="
                        f"{c.position} a {kind}, with {', '.join(settings).lower()}: "
                        "train one without, or use sample.py")
    if learned:
        return "gpt2", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
                        "vocab_size": c.vocab_size, "n_positions": c.block_size, "n_embd": c.n_embd,
                        "n_layer": c.n_layer, "n_head": c.n_head, "n_inner": c.hidden_dim,
                        "activation_function": "gelu_new", "layer_norm_epsilon": c.norm_eps,
                        "tie_word_embeddings": c.tie_embeddings, **ends,
                        **{f"{where}_pdrop": c.dropout for where in ("resid", "embd", "attn")}}
    settings = {"vocab_size": c.vocab_size, "max_position_embeddings": c.block_size,
                "hidden_size": c.n_embd, "intermediate_size": c.hidden_dim,
                "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
                "num_key_value_heads": c.kv_heads, "head_dim": c.key_dim, "hidden_act": "silu",
                "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta,
                "tie_word_embeddings": c.tie_embeddings,
                "attention_dropout": c.dropout, **ends}
    if c.rope_factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": c.rope_factor}
    if c.rope_factor != 1 and c.rope_trained is not None:
        settings["rope_scaling"] = {
            "rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": ROPE_LOW,
            "high_freq_factor": ROPE_HIGH, "original_max_position_embeddings": c.rope_trained}
    if c.bias == "qkv":
        return "llama", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **settings}
    return "llama", {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings,
                     "attention_bias": c.biased("output"), "mlp_bias": c.biased("mlp")}
