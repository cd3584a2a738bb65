"""Names of a model's tensors and settings in other libraries."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# What torch.compile and data-parallel training put before the names of all tensors.
WRAPPER_PREFIX = re.compile(r"^(_orig_mod\.|module\.)+")
QKV = "blocks.{i}.attention.W_Q blocks.{i}.attention.W_K blocks.{i}.attention.W_V"
_GGUF_NAMES = {
    "token_embd": "token_embedding",
    "position_embd": "position_embedding",
    "output_norm": "norm",
    "output": "head",
    "blk.{i}.attn_norm": "blocks.{i}.norm_1",
    "blk.{i}.attn_output": "blocks.{i}.attention.W_O",
    "blk.{i}.ffn_norm": "blocks.{i}.norm_2",
    "blk.{i}.ffn_gate": "blocks.{i}.mlp.W_gate",
    "blk.{i}.ffn_up": "blocks.{i}.mlp.W_in",
    "blk.{i}.ffn_down": "blocks.{i}.mlp.W_out",
}
# Modules in another library → ours, by the library's naming; i is the number of the block. If
# there are several of ours, the library stacks their weights by rows in this order.
MODULE_NAMES = {
    # Hugging Face's GPT-2, and nanoGPT
    "gpt2": {
        "transformer.wte": "token_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "norm",
        "lm_head": "head",
        "transformer.h.{i}.ln_1": "blocks.{i}.norm_1",
        "transformer.h.{i}.attn.c_attn": QKV,
        "transformer.h.{i}.attn.c_proj": "blocks.{i}.attention.W_O",
        "transformer.h.{i}.ln_2": "blocks.{i}.norm_2",
        "transformer.h.{i}.mlp.c_fc": "blocks.{i}.mlp.W_in",
        "transformer.h.{i}.mlp.c_proj": "blocks.{i}.mlp.W_out",
    },
    # Hugging Face's Llama, Mistral, Qwen 2 and Qwen 3
    "llama": {
        "model.embed_tokens": "token_embedding",
        "model.norm": "norm",
        "lm_head": "head",
        "model.layers.{i}.input_layernorm": "blocks.{i}.norm_1",
        "model.layers.{i}.self_attn.q_proj": "blocks.{i}.attention.W_Q",
        "model.layers.{i}.self_attn.k_proj": "blocks.{i}.attention.W_K",
        "model.layers.{i}.self_attn.v_proj": "blocks.{i}.attention.W_V",
        "model.layers.{i}.self_attn.q_norm": "blocks.{i}.attention.norm_q",
        "model.layers.{i}.self_attn.k_norm": "blocks.{i}.attention.norm_k",
        "model.layers.{i}.self_attn.o_proj": "blocks.{i}.attention.W_O",
        "model.layers.{i}.post_attention_layernorm": "blocks.{i}.norm_2",
        "model.layers.{i}.mlp.gate_proj": "blocks.{i}.mlp.W_gate",
        "model.layers.{i}.mlp.up_proj": "blocks.{i}.mlp.W_in",
        "model.layers.{i}.mlp.down_proj": "blocks.{i}.mlp.W_out",
    },
    # Hugging Face's GPT-NeoX
    "gpt_neox": {
        "gpt_neox.embed_in": "token_embedding",
        "gpt_neox.final_layer_norm": "norm",
        "lm_head": "head",
        "gpt_neox.layers.{i}.input_layernorm": "blocks.{i}.norm_1",
        "gpt_neox.layers.{i}.attention.query_key_value": QKV,
        "gpt_neox.layers.{i}.attention.dense": "blocks.{i}.attention.W_O",
        "gpt_neox.layers.{i}.post_attention_layernorm": "blocks.{i}.norm_2",
        "gpt_neox.layers.{i}.mlp.dense_h_to_4h": "blocks.{i}.mlp.W_in",
        "gpt_neox.layers.{i}.mlp.dense_4h_to_h": "blocks.{i}.mlp.W_out",
    },
    # .gguf files of Llama, Qwen 2 and Qwen 3
    "gguf": {
        **_GGUF_NAMES,
        "blk.{i}.attn_q": "blocks.{i}.attention.W_Q",
        "blk.{i}.attn_k": "blocks.{i}.attention.W_K",
        "blk.{i}.attn_v": "blocks.{i}.attention.W_V",
        "blk.{i}.attn_q_norm": "blocks.{i}.attention.norm_q",
        "blk.{i}.attn_k_norm": "blocks.{i}.attention.norm_k",
    },
    # .gguf files of GPT-2
    "gguf_gpt2": {**_GGUF_NAMES, "blk.{i}.attn_qkv": QKV},
}

_LLAMA_SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "n_embd",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_hidden",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_embeddings",
}
# Settings in a config.json of Hugging Face's format → ours, by its model_type. Of two names for one
# of ours, the second prevails.
HF_SETTINGS = {
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_inner": "mlp_hidden",
        "activation_function": "mlp",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "rope_share"}
    | _LLAMA_SETTINGS
    | {
        "hidden_act": "mlp",
        "use_parallel_residual": "parallel_mlp",
        "layer_norm_eps": "norm_eps",
        "partial_rotary_factor": "rope_share",
    },
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_SETTINGS),
}

ROPE_TENSOR = "rope_freqs.weight"  # factors by which Llama 3 stretches the rotary wavelengths
_GGUF_LLAMA_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
}
# Settings in a .gguf file, after the architecture's name and a dot → those in a config.json. An
# architecture is added with the order in which it stores the rows of W_Q and W_K: of these, only
# "llama" interleaves them.
GGUF_SETTINGS = {
    "gpt2": {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "attention.head_count": "n_head",
        "feed_forward_length": "n_inner",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _GGUF_LLAMA_SETTINGS),
}


class TensorMapping(NamedTuple):
    """A tensor of another library's checkpoint, and our parameters that it contains."""

    name: str  # of the tensor in the checkpoint
    parameters: list[str]  # names of our parameters, which are stacked by rows
    is_transposed: bool  # whether the checkpoint has the transpose of the stacked parameters
    shape: list[int]  # of the tensor in the checkpoint


def map_tensors(parameter_shapes: dict[str, list[int]], naming: str) -> Iterator[TensorMapping]:
    """Yield the tensors that another library's checkpoint of our model has.

    Parameters that our model lacks, such as biases, are not expected in the checkpoint either.
    """
    blocks = {int(name.split(".")[1]) for name in parameter_shapes if name.startswith("blocks.")}
    for i in range(-1, len(blocks)):  # -1: the modules outside the blocks
        for module, our_modules in MODULE_NAMES[naming].items():
            if ("{i}" in module) != (i >= 0):
                continue
            for kind in ("weight", "bias"):
                parameters = [f"{name}.{kind}".format(i=i) for name in our_modules.split()]
                if parameters[0] not in parameter_shapes:
                    continue
                rows = sum(parameter_shapes[name][0] for name in parameters)
                shape = [rows, *parameter_shapes[parameters[0]][1:]]
                # GPT-2's linear layers, whose names begin with c_, compute x W instead of x Wᵀ
                is_transposed = naming == "gpt2" and kind == "weight" and ".c_" in module
                if is_transposed:
                    shape.reverse()
                name = f"{module}.{kind}".format(i=i)
                yield TensorMapping(name, parameters, is_transposed, shape)
