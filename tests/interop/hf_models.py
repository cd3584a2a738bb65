"""Models and tokenizers of transformers, with which ours are compared."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from models import lively
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from tokenizers import models as library_models

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

EMBEDDING = "transformer.wte.weight"
WEIGHTS = "model.safetensors"
SENTENCE = (
    "the glass model attends to every token before it and writes what follows, it's 1234 é—λ\n"
)
TEXT = SENTENCE * 30
LLAMA_SHAPE = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu"}

# No width is below 8, because a norm over few numbers amplifies rounding errors.
gpt2_configs = st.builds(
    lambda heads, width, **settings: transformers.GPT2Config(
        n_head=heads, n_embd=heads * width, bos_token_id=0, eos_token_id=0, **settings
    ),
    heads=st.integers(1, 4),
    width=st.integers(8, 12),
    vocab_size=st.integers(5, 40),
    n_positions=st.integers(16, 24),
    n_layer=st.integers(1, 3),
    n_inner=st.none() | st.integers(1, 40),
    activation_function=st.sampled_from(["gelu_new", "gelu"]),
    layer_norm_epsilon=st.sampled_from([1e-5, 1e-3]),
    tie_word_embeddings=st.booleans(),
)


# Rotated channels are a whole number of pairs.
gpt_neox_configs = st.builds(
    lambda heads, rotary, **settings: transformers.GPTNeoXConfig(
        num_attention_heads=heads, hidden_size=8 * heads, rope_parameters=dict(rotary), **settings
    ),
    heads=st.sampled_from([2, 4, 8]),
    rotary=st.fixed_dictionaries(
        {
            "rope_type": st.just("default"),
            "rope_theta": st.sampled_from([10000.0, 500.0]),
            "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0]),
        }
    ),
    vocab_size=st.integers(5, 40),
    max_position_embeddings=st.integers(16, 24),
    num_hidden_layers=st.integers(1, 3),
    intermediate_size=st.integers(1, 40),
    hidden_act=st.sampled_from(["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]),
    use_parallel_residual=st.booleans(),
    layer_norm_eps=st.sampled_from([1e-5, 1e-3]),
    tie_word_embeddings=st.booleans(),
    bos_token_id=st.just(0),
    eos_token_id=st.just(0),
)


def llama3_rope(theta, factor, low, high, trained_length):
    """Return Llama 3's settings of rotary positions."""
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained_length,
    }


rope_settings = st.sampled_from(
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        llama3_rope(500.0, 8.0, 1.0, 4.0, 12),
        llama3_rope(10000.0, 5.0, 1.0, 4.0, 10),
    ]
)


@st.composite
def llama_configs(draw, config_class=transformers.LlamaConfig):
    groups = draw(st.integers(1, 3))
    heads, head_dim = groups * draw(st.integers(1, 3)), 2 * draw(st.integers(4, 6))
    settings = {}
    if config_class is transformers.MistralConfig:
        settings = {"sliding_window": draw(st.sampled_from([None, 32, 4096]))}
    elif config_class is not transformers.Qwen2Config:
        settings = {"attention_bias": draw(st.booleans()), "head_dim": 2 * draw(st.integers(4, 8))}
    if config_class is transformers.LlamaConfig:
        settings["mlp_bias"] = draw(st.booleans())
    return config_class(
        vocab_size=draw(st.integers(5, 40)),
        hidden_size=heads * head_dim,
        intermediate_size=draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=32,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-3])),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=dict(draw(rope_settings)),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **settings,
    )


FAMILIES = {
    "gpt2": gpt2_configs,
    "gpt_neox": gpt_neox_configs,
    "llama": llama_configs(),
    "mistral": llama_configs(transformers.MistralConfig),
    "qwen2": llama_configs(transformers.Qwen2Config),
    "qwen3": llama_configs(transformers.Qwen3Config),
}


def make_hf_model(config, seed=0):
    """Build a model of transformers with weights as large as trained ones."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return lively(model, seed)


@torch.no_grad()
def max_difference(hf_model, our_model, tokens) -> float:
    """Return the largest difference between the logits of two models."""
    return (hf_model(tokens).logits - our_model(tokens)[0]).abs().max().item()


# --- folders --------------------------------------------------------------------------------------


def write_model(family: str, folder: Path, **options) -> None:
    """Write a small GPT-2, GPT-NeoX or Llama of transformers."""
    shape = {"vocab_size": 420, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if family == "gpt2":
        config = transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **shape)
    else:
        config_class = {"gpt_neox": transformers.GPTNeoXConfig, "llama": transformers.LlamaConfig}
        config = config_class[family](
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4 if family == "gpt_neox" else 2,
            max_position_embeddings=64,
            **shape,
        )
    make_hf_model(config).save_pretrained(folder, **options)


def write_model_and_tokenizer(family: str, folder: Path) -> None:
    """Write a small model of transformers with a tokenizer of its family, as `write_model` does."""
    write_tokenizer(family, folder)
    write_model(family, folder)


def write_tokenizer(family: str, folder: Path) -> None:
    """Write a tokenizer as transformers does: gpt2, gpt_neox or llama."""
    make_tokenizer = {"gpt_neox": make_gpt_neox_tokenizer, "llama": make_llama_tokenizer}
    make_tokenizer.get(family, make_gpt2_tokenizer)().save_pretrained(folder)


def learn_vocabulary(model, pre_tokenizer, special_tokens, alphabet):
    """Return the vocabulary and merges that the tokenizers library learns from TEXT."""
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special_tokens,
        show_progress=False,
        initial_alphabet=alphabet,
    )
    library.train_from_iterator([TEXT], trainer)
    learned = json.loads(library.to_str())["model"]
    return {"vocab": learned["vocab"], "merges": [tuple(pair) for pair in learned["merges"]]}


def make_gpt2_tokenizer(special_tokens=("<|endoftext|>",), kind=transformers.GPT2Tokenizer):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return kind(**learn_vocabulary(library_models.BPE(), byte_level, [*special_tokens], alphabet))


def make_gpt_neox_tokenizer():
    special_tokens = "<|endoftext|>", "<|padding|>"
    tokenizer = make_gpt2_tokenizer(special_tokens, transformers.GPTNeoXTokenizer)
    # Runs of spaces, which are not in the vocabulary
    spaces = [AddedToken(" " * n, normalized=True) for n in range(4, 1, -1)]
    tokenizer.add_tokens(spaces)
    return tokenizer


def make_llama_tokenizer():
    special_tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = library_models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    learned = learn_vocabulary(model, pre_tokenizers.Metaspace(), special_tokens, [])
    return transformers.LlamaTokenizer(**learned, add_bos_token=True)
