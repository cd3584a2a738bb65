"""Translate a config.json of Hugging Face's format to our settings, and ours to one."""

from dataclasses import asdict, fields, replace
from typing import Any

from common.errors import UserError
from common.settings import convert_value, format_value, show_value
from config import GPTConfig
from data.tokenizer import Tokenizer
from interop.names import HF_SETTINGS
from interop.tokenizer_export import begin_id
from model import ROPE_HIGH, ROPE_LOW

HFSettings = dict[str, Any]  # the content of a config.json

# The supported families by the model_type of their config.json.
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# MLPs without a gate in a config.json → ours. An export takes the last name of several.
ACTIVATIONS = dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh", "gelu_new"), "gelu")
ACTIVATIONS["gelu"] = "gelu_exact"
# Settings that our model lacks, with the values for which it computes the same. One that is missing
# or null is supported, too, and so is each value that `HF_SETTINGS` translates.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": tuple(HF_SETTINGS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "hidden_act": ("silu", "swish"),
    "layer_types": ("full_attention", "sliding_attention"),
    "num_experts": (0,),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "none", "linear", "llama3"),
    "low_freq_factor": (ROPE_LOW,),
    "high_freq_factor": (ROPE_HIGH,),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
}
# Our settings for a family, except for what its config.json says.
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "position": "rope",
    "mlp": "swiglu",
    "tie_embeddings": False,
}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": True},
    "gpt_neox": {
        "bias": True,
        "position": "rope",
        "rope_share": 0.25,
        "mlp": "gelu_exact",
        "parallel_mlp": True,
        "tie_embeddings": False,
    },
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA | {"bias": "qkv"},
    "qwen3": LLAMA | {"qk_norm": "gains", "head_dim": 128},
}
REQUIRED_SETTINGS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")


def config_from_hf(settings: HFSettings) -> GPTConfig:
    """Translate the settings of a config.json to ours, and check them.

    Raises:
        UserError: A setting is missing, invalid, or not supported by our model.
    """
    settings = _flatten(settings)
    family = settings["model_type"]
    for name, supported in SUPPORTED_VALUES.items():
        if name not in HF_SETTINGS.get(str(family), {}):
            _require_one_of(name, settings.get(name), supported)
    ours = dict(FAMILY_SETTINGS[family])
    for name, our_name in HF_SETTINGS[family].items():
        value = settings.get(name)
        if value is not None:
            if our_name == "mlp":
                _require_one_of(name, value, tuple(ACTIVATIONS))
                value = ACTIVATIONS[value]
            ours[our_name] = value
        elif our_name in REQUIRED_SETTINGS:
            raise UserError(f"the setting {name} is missing: add it")
    if settings.get("attention_bias"):
        ours.setdefault("bias", "attention")
    if settings.get("mlp_bias"):
        ours["bias"] = True if settings.get("attention_bias") else "mlp"
    if settings["rope_type"] in ("linear", "llama3"):
        ours["rope_factor"] = settings.get("factor")
    if settings["rope_type"] == "llama3":
        trained_length = settings.get("original_max_position_embeddings")
        ours["rope_trained"] = trained_length or settings["max_position_embeddings"]
    config = checked_config(ours)
    window = settings["sliding_window"]
    if _has_sliding_window(settings) and window and window < config.block_size:
        raise UserError(
            f"sliding_window={show_value(window)} is not supported, because it is shorter than the "
            f"context of {config.block_size} tokens"
        )
    return config


def _flatten(settings: HFSettings) -> HFSettings:
    """Return the settings with those of rotary positions, and with defaults of transformers."""
    rope: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # the older name prevails in transformers
        rope = settings.get(name) or rope
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise UserError(
                f"{name}={show_value(rope)} is not supported: only one object for all layers is"
            )
    settings = settings | rope
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    defaults = {"model_type": "unknown", "sliding_window": 4096}
    return defaults | settings | {"rope_type": rope_type}


def _has_sliding_window(settings: HFSettings) -> bool:
    """Return whether a layer may attend to fewer tokens than the context has."""
    if settings["model_type"] == "mistral":  # all of its layers have the window
        return True
    layer_types = settings.get("layer_types") or ["sliding_attention"]
    return bool(settings.get("use_sliding_window")) and "sliding_attention" in layer_types


def _require_one_of(name: str, value: Any, supported: tuple[Any, ...]) -> None:
    for item in value if isinstance(value, list) else [value]:
        if item is not None and item not in supported:
            choices = " or ".join(format_value(choice) for choice in supported)
            raise UserError(f"{name}={show_value(item)} is not supported: only {choices} is")


def checked_config(values: dict[str, Any]) -> GPTConfig:
    """Return the settings of a model, whose values come from a file."""
    config = GPTConfig(
        **{
            field.name: convert_value(f"model.{field.name}", field, values[field.name])
            for field in fields(GPTConfig)
            if field.name in values
        }
    )
    config.check()
    return config


def config_to_hf(config: GPTConfig, tokenizer: Tokenizer | None = None) -> HFSettings:
    """Return the config.json of an equal model; `UserError` if transformers has none."""
    exported = _resolve_defaults(find_counterpart(config))
    family = find_family(exported)
    settings: HFSettings = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if tokenizer is not None:
        ends = [*tokenizer.end_of_text_ids]
        settings["bos_token_id"] = begin_id(tokenizer)
        settings["eos_token_id"] = ends if len(ends) > 1 else tokenizer.end_of_text
    settings |= {theirs: getattr(exported, ours) for theirs, ours in HF_SETTINGS[family].items()}
    settings |= _hf_settings_of_family(exported, family)
    _require_round_trip(exported, settings)
    return settings


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
        mlp_hidden=max(1, config.hidden_dim),  # a model without an MLP is refused by its kind
        mlp_ratio=None,
        vocab_multiple=None,
        rope_trained=None if config.rope_factor == 1 else config.rope_trained,
    )


def _hf_settings_of_family(config: GPTConfig, family: str) -> HFSettings:
    """Return the settings of a config.json that are not a copy of one of our settings."""
    if family == "gpt2":
        dropouts = {f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")}
        names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        return {"activation_function": names.get(config.mlp, "gelu_new"), **dropouts}
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


# They have no effect without model.ngrams, which an export refuses.
NGRAM_DETAILS = ("ngram_size", "ngram_count", "ngram_rows")


def _require_round_trip(config: GPTConfig, settings: HFSettings) -> None:
    restored = replace(_resolve_defaults(config_from_hf(settings)), dropout=config.dropout)
    unsupported = [
        f"model.{name}={format_value(value)}"
        for name, value in asdict(config).items()
        if value != getattr(restored, name) and name not in NGRAM_DETAILS
    ]
    if config.is_rotary and config.n_embd % config.n_head:
        unsupported.append(
            f"model.n_embd={config.n_embd} that is not a multiple of model.n_head={config.n_head}"
        )
    if unsupported:
        closest = settings["architectures"][0]
        raise UserError(
            f"{closest}, the closest model that is exported, has no "
            f"{', '.join(unsupported)}, so this model cannot be exported: train one without that, "
            "or use sample.py"
        )
