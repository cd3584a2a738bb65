"""The transformer: attention as the documents define it, the block, GPT. Shapes are written with
the documents' letters (docs/attention.md): B batch, T tokens, C channels, H query heads, G
key/value heads, d_k the size of a query or key, d_v the size of a value, V the vocabulary."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from common.errors import UserError
from config import GPTConfig
from decoding import generate
from kernels import KVCache

# Llama 3 stretches wavelengths that make at most so many turns in rope_trained tokens whole, and
# those that make at least so many not at all.
ROPE_LOW, ROPE_HIGH = 1.0, 4.0

# What looks inside a forward pass, or changes it: name → function(layer, value) → value. The names
# are embedding, q, k, v, weights (attention is then written out), heads (what each head gathered,
# before W_O), attention and mlp (what they add), and residual (after the block).
Taps = dict[str, Callable[[int, Tensor], Tensor]]


def tap(taps: Taps | None, name: str, module: nn.Module, value: Tensor) -> Tensor:
    """The value, or what a tap of this name makes of it in the layer of the module."""
    return taps[name](module.layer, value) if taps and name in taps else value


def store(values: list[Tensor], layer: int, value: Tensor) -> Tensor:
    """A tap, once it has a list, that stores the value of each layer there."""
    values.append(value)
    return value


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ · scale + M) V, written out: the fused kernel's reference; maps are made of it.

    Args:
        q: queries (…, T_q, d_k), or (…, H, T_q, d_k) with heads.
        k: keys (…, T_k, d_k); with grouped heads (…, G, T_k, d_k), H a multiple of G: the first H/G
            query heads share key/value head 0, the next H/G head 1, …
        v: values (…, T_k, d_v), grouped like the keys. Queries may come from another sequence
            than keys and values, and d_v may differ from d_k.
        mask: broadcast to (…, T_q, T_k); boolean (True: may attend) or added to the scores
            (-inf: may not). A query that may attend to nothing gets zero weights and output.
        scale: 1/√d_k when None (Vaswani et al. 2017); 1.0 leaves the products as they are.

    Returns:
        output (…, T_q, d_v) and weights (…, T_q, T_k), whose rows sum to 1, in the dtype given."""
    weights = attention_weights(q, k, mask, scale)
    return weights @ for_each_head(v, q), weights


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The weights (…, T_q, T_k) of `attention`."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ for_each_head(k, q).transpose(-2, -1) * scale  # (…, T_q, T_k)
    if mask is None:
        return scores.softmax(dim=-1)
    boolean = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if boolean else scores + mask.to(scores.dtype)
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    # Softmax over nothing is 0/0 (a caller's mask may leave a row nothing). Such rows pass
    # through it as zeros, so that their gradient is 0 and not NaN.
    return scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)


def for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values x (…, G, T_k, d) once for each of the heads of q (…, H, T_q, d_k)."""
    if q.dim() < 3 or x.dim() < 3 or q.shape[-3] == x.shape[-3]:
        return x
    heads, groups = q.shape[-3], x.shape[-3]
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads are not a multiple of {groups} key/value heads")
    return x.repeat_interleave(heads // groups, dim=-3)  # (…, H, T_k, d)


def causal_mask(T_q: int, T_k: int, device: torch.device | None = None) -> Tensor:
    """Boolean (T_q, T_k), True where a query may attend: to no later key. The last query stands at
    the last key, so T_q < T_k is decoding with T_k - T_q cached tokens."""
    return torch.ones(T_q, T_k, dtype=torch.bool, device=device).tril(diagonal=T_k - T_q)


def rotary_frequencies(config: GPTConfig) -> Tensor:
    """Radians that each pair of numbers turns by from one position to the next, (d_k/2) float32.
    Wavelengths are stretched by `rope_factor`: all of them (Chen et al. 2023), or, where
    `rope_trained` is given, the more the fewer turns they make in so many tokens (Llama 3.1)."""
    c = config
    exponents = torch.arange(0, c.key_dim, 2, dtype=torch.float32) / c.key_dim  # (d_k/2)
    if c.rope_factor == 1:
        return c.rope_theta**-exponents
    # Rounded as where such models were trained: far tokens turn by much of a last bit.
    frequencies = 1 / c.rope_theta**exponents
    turns = (c.rope_trained or 0) / (2 * math.pi / frequencies)
    kept = ((turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)).clamp(0, 1)
    return (1 - kept) * frequencies / c.rope_factor + kept * frequencies


def rotary_table(length: int, config: GPTConfig) -> Tensor:
    """cos and sin of every position's angles, (2, length, d_k) float32 (Su et al. 2021): the same
    d_k/2 angles twice, the first half of the sines negated, for `rotate`."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * rotary_frequencies(config)  # (T, d_k/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return kernels.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.has_bias("norm"))


