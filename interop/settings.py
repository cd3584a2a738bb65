"""Translate a config.json of Hugging Face's format to our settings, and ours to one."""

import re
from dataclasses import asdict, fields, replace
from typing import Any

from common.errors import UserError
from common.settings import convert_value, format_value, show_value
from config import GPTConfig
from data.tokenizer import Tokenizer
from interop.names import HF_SETTINGS
from model import ROPE_HIGH, ROPE_LOW

HFSettings = dict[str, Any]  # the content of a config.json

# The supported families by the model_type of their config.json.
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers assumes for a setting that is missing or null; the others are required.
LLAMA_DEFAULTS: HFSettings = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEFAULTS: dict[str, HFSettings] = {
    "gpt2": {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama": LLAMA_DEFAULTS,
    "qwen2": LLAMA_DEFAULTS,
    "qwen3": LLAMA_DEFAULTS | {"head_dim": 128},
}
# Settings that our model lacks, with the values for which it computes the same.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "num_experts": (0,),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "none", "linear", "llama3"),
    "low_freq_factor": (ROPE_LOW,),
    "high_freq_factor": (ROPE_HIGH,),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
}
# Settings of stretched rotary wavelengths → ours.
ROPE_SETTINGS = {"factor": "rope_factor", "original_max_position_embeddings": "rope_trained"}


def config_from_hf(settings: HFSettings, names: dict[str, str] | None = None) -> GPTConfig:
    """Translate the settings of a config.json to ours, and check them.

    `names` are what the file calls the settings, if it is not a config.json, for error messages.

    Raises:
        UserError: A setting is missing, invalid, or not supported by our model.
        ValueError, ArithmeticError or TypeError: A value is of an unexpected type or size.
    """
    names = names or {}
    family = _read_family(settings, names)
    rope: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # the older name prevails in transformers
        rope = settings.get(name) or rope
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise UserError(
                f"{name}={show_value(rope)} is not supported; only one object for all layers is"
            )
    settings = settings | rope
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    _require_supported({**settings, "rope_type": rope_type}, names)

    # Translate the settings that have another name
    translations = HF_SETTINGS[family]
    values = dict(DEFAULTS[family])
    values |= {name: settings[name] for name in translations if settings.get(name) is not None}
    missing = translations.keys() - values.keys()
    if missing:
        name = min(missing)
        raise UserError(f"the setting {names.get(name, name)} is missing; add it")
    ours = {translations[name]: value for name, value in values.items()}

    # Add those that the family implies
    if family == "gpt2":
        ours["bias"] = True
    else:
        ours |= _llama_settings(settings, family, rope_type)
    theirs = {our_name: name for name, our_name in (translations | ROPE_SETTINGS).items()}
    return checked_config(ours, {our_name: names.get(n, n) for our_name, n in theirs.items()})


def checked_config(values: dict[str, Any], names: dict[str, str]) -> GPTConfig:
    """Return the settings of a model, whose values may come from a damaged file.

    `names` are what the file calls the settings, for the `UserError` about an invalid one.
    """
    try:
        config = GPTConfig(
            **{
                field.name: convert_value(f"model.{field.name}", field, values[field.name])
                for field in fields(GPTConfig)
                if field.name in values
            }
        )
        config.check()
    except UserError as e:
        in_file = re.sub(r"model\.(\w+)", lambda name: names.get(name[1], name[1]), str(e))
        raise UserError(in_file) from None
    return config


def config_to_hf(config: GPTConfig, tokenizer: Tokenizer | None = None) -> HFSettings:
    """Return the config.json of an equal model; `UserError` if transformers has none."""
    _require_counterpart(config)
    exported = _resolve_defaults(find_counterpart(config))
    family = find_family(exported)
    settings: HFSettings = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if tokenizer is not None:
        begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
        settings |= {"bos_token_id": end if begin is None else begin, "eos_token_id": end}
    settings |= {theirs: getattr(exported, ours) for theirs, ours in HF_SETTINGS[family].items()}
    settings |= _hf_settings_of_family(exported, family)
    _require_round_trip(exported, settings, family)
    return settings


def _require_counterpart(config: GPTConfig) -> None:
    parts = {"mlp": "none", "smear_keys": True, "attention_sink": True}
    if config.attention_gate != "none":
        parts["attention_gate"] = config.attention_gate
    for name, value in parts.items():
        if getattr(config, name) == value:
            others = " (only gpt-oss has sink logits)" if name == "attention_sink" else ""
            raise UserError(
                f"model.{name}={format_value(value)} has no counterpart in the models of "
                f"transformers and llama.cpp that an export can write{others}, so this model "
                "cannot be exported; train one without it, or use sample.py"
            )


def find_family(config: GPTConfig) -> str:
    """Return the model_type of the family that is most like our model."""
    if not config.is_rotary:
        return "gpt2"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.bias == "qkv" else "llama"


