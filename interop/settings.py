"""config.json of Hugging Face's format: read as our configuration, and written from one."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import cli
from attention import ROPE_HIGH, ROPE_LOW
from common.errors import UserError
from common.settings import format_value
from config import GPTConfig
from data.tokenizer import Tokenizer

# The families by their model_type.
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
GPT2, LLAMA = NAMES["settings"]["gpt2"], NAMES["settings"]["llama"]
# What transformers takes for a setting that is missing or null; of the others there is no default.
GPT2_DEFAULTS = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Settings that our model has none of, with the values under which it computes the same.
FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "num_experts": (0,),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "none", "linear", "llama3"),
    "low_freq_factor": (ROPE_LOW,),
    "high_freq_factor": (ROPE_HIGH,),
}


def model_config(path: Path, settings: Callable[[], dict]) -> GPTConfig:
    """Our configuration for the settings of a config.json, or of what else is at a path."""
    try:
        config = from_hf(settings())
        config.check()
        return config
    except (UserError, OmegaConfBaseException, ArithmeticError, TypeError) as e:
        raise UserError(f"{path} cannot be used: {cli.error_sentence(e)}") from None


def from_hf(settings: dict) -> GPTConfig:
    """Our configuration for the settings in a config.json."""
    kind = settings.get("model_type")
    if kind == "mistral":  # a Llama, unless its window slides
        if settings.get("sliding_window") is not None:
            raise UserError(f"sliding_window is {settings['sliding_window']}; our model has none")
        kind = "llama"
    if kind not in ARCHITECTURES:
        raise UserError(
            f"its model_type is {kind}; what can be read is {', '.join(ARCHITECTURES)}, mistral"
        )
    settings = settings | (settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    for name, taken in FIXED.items():
        value = rope_type if name == "rope_type" else settings.get(name)
        if value is not None and value not in taken:
            ours = " or ".join(map(format_value, taken))
            raise UserError(f"{name} is {format_value(value)}; what our model has is {ours}")
    layers = set(settings.get("layer_types") or ()) - {"full_attention"}
    if layers:
        raise UserError(f"layer_types has {layers.pop()}; what our model has is full_attention")

    names, values = (GPT2, GPT2_DEFAULTS) if kind == "gpt2" else (LLAMA, LLAMA_DEFAULTS)
    if kind == "qwen3":
        values = values | {"head_dim": 128}
    values = values | {name: settings[name] for name in names if settings.get(name) is not None}
    missing = names.keys() - values.keys()
    if missing:
        raise UserError(f"{min(missing)} is missing")
    ours = {names[name]: value for name, value in values.items()}
    if kind == "gpt2":
        ours["bias"] = True
    else:
        everywhere, attention = settings.get("mlp_bias"), settings.get("attention_bias")
        ours |= {
            "norm": "rmsnorm",
            "position": "rope",
            "mlp": "swiglu",
            "qk_norm": "gains" if kind == "qwen3" else False,
            "bias": "qkv"
            if kind == "qwen2"
            else bool(everywhere) or ("attention" if attention else False),
        }
        if rope_type not in ("default", "none"):
            ours["rope_factor"] = settings.get("factor")
        if rope_type == "llama3":
            trained = settings.get("original_max_position_embeddings")
            ours["rope_trained"] = trained or ours["block_size"]
    return OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(GPTConfig(vocab_size=None)), ours)
    )


def hf_settings(config: GPTConfig, tokenizer: Tokenizer | None = None) -> dict:
    """The config.json by which transformers builds a model."""
    c = spelled_out(counterpart(config))
    kind = family_of(c)
    settings = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if tokenizer is not None:
        begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
        settings |= {"bos_token_id": end if begin is None else begin, "eos_token_id": end}
    names = GPT2 if kind == "gpt2" else LLAMA
    settings |= {theirs: getattr(c, ours) for theirs, ours in names.items()}
    if kind == "gpt2":
        settings |= {
            "activation_function": "gelu_new",
            **{f"{where}_pdrop": c.dropout for where in ("resid", "embd", "attn")},
        }
    else:
        settings |= {"hidden_act": "silu", "attention_dropout": c.dropout}
    if kind in ("llama", "qwen3"):
        settings["attention_bias"] = c.has_bias("output")
    if kind == "llama":
        settings["mlp_bias"] = c.has_bias("mlp")
    if kind != "gpt2" and c.rope_factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": c.rope_factor}
        if c.rope_trained is not None:
            settings["rope_scaling"] |= {
                "rope_type": "llama3",
                "low_freq_factor": ROPE_LOW,
                "high_freq_factor": ROPE_HIGH,
                "original_max_position_embeddings": c.rope_trained,
            }

    # What does not come back as it was has no counterpart.
    back = replace(spelled_out(from_hf(settings)), dropout=c.dropout)
    odd = [
        f"model.{name}={format_value(value)}"
        for name, value in asdict(c).items()
        if value != getattr(back, name) and not name.startswith("ngram_")
    ]
    if kind != "gpt2" and c.n_embd % c.n_head:
        odd.append(f"model.n_embd={c.n_embd}, no multiple of model.n_head={c.n_head}")
    if odd:
        raise UserError(
            f"transformers has no counterpart of this model: its {ARCHITECTURES[kind]} "
            f"has no {', '.join(odd)}; train one without that, or use sample.py"
        )
    return settings


def family_of(config: GPTConfig) -> str:
    """The nearest family, by its model_type in config.json."""
    if not config.is_rotary:
        return "gpt2"
    return "qwen3" if config.qk_norm else "qwen2" if config.bias == "qkv" else "llama"


def counterpart(config: GPTConfig) -> GPTConfig:
    """The model of transformers' that computes the same: its GPT-2 always has biases, its Qwen 3
    gains, and a table of normalised embeddings is not the head's."""
    kind, changes = family_of(config), {}
    if kind == "gpt2" and not config.bias:
        changes["bias"] = True
    if kind == "qwen3":
        changes["qk_norm"] = "gains"
    if kind != "gpt2" and config.norm_embedding:
        changes |= {"norm_embedding": False, "tie_embeddings": False}
    return replace(config, **changes)


def spelled_out(config: GPTConfig) -> GPTConfig:
    """The configuration with what follows from other settings, and without what is not in use."""
    c = config
    return replace(
        c,
        n_kv_head=c.kv_heads,
        head_dim=c.key_dim,
        value_head_dim=c.value_dim,
        mlp_hidden=c.hidden_dim,
        rope_trained=None if c.rope_factor == 1 else c.rope_trained,
    )
