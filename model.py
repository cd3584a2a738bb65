"""The transformer: the formula of attention, its layer, the MLP, the block and GPT.

Shapes are written with the same letters in every module: B batch, T tokens, C channels of the
residual stream, H query heads, G key/value heads, d_k the size of a query or key, d_v the size of a
value, V the vocabulary. T_q queries attend to T_k keys.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kernels  # the same arithmetic in fewer calls and less memory
from common.errors import UserError
from config import GPTConfig

INIT_STD = 0.02  # of GPT-2 (Radford et al. 2019)
# Initial gains of queries and keys. Normalized embeddings outweigh what the blocks write at first,
# so all layers read nearly the same and compete for the same role. If attention begins sharper
# below the last layer, previous-token heads form where another layer can read them.
LOWER_QK_GAIN = 1.4
LAST_QK_GAIN = 0.7
# Llama 3.1 stretches a wavelength that makes fewer than ROPE_LOW turns in `rope_trained` tokens by
# the whole factor, and leaves one that makes more than ROPE_HIGH turns as it is.
ROPE_LOW = 1.0
ROPE_HIGH = 4.0


# --- Attention ------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q Kᵀ · scale + M) V, written out: the formula that all kernels must equal.

    Queries may come from another sequence than keys and values.

    Args:
        q: Queries (…, T_q, d_k), or (…, H, T_q, d_k) with heads.
        k: Keys (…, T_k, d_k), or (…, G, T_k, d_k) with heads. H is a multiple of G: the first H/G
            query heads share key/value head 0, the next H/G share head 1, and so on.
        v: Values (…, T_k, d_v), grouped like the keys. d_v may differ from d_k.
        mask: M, broadcast to (…, T_q, T_k). A boolean mask is True where a query may attend; any
            other mask is added to the scores. A query that may attend to no key gets weights and
            an output of zero.
        scale: Factor of the dot products; None: 1/√d_k.

    Returns:
        The output (…, T_q, d_v) and the weights (…, T_q, T_k), in the dtype of the queries. Each
        row of the weights sums to 1, or to 0 if the query may attend to no key.

    Reference: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023, "GQA".
    """
    weights = attention_weights(q, k, mask, scale)
    return weights @ repeat_groups(v, q), weights


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Compute the weights (…, T_q, T_k) of `attention`, which takes the same arguments."""
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ repeat_groups(k, q).transpose(-2, -1) * scale  # (…, T_q, T_k)
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    else:
        scores = scores + mask.to(scores.dtype)
    # The softmax of a row of -inf is 0/0. Such a row enters it as zeros, so that its gradient is
    # 0 and not NaN, and leaves it as zeros.
    is_empty = (scores == -math.inf).all(dim=-1, keepdim=True)  # (…, T_q, 1)
    return scores.masked_fill(is_empty, 0.0).softmax(dim=-1).masked_fill(is_empty, 0.0)


def repeat_groups(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values (…, G, T_k, d) for each of the heads of q (…, H, T_q, d_k)."""
    if q.dim() < 3 or x.dim() < 3 or q.shape[-3] == x.shape[-3]:
        return x
    n_head, n_group = q.shape[-3], x.shape[-3]
    if n_group == 0 or n_head % n_group:
        raise ValueError(f"{n_head} query heads are not a multiple of {n_group} key/value heads")
    return x.repeat_interleave(n_head // n_group, dim=-3)  # (…, H, T_k, d)


def causal_mask(T_q: int, T_k: int, device: torch.device | None = None) -> Tensor:
    """Return the boolean mask (T_q, T_k) that lets each query attend to no later key.

    The last query is aligned to the last key: T_q < T_k means that T_k - T_q tokens are cached.
    """
    return torch.ones(T_q, T_k, dtype=torch.bool, device=device).tril(diagonal=T_k - T_q)


def rotary_frequencies(config: GPTConfig) -> Tensor:
    """Return the angles (d_k/2) in radians by which the pairs of channels turn per position.

    Only the first pairs turn if `rope_share` is below 1; the angle of the others is 0.

    `rope_factor` stretches the wavelengths: all of them alike, or, if `rope_trained` is set, the
    more the fewer turns they make in `rope_trained` tokens.

    Reference: Su et al. 2021, "RoFormer"; Chen et al. 2023, "Extending Context Window of Large
    Language Models via Position Interpolation"; Llama 3.1 for `rope_trained`.
    """
    theta, pairs = config.rope_theta, config.rotary_dim // 2
    exponents = torch.arange(pairs, dtype=torch.float32) / pairs
    frequencies = theta**-exponents
    if config.rope_factor != 1:
        # Rounded as in the models that were trained so: the angles of distant tokens depend on it.
        frequencies = 1 / theta**exponents
        turns = (config.rope_trained or 0) / (2 * math.pi / frequencies)
        unstretched = ((turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)).clamp(0, 1)  # share
        stretched = (1 - unstretched) * frequencies / config.rope_factor
        frequencies = stretched + unstretched * frequencies
    return F.pad(frequencies, (0, config.key_dim // 2 - pairs))


def rotary_table(start: int, end: int, config: GPTConfig) -> Tensor:
    """Return the cosines and sines of positions start … end - 1, (2, end - start, d_k).

    Both halves of the channels have the same d_k/2 angles; the first half of the sines is negated.
    """
    positions = torch.arange(start, end, dtype=torch.float32)
    angles = positions[:, None] * rotary_frequencies(config)  # (T, d_k/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + d_k/2}) of x (…, d_k) by the angles of `rotary` (2, …, d_k)."""
    cos, sin = rotary.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


# --- What a forward pass brings to its layers -----------------------------------------------------

# Functions by (name, layer) that a forward pass calls with a value: they return its replacement, or
# None to keep it. This is how a model is read and how interventions change it.
Taps = dict[tuple[str, int], Callable[[Tensor], Tensor | None]]
# embedding (B, T, C), in layer 0 only; q, k, v (B, H or G, T, d), before they are cached; weights
# (B, H, T, T_k): attention is written out, not fused, if they are tapped; heads (B, T, H, d_v): the
# outputs before W_O; attention, mlp (B, T, C): the updates ΔE; residual (B, T, C), after the block.
TAP_NAMES = ("embedding", "q", "k", "v", "weights", "heads", "attention", "mlp", "residual")


class KVCache:
    """Preallocated keys and values of the tokens read so far, and these tokens.

    For d_k = d_v = d, it holds 2 · n_layer · B · G · capacity · d numbers: H/G times fewer than
    multi-head attention needs.

    Reference: Shazeer 2019, "Fast Transformer Decoding"; Ainslie et al. 2023, "GQA".
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        capacity: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate an empty cache for B sequences of at most `capacity` tokens."""
        shape = (config.n_layer, batch_size, config.kv_heads, capacity)  # (L, B, G, capacity)
        self.keys = torch.empty(*shape, config.key_dim, device=device, dtype=dtype)
        self.values = torch.empty(*shape, config.value_dim, device=device, dtype=dtype)
        self.tokens = torch.empty(batch_size, capacity, device=device, dtype=torch.int64)
        self.capacity = capacity
        self.nbytes = self.keys.nbytes + self.values.nbytes  # bytes of both
        self.length = 0  # number of tokens that the cache holds in every layer

    @property
    def previous_tokens(self) -> Tensor:
        """Ids (B, length) of the tokens that the cache holds."""
        return self.tokens.narrow(1, 0, self.length)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys (B, G, T, d_k) and values (B, G, T, d_v) of T new tokens in one layer.

        `length` does not change until `advance` is called, when every layer has stored them.

        Returns:
            All keys (B, G, length + T, d_k) and values (B, G, length + T, d_v) of the layer.
        """
        keys, values, T = self.keys[layer], self.values[layer], k.shape[2]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, self.length + T), values.narrow(2, 0, self.length + T)

    def advance(self, tokens: Tensor) -> None:
        """Add tokens (B, T), whose keys and values every layer has stored, to the cache."""
        T = tokens.shape[1]
        self.tokens.narrow(1, self.length, T).copy_(tokens)
        self.length += T


class Context(NamedTuple):
    """The inputs of a forward pass that every layer reads, besides the residual stream."""

    rotary: Tensor | None = None  # `rotary_table` (2, T, d_k) of the tokens; None: not rotary
    cache: KVCache | None = None  # keys and values of the tokens before
    mask: Tensor | None = None  # (…, T, T_k), as in `attention`; None: causal, and T is 1 or T_k
    taps: Taps | None = None

    def tap(self, name: str, layer: int, value: Tensor) -> Tensor:
        """Return the value, or its replacement by the tap of this name and layer.

        Raises:
            ValueError: If the replacement has another shape; only the number of rows may differ.
        """
        if not self.taps or (name, layer) not in self.taps:
            return value
        if value.requires_grad:
            value = value.clone()  # autograd may have saved it, and a tap may change it in place
        replacement = self.taps[name, layer](value)
        if replacement is None:
            return value
        if not isinstance(replacement, Tensor) or replacement.shape[1:] != value.shape[1:]:
            returned = getattr(replacement, "shape", type(replacement).__name__)
            raise ValueError(
                f"the tap {(name, layer)} returned {returned}; return a tensor of the shape of its "
                f"value, {tuple(value.shape)}, or None to keep it"
            )
        return replacement


# --- Layers ---------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Causal self-attention: Concat(head_1 … head_H) W_O.

    head_h = attention(x W_Q^h, x W_K^g, x W_V^g), where g is the key/value head that query head h
    shares. G = H is multi-head attention, G = 1 multi-query attention, G between them grouped-query
    attention.

    Reference: Vaswani et al. 2017; Shazeer 2019 (multi-query); Ainslie et al. 2023 (grouped-query).
    """

    is_plain = True  # generation.decoder computes the same in fewer calls

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        H, G, C = config.n_head, config.kv_heads, config.n_embd
        d_k, d_v = config.key_dim, config.value_dim
        self.config, self.layer = config, layer
        self.W_Q = nn.Linear(C, H * d_k, bias=config.has_bias("qkv"))
        self.W_K = nn.Linear(C, G * d_k, bias=config.has_bias("qkv"))
        self.W_V = nn.Linear(C, G * d_v, bias=config.has_bias("qkv"))
        self.W_O = nn.Linear(H * d_v, C, bias=config.has_bias("output"))
        if config.qk_norm == "gains":
            self.norm_q = kernels.RMSNorm(d_k, config.norm_eps)
            self.norm_k = kernels.RMSNorm(d_k, config.norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Compute the update ΔE (B, T, C) from the normalized residual stream x (B, T, C)."""
        q, k, v = self.project(x, context.rotary)
        y = self.attend(q, k, v, context).to(x.dtype)  # (B, T, H, d_v)
        y = context.tap("heads", self.layer, y).flatten(2)  # (B, T, H · d_v)
        return F.dropout(self.W_O(y), self.config.dropout, self.training)  # (B, T, C)

    def project(self, x: Tensor, rotary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, H, T, d_k), keys (B, G, T, d_k) and values (B, G, T, d_v).

        Reference: Henry et al. 2020, "Query-Key Normalization for Transformers".
        """
        c = self.config
        H, G = c.n_head, c.kv_heads
        qkv = F.linear(x, *self.join_projections())  # (B, T, (H + G) d_k + G d_v)
        # split_with_sizes takes a third of the time of split
        qk, v = qkv.split_with_sizes(((H + G) * c.key_dim, G * c.value_dim), dim=-1)
        qk = qk.unflatten(-1, (H + G, c.key_dim))  # (B, T, H + G, d_k)
        v = v.unflatten(-1, (G, c.value_dim))  # (B, T, G, d_v)
        if c.qk_norm:
            qk = kernels.rms_norm(kernels.in_float32_or_finer(qk), *self.qk_gains_and_eps())
        if rotary is not None:
            qk = rotate(kernels.in_float32_or_finer(qk), rotary[:, :, None])
        q, k = qk.split_with_sizes((H, G), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, d)
        if q.dtype != v.dtype:
            q = q.to(v.dtype, memory_format=torch.contiguous_format)
            k = k.to(v.dtype, memory_format=torch.contiguous_format)
        return q, k, v

    def join_projections(self) -> tuple[Tensor, Tensor | None]:
        """Concatenate W_Q, W_K and W_V, and their biases, for one matrix product."""
        parts = (self.W_Q, self.W_K, self.W_V)
        bias = torch.cat([p.bias for p in parts]) if self.config.has_bias("qkv") else None
        return torch.cat([p.weight for p in parts]), bias

    def qk_gains_and_eps(self) -> tuple[Tensor | None, float | None]:
        """Return the gains (H + G, d_k) and the ε of QK-norm; None: no gains, the machine's ε."""
        if self.config.qk_norm in (True, False):
            return None, None
        gains_q = self.norm_q.weight.expand(self.config.n_head, -1)  # (H, d_k)
        gains_k = self.norm_k.weight.expand(self.config.kv_heads, -1)  # (G, d_k)
        return torch.cat((gains_q, gains_k)), self.config.norm_eps

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Compute the outputs (B, T, H, d_v) of the heads from what `project` returns."""
        q = context.tap("q", self.layer, q)
        k = context.tap("k", self.layer, k)
        v = context.tap("v", self.layer, v)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, G, T_k, d_k), (B, G, T_k, d_v)
            q = q.to(k.dtype)  # the cache may be more precise than the weights
        mask = context.mask
        if not context.taps or ("weights", self.layer) not in context.taps:
            return self.fused(q, k, v, mask).transpose(1, 2)
        if mask is None:
            mask = causal_mask(q.shape[2], k.shape[2], q.device)
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (kernels.in_float32_or_finer(x) for x in (q, k, v))
            weights = context.tap("weights", self.layer, self.weights(q, k, mask))
            return (weights @ repeat_groups(v, q)).transpose(1, 2)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the outputs (B, H, T, d_v) of the heads with the fastest kernel."""
        return kernels.attend(q, k, v, mask, self.config.dropout if self.training else 0.0)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Compute the attention weights (B, H, T, T_k), written out."""
        return attention_weights(q, k, mask)


class MLP(nn.Module):
    """Two linear layers with a non-linearity between them, or SwiGLU with three.

    Reference: Hendrycks & Gimpel 2016 (GELU, of which `gelu` is the tanh approximation); So et al.
    2021 (ReLU²); Shazeer 2020 (SwiGLU).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C, hidden, bias = config.n_embd, config.hidden_dim, config.has_bias("mlp")
        self.config = config
        self.W_in = nn.Linear(C, hidden, bias=bias)
        self.W_gate = nn.Linear(C, hidden, bias=bias) if config.mlp == "swiglu" else None
        self.W_out = nn.Linear(hidden, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the update ΔE (B, T, C) of the residual stream from x (B, T, C)."""
        h = self.W_in(x)
        gate = None if self.W_gate is None else self.W_gate(x)
        return F.dropout(self.W_out(self.activate(h, gate)), self.config.dropout, self.training)

    def activate(self, h: Tensor, gate: Tensor | None) -> Tensor:
        """Apply the non-linearity to h, or to the gate that SwiGLU multiplies h by."""
        if gate is not None:
            return F.silu(gate) * h
        if self.config.mlp == "relu2":
            return F.relu(h).square()
        return F.gelu(h, approximate={"gelu": "tanh", "gelu_exact": "none"}[self.config.mlp])


class Block(nn.Module):
    """A transformer block: attention, then the MLP if there is one, each with a norm before it.

    Reference: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", for models
    of attention only; Wang & Komatsuzaki 2021, GPT-J, for an MLP parallel to attention.
    """

    def __init__(self, config: GPTConfig, layer: int, attention: type[SelfAttention]) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.norm_1 = make_norm(config)
        self.attention = attention(config, layer)
        has_mlp = config.mlp != "none"
        self.norm_2 = make_norm(config) if has_mlp else None
        self.mlp = MLP(config) if has_mlp else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the residual stream (B, T, C) after the block, for x (B, T, C) before it."""
        update = self.attention(self.norm_1(x), context)
        y = x + context.tap("attention", self.layer, update)
        if self.mlp is not None:
            y = y + context.tap("mlp", self.layer, self.run_mlp(x, y))
        return context.tap("residual", self.layer, y)

    def run_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the MLP's update from the residual stream x before attention and y after it."""
        assert self.norm_2 is not None and self.mlp is not None
        return self.mlp(self.norm_2(x if self.config.parallel_mlp else y))


def make_norm(config: GPTConfig) -> nn.Module:
    """Return LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019)."""
    if config.norm == "rmsnorm":
        return kernels.RMSNorm(config.n_embd, eps=config.norm_eps)
    assert config.norm == "layernorm"
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.has_bias("norm"))


# --- The model ------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A decoder-only transformer.

    `attention` is the class of its attention layers, and `ngrams` an embedding of n-grams, if it
    has one; `variants.build_model` chooses both by the configuration.

    Reference: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    checkpoint_activations = False  # True: training computes each block again in its backward pass

    def __init__(
        self,
        config: GPTConfig,
        attention: type[SelfAttention] = SelfAttention,
        ngrams: nn.Module | None = None,
    ) -> None:
        super().__init__()
        config.check()
        lacks_ngrams = config.ngrams > 1 and ngrams is None
        if lacks_ngrams or (config.has_variant_attention and attention.is_plain):
            raise UserError("this configuration has optional parts: use variants.build_model")
        self.config = config
        T, C, V = config.block_size, config.n_embd, config.vocab_size
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = nn.Embedding(T, C) if config.position == "learned" else None
        self.ngrams = ngrams
        self.blocks = nn.ModuleList(Block(config, n, attention) for n in range(config.n_layer))
        self.norm = make_norm(config)
        # Loading a model sets these: the first two to those of its tokenizer.
        self.token_count = V
        self.begin_of_text: int | None = None
        self.source: str | None = None  # where it was read, such as "runs/mine at step 2,000"
        self.head = nn.Linear(C, V, bias=False)
        if config.tie_embeddings:  # Press & Wolf 2017
            self.head.weight = self.token_embedding.weight
        self.draw_weights()

    def draw_weights(self) -> None:
        """Draw matrices from N(0, 0.02²), so that the loss starts near ln V; biases are 0, gains 1.

        The variance of those that write to the residual stream, W_O and W_out, is divided by their
        number. Beside normalized embeddings, the gains of queries and keys are `LOWER_QK_GAIN`, and
        `LAST_QK_GAIN` in the last layer.
        """
        writers = self.config.n_layer * (1 if self.config.mlp == "none" else 2)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                depth = writers if name.endswith(("W_O", "W_out")) else 1
                nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(depth))
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        if self.config.norm_embedding and self.config.qk_norm == "gains":
            for block in self.blocks:
                gain = LAST_QK_GAIN if block is self.blocks[-1] else LOWER_QK_GAIN
                nn.init.constant_(block.attention.norm_q.weight, gain)
                nn.init.constant_(block.attention.norm_k.weight, gain)

    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: the parameters, tied ones once, and the n-grams' keys."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def assign(self, tensors: dict[str, Tensor]) -> None:
        """Use tensors as parameters without a copy; they are those that `tensors` returns."""
        if self.config.tie_embeddings:
            tensors = {**tensors, "head.weight": tensors["token_embedding.weight"]}
        self.load_state_dict(tensors, assign=True)
        if self.config.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def rotary_at(self, start: int, end: int) -> Tensor | None:
        """Return `rotary_table` in float32 on the model's device, None if positions are learned."""
        if not self.config.is_rotary:
            return None
        return rotary_table(start, end, self.config).to(self.head.weight.device)

    def embed(
        self, tokens: Tensor, previous: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Embed tokens, their positions and the n-grams that end at them: (B, T, C).

        Args:
            tokens: Ids (B, T), at positions P … P + T - 1.
            previous: Ids (B, P) of the tokens before them; None: P = 0.
            hidden: Boolean (B, P + T), True for tokens that n-grams of later tokens cannot read.
                None: nothing is hidden. Attention has its own mask.
        """
        x = F.embedding(tokens, self.token_embedding.weight)  # (B, T, C)
        if self.position_embedding is not None:
            start = 0 if previous is None else previous.shape[1]
            x = x + self.position_embedding.weight.narrow(0, start, tokens.shape[1])
        if self.ngrams is not None:
            x = x + self.ngrams(tokens, previous, hidden)
        if self.config.norm_embedding:
            x = kernels.rms_norm(x)
        return x

    def run_blocks(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Taps | None = None,
        entry: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the blocks and return the residual stream (B, T, C) before the final norm.

        Args:
            tokens: Ids (B, T).
            cache: Holds keys and values of the tokens before, to which those of `tokens` are added.
            mask: Mask (…, T, T_k) of all layers, as in `attention`; None: causal.
            taps: Functions that record or replace values.
            entry: A layer and its input (B, T, C): blocks below this layer are not run.
        """
        start, capacity = 0, self.config.block_size
        if cache is not None:
            start, capacity = cache.length, min(capacity, cache.capacity)
        end = start + tokens.shape[1]
        if end > capacity:
            raise ValueError(f"{end} tokens do not fit the context or cache of {capacity} tokens")
        if mask is None and 1 < end - start < end:  # the fused kernel aligns it to the first key
            mask = causal_mask(end - start, end, tokens.device)
        context = Context(self.rotary_at(start, end), cache, mask, taps)
        if entry is None:
            x = self.embed(tokens, None if cache is None else cache.previous_tokens)
            x = F.dropout(x, self.config.dropout, self.training)  # (B, T, C)
            entry = 0, context.tap("embedding", 0, x)
        first_layer, x = entry
        for block in list(self.blocks)[first_layer:]:
            if self.checkpoint_activations and self.training and not taps:  # Chen et al. 2016
                has_dropout = self.config.dropout > 0
                x = checkpoint(
                    block, x, context, use_reentrant=False, preserve_rng_state=has_dropout
                )
            else:
                x = block(x, context)
        if cache is not None:
            cache.advance(tokens)
        return x

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits (B, T, V) of every next token, and their mean loss in nats per token.

        With targets, gradients flow through the loss alone; without, the loss is None.

        Args:
            tokens: Ids (B, T); with those in the cache, at most block_size tokens.
            targets: Ids (B, T) of the tokens that follow; -1 is left out of the loss.
            cache: As in `run_blocks`.
        """
        return self.predict(self.run_blocks(tokens, cache), targets)

    def predict(self, x: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute what `forward` returns from the residual stream (B, T, C) after the blocks."""
        x = self.norm(x)
        padding = self.config.vocab_padding
        if padding:
            logits = kernels.padded_logits(x, self.head.weight, padding)  # (B, T, V + padding)
        else:
            logits = self.head(x)  # (B, T, V)
        loss = None
        if targets is not None:
            loss = kernels.cross_entropy(logits.flatten(0, 1), targets.flatten())
            logits = logits.detach()  # compiled code would add zeros of their size to the gradient
        if padding:
            logits = logits[..., : self.config.vocab_size]
        return logits, loss

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Continue prompts: `generation.generate` of this model, which takes the same arguments."""
        from generation import generate

        return generate(self, *args, **kwargs)

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise `ValueError` unless tokens are ids (B, T) of the vocabulary."""
        V = self.config.vocab_size
        id_dtypes = (torch.int64, torch.int32)  # which an embedding takes
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in id_dtypes:
            raise ValueError(
                "tokens must be integers (B, T), as in "
                "torch.tensor([encode_prompt(tokenizer, text)])"
            )
        wrong = tokens[(tokens < 0) | (tokens >= V)]
        if len(wrong):
            raise ValueError(f"there is no token {wrong[0]}: ids must be from 0 to {V - 1}")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode, and restore its mode at the end."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def run_with_taps(self, tokens: Tensor, taps: Taps) -> Tensor:
        """Compute the logits (B, T, V) of tokens (B, T), with taps that read or replace values.

        The pass runs in evaluation mode; gradients flow through what the taps return or change.

        Args:
            tokens: Ids (B, T), at most block_size in a row.
            taps: Functions by (name, layer), such as ("heads", 2), with a name of `TAP_NAMES`. Each
                is called with a value, and returns its replacement, or None to keep it.

        Raises:
            ValueError: If a name or layer does not exist, a replacement has another shape, or the
                model has no such tokens.
        """
        self.check_tokens(tokens)
        if unknown := taps.keys() - set(self._tap_keys(TAP_NAMES)):
            raise ValueError(
                f"there is no value {unknown.pop()!r} to tap; use (name, layer), with a name of "
                f"{', '.join(TAP_NAMES)} and a layer below {self.config.n_layer} (embedding: 0)"
            )
        with self.evaluating():
            return self.head(self.norm(self.run_blocks(tokens, taps=taps)))

    def run_with_cache(
        self, tokens: Tensor, *names: str
    ) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        """Compute the logits (B, T, V) of tokens (B, T), and record values by (name, layer).

        `names` are some of `TAP_NAMES`; without names, all are recorded.
        """
        values: dict[tuple[str, int], Tensor] = {}
        keys = self._tap_keys(names or TAP_NAMES)
        logits = self.run_with_taps(tokens, {key: partial(values.__setitem__, key) for key in keys})
        return logits, values

    def _tap_keys(self, names: tuple[str, ...]) -> list[tuple[str, int]]:
        layers = {"embedding": 1, "mlp": 0 if self.config.mlp == "none" else self.config.n_layer}
        counts = [(name, layers.get(name, self.config.n_layer)) for name in names]
        return [(name, layer) for name, count in counts for layer in range(count)]

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Return the attention weights (n_layer, B, H, T, T) of tokens (B, T) in float32."""
        _, weights = self.run_with_cache(tokens, "weights")
        return torch.stack(list(weights.values())).float()
