"""The transformer: attention as the documents define it, the block, GPT, the KV cache.

The documents are five introductions to self-attention that the project started from, cited by
their files' names.
Shapes are written with their letters: B batch, T tokens, C channels, H query heads,
G key/value heads, d_k the size of a query or key, d_v the size of a value, V the vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig, UserError
from decoding import stream

__all__ = ["GPT", "Decoder", "GPTConfig", "KVCache", "SelfAttention", "attention", "causal_mask"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
              scale: float | None = None) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ · scale + M) V, written out: the fused kernel's reference; maps are made of it.

    Args:
        q: queries (…, T_q, d_k), or (…, H, T_q, d_k) with heads.
        k: keys (…, T_k, d_k); with grouped heads (…, G, T_k, d_k), H a multiple of G: the first H/G
            query heads share key/value head 0, the next H/G head 1, … (000_634833161fd3075e.txt).
        v: values (…, T_k, d_v), grouped like the keys. Queries may come from another sequence
            than keys and values, and d_v may differ from d_k (004_2e522ac47f105ae6.txt).
        mask: broadcast to (…, T_q, T_k); boolean (True: may attend) or added to the scores
            (-inf: may not). A query that may attend to nothing gets zero weights and output.
        scale: 1/√d_k when None (Vaswani et al. 2017); 1.0 leaves the products as they are.

    Returns:
        output (…, T_q, d_v) and weights (…, T_q, T_k), whose rows sum to 1, in the dtype given.

    Raises:
        ValueError: the heads of q are not a multiple of those of k and v.
    """
    if q.dim() > 2 and k.dim() > 2 and q.shape[-3] != k.shape[-3]:
        heads, groups = q.shape[-3], k.shape[-3]
        if groups == 0 or heads % groups:
            raise ValueError(f"{heads} query heads are not a multiple of {groups} key/value heads")
        k = k.repeat_interleave(heads // groups, dim=-3)  # (…, H, T_k, d_k)
        v = v.repeat_interleave(heads // groups, dim=-3)  # (…, H, T_k, d_v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-2, -1) * scale  # (…, T_q, T_k)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if boolean else scores + mask.to(scores.dtype)
        nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
        # Softmax over nothing is 0/0 (a caller's mask may leave a row nothing). Such rows pass
        # through it as zeros, so that their gradient is 0 and not NaN.
        weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
    else:
        weights = scores.softmax(dim=-1)
    return weights @ v, weights


def causal_mask(T_q: int, T_k: int, device: torch.device | None = None) -> Tensor:
    """Boolean (T_q, T_k), True where a query may attend: no later key (001_08d6058950a92142.txt).

    The last query stands at the last key, so T_q < T_k is decoding with T_k - T_q cached tokens.
    """
    return torch.ones(T_q, T_k, dtype=torch.bool, device=device).tril(diagonal=T_k - T_q)


# Llama 3 stretches wavelengths that make at most so many turns in rope_trained tokens whole, and
# those that make at least so many not at all.
ROPE_LOW, ROPE_HIGH = 1.0, 4.0
LOGITS_AT_ONCE = 1 << 20  # that `CrossEntropy` has in float32
SHORT = 512  # tokens up to which `short_attention` is the faster one


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal `attention` (B, H, T, d_v) of q (B, H, T, d_k) to k and v (B, G, T, …), as a CPU runs
    it fastest in bf16: torch's fused kernel takes 2 to 5 times as long there, up to a few hundred
    tokens (LOG.md). `dropout` is the fraction of the weights that is dropped."""
    (B, H, T, d_k), G = q.shape, k.shape[1]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(diagonal=1)
    # The scores of the query heads that share a key/value head, scaled and masked in one product.
    scores = torch.baddbmm(future.repeat(H // G, 1), q.reshape(B * G, H // G * T, d_k),
                           k.flatten(0, 1).mT, alpha=1 / math.sqrt(d_k))
    weights = F.dropout(scores.softmax(dim=-1), dropout)  # (B · G, H/G · T, T)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, 1)).view(B, H, T, -1)


def rotary_frequencies(config: GPTConfig) -> Tensor:
    """Radians that each pair of numbers turns by from one position to the next, (d_k/2) float32.

    Wavelengths are stretched by `rope_factor`: all of them (Chen et al. 2023), or, where
    `rope_trained` is given, the more the fewer turns they make in so many tokens (Llama 3.1).
    """
    c = config
    exponents = torch.arange(0, c.key_dim, 2, dtype=torch.float32) / c.key_dim  # (d_k/2)
    frequencies = c.rope_theta ** -exponents
    if c.rope_factor != 1:
        # Rounded as where such models were trained: far tokens turn by much of a last bit.
        frequencies = 1 / c.rope_theta ** exponents
        turns = (c.rope_trained or 0) / (2 * math.pi / frequencies)
        kept = ((turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / c.rope_factor + kept * frequencies
    return frequencies


def rotary_table(length: int, config: GPTConfig) -> Tensor:
    """cos and signed sin of every position's angles, (2, length, d_k) float32 (Su et al. 2021).

    Both halves of a row hold the same d_k/2 angles, the first half of the sines negated, for
    `rotate`.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * rotary_frequencies(config)  # (T, d_k/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+d/2}) of x (…, d_k) by their positions' angles, (2, …, d_k)."""
    cos, sin = rotary.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: what grouped heads make small.

    2 · n_layer · B · G · length · d numbers for d_k = d_v = d: H/G times fewer than multi-head.
    """

    def __init__(self, config: GPTConfig, batch_size: int, length: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        """Room for `length` tokens (block_size when None); `GPT.make_cache` knows the rest."""
        shape = (config.n_layer, batch_size, config.kv_heads, length or config.block_size)
        # (L, B, G, T, d_k) and (L, B, G, T, d_v); zeros, since a mask leaves what is not a number.
        self.keys = torch.zeros(*shape, config.key_dim, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, config.value_dim, device=device, dtype=dtype)
        self.length = 0  # tokens that every layer holds

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k (B, G, T, d_k) and v (B, G, T, d_v) behind the tokens held; return all of them.

        `length` stays: GPT moves it once every layer has stored the same tokens.
        """
        keys, values, count = self.keys[layer], self.values[layer], k.shape[2]
        keys.narrow(2, self.length, count).copy_(k)
        values.narrow(2, self.length, count).copy_(v)
        return keys.narrow(2, 0, self.length + count), values.narrow(2, 0, self.length + count)


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + ε), times the gains (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, gains: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / √(mean x² + ε) over the last dimension, times the gains: `F.rms_norm`, on a CPU in less
    time (LOG.md)."""
    if is_eager_on_cpu(x):
        x = UnitRMS.apply(x, torch.finfo(x.dtype).eps if eps is None else eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], eps=eps)
    return x if gains is None else x * gains


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether x is trained through on a CPU, uncompiled: where functions of our own are faster."""
    return x.device.type == "cpu" and x.requires_grad and not torch.compiler.is_compiling()


class UnitRMS(torch.autograd.Function):
    """x / √(mean x² + ε) in few calls: torch's on a CPU is a dozen, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()  # (…, 1)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(dim=-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(scale), None


class SelfAttention(nn.Module):
    """Causal attention of a sequence to itself: multi-head at G = H, multi-query at G = 1.

    Concat(head_1 … head_H) W_O, head_h = attention(x W_Q^h, x W_K^g, x W_V^g), g the group of h.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        H, G, C = config.n_head, config.kv_heads, config.n_embd
        d_k, d_v = config.key_dim, config.value_dim
        self.config = config
        self.W_Q = nn.Linear(C, H * d_k, bias=config.biased("qkv"))
        self.W_K = nn.Linear(C, G * d_k, bias=config.biased("qkv"))
        self.W_V = nn.Linear(C, G * d_v, bias=config.biased("qkv"))
        self.W_O = nn.Linear(H * d_v, C, bias=config.biased("output"))
        if config.qk_norm:
            gains = config.qk_norm == "gains"
            self.norm_q, self.norm_k = (
                RMSNorm(d_k, eps=config.norm_eps if gains else None, elementwise_affine=gains)
                for _ in range(2))

    def project(self, x: Tensor, rotary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, d_k), keys (B, G, T, d_k) and values (B, G, T, d_v) of x (B, T, C)."""
        c, T = self.config, x.shape[1]
        H, G, d_k, d_v = c.n_head, c.kv_heads, c.key_dim, c.value_dim
        joined = as_function(self.W_Q, self.W_K, self.W_V)(x)  # (B, T, (H + G) d_k + G d_v)
        qk, v = joined.split(((H + G) * d_k, G * d_v), dim=-1)
        qk, v = qk.unflatten(-1, (H + G, d_k)), v.unflatten(-1, (G, d_v))
        dtype = qk.dtype
        if c.qk_norm or c.position == "rope":  # in float32, which a CPU does faster than bf16
            qk = qk.to(torch.promote_types(dtype, torch.float32))
        if c.qk_norm:
            qk = rms_norm(qk, self.gains(), self.norm_q.eps)
        if c.position == "rope":
            if rotary is None:  # used on its own, outside a GPT
                rotary = rotary_table(T, c).to(x.device)
            qk = rotate(qk, rotary[:, :, None])
        q, k = (part.transpose(1, 2) for part in qk.split((H, G), dim=2))
        if q.dtype != dtype:
            q, k = (part.to(dtype, memory_format=torch.contiguous_format) for part in (q, k))
        return q, k, v.transpose(1, 2)

    def gains(self) -> Tensor | None:
        """What each head's queries and keys are multiplied by, (H + G, d_k)."""
        c = self.config
        if c.qk_norm != "gains":
            return None
        return torch.cat((self.norm_q.weight.expand(c.n_head, -1),
                          self.norm_k.weight.expand(c.kv_heads, -1)))

    def forward(self, x: Tensor, rotary: Tensor | None = None,
                cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """The update ΔE (B, T, C) of the embeddings x (B, T, C), which follow a cache's tokens."""
        c, (B, T, _) = self.config, x.shape
        q, k, v = self.project(x, rotary)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, G, T_k, d_k), (B, G, T_k, d_v)
            q = q.to(k.dtype)  # the cache may be finer than the weights
        T_k = k.shape[2]
        dropout = c.dropout if self.training else 0.0
        # What `attention` writes out, fused.
        if q.dtype == torch.bfloat16 and q.device.type == "cpu" and T == T_k <= SHORT:
            y = short_attention(q, k, v, dropout)
        else:
            # Over a whole sequence the kernel knows the causal mask. It is spelled out for new
            # tokens after cached ones: the kernel would align it to the first key, not the last.
            mask = causal_mask(T, T_k, x.device) if 1 < T < T_k else None
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=T_k == T, enable_gqa=c.kv_heads != c.n_head,
                dropout_p=dropout)  # (B, H, T, d_v)
        if cache is not None:
            y = y.to(x.dtype)
        y = y.transpose(1, 2).reshape(B, T, c.n_head * c.value_dim)
        return F.dropout(self.W_O(y), c.dropout, self.training)

    def weights(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """The weights (B, H, T, T) that `forward` applies to x (B, T, C), before any dropout, in
        float32 or finer."""
        q, k, v = self.project(x, rotary)
        q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            return attention(q, k, v, causal_mask(x.shape[1], x.shape[1], x.device))[1]

    def value_norms(self, x: Tensor) -> Tensor:
        """‖v_j W_O^h‖ of every token j of x (B, T, C) in every head h: (B, H, T), float32 or finer.

        How much a head writes to the residual stream when it looks at a token: times the weight,
        the value-weighted map (Kobayashi et al. 2020, "Attention is Not Only a Weight").
        """
        c = self.config
        v = self.W_V(x).unflatten(-1, (c.kv_heads, c.value_dim)).transpose(1, 2)  # (B, G, T, d_v)
        v = v.to(torch.promote_types(x.dtype, torch.float32))
        v = v.repeat_interleave(c.n_head // c.kv_heads, dim=1)  # (B, H, T, d_v)
        W = self.W_O.weight.to(v.dtype).unflatten(1, (c.n_head, c.value_dim))  # (C, H, d_v)
        gram = torch.einsum("chd,che->hde", W, W)  # ‖W v‖² = vᵀ WᵀW v: the small d_v, not C
        return torch.einsum("bhtd,hde,bhte->bht", v, gram, v).clamp(min=0).sqrt()


def activate(kind: str, h: Tensor, gate: Tensor | None = None) -> Tensor:
    """GELU (tanh form), ReLU² (So et al. 2021), or SwiGLU with its gate (Shazeer 2020), of h."""
    if kind == "swiglu":
        return F.silu(gate) * h
    return F.relu(h).square() if kind == "relu2" else F.gelu(h, approximate="tanh")


class MLP(nn.Module):
    """Two linear layers with a non-linearity between."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.W_in = nn.Linear(config.n_embd, config.hidden_dim, bias=config.biased("mlp"))
        if config.mlp == "swiglu":
            self.W_gate = nn.Linear(config.n_embd, config.hidden_dim, bias=config.biased("mlp"))
        self.W_out = nn.Linear(config.hidden_dim, config.n_embd, bias=config.biased("mlp"))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.W_gate(x) if self.config.mlp == "swiglu" else None
        h = activate(self.config.mlp, self.W_in(x), gate)  # (B, T, hidden)
        return F.dropout(self.W_out(h), self.config.dropout, self.training)  # (B, T, C)


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.biased("norm"))


class Block(nn.Module):
    """E' = E + ΔE, by attention and then by the MLP, each reading a normalised E."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attention = SelfAttention(config)
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor | None = None,
                cache: KVCache | None = None, layer: int = 0) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotary, cache, layer)  # (B, T, C)
        return x + self.mlp(self.norm_2(x))


class Decoder:
    """A model's next-token logits with a cache, as `GPT.forward` gives them, in fewer calls.

    The calls, not the arithmetic, take the time of a small model's step. So W_Q, W_K and W_V are
    joined and functions stand for modules: twice the speed at 0.8 M parameters (LOG.md). On a GPU
    a step is recorded as a CUDA graph, and launched as one.
    """

    @torch.inference_mode()
    def __init__(self, model: "GPT", cache: KVCache):
        """Reads the model's weights as they are now; fills and moves on the cache."""
        c, weight = model.config, model.token_embedding.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.graphs = {}  # by the length of the cache that each sees
        self.block_size, self.vocab_size = c.block_size, c.vocab_size
        self.rotary = None if model.rotary is None else model.rotary.to(weight.dtype)
        self.norm, self.head, self.layers = as_function(model.norm), as_function(model.head), []
        for block, keys, values in zip(model.blocks, cache.keys, cache.values):
            a, mlp, gated = block.attention, block.mlp, c.mlp == "swiglu"
            self.layers.append((
                as_function(block.norm_1), as_function(a.W_Q, a.W_K, a.W_V), a.gains(), keys,
                values, as_function(a.W_O), as_function(block.norm_2), as_function(mlp.W_in),
                as_function(mlp.W_gate) if gated else None, as_function(mlp.W_out)))

    def forget(self) -> None:
        """Begin again, before any token."""
        self.cache.length = 0

    def fill(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B, T) more."""
        if tokens.shape[1] == 1:
            return self.step(tokens[:, 0])
        with self.model.evaluating():
            return self.head(self.norm(self.model.hidden(tokens, self.cache)[:, -1]))

    def step(self, token: Tensor) -> Tensor:
        """Logits (B, V) after one token (B,) more."""
        n = self.cache.length
        self.cache.length = n + 1
        if self.device.type == "cuda":
            return self.replay(token, n)
        return self.compute(token, n)

    def replay(self, token: Tensor, n: int) -> Tensor:
        """`compute` as a CUDA graph, of which there is one for lengths up to each power of two."""
        seen = min(self.cache.capacity, max(64, 1 << n.bit_length()))
        if seen not in self.graphs:
            self.graphs[seen] = self.record(token.clone(), torch.full_like(token[:1], n), seen)
        graph, its_token, its_position, logits = self.graphs[seen]
        its_token.copy_(token)
        its_position.fill_(n)
        graph.replay()
        return logits.clone()

    def record(self, token: Tensor, n: Tensor, seen: int):
        """A CUDA graph of `compute` with its inputs token (B,) and n (1,), and its logits."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # once for real, in which the libraries set themselves up
            self.compute(token, n, seen)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            logits = self.compute(token, n, seen)
        return graph, token, n, logits

    def compute(self, token: Tensor, n: int | Tensor, seen: int | None = None) -> Tensor:
        """Logits (B, V) after a token (B,) at position n. Where n is a tensor (1,), attention is to
        the first `seen` tokens of the cache, the later ones masked: all shapes stay the same."""
        c, B = self.model.config, len(token)
        H, G, d_k, d_v = c.n_head, c.kv_heads, c.key_dim, c.value_dim
        x = self.model.token_embedding.weight[token]  # (B, C)
        if self.model.position_embedding is not None:
            x = x + self.model.position_embedding.weight[n]
        if c.norm_embedding:
            x = rms_norm(x)
        eps = c.norm_eps if c.qk_norm == "gains" else None
        mask = None if seen is None else torch.arange(seen, device=n.device)[None] <= n  # (1, seen)
        for norm_1, qkv, gains, keys, values, W_O, norm_2, W_in, W_gate, W_out in self.layers:
            qk, v = qkv(norm_1(x)).split(((H + G) * d_k, G * d_v), dim=-1)
            qk = qk.view(B, H + G, d_k)
            if c.qk_norm:
                qk = rms_norm(qk, gains, eps)
            if self.rotary is not None:
                qk = rotate(qk, self.rotary[:, n])
            q, k = qk.split((H, G), dim=1)  # (B, H, d_k), (B, G, d_k)
            v = v.view(B, G, d_v)
            if mask is None:
                keys.select(2, n).copy_(k)
                values.select(2, n).copy_(v)
            else:
                keys.index_copy_(2, n, k[:, :, None].to(keys.dtype))
                values.index_copy_(2, n, v[:, :, None].to(values.dtype))
            # Query heads that share keys are as many queries to them, each of which may see all.
            q = q.reshape(B, G, H // G, d_k).to(keys.dtype)
            k, v = (kept.narrow(2, 0, seen or n + 1) for kept in (keys, values))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + W_O(y.reshape(B, H * d_v).to(x.dtype))
            h = norm_2(x)
            x = x + W_out(activate(c.mlp, W_in(h), None if W_gate is None else W_gate(h)))
        return self.head(self.norm(x))


def as_function(*modules: nn.Module) -> Callable:
    """A norm, a linear map, or several linear maps side by side, as a function with its weights."""
    m = modules[0]
    if isinstance(m, nn.RMSNorm):
        return partial(F.rms_norm, normalized_shape=m.normalized_shape, weight=m.weight, eps=m.eps)
    if isinstance(m, nn.LayerNorm):
        return partial(F.layer_norm, normalized_shape=m.normalized_shape, weight=m.weight,
                       bias=m.bias, eps=m.eps)
    if len(modules) == 1:
        return partial(linear, weight=m.weight, bias=m.bias) if isinstance(m, nn.Linear) else m
    if not isinstance(m, nn.Linear):  # quantized
        return m.beside(*modules[1:])
    return partial(linear, weight=torch.cat([each.weight for each in modules]),
                   bias=None if m.bias is None else torch.cat([each.bias for each in modules]))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x (…, in); of one row (1, in) by a matrix–vector product, which reads bf16
    weights faster on a CPU (LOG.md)."""
    if x.dim() > 2 or len(x) > 1:
        return F.linear(x, weight, bias)
    y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])  # (out)
    return y[None]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -ln p of targets (N,), but for -1, by logits (N, V): `F.cross_entropy`, of many
    logits on a CPU in half the time, and in the memory of a part of them (LOG.md)."""
    if is_eager_on_cpu(logits) and logits.numel() > LOGITS_AT_ONCE:
        return CrossEntropy.apply(logits, targets)
    return F.cross_entropy(logits.float(), targets, ignore_index=-1)


class CrossEntropy(torch.autograd.Function):
    """`F.cross_entropy`, row by row with its gradient, while the rows are in the processor's cache.
    A token that float32 gives no chance counts as 87 nats."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        gradient, loss = torch.empty_like(logits), logits.new_zeros((), dtype=torch.float32)
        counts = targets.ge(0)
        shares = counts / counts.sum()  # (N,)
        rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
        for z, target, share, out in zip(*(t.split(rows) for t in (
                logits, targets.clamp(min=0)[:, None], shares[:, None], gradient))):
            p = z.softmax(dim=-1, dtype=torch.float32)  # (rows, V)
            chance = p.gather(1, target).clamp(min=torch.finfo(p.dtype).tiny)
            loss -= (chance.log() * share).sum()
            p.scatter_add_(1, target, -torch.ones_like(share))
            torch.mul(p, share, out=out)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad, None


class GPT(nn.Module):
    """A decoder-only transformer.

    Raises:
        UserError: the configuration contradicts itself.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        config.check()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set: give the tokenizer's")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        learned, T = config.position == "learned", config.block_size
        self.position_embedding = nn.Embedding(T, config.n_embd) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        rotary = None if learned else rotary_table(T, config)
        self.register_buffer("rotary", rotary, persistent=False)  # (2, T, d_k)
        init_weights(self)

    def num_parameters(self) -> int:
        """Numbers that are trained, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of a training step per token, counted from the structure.

        Forward 2 per weight of a matrix and 2·H·(d_k + d_v) per pair of tokens, half of the pairs
        being masked; backward twice that (Kaplan et al. 2020, Chowdhery et al. 2022).
        """
        c = self.config
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        matrices += self.head.weight.numel()
        pairs = c.n_layer * c.n_head * (c.key_dim + c.value_dim) * c.block_size // 2
        return 6 * (matrices + pairs)

    def _embed(self, tokens: Tensor, start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Embeddings (B, T, C) of tokens at positions start …, and those positions' angles."""
        end = start + tokens.shape[1]
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens are more than the model's block_size of "
                             f"{self.config.block_size}")
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start:end]
        if self.config.norm_embedding:
            x = rms_norm(x)
        rotary = self.rotary[:, start:end] if self.rotary is not None else None
        return F.dropout(x, self.config.dropout, self.training), rotary

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the blocks make of tokens (B, T), before the last norm: (B, T, C); see `forward`."""
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        if cache is not None and end > cache.capacity:
            raise ValueError(f"{end} tokens are more than the cache's {cache.capacity}")
        x, rotary = self._embed(tokens, start)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, cache, layer)
        if cache is not None:
            cache.length = end
        return x

    def forward(self, tokens: Tensor, targets: Tensor | None = None,
                cache: KVCache | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of every next token, and the mean loss where targets are given.

        Args:
            tokens: (B, T) ids, T at most block_size, less what the cache holds.
            targets: (B, T) ids of the tokens that follow; -1 is left out of the mean.
            cache: keys and values of the tokens before these; takes these in.

        Returns:
            logits (B, T, V) and the loss in nats per token, or None.

        Raises:
            ValueError: more tokens than the block or the cache has room for.
        """
        logits = self.head(self.norm(self.hidden(tokens, cache)))  # (B, T, V)
        loss = None
        if targets is not None:
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation for a while; its mode is left as it was."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    @torch.no_grad()
    def attention_inputs(self, tokens: Tensor
                         ) -> Iterator[tuple[SelfAttention, Tensor, Tensor | None]]:
        """Yield each layer's attention, in evaluation, with the x (B, T, C) and the rotary angles
        that it is called with."""
        with self.evaluating():
            x, rotary = self._embed(tokens)
            for block, before in zip(self.blocks, (None, *self.blocks)):
                x = before(x, rotary) if before else x
                yield block.attention, block.norm_1(x), rotary

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Every head's attention weights on tokens (B, T): (n_layer, B, n_head, T, T) float32.

        Computed by the written-out formula from the very inputs that the fused kernel gets.
        """
        inputs = self.attention_inputs(tokens)
        return torch.stack([layer.weights(x, rotary).float() for layer, x, rotary in inputs])

    def make_cache(self, batch_size: int, length: int | None = None) -> KVCache:
        """An empty cache for `length` tokens (block_size when None, and at most), where the weights
        are and as fine; on a CPU float32 at least, in which it attends far faster (LOG.md)."""
        weight, block = self.token_embedding.weight, self.config.block_size
        finest = torch.float32 if weight.device.type == "cpu" else weight.dtype
        return KVCache(self.config, batch_size, min(block, length or block), weight.device,
                       torch.promote_types(weight.dtype, finest))

    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
                 seed: int | None = None, stop_token: int | None = None,
                 repetition_penalty: float = 1.0) -> Tensor:
        """Continue tokens (B, T) by up to max_new_tokens each: (B, T + new).

        Args:
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p, min_p: see `decoding.next_token_probabilities`.
            seed: same seed, same tokens (row r draws from seed + r); None: torch's own state.
            stop_token: a sequence that produced it is filled up with it, and all end when all have.
            repetition_penalty: see `decoding.penalise_repetition`; of the tokens given and made.
        """
        rows, length = tokens.shape
        seeds = None if seed is None else [seed + row for row in range(rows)]
        decoder = Decoder(self, self.make_cache(rows, length + max_new_tokens))
        new = list(stream(decoder, tokens, max_new_tokens, seeds, stop_token,
                          repetition_penalty=repetition_penalty, temperature=temperature,
                          top_k=top_k, top_p=top_p, min_p=min_p))
        if stop_token is not None:
            new = [token.masked_fill(token < 0, stop_token) for token in new]
        return torch.cat((tokens, torch.stack(new, dim=1)), dim=1) if new else tokens


def autocast(device: str, precision: str) -> AbstractContextManager:
    """The context in which a forward pass runs at this precision, fp32 or bf16."""
    if precision == "bf16":
        return torch.autocast(device.partition(":")[0], dtype=torch.bfloat16)
    return nullcontext()


def parameter_shapes(config: GPTConfig) -> dict[str, list[int]]:
    """The shapes of a model's parameters, by name, without making one.

    Raises:
        UserError: it is larger than any memory.
    """
    try:
        with torch.device("meta"):
            return {name: list(p.shape) for name, p in GPT(config).named_parameters()}
    except RuntimeError:
        raise UserError(f"a model of n_embd={config.n_embd}, vocab_size={config.vocab_size} "
                        "is larger than any memory") from None


def init_weights(model: GPT) -> None:
    """Give every weight its first value (Radford et al. 2019): the loss starts near ln V.

    Matrices are drawn from N(0, 0.02²), those that write to the residual stream (W_O, W_out) from
    N(0, 0.02² / 2 n_layer). Biases are 0, and the gains of norms 1, as torch builds norms.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            writes = name.endswith(("W_O", "W_out"))
            std = 0.02 / math.sqrt(2 * model.config.n_layer) if writes else 0.02
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