class NGrams(nn.Module):
    """A row of a table for each of the last 2 … n tokens, summed (Huang et al. 2025,
    "Over-Tokenized Transformer"; without a hash, of the n-grams that the training text has often).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n, self.vocab_size = config.ngrams, config.vocab_size
        self.register_buffer("keys", torch.zeros(config.ngram_rows, dtype=torch.int64))  # a trie
        # Of each length a row for what is rare and one where the text begins later, then the keys'.
        self.special = 2 * (self.n - 1)
        self.rest = config.n_embd - config.ngram_dim  # channels to which nothing is added
        self.table = nn.Parameter(torch.zeros(self.special + config.ngram_rows, config.ngram_dim))
        self.sparse = False  # whether its gradient has the rows that were used alone

    def rows(self, tokens: Tensor) -> Tensor:
        """The rows (B, T, n - 1) of what ends at tokens (B, n - 1 + T), after the first n - 1; an
        id of -1 is of no token. The keys are `data.ngrams.count_ngrams`'s."""
        found, T, parents = [], tokens.shape[1] - self.n + 1, tokens
        absent = tokens < 0
        for shorter in range(self.n - 1):
            tokens, absent = tokens[:, 1:], absent[:, :-1] | (tokens[:, 1:] < 0)
            key = (parents[:, :-1] * self.vocab_size + tokens).masked_fill(absent, -1)
            at = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
            common = self.keys[at] == key
            parents = torch.where(common, self.vocab_size + at, -1)
            row = torch.where(common, self.special + at, 2 * shorter + absent)
            found.append(row[:, -T:])
        return torch.stack(found, dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """What is added to the embeddings (B, T, C) of tokens (B, n - 1 + T), after the first."""
        rows = self.rows(tokens)  # (B, T, n - 1)
        x = F.embedding_bag(rows.flatten(0, 1), self.table, mode="sum", sparse=self.sparse)
        return F.pad(x.view(*rows.shape[:2], -1), (0, self.rest))


class SelfAttention(nn.Module):
    """Causal attention of a sequence to itself: multi-head at G = H, multi-query at G = 1.
    Concat(head_1 … head_H) W_O, head_h = attention(x W_Q^h, x W_K^g, x W_V^g), g the group of h."""

    def __init__(self, config: GPTConfig, layer: int = 0):
        super().__init__()
        H, G, C = config.n_head, config.kv_heads, config.n_embd
        d_k, d_v = config.key_dim, config.value_dim
        self.config, self.layer = config, layer
        self.W_Q = nn.Linear(C, H * d_k, bias=config.has_bias("qkv"))
        self.W_K = nn.Linear(C, G * d_k, bias=config.has_bias("qkv"))
        self.W_V = nn.Linear(C, G * d_v, bias=config.has_bias("qkv"))
        self.W_O = nn.Linear(H * d_v, C, bias=config.has_bias("output"))
        if config.qk_norm:
            gains = config.qk_norm == "gains"
            make = partial(kernels.RMSNorm, d_k, config.norm_eps if gains else None, gains)
            self.norm_q, self.norm_k = make(), make()

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """W_Q, W_K, W_V in one matrix ((H + G) d_k + G d_v, C), for one product; their biases."""
        parts = (self.W_Q, self.W_K, self.W_V)
        weight = torch.cat([part.weight for part in parts])
        return weight, None if parts[0].bias is None else torch.cat([part.bias for part in parts])

    def gains(self) -> Tensor | None:
        """What each head's queries and keys are multiplied by, (H + G, d_k)."""
        c = self.config
        if c.qk_norm != "gains":
            return None
        return torch.cat(
            (self.norm_q.weight.expand(c.n_head, -1), self.norm_k.weight.expand(c.kv_heads, -1))
        )

    def project(self, x: Tensor, rotary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, d_k), keys (B, G, T, d_k) and values (B, G, T, d_v) of x (B, T, C)."""
        c, T = self.config, x.shape[1]
        H, G, d_k, d_v = c.n_head, c.kv_heads, c.key_dim, c.value_dim
        qk, v = F.linear(x, *self.joined()).split(((H + G) * d_k, G * d_v), dim=-1)  # (B, T, …)
        qk, v = qk.unflatten(-1, (H + G, d_k)), v.unflatten(-1, (G, d_v))
        dtype = qk.dtype
        if c.qk_norm or c.position == "rope":  # in float32, which a CPU does faster than bf16
            qk = qk.to(torch.promote_types(dtype, torch.float32))
        if c.qk_norm:
            qk = kernels.rms_norm(qk, self.gains(), self.norm_q.eps)
        if c.position == "rope":
            if rotary is None:  # used on its own, outside a GPT
                rotary = rotary_table(T, c).to(x.device)
            qk = kernels.rotate(qk, rotary[:, :, None])
        q, k = (part.transpose(1, 2) for part in qk.split((H, G), dim=2))
        if q.dtype != dtype:
            q, k = (part.to(dtype, memory_format=torch.contiguous_format) for part in (q, k))
        return q, k, v.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """The update ΔE (B, T, C) of the embeddings x (B, T, C), which follow a cache's tokens;
        mask (…, T, T_k) as of `attention`, causal where None."""
        q, k, v = self.project(x, rotary)
        q, k, v = (tap(taps, name, self, part) for name, part in zip("qkv", (q, k, v)))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, G, T_k, d_k), (B, G, T_k, d_v)
            q = q.to(k.dtype)  # the cache may be finer than the weights
        if mask is None and 1 < q.shape[2] < k.shape[2]:  # the kernel aligns it to the first key
            mask = causal_mask(q.shape[2], k.shape[2], x.device)
        dropout = self.config.dropout if self.training else 0.0
        if taps and "weights" in taps:
            y = self.written_out(q, k, v, mask, taps)
        else:
            y = kernels.fused_attention(q, k, v, mask, dropout)
        y = y.transpose(1, 2).to(x.dtype)  # (B, T, H, d_v)
        y = tap(taps, "heads", self, y).flatten(2)
        return F.dropout(self.W_O(y), self.config.dropout, self.training)

    def written_out(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, taps: Taps
    ) -> Tensor:
        """`attention` (B, H, T, d_v) in float32 or finer, its weights (B, H, T, T_k) tapped."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
            mask = causal_mask(q.shape[2], k.shape[2], q.device) if mask is None else mask
            weights = tap(taps, "weights", self, attention_weights(q, k, mask))
            return weights @ for_each_head(v, q)


class MLP(nn.Module):
    """Two linear layers with a non-linearity between."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.W_in = nn.Linear(config.n_embd, config.hidden_dim, bias=config.has_bias("mlp"))
        if config.mlp == "swiglu":
            self.W_gate = nn.Linear(config.n_embd, config.hidden_dim, bias=config.has_bias("mlp"))
        self.W_out = nn.Linear(config.hidden_dim, config.n_embd, bias=config.has_bias("mlp"))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.W_gate(x) if self.config.mlp == "swiglu" else None
        h = kernels.activate(self.config.mlp, self.W_in(x), gate)  # (B, T, hidden)
        return F.dropout(self.W_out(h), self.config.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """E' = E + ΔE, by attention and then by the MLP, each reading a normalised E."""

    def __init__(self, config: GPTConfig, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.norm_1 = make_norm(config)
        self.attention = SelfAttention(config, layer)
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        added = self.attention(self.norm_1(x), rotary, cache, mask, taps)  # (B, T, C)
        x = x + tap(taps, "attention", self, added)
        x = x + tap(taps, "mlp", self, self.mlp(self.norm_2(x)))  # (B, T, C)
        return tap(taps, "residual", self, x)


class GPT(nn.Module):
    """A decoder-only transformer; `generate` is `decoding.generate`."""

    generate = generate

    def __init__(self, config: GPTConfig):
        super().__init__()
        config.check()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set: give the tokenizer's")
        if config.ngrams > 1 and config.ngram_rows is None:
            raise UserError("model.ngram_rows is not set: give the number of n-grams")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        learned, T = config.position == "learned", config.block_size
        self.position_embedding = nn.Embedding(T, config.n_embd) if learned else None
        self.ngrams = NGrams(config) if config.ngrams > 1 else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        rotary = None if learned else rotary_table(T, config)
        self.register_buffer("rotary", rotary, persistent=False)  # (2, T, d_k)
        if not self.head.weight.is_meta:  # which has no values
            init_weights(self)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())  # tied ones once

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it: the parameters, tied ones once, and the n-grams' keys."""
        keys = {} if self.ngrams is None else {"ngrams.keys": self.ngrams.keys}
        return dict(self.named_parameters()) | keys

    def embed(self, tokens: Tensor, start: int = 0, context: Tensor | None = None) -> Tensor:
        """Embeddings (B, T, C) of tokens (B, T) at positions start, start + 1, … Their n-grams are
        of the context (B, n - 1 + T), these and n - 1 before, -1 for none; of these alone if None.
        """
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start : start + tokens.shape[1]]
        if self.ngrams is not None:
            if context is None:
                context = F.pad(tokens, (self.config.ngrams - 1, 0), value=-1)
            x = x + self.ngrams(context)
        if self.config.norm_embedding:
            x = kernels.rms_norm(x)
        return F.dropout(x, self.config.dropout, self.training)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Taps | None = None,
        entry: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """What the blocks make of tokens (B, T), before the last norm: (B, T, C). A cache holds the
        tokens before these, and takes these in. The mask (…, T, T_k) is that of `attention` in all
        layers, causal where None. `entry` is a layer to begin with and the x (B, T, C) that it is
        given; what is below is not computed."""
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        room = min(self.config.block_size, end if cache is None else cache.capacity)
        if end > room:
            raise ValueError(f"{end} tokens are more than the {room} that there is room for")
        rotary = self.rotary[:, start:end] if self.rotary is not None else None
        context = cache.take(tokens) if self.ngrams is not None and cache is not None else None
        first, x = entry or (
            0,
            tap(taps, "embedding", self.blocks[0], self.embed(tokens, start, context)),
        )
        for block in [*self.blocks][first:]:
            x = block(x, rotary, cache, mask, taps)
        if cache is not None:
            cache.length = end
        return x

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, V) of every next token, and the mean loss in nats per token where targets
        (B, T) are given, the ids of the tokens that follow; -1 is left out of the mean. tokens
        (B, T) are at most block_size, less what the cache holds."""
        logits = self.head(self.norm(self.hidden(tokens, cache)))  # (B, T, V)
        if targets is None:
            return logits, None
        return logits, kernels.cross_entropy(logits.flatten(0, 1), targets.flatten())

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
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Every head's attention weights on tokens (B, T): (n_layer, B, n_head, T, T) float32."""
        maps = []
        with self.evaluating():
            self.hidden(tokens, taps={"weights": partial(store, maps)})
        return torch.stack(maps).float()

    def make_cache(self, batch_size: int, length: int | None = None) -> KVCache:
        """An empty cache for `length` tokens (block_size when None, and at most), where the weights
        are and as fine; on a CPU float32 at least, in which it attends far faster (LOG.md)."""
        weight, block = self.token_embedding.weight, self.config.block_size
        finest = torch.float32 if weight.device.type == "cpu" else weight.dtype
        return KVCache(
            self.config,
            batch_size,
            min(block, length or block),
            weight.device,
            torch.promote_types(weight.dtype, finest),
        )

    def make_decoder(self, batch_size: int, length: int | None = None) -> kernels.Decoder:
        return kernels.Decoder(self, self.make_cache(batch_size, length))


def autocast(device: str, precision: str) -> torch.autocast:
    """The context in which a forward pass runs at this precision, fp32 or bf16."""
    return torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=precision == "bf16")


def init_weights(model: GPT) -> None:
    """Give every weight its first value (Radford et al. 2019): the loss starts near ln V. Matrices
    are drawn from N(0, 0.02²), those that write to the residual stream (W_O, W_out) from N(0, 0.02²
    / 2 n_layer). Biases are 0, gains 1."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            writes = name.endswith(("W_O", "W_out"))
            std = 0.02 / math.sqrt(2 * model.config.n_layer) if writes else 0.02
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
