"""The transformer: attention as the documents define it, the block, GPT, the KV cache.

The documents are five introductions to self-attention that the project started from, cited by their files' names.
Shapes are written with their letters: B batch, T tokens, C channels, H query heads,
G key/value heads, d_k the size of a query or key, d_v the size of a value, V the vocabulary.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig, UserError

__all__ = ["GPT", "GPTConfig", "KVCache", "SelfAttention", "attention", "causal_mask"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
              scale: float | None = None) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ · scale + M) V, written out: the reference for the fused kernel, and what maps are made of.

    Args:
        q: queries (…, T_q, d_k), or (…, H, T_q, d_k) with heads.
        k: keys (…, T_k, d_k); with grouped heads (…, G, T_k, d_k), H a multiple of G: the first H/G query
            heads share key/value head 0, the next H/G head 1, and so on (000_634833161fd3075e.txt).
        v: values (…, T_k, d_v), grouped like the keys. Queries may come from another sequence
            than keys and values, and d_v may differ from d_k (004_2e522ac47f105ae6.txt).
        mask: broadcast to (…, T_q, T_k); boolean (True: may attend) or added to the scores
            (-inf: may not). A query that may attend to nothing gets zero weights and output.
        scale: 1/√d_k when None (Vaswani et al. 2017); 1.0 leaves the products as they are.

    Returns:
        output (…, T_q, d_v) and weights (…, T_q, T_k), each row of which sums to 1, in the dtype given.

    Raises:
        ValueError: the heads of q are not a multiple of those of k and v.
    """
    if q.dim() > 2 and k.dim() > 2 and q.shape[-3] != k.shape[-3]:
        heads, groups = q.shape[-3], k.shape[-3]
        if groups == 0 or heads % groups:
            raise ValueError(f"{heads} query heads are not a multiple of {groups} key/value heads")
        k = k.repeat_interleave(heads // groups, dim=-3)  # (…, H, T_k, d_k)
        v = v.repeat_interleave(heads // groups, dim=-3)  # (…, H, T_k, d_v)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)  # (…, T_q, T_k)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
        # Softmax over nothing is 0/0 (a causal row always has itself, a caller's mask may leave a row nothing).
        # Such rows pass through it as zeros, so that their gradient is 0 and not NaN.
        weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
    else:
        weights = scores.softmax(dim=-1)
    return weights @ v, weights


def causal_mask(T_q: int, T_k: int, device: torch.device | None = None) -> Tensor:
    """Boolean (T_q, T_k), True where a query may attend: no later key (001_08d6058950a92142.txt).

    The last query stands at the last key, so T_q < T_k is decoding with T_k - T_q cached tokens.
    """
    return torch.ones(T_q, T_k, dtype=torch.bool, device=device).tril(diagonal=T_k - T_q)


SHORT = 512  # tokens up to which `short_attention` is the faster one


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal `attention` of q (B, H, T, d_k) to k and v (B, G, T, …), as a CPU runs it fastest in bf16: (B, H, T, d_v).

    There torch's fused kernel takes 2 to 5 times as long up to a few hundred tokens (LOG.md). `dropout` is the share of
    the weights that is dropped.
    """
    (B, H, T, d_k), G = q.shape, k.shape[1]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(diagonal=1).repeat(H // G, 1)  # (H/G · T, T)
    # The scores of the query heads that share a key/value head, scaled and masked within the one product.
    scores = torch.baddbmm(future, q.reshape(B * G, H // G * T, d_k), k.flatten(0, 1).mT, alpha=1 / math.sqrt(d_k))
    weights = F.dropout(scores.softmax(dim=-1), dropout)  # (B · G, H/G · T, T)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, 1)).view(B, H, T, -1)


def rotary_table(length: int, config: GPTConfig) -> Tensor:
    """cos and signed sin of every position's angles, (2, length, d_k) float32 (Su et al. 2021, RoFormer).

    Both halves of a row hold the same d_k/2 angles, the first half of the sines negated: what `rotate` multiplies by.
    Wavelengths are stretched by `rope_factor`: all of them (Chen et al. 2023), or, where `rope_trained` is given, the more the
    fewer turns they make in so many tokens (Llama 3.1).
    """
    c, exponents = config, torch.arange(0, config.key_dim, 2, dtype=torch.float32) / config.key_dim  # (d_k/2)
    frequencies = c.rope_theta ** -exponents
    if c.rope_factor != 1:
        frequencies = 1 / c.rope_theta ** exponents  # rounded as where such models were trained: far tokens turn by much of a last bit
        turns = (c.rope_trained or 0) / (2 * math.pi / frequencies)
        kept = ((turns - c.rope_low) / (c.rope_high - c.rope_low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / c.rope_factor + kept * frequencies
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies  # (T, d_k/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+d/2}) of queries or keys (B, heads, T, d_k) by their position's angles (2, T, d_k)."""
    cos, sin = rotary.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: what grouped heads make small.

    Its bytes are 2 · n_layer · B · G · length · d for d_k = d_v = d: H/G times fewer than multi-head.
    """

    def __init__(self, config: GPTConfig, batch_size: int, length: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        """Room for `length` tokens (block_size when None) of `batch_size` sequences; `GPT.make_cache` knows the rest."""
        shape = (config.n_layer, batch_size, config.kv_heads, length or config.block_size)
        self.keys = torch.empty(*shape, config.key_dim, device=device, dtype=dtype)  # (L, B, G, T, d_k)
        self.values = torch.empty(*shape, config.value_dim, device=device, dtype=dtype)  # (L, B, G, T, d_v)
        self.length = 0  # tokens that every layer holds

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k (B, G, T, d_k) and v (B, G, T, d_v) behind the tokens held; return all, these included.

        `length` stays: GPT moves it once every layer has stored the same tokens.
        """
        keys, values, count = self.keys[layer], self.values[layer], k.shape[2]
        keys.narrow(2, self.length, count).copy_(k)
        values.narrow(2, self.length, count).copy_(v)
        return keys.narrow(2, 0, self.length + count), values.narrow(2, 0, self.length + count)


class SelfAttention(nn.Module):
    """Causal attention of a sequence to itself: multi-head at G = H, grouped-query between, multi-query at G = 1.

    Concat(head_1 … head_H) W_O with head_h = attention(x W_Q^h, x W_K^g, x W_V^g), g the group of h.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        H, G, d_k, d_v, C = config.n_head, config.kv_heads, config.key_dim, config.value_dim, config.n_embd
        self.config = config
        self.W_Q = nn.Linear(C, H * d_k, bias=config.biased("qkv"))
        self.W_K = nn.Linear(C, G * d_k, bias=config.biased("qkv"))
        self.W_V = nn.Linear(C, G * d_v, bias=config.biased("qkv"))
        self.W_O = nn.Linear(H * d_v, C, bias=config.biased("output"))

    def project(self, x: Tensor, rotary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, d_k), keys (B, G, T, d_k) and values (B, G, T, d_v) of x (B, T, C)."""
        c, (B, T, _) = self.config, x.shape
        q = self.W_Q(x).view(B, T, c.n_head, c.key_dim).transpose(1, 2)  # (B, H, T, d_k)
        k = self.W_K(x).view(B, T, c.kv_heads, c.key_dim).transpose(1, 2)  # (B, G, T, d_k)
        v = self.W_V(x).view(B, T, c.kv_heads, c.value_dim).transpose(1, 2)  # (B, G, T, d_v)
        if c.qk_norm:
            q, k = F.rms_norm(q, (c.key_dim,)), F.rms_norm(k, (c.key_dim,))
        if c.position == "rope":
            if rotary is None:  # used on its own, outside a GPT
                rotary = rotary_table(T, c).to(x.device)
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q, k, v

    def forward(self, x: Tensor, rotary: Tensor | None = None,
                cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """The update ΔE (B, T, C) of the embeddings x (B, T, C); with a cache, x follows the tokens held there."""
        c, (B, T, _) = self.config, x.shape
        q, k, v = self.project(x, rotary)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, G, T_k, d_k), (B, G, T_k, d_v)
            q = q.to(k.dtype)  # the cache may be finer than the weights
        T_k = k.shape[2]
        dropout = c.dropout if self.training else 0.0
        # What `attention` writes out, fused.
        if T == 1:  # a new token, which may look at everything: the heads that share keys are as many queries to them
            y = F.scaled_dot_product_attention(q.reshape(B, c.kv_heads, -1, c.key_dim), k, v, dropout_p=dropout).view(B, c.n_head, 1, -1)
        elif q.dtype == torch.bfloat16 and q.device.type == "cpu" and T == T_k <= SHORT:
            y = short_attention(q, k, v, dropout)
        else:
            # Over a whole sequence the kernel knows the causal mask. It is spelled out for new tokens after
            # cached ones, because the kernel would align it to the first key and not to the last.
            mask = causal_mask(T, T_k, x.device) if T_k > T else None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                               enable_gqa=c.kv_heads != c.n_head, dropout_p=dropout)  # (B, H, T, d_v)
        if cache is not None:
            y = y.to(x.dtype)
        y = y.transpose(1, 2).reshape(B, T, c.n_head * c.value_dim)
        return F.dropout(self.W_O(y), c.dropout, self.training)

    def weights(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """The attention weights (B, H, T, T) that `forward` applies to x (B, T, C), before any dropout, in float32 or finer."""
        q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in self.project(x, rotary))
        with torch.autocast(x.device.type, enabled=False):
            return attention(q, k, v, causal_mask(x.shape[1], x.shape[1], x.device))[1]

    def value_norms(self, x: Tensor) -> Tensor:
        """‖v_j W_O^h‖ of every token j of x (B, T, C) in every head h: (B, H, T), float32 or finer.

        How much a head writes to the residual stream when it looks at a token: times the weight, the value-weighted
        map (Kobayashi et al. 2020, "Attention is Not Only a Weight").
        """
        c = self.config
        v = self.W_V(x).unflatten(-1, (c.kv_heads, c.value_dim)).transpose(1, 2)  # (B, G, T, d_v)
        v = v.to(torch.promote_types(x.dtype, torch.float32))
        v = v.repeat_interleave(c.n_head // c.kv_heads, dim=1)  # (B, H, T, d_v)
        W = self.W_O.weight.to(v.dtype).unflatten(1, (c.n_head, c.value_dim))  # (C, H, d_v)
        gram = torch.einsum("chd,che->hde", W, W)  # ‖W v‖² = vᵀ WᵀW v, with the small d_v in place of C
        return torch.einsum("bhtd,hde,bhte->bht", v, gram, v).clamp(min=0).sqrt()


def activate(kind: str, h: Tensor, gate: Tensor | None = None) -> Tensor:
    """GELU (tanh form), ReLU² (So et al. 2021), or SwiGLU with its gate (Shazeer 2020), of h (…, hidden)."""
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
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
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
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        rotary = rotary_table(config.block_size, config) if config.position == "rope" else None
        self.register_buffer("rotary", rotary, persistent=False)  # (2, T, d_k)
        init_weights(self)

    def num_parameters(self) -> int:
        """Numbers that are trained, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of a training step per token, counted from the structure.

        Forward 2 per weight of a matrix and 2·H·(d_k + d_v) per pair of tokens, half of the pairs being
        masked; backward twice that (Kaplan et al. 2020, Chowdhery et al. 2022).
        """
        c = self.config
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2) + self.head.weight.numel()
        pairs = c.n_layer * c.n_head * (c.key_dim + c.value_dim) * c.block_size // 2
        return 6 * (matrices + pairs)

    def _embed(self, tokens: Tensor, start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Embeddings (B, T, C) of tokens at positions start …, and the rotary angles of those positions."""
        end = start + tokens.shape[1]
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens are more than the model's block_size of {self.config.block_size}")
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start:end]
        if self.config.norm_embedding:
            x = F.rms_norm(x, (self.config.n_embd,))
        rotary = self.rotary[:, start:end] if self.rotary is not None else None
        return F.dropout(x, self.config.dropout, self.training), rotary

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the blocks make of tokens (B, T), before the last norm: (B, T, C). For arguments and errors see `forward`."""
        start = cache.length if cache is not None else 0
        if cache is not None and start + tokens.shape[1] > cache.capacity:
            raise ValueError(f"{start + tokens.shape[1]} tokens are more than the cache's {cache.capacity}")
        x, rotary = self._embed(tokens, start)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, cache, layer)
        if cache is not None:
            cache.length += tokens.shape[1]
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
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def attention_inputs(self, tokens: Tensor) -> Iterator[tuple[SelfAttention, Tensor, Tensor | None]]:
        """Yield each layer's attention with the x (B, T, C) and the rotary angles that it is called with.

        Runs the model in evaluation, as `forward` would, and leaves its mode as it was.
        """
        training = self.training
        self.eval()
        try:
            x, rotary = self._embed(tokens)
            for block, before in zip(self.blocks, (None, *self.blocks)):
                x = before(x, rotary) if before else x
                yield block.attention, block.norm_1(x), rotary
        finally:
            self.train(training)

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Every head's attention weights on tokens (B, T): (n_layer, B, n_head, T, T) float32.

        Computed by the written-out formula from the very inputs that the fused kernel gets.
        """
        return torch.stack([a.weights(x, rotary).float() for a, x, rotary in self.attention_inputs(tokens)])

    def make_cache(self, batch_size: int, length: int | None = None) -> KVCache:
        """An empty cache for `length` tokens (block_size when None) of so many sequences, where the weights are and as fine.

        On a CPU it is float32 at least: a CPU attends in float32 several times faster than in bf16 (LOG.md).
        """
        weight = self.head.weight
        dtype = torch.promote_types(weight.dtype, torch.float32) if weight.device.type == "cpu" else weight.dtype
        return KVCache(self.config, batch_size, length, device=weight.device, dtype=dtype)

    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
                 stop_token: int | None = None, repetition_penalty: float = 1.0) -> Tensor:
        """Continue tokens (B, T) by up to max_new_tokens each: (B, T + new).

        Args:
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p, min_p: see `decoding.next_token_probabilities`.
            seed: same seed, same tokens (row r draws from seed + r); None draws from torch's own state.
            stop_token: a sequence that produced it is filled up with it, and all end when all have.
            repetition_penalty: see `decoding.penalise_repetition`; of the tokens given and made.
        """
        from decoding import stream  # which stands on this module

        seeds = None if seed is None else [seed + row for row in range(len(tokens))]
        new = list(stream(self, tokens, max_new_tokens, seeds, stop_token, repetition_penalty=repetition_penalty,
                          temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
        if stop_token is not None:
            new = [token.masked_fill(token < 0, stop_token) for token in new]
        return torch.cat((tokens, torch.stack(new, dim=1)), dim=1) if new else tokens


def init_weights(model: GPT) -> None:
    """Give every weight its first value (Radford et al. 2019): the logits start near 0, the loss near ln V.

    | weights                                              | distribution             |
    |------------------------------------------------------|--------------------------|
    | token and position embeddings, and the head          | N(0, 0.02²)              |
    | W_Q, W_K, W_V, W_in, W_gate                          | N(0, 0.02²)              |
    | W_O, W_out, which write to the residual stream       | N(0, 0.02² / 2 n_layer)  |
    | biases                                               | 0                        |
    | gains of LayerNorm and RMSNorm                       | 1                        |
    """
    writers = {id(m) for block in model.blocks for m in (block.attention.W_O, block.mlp.W_out)}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02 / math.sqrt(2 * model.config.n_layer) if id(module) in writers else 0.02
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        # LayerNorm and RMSNorm are built with gains of 1 and biases of 0.
