"""What other libraries call the modules of a model and its settings."""

from typing import NamedTuple


class ModuleNames(NamedTuple):
    """The names that another library gives to the modules of a model.

    Each name is mapped to the names of our modules. If there are several, the library stacks their
    weights by rows in this order.

    Attributes:
        top: Modules outside the blocks.
        layers: What the names of all modules in blocks begin with, before the number of the block.
        block: Modules of a block.
    """

    top: dict[str, tuple[str, ...]]
    layers: str
    block: dict[str, tuple[str, ...]]

    @property
    def embedding(self) -> str:
        """Name of the tensor with the token embeddings."""
        return next(
            f"{name}.weight" for name, ours in self.top.items() if "token_embedding" in ours
        )


_GGUF_TOP: dict[str, tuple[str, ...]] = {
    "token_embd": ("token_embedding",),
    "position_embd": ("position_embedding",),
    "output_norm": ("norm",),
    "output": ("head",),
}
_GGUF_BLOCK: dict[str, tuple[str, ...]] = {
    "attn_norm": ("norm_1",),
    "attn_output": ("attention.W_O",),
    "ffn_norm": ("norm_2",),
    "ffn_gate": ("mlp.W_gate",),
    "ffn_up": ("mlp.W_in",),
    "ffn_down": ("mlp.W_out",),
}
MODULE_NAMES = {
    # Hugging Face's GPT-2, and nanoGPT
    "gpt2": ModuleNames(
        top={
            "transformer.wte": ("token_embedding",),
            "transformer.wpe": ("position_embedding",),
            "transformer.ln_f": ("norm",),
            "lm_head": ("head",),
        },
        layers="transformer.h",
        block={
            "ln_1": ("norm_1",),
            "attn.c_attn": ("attention.W_Q", "attention.W_K", "attention.W_V"),
            "attn.c_proj": ("attention.W_O",),
            "ln_2": ("norm_2",),
            "mlp.c_fc": ("mlp.W_in",),
            "mlp.c_proj": ("mlp.W_out",),
        },
    ),
    # Hugging Face's Llama, Mistral, Qwen 2 and Qwen 3
    "llama": ModuleNames(
        top={
            "model.embed_tokens": ("token_embedding",),
            "model.norm": ("norm",),
            "lm_head": ("head",),
        },
        layers="model.layers",
        block={
            "input_layernorm": ("norm_1",),
            "self_attn.q_proj": ("attention.W_Q",),
            "self_attn.k_proj": ("attention.W_K",),
            "self_attn.v_proj": ("attention.W_V",),
            "self_attn.q_norm": ("attention.norm_q",),
            "self_attn.k_norm": ("attention.norm_k",),
            "self_attn.o_proj": ("attention.W_O",),
            "post_attention_layernorm": ("norm_2",),
            "mlp.gate_proj": ("mlp.W_gate",),
            "mlp.up_proj": ("mlp.W_in",),
            "mlp.down_proj": ("mlp.W_out",),
        },
    ),
    # .gguf files of Llama, Qwen 2 and Qwen 3
    "gguf": ModuleNames(
        top=_GGUF_TOP,
        layers="blk",
        block={
            "attn_q": ("attention.W_Q",),
            "attn_k": ("attention.W_K",),
            "attn_v": ("attention.W_V",),
            "attn_q_norm": ("attention.norm_q",),
            "attn_k_norm": ("attention.norm_k",),
            **_GGUF_BLOCK,
        },
    ),
    # .gguf files of GPT-2
    "gguf_gpt2": ModuleNames(
        top=_GGUF_TOP,
        layers="blk",
        block={
            "attn_qkv": ("attention.W_Q", "attention.W_K", "attention.W_V"),
            **_GGUF_BLOCK,
        },
    ),
}

# Settings in a config.json of Hugging Face's format → ours, by the format's two dialects.
HF_SETTINGS = {
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_inner": "mlp_hidden",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    "llama": {
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
    },
}

# Settings in a .gguf file, after the architecture's name and a dot → those in a config.json.
GGUF_SETTINGS = {
    "gpt2": {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "attention.head_count": "n_head",
        "feed_forward_length": "n_inner",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "llama": {
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
        "attention.sliding_window": "use_sliding_window",
        "expert_count": "num_experts",
    },
}