def find_counterpart(config: GPTConfig) -> GPTConfig:
    """Return the settings of the equivalent model in transformers.

    They differ from ours where transformers has no option: its GPT-2 always has biases, and its
    Qwen 3 always has QK-norm gains. It cannot normalize embeddings, so the exported embedding is
    normalized already and is not tied to the output layer.
    """
    if not config.is_rotary:
        return config if config.bias else replace(config, bias=True)
    if config.qk_norm:
        config = replace(config, qk_norm="gains")
    if config.norm_embedding:
        config = replace(config, norm_embedding=False, tie_embeddings=False)
    return config


def _resolve_defaults(config: GPTConfig) -> GPTConfig:
    """Return the settings with the values that follow from others, and without unused ones."""
    return replace(
        config,
        n_kv_head=config.kv_heads,
        head_dim=config.key_dim,
        value_head_dim=config.value_dim,
        mlp_hidden=config.hidden_dim,
        vocab_multiple=None,
        rope_trained=None if config.rope_factor == 1 else config.rope_trained,
    )


def _read_family(settings: HFSettings, names: dict[str, str]) -> str:
    """Return the family that a config.json names. Without a sliding window, Mistral is a Llama."""
    family = settings.get("model_type")
    if family == "mistral":
        window = settings.get("sliding_window")
        if window is not None:
            raise UserError(f"sliding_window={show_value(window)} is not supported; only null is")
        return "llama"
    if not isinstance(family, str) or family not in ARCHITECTURES:
        name = names.get("model_type", "model_type")
        supported = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{name}={show_value(family)} is not supported; only {supported} and mistral are"
        )
    return family


def _require_supported(settings: HFSettings, names: dict[str, str]) -> None:
    for name, supported in SUPPORTED_VALUES.items():
        value = settings.get(name)
        if value is not None and value not in supported:
            choices = " or ".join(format_value(choice) for choice in supported)
            shown = f"{names.get(name, name)}={show_value(value)}"
            raise UserError(f"{shown} is not supported; only {choices} is")
    layer_types = settings.get("layer_types")
    if isinstance(layer_types, list):
        layer_types = [kind for kind in layer_types if kind != "full_attention"]
    if layer_types:
        raise UserError(
            f"layer_types has {show_value(layer_types)}, which is not supported; only "
            "full_attention is"
        )


def _llama_settings(settings: HFSettings, family: str, rope_type: str) -> dict[str, Any]:
    bias: bool | str
    if family == "qwen2":
        bias = "qkv"
    elif settings.get("mlp_bias"):
        bias = True
    else:
        bias = "attention" if settings.get("attention_bias") else False
    ours: dict[str, Any] = {
        "norm": "rmsnorm",
        "position": "rope",
        "mlp": "swiglu",
        "qk_norm": "gains" if family == "qwen3" else False,
        "bias": bias,
    }
    if rope_type not in ("default", "none"):
        ours["rope_factor"] = settings.get("factor")
    if rope_type == "llama3":
        trained_length = settings.get("original_max_position_embeddings")
        ours["rope_trained"] = trained_length or settings["max_position_embeddings"]
    return ours


def _hf_settings_of_family(config: GPTConfig, family: str) -> HFSettings:
    """Return the settings of a config.json that are not a copy of one of our settings."""
    if family == "gpt2":
        dropouts = {f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")}
        return {"activation_function": "gelu_new", **dropouts}
    settings: HFSettings = {"hidden_act": "silu", "attention_dropout": config.dropout}
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = config.has_bias("output")
    if family == "llama":
        settings["mlp_bias"] = config.has_bias("mlp")
    if config.rope_factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": config.rope_factor}
        if config.rope_trained is not None:
            settings["rope_scaling"] |= {
                "rope_type": "llama3",
                "low_freq_factor": ROPE_LOW,
                "high_freq_factor": ROPE_HIGH,
                "original_max_position_embeddings": config.rope_trained,
            }
    return settings


def _require_round_trip(config: GPTConfig, settings: HFSettings, family: str) -> None:
    restored = replace(_resolve_defaults(config_from_hf(settings)), dropout=config.dropout)
    unsupported = [
        f"model.{name}={format_value(value)}"
        for name, value in asdict(config).items()
        if value != getattr(restored, name) and not name.startswith("ngram_")
    ]
    if family != "gpt2" and config.n_embd % config.n_head:
        unsupported.append(
            f"model.n_embd={config.n_embd} that is not a multiple of model.n_head={config.n_head}"
        )
    if unsupported:
        raise UserError(
            f"{ARCHITECTURES[family]}, the closest model of transformers and llama.cpp, has no "
            f"{', '.join(unsupported)}, so this model cannot be exported; train one without that, "
            "or use sample.py"
        )
