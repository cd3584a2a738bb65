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


def short_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal `attention` of q (B, H, T, d_k) to k and v (B, G, T, …), as a CPU runs it fastest in bf16: (B, H, T, d_v).

    There torch's fused kernel takes 2 to 5 times as long up to a few hundred tokens (LOG.md).
    """
    groups, T = k.shape[1], q.shape[2]
    q = (q / math.sqrt(q.shape[-1])).unflatten(1, (groups, -1)).flatten(2, 3)  # (B, G, H/G · T, d_k)
    scores = (q @ k.transpose(-2, -1)).unflatten(2, (-1, T))  # (B, G, H/G, T, T)
    future = ~causal_mask(T, T, q.device)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    y = weights.to(v.dtype).flatten(2, 3) @ v  # (B, G, H/G · T, d_v)
    return y.unflatten(2, (-1, T)).flatten(1, 2)


def rotary_table(length: int, dim: int, theta: float) -> Tensor:
    """cos and sin of every position's angles, (2, length, dim/2) float32 (Su et al. 2021, RoFormer)."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # (d_k/2)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies  # (T, d_k/2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+d/2}) of queries or keys (B, heads, T, d_k) by their position's angles."""
    cos, sin = rotary.to(x.dtype)  # (T, d_k/2) each
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: what grouped heads make small.

    Its bytes are 2 · n_layer · B · G · length · d for d_k = d_v = d: H/G times fewer than multi-head.
    """

    def __init__(self, config: GPTConfig, batch_size: int, length: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        """Room for `length` tokens (block_size when None) of `batch_size` sequences."""
        shape = (config.n_layer, batch_size, config.kv_heads, length or config.block_size)
        self.keys = torch.zeros(*shape, config.key_dim, device=device, dtype=dtype)  # (L, B, G, T, d_k)
        self.values = torch.zeros(*shape, config.value_dim, device=device, dtype=dtype)  # (L, B, G, T, d_v)
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
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length:end] = k
        self.values[layer, :, :, self.length:end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class SelfAttention(nn.Module):
    """Causal attention of a sequence to itself: multi-head at G = H, grouped-query between, multi-query at G = 1.

    Concat(head_1 … head_H) W_O with head_h = attention(x W_Q^h, x W_K^g, x W_V^g), g the group of h.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        H, G, d_k, d_v, C = config.n_head, config.kv_heads, config.key_dim, config.value_dim, config.n_embd
        self.config = config
        self.W_Q = nn.Linear(C, H * d_k, bias=config.bias)
        self.W_K = nn.Linear(C, G * d_k, bias=config.bias)
        self.W_V = nn.Linear(C, G * d_v, bias=config.bias)
        self.W_O = nn.Linear(H * d_v, C, bias=config.bias)

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
                rotary = rotary_table(T, c.key_dim, c.rope_theta).to(x.device)
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q, k, v

    def forward(self, x: Tensor, rotary: Tensor | None = None,
                cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """The update ΔE (B, T, C) of the embeddings x (B, T, C); with a cache, x follows the tokens held there."""
        c, (B, T, _) = self.config, x.shape
        q, k, v = self.project(x, rotary)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, G, T_k, d_k), (B, G, T_k, d_v)
        T_k = k.shape[2]
        # What `attention` writes out, fused. Three cases: a whole sequence (T = T_k), where the kernel knows the causal
        # mask; one new token (T = 1), which may look at everything; several new tokens after cached ones, whose mask is
        # spelled out, because the kernel would align it to the first key and not to the last.
        mask = causal_mask(T, T_k, x.device) if 1 < T < T_k else None
        dropout = c.dropout if self.training else 0.0
        if q.dtype == torch.bfloat16 and q.device.type == "cpu" and T == T_k <= SHORT and not dropout:
            y = short_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T > 1 and mask is None,
                                               enable_gqa=c.kv_heads != c.n_head, dropout_p=dropout)  # (B, H, T, d_v)
        y = y.transpose(1, 2).reshape(B, T, c.n_head * c.value_dim)
        return F.dropout(self.W_O(y), c.dropout, self.training)

    def weights(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """The attention weights (B, H, T, T) that `forward` applies to x (B, T, C), before any dropout, in float32 or finer."""
        q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in self.project(x, rotary))
        with torch.autocast(x.device.type, enabled=False):
            return attention(q, k, v, causal_mask(x.shape[1], x.shape[1], x.device))[1]


class MLP(nn.Module):
    """Two linear layers with GELU (tanh form), ReLU² (So et al. 2021), or SwiGLU's gate (Shazeer 2020) between."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.W_in = nn.Linear(config.n_embd, config.hidden_dim, bias=config.bias)
        if config.mlp == "swiglu":
            self.W_gate = nn.Linear(config.n_embd, config.hidden_dim, bias=config.bias)
        self.W_out = nn.Linear(config.hidden_dim, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.W_in(x)  # (B, T, hidden)
        if self.config.mlp == "swiglu":
            h = F.silu(self.W_gate(x)) * h
        elif self.config.mlp == "relu2":
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate="tanh")
        return F.dropout(self.W_out(h), self.config.dropout, self.training)  # (B, T, C)


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


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
        rotary = rotary_table(config.block_size, config.key_dim, config.rope_theta) if config.position == "rope" else None
        self.register_buffer("rotary", rotary, persistent=False)  # (2, T, d_k/2)
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
        start = cache.length if cache is not None else 0
        if cache is not None and start + tokens.shape[1] > cache.capacity:
            raise ValueError(f"{start + tokens.shape[1]} tokens are more than the cache's {cache.capacity}")
        x, rotary = self._embed(tokens, start)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, cache, layer)
        if cache is not None:
            cache.length += tokens.shape[1]
        logits = self.head(self.norm(x))  # (B, T, V)
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
            for block in self.blocks:
                yield block.attention, block.norm_1(x), rotary
                x = block(x, rotary)
        finally:
            self.train(training)

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Every head's attention weights on tokens (B, T): (n_layer, B, n_head, T, T) float32.

        Computed by the written-out formula from the very inputs that the fused kernel gets.
        """
        return torch.stack([a.weights(x, rotary).float() for a, x, rotary in self.attention_inputs(tokens)])

    def stream(self, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
               top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
               stop_token: int | None = None, cache: KVCache | None = None) -> Iterator[Tensor]:
        """Yield the next token (B,) of each sequence of tokens (B, T), T at least 1, until the text ends.

        A token is predicted from those since `window_start`. While that start stays, each step feeds one
        token to the cache; when it moves, positions count from the new start and the cache is filled
        again, so that a cached and a full computation see the same tokens at the same positions.

        Args: as `generate`, and a cache to use, with room for block_size tokens; what it holds is forgotten.
        """
        if tokens.shape[1] == 0:
            raise ValueError("generation starts from at least one token")
        device, rows, block = tokens.device, len(tokens), self.config.block_size
        if cache is None:
            cache = KVCache(self.config, rows, device=device, dtype=self.head.weight.dtype)
        cache.length = 0
        # A generator for each sequence: what is drawn for one does not depend on how many are drawn beside it.
        generators = [None if seed is None else torch.Generator(device).manual_seed(seed + row) for row in range(rows)]
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        start = window_start(tokens.shape[1], block)
        fresh = tokens[:, start:]  # the tokens that the cache has not seen
        training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                with torch.no_grad():
                    logits = self(fresh, cache=cache)[0][:, -1]  # (B, V)
                    probabilities = next_token_probabilities(logits.float(), temperature, top_k, top_p, min_p)
                    token = torch.cat([torch.multinomial(p, 1, generator=g)
                                       for p, g in zip(probabilities, generators)])  # (B,)
                if stop_token is not None:
                    token = token.masked_fill(ended, stop_token)
                    ended = ended | (token == stop_token)
                yield token
                if ended.all():
                    return
                tokens = torch.cat((tokens, token[:, None]), dim=1)
                moved = window_start(tokens.shape[1], block)
                if moved == start:
                    fresh = token[:, None]
                else:
                    start, cache.length, fresh = moved, 0, tokens[:, moved:]
        finally:
            self.train(training)

    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
                 stop_token: int | None = None) -> Tensor:
        """Continue tokens (B, T) by up to max_new_tokens each: (B, T + new).

        Args:
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p, min_p: see `next_token_probabilities`.
            seed: same seed, same tokens (row r draws from seed + r); None draws from torch's own state.
            stop_token: a sequence that produced it is filled up with it, and all end when all have.
        """
        new = list(self.stream(tokens, max_new_tokens, temperature, top_k, top_p, min_p, seed, stop_token))
        return torch.cat((tokens, torch.stack(new, dim=1)), dim=1) if new else tokens


def window_start(length: int, block_size: int) -> int:
    """The first token that a prediction after `length` tokens sees; it sees all up to the last.

    0 while they fit the block. Beyond, the window moves a quarter block at a time rather than by one:
    every move changes all positions and so empties the KV cache, and this way that happens once in
    block_size/4 tokens, with never fewer than 3/4 of the block in sight. A pure function of the length,
    whatever part of it was a prompt.
    """
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def next_token_probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None,
                             top_p: float | None = None, min_p: float | None = None) -> Tensor:
    """Probabilities (B, V) to draw the next token from, given logits (B, V). The likeliest is never removed.

    In this order: divide by the temperature (0: all on the likeliest); keep the top_k likeliest (Fan et al.
    2018); the fewest whose probabilities sum to top_p (Holtzman et al. 2020); those with at least min_p
    times the highest probability (Nguyen et al. 2024).

    Raises:
        ValueError: temperature is below 0, top_k below 1, top_p not in (0, 1], or min_p not in [0, 1].
    """
    if not (temperature >= 0 and (top_k is None or top_k >= 1) and (top_p is None or 0 < top_p <= 1) and (min_p is None or 0 <= min_p <= 1)):
        raise ValueError(f"temperature={temperature}, top_k={top_k}, top_p={top_p}, min_p={min_p}: one is out of its bounds")
    if temperature < torch.finfo(torch.float32).tiny:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    logits = logits - logits.max(dim=-1, keepdim=True).values  # a tiny temperature then cannot overflow upwards
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept.indices, kept.values)
    if top_p is not None and top_p < 1:
        ordered, index = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        enough = ordered.cumsum(dim=-1) - ordered >= top_p  # the sum before a token already reaches top_p
        logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, index, enough), -math.inf)
    probabilities = logits.softmax(dim=-1)
    if min_p is not None:
        low = probabilities < min_p * probabilities.max(dim=-1, keepdim=True).values
        probabilities = probabilities.masked_fill(low, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


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
