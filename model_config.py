"""Settings of a model's shape: the section `model` of the configuration. Does not import torch."""

import dataclasses
from dataclasses import MISSING, dataclass

from common.errors import UserError, not_one_of
from common.settings import check_settings, setting

# Tensor cores multiply 16-bit matrices whose sizes are multiples of 64 in full tiles.
GPU_VOCAB_MULTIPLE = 64


@dataclass
class ModelConfig:
    """Shape of a model; if `vocab_size` is None, it is taken from the tokenizer."""

    vocab_size: int | None = setting(MISSING, "tokens in the vocabulary; null: tokenizer's", ge=1)
    block_size: int = setting(256, "context length T, in tokens", ge=2)
    n_layer: int = setting(4, "number of transformer blocks", ge=1, le=10_000)
    n_head: int = setting(4, "number of query heads H", ge=1)
    n_kv_head: int | None = setting(
        None, "number of key/value heads G, a divisor of n_head; null: n_head", ge=1
    )
    n_embd: int = setting(128, "width C of the residual stream", ge=1)
    head_dim: int | None = setting(None, "size d_k of a query or key; null: n_embd / n_head", ge=1)
    value_head_dim: int | None = setting(None, "size d_v of a value; null: head_dim", ge=1)
    mlp: str = setting(
        "gelu",
        "type of MLP; none: blocks of attention only",
        choices=("gelu", "swiglu", "relu2", "none"),
    )
    mlp_hidden: int | None = setting(
        None, "hidden width of the MLP; null: 4 * n_embd, or 8/3 * n_embd for swiglu", ge=1
    )
    attention_sink: bool = setting(
        False, "learn a logit per head beside its scores, so that it need not attend to any token"
    )
    attention_gate: str = setting(
        "none",
        "multiply the heads' outputs by gates: none, one per head, or one per channel",
        choices=("none", "head", "channel"),
    )
    smear_keys: bool = setting(
        False, "mix each key with the key of the token before; the share is learned"
    )
    norm: str = setting("layernorm", "type of normalization", choices=("layernorm", "rmsnorm"))
    norm_eps: float = setting(1e-5, "epsilon added to the variance in normalization layers", gt=0)
    norm_embedding: bool = setting(False, "apply RMSNorm to the embeddings before the first block")
    position: str = setting(
        "learned",
        "position encoding: learned embeddings or rotary (RoPE)",
        choices=("learned", "rope"),
    )
    rope_theta: float = setting(10000.0, "base of the rotary wavelengths", gt=0)
    rope_factor: float = setting(1.0, "stretches the rotary wavelengths for a longer context", ge=1)
    rope_trained: int | None = setting(
        None,
        "context length before stretching, which Llama 3's scaling by wavelength needs; "
        "null: stretch all wavelengths equally",
        ge=1,
    )
    qk_norm: bool | str = setting(
        False,
        "apply RMSNorm to queries and keys; gains: with trained gains",
        choices=(True, False, "gains"),
    )
    bias: bool | str = setting(
        False,
        "bias terms: in all layers, in attention, or on queries, keys and values",
        choices=(True, False, "attention", "qkv"),
    )
    dropout: float = setting(
        0.0, "probability of dropping an activation or attention weight in training", ge=0, lt=1
    )
    tie_embeddings: bool = setting(True, "use the token embedding as the output layer's weight")
    vocab_multiple: int | None = setting(
        None,
        "pad the logits to a multiple of this while they are computed, which is faster on a GPU; "
        f"null: {GPU_VOCAB_MULTIPLE} with CUDA, else 1",
        ge=1,
        le=65_536,
    )
    ngrams: int = setting(
        0,
        "add embeddings of the last 2 to n tokens to each token's embedding; 0: none",
        ge=0,
        le=64,
    )
    ngram_size: int | None = setting(None, "channels of the n-gram embeddings; null: n_embd", ge=1)
    ngram_count: int = setting(
        2,
        "n-grams seen at least this often in the training split have their own row of the n-gram "
        "table; rarer ones share one",
        ge=1,
    )
    ngram_rows: int | None = setting(None, "rows of the n-gram table; null: set by the text", ge=1)

    @property
    def is_rotary(self) -> bool:
        """True if positions rotate queries and keys, False if each position has an embedding."""
        if self.position not in ("learned", "rope"):
            raise UserError(not_one_of("model.position", self.position, ("learned", "rope")))
        return self.position == "rope"

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads G."""
        return self.n_kv_head or self.n_head

    @property
    def key_dim(self) -> int:
        """Size d_k of a query or key."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def value_dim(self) -> int:
        """Size d_v of a value."""
        return self.value_head_dim or self.key_dim

    @property
    def gate_dim(self) -> int:
        """Number of gates of an attention layer."""
        gates_per_head = {"none": 0, "head": 1, "channel": self.value_dim}
        return self.n_head * gates_per_head[self.attention_gate]

    @property
    def vocab_padding(self) -> int:
        """Number of columns of zeros by which the output layer's matrix product is padded."""
        return -(self.vocab_size or 0) % (self.vocab_multiple or 1)

    @property
    def ngram_dim(self) -> int:
        """Number of channels of the n-gram embeddings."""
        return self.ngram_size or self.n_embd

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLP, 0 without one."""
        if self.mlp == "none":
            return 0
        if self.mlp_hidden:
            return self.mlp_hidden
        if self.mlp == "swiglu":
            return -(-self.n_embd // 3) * 8  # a multiple of 8
        return 4 * self.n_embd

    def has_bias(self, part: str) -> bool:
        """Return whether a part of the model has biases.

        Args:
            part: `qkv`, `output` (of attention), `mlp` or `norm`.
        """
        if isinstance(self.bias, bool):
            return self.bias
        parts = {"attention": ("qkv", "output"), "qkv": ("qkv",)}
        return part in parts.get(self.bias, ())

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        check_settings(self, "model.")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}: "
                "change one of them, or set model.head_dim"
            )
        if self.n_head % self.kv_heads:
            divisors = [str(d) for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            raise UserError(
                f"model.n_head={self.n_head} is not divisible by model.n_kv_head="
                f"{self.n_kv_head}: set model.n_kv_head to one of {', '.join(divisors)}"
            )
        if self.ngrams > 1 and self.ngram_dim > self.n_embd:
            raise UserError(
                f"model.ngram_size={self.ngram_size} exceeds model.n_embd={self.n_embd}: lower it"
            )
        if self.is_rotary and self.key_dim % 2:
            raise UserError(
                f"model.position=rope needs an even head size, but it is {self.key_dim}: "
                "change model.n_embd, model.n_head or model.head_dim"
            )


@dataclass
class GPTConfig(ModelConfig):
    """Shape of a model whose vocabulary is known."""

    vocab_size: int = setting(MISSING, "number of tokens in the vocabulary", ge=1)

    @classmethod
    def from_settings(cls, settings: ModelConfig) -> "GPTConfig":
        """Build a `GPTConfig` from settings with a known vocabulary size."""
        if settings.vocab_size is None:
            raise UserError("model.vocab_size is not set: set it to the tokenizer's vocabulary")
        return cls(**dataclasses.asdict(settings))
