"""config.json of Hugging Face's format: read as our configuration, and written from one."""

import json
import math
from dataclasses import replace
from pathlib import Path

from config import GPTConfig, UserError, knobs
from data.hf_tokenizer import read_json
from data.tokenizer import Tokenizer
from model import ROPE_HIGH, ROPE_LOW

CONFIG = "config.json"
# Families by their model_type in config.json, with the values that a setting may have in them where
# it is not our neutral one; some settings are free, and what they must be together is looked at.
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
                 "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "nanochat": "NanoChatForCausalLM"}
NEUTRAL = GPTConfig(vocab_size=None)
FREE = {"vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim",
        "value_head_dim", "mlp_hidden", "norm_eps", "dropout", "tie_embeddings", "position",
        "rope_theta", "rope_factor", "rope_trained"}
LLAMA = {"norm": ("rmsnorm",), "mlp": ("swiglu",), "norm_embedding": (False, True)}
WANTED = {"gpt2": {"bias": (False, True)},
          "llama": LLAMA | {"bias": (False, True, "attention")},
          "qwen2": LLAMA | {"bias": ("qkv",)},
          "qwen3": LLAMA | {"bias": (False, "attention"), "qk_norm": (True, "gains")},
          "nanochat": {"norm": ("rmsnorm",), "mlp": ("relu2",), "qk_norm": (True,),
                       "norm_embedding": (True,)}}
NEAREST = {"gpt2": "GPT-2 (model.position=learned)", "llama": "Llama (model.position=rope)",
           "qwen2": "Qwen 2 (model.bias=qkv)", "qwen3": "Qwen 3 (model.qk_norm)",
           "nanochat": "NanoChat (model.mlp=relu2)"}
LONGEST = 1 << 22  # tokens of context, beyond which a table of rotary angles would fill the memory


def model_config(folder: Path) -> GPTConfig:
    """Our configuration for the config.json of a folder.

    Raises:
        UserError: it is of no family that we have, or something in it is missing, of a wrong type,
            or beyond our model.
    """
    settings = read_json(folder / CONFIG)
    try:
        kind = settings.get("model_type")
        if kind not in ("gpt2", "llama", "qwen2", "qwen3"):
            raise UserError(f"its model_type is {_shown(kind)}; "
                            "what can be read is gpt2, llama, qwen2 and qwen3")
        if settings.get("quantization_config") is not None:
            raise UserError("its weights are quantised, which is not read")
        config = _from_gpt2(settings) if kind == "gpt2" else _from_llama(settings)
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
    layers = settings.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise UserError(f"layer_types is {_shown(layers)}; what our model has is full_attention")
    family, heads = settings["model_type"], _number(settings, "num_attention_heads")
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
    bias = "qkv" if family == "qwen2" else True if mlp else "attention" if attention else False
    return GPTConfig(vocab_size=_number(settings, "vocab_size"), block_size=block_size, n_embd=C,
                     n_layer=_number(settings, "num_hidden_layers"), n_head=heads,
                     n_kv_head=_number(settings, "num_key_value_heads", heads),
                     head_dim=_number(settings, "head_dim",
                                      128 if family == "qwen3" else max(1, C // heads)),
                     mlp="swiglu", qk_norm="gains" if family == "qwen3" else False,
                     mlp_hidden=_number(settings, "intermediate_size"), norm="rmsnorm",
                     norm_eps=_number(settings, "rms_norm_eps", 1e-6, whole=False), position="rope",
                     rope_theta=float(_number({**settings, **rope}, "rope_theta", 10000.0,
                                              whole=False)),
                     **scaling, bias=bias,
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


def hf_settings(config: GPTConfig, tokenizer: Tokenizer | None = None) -> dict:
    """The config.json by which transformers builds a model: of GPT-2, Llama, Qwen 2, Qwen 3 or
    NanoChat, by its model_type.

    Raises:
        UserError: it has none like it; the settings that stand in the way are named.
    """
    c, kind = config, family_of(config)
    odd = [name for name, _, value in knobs(c) if name not in FREE
           and value not in WANTED[kind].get(name, (getattr(NEUTRAL, name),))]
    differ = {"value_head_dim": c.value_dim != c.key_dim}
    if kind == "gpt2":
        differ |= {"n_kv_head": c.kv_heads != c.n_head,
                   "head_dim": c.key_dim * c.n_head != c.n_embd}
    else:
        differ |= {"n_embd": c.n_embd % c.n_head != 0,
                   "rope_factor": kind == "nanochat" and c.rope_factor != 1}
    odd += [name for name, differs in differ.items() if differs]
    if odd:
        settings = [f"model.{name}={getattr(c, name)}" for name in odd]
        raise UserError(f"transformers has no counterpart of this model: it is a {NEAREST[kind]} "
                        f"but for {', '.join(settings).lower()}; train one without that, or use "
                        "sample.py")
    ends = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
        ends = {"bos_token_id": end if begin is None else begin, "eos_token_id": end}
    settings = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, **ends,
                "vocab_size": c.vocab_size,
                "tie_word_embeddings": c.tie_embeddings and not c.norm_embedding}
    if kind == "gpt2":
        return settings | {
            "n_positions": c.block_size, "n_embd": c.n_embd, "n_layer": c.n_layer,
            "n_head": c.n_head, "n_inner": c.hidden_dim, "activation_function": "gelu_new",
            "layer_norm_epsilon": c.norm_eps,
            **{f"{where}_pdrop": c.dropout for where in ("resid", "embd", "attn")}}
    settings |= {"max_position_embeddings": c.block_size, "hidden_size": c.n_embd,
                 "intermediate_size": c.hidden_dim, "num_hidden_layers": c.n_layer,
                 "num_attention_heads": c.n_head, "num_key_value_heads": c.kv_heads,
                 "head_dim": c.key_dim, "hidden_act": "silu", "rms_norm_eps": c.norm_eps,
                 "rope_theta": c.rope_theta, "attention_dropout": c.dropout}
    if c.rope_factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": c.rope_factor}
    if c.rope_factor != 1 and c.rope_trained is not None:
        settings["rope_scaling"] = {
            "rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": ROPE_LOW,
            "high_freq_factor": ROPE_HIGH, "original_max_position_embeddings": c.rope_trained}
    if kind == "nanochat":
        return settings | {"hidden_act": "relu2", "final_logit_softcapping": None}
    if kind == "qwen2":
        return settings
    return settings | {"attention_bias": c.biased("output"), "mlp_bias": c.biased("mlp")}


def family_of(config: GPTConfig) -> str:
    """The nearest family, by its model_type in config.json."""
    c = config
    if c.position == "learned":
        return "gpt2"
    if c.mlp == "relu2":
        return "nanochat"
    return "qwen3" if c.qk_norm else "qwen2" if c.bias == "qkv" else "llama"
