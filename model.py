"""The transformer: attention layer, MLP, block and GPT.

Shapes are written with these letters, as in attention.py: B batch, T tokens, C channels of the
residual stream, H query heads, G key/value heads, d_k the size of a query or key, d_v the size of a
value, V the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
import layers
from attention import attention as attention  # for notebooks
from attention import (
    attention_weights,
    causal_mask,
    fused_attention,
    repeat_groups,
    rotary_table,
    shift_keys,
)
from common.errors import UserError, not_one_of
from config import GPTConfig
from generation.decoder import Decoder, KVCache
from generation.sampling import generate
from initial_weights import init_weights
from ngrams import NGramEmbedding
from taps import TAP_NAMES, Taps, tap

SMEAR_START = 2.0  # a key's own share in its smeared key begins at σ(2) = 88%
# Sink logits are this times their parameters, so that they grow as fast as queries × keys.
SINK_SCALE = 10.0
ROTARY_LENGTH = 16384  # positions in a new model's rotary table, which grows when more are needed


class SelfAttention(nn.Module):
    """Causal self-attention: Concat(head_1 … head_H) W_O.

    head_h = attention(x W_Q^h, x W_K^g, x W_V^g), where g is the key/value head that query head h
    shares. G = H is multi-head attention, G = 1 multi-query attention, G between them grouped-query
    attention.

    Reference: Vaswani et al. 2017; Shazeer 2019 (multi-query); Ainslie et al. 2023 (grouped-query).
    """

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
        self.sink = nn.Parameter(torch.zeros(H)) if config.attention_sink else None
        self.smear = nn.Parameter(torch.full((G,), SMEAR_START)) if config.smear_keys else None
        self.W_gate = nn.Linear(C, config.gate_dim) if config.gate_dim else None

    def join_projections(self) -> layers.Projection:
        """Concatenate W_Q, W_K and W_V into one matrix, and their QK-norm gains into one vector."""
        c, parts = self.config, (self.W_Q, self.W_K, self.W_V)
        gains = None
        if c.qk_norm == "gains":
            gains_q = self.norm_q.weight.expand(c.n_head, -1)  # (H, d_k)
            gains_k = self.norm_k.weight.expand(c.kv_heads, -1)  # (G, d_k)
            gains = torch.cat((gains_q, gains_k))
        bias = torch.cat([part.bias for part in parts]) if c.has_bias("qkv") else None
        matrix = torch.cat([part.weight for part in parts])
        return layers.Projection(c, matrix, bias, gains, self.smear)

    def sink_logits(self) -> Tensor | None:
        """Return the sink logits (H, 1, 1) of the heads, None without sinks."""
        return None if self.sink is None else SINK_SCALE * self.sink[:, None, None]

    def project(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, H, T, d_k), keys (B, G, T, d_k) and values (B, G, T, d_v).

        `x` (B, T, C) is the normalized residual stream. `rotary` (2, T, d_k) is the table that
        `GPT.rotary_at` returns for the positions of `x`. `cache` and `mask` are those of `forward`:
        smeared keys read the key of the token before, if its query may attend to that token.
        """
        if rotary is not None:
            rotary = rotary[:, :, None]  # (2, T, 1, d_k)
        # In float32, a CPU normalizes and rotates faster than in bf16.
        dtype = torch.promote_types(x.dtype, torch.float32)
        previous = partial(self._previous_keys, cache=cache, mask=mask)
        q, k, v = layers.project(x, self.join_projections(), rotary, dtype, previous)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, d)
        if q.dtype != v.dtype:
            q = q.to(v.dtype, memory_format=torch.contiguous_format)
            k = k.to(v.dtype, memory_format=torch.contiguous_format)
        return q, k, v

    def _previous_keys(self, k: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        """Return the key before each of k (B, T, G, d_k); 0 if there is none, or it is masked."""
        if cache is None:
            return shift_keys(k, torch.zeros_like(k[:, 0]), mask)
        return shift_keys(k, cache.replace_last_key(self.layer, k[:, -1]), mask)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Compute the update ΔE (B, T, C) of the residual stream.

        Args:
            x: Normalized residual stream (B, T, C).
            rotary: As in `project`.
            cache: Keys and values of the tokens before, to which those of x are added.
            mask: (…, T, T_k), as in `attention.attention`; None: causal.
            taps: Functions that record or replace values.
        """
        q, k, v = self.project(x, rotary, cache, mask)
        q = tap(taps, "q", self.layer, q)
        k = tap(taps, "k", self.layer, k)
        v = tap(taps, "v", self.layer, v)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, G, T_k, d_k), (B, G, T_k, d_v)
            q = q.to(k.dtype)  # the cache may be more precise than the weights
        T, T_k = q.shape[2], k.shape[2]
        if mask is None and 1 < T < T_k:  # the fused kernel would align it to the first key
            mask = causal_mask(T, T_k, x.device)
        if taps and ("weights", self.layer) in taps:
            y = self._written_out_attention(q, k, v, mask, taps)
        else:
            dropout = self.config.dropout if self.training else 0.0
            y = fused_attention(q, k, v, mask, dropout, self.sink_logits())
        y = y.transpose(1, 2).to(x.dtype)  # (B, T, H, d_v)
        if self.W_gate is not None:
            y = y * layers.head_gates(x, self.W_gate, self.config.n_head)
        y = tap(taps, "heads", self.layer, y).flatten(2)  # (B, T, H · d_v)
        return F.dropout(self.W_O(y), self.config.dropout, self.training)  # (B, T, C)

    def _written_out_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, taps: Taps
    ) -> Tensor:
        """Compute attention (B, H, T, d_v) in float32 or finer, with its weights tapped."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
            if mask is None:
                mask = causal_mask(q.shape[2], k.shape[2], q.device)
            weights = attention_weights(q, k, mask, sink=self.sink_logits())  # (B, H, T, T_k)
            return tap(taps, "weights", self.layer, weights) @ repeat_groups(v, q)


class MLP(nn.Module):
    """Two linear layers with a non-linearity between them, or SwiGLU with three."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.mlp not in layers.MLPS:
            raise UserError(not_one_of("model.mlp", config.mlp, layers.MLPS))
        C, hidden, bias = config.n_embd, config.hidden_dim, config.has_bias("mlp")
        self.config = config
        self.W_in = nn.Linear(C, hidden, bias=bias)
        self.W_gate = nn.Linear(C, hidden, bias=bias) if config.mlp == "swiglu" else None
        self.W_out = nn.Linear(hidden, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the update ΔE (B, T, C) of the residual stream from x (B, T, C)."""
        y = layers.feed_forward(x, self.config.mlp, self.W_in, self.W_gate, self.W_out)
        return F.dropout(y, self.config.dropout, self.training)


class Block(nn.Module):
    """A transformer block: attention, then the MLP if there is one, each with a norm before it."""

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.norm_1 = kernels.make_norm(config)
        self.attention = SelfAttention(config, layer)
        has_mlp = config.mlp != "none"
        self.norm_2 = kernels.make_norm(config) if has_mlp else None
        self.mlp = MLP(config) if has_mlp else None

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Return the residual stream (B, T, C) after the block, for x (B, T, C) before it.

        The other arguments are those of `SelfAttention.forward`.
        """

        def attention_update(x: Tensor) -> Tensor:
            return tap(taps, "attention", self.layer, self.attention(x, rotary, cache, mask, taps))

        mlp = self.mlp
        mlp_update = None if mlp is None else lambda x: tap(taps, "mlp", self.layer, mlp(x))
        x = layers.transformer_block(x, self.norm_1, attention_update, self.norm_2, mlp_update)
        return tap(taps, "residual", self.layer, x)


class GPT(nn.Module):
    """A decoder-only transformer.

    Reference: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    generate = generate
    checkpoint_activations = False  # True: training computes each block again in its backward pass
    rotary: Tensor | None  # (2, positions, d_k) in float32; None unless positions are rotary

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        config.check()
        if config.vocab_size is None:
            raise UserError(
                "model.vocab_size is not set: set it to the vocabulary size of the tokenizer"
            )
        self.config = config
        T, C, V = config.block_size, config.n_embd, config.vocab_size
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = None if config.is_rotary else nn.Embedding(T, C)
        self.ngrams = NGramEmbedding(config) if config.ngrams > 1 else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = kernels.make_norm(config)
        self.token_count = V  # loading a model lowers it to the number of its tokenizer's tokens
        self.head = nn.Linear(C, V, bias=False)
        if config.tie_embeddings:  # Press & Wolf 2017
            self.head.weight = self.token_embedding.weight
        self.register_buffer("rotary", None, persistent=False)
        self.compute_rotary()
        if not self.head.weight.is_meta:  # a meta tensor has no values
            init_weights(self)

    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: the parameters, tied ones once, and the n-grams' keys."""
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        if self.ngrams is not None:
            tensors["ngrams.keys"] = self.ngrams.keys
        return tensors

    def assign(self, tensors: dict[str, Tensor]) -> None:
        """Use tensors, with the names that `tensors` gives them, as parameters without a copy."""
        self.load_state_dict(tensors, strict=False, assign=True)
        if self.config.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def compute_rotary(self, device: torch.device | None = None) -> None:
        """Compute the start of the rotary table in float32, if positions are rotary."""
        if self.config.is_rotary:
            length = min(ROTARY_LENGTH, self.config.block_size)
            self.rotary = rotary_table(length, self.config).to(device)

    def rotary_at(self, start: int, end: int) -> Tensor | None:
        """Return the rotary table (2, T, d_k) of positions start … end - 1, None if not rotary."""
        if self.rotary is None:
            return None
        if end > self.rotary.shape[1]:
            length = min(2 * end, self.config.block_size)
            with torch.inference_mode(False):  # training may use the table later
                self.rotary = rotary_table(length, self.config).to(self.rotary)
        return self.rotary[:, start:end]

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
            cache: Holds the tokens before these, and takes these in.
            mask: Mask (…, T, T_k) of all layers, as in `attention.attention`; None: causal.
            taps: Functions that record or replace values.
            entry: A layer and its input (B, T, C): blocks below this layer are not run.
        """
        start, capacity = 0, self.config.block_size
        if cache is not None:
            start, capacity = cache.length, min(capacity, cache.capacity)
        end = start + tokens.shape[1]
        if end > capacity:
            raise ValueError(f"{end} tokens do not fit the context or cache of {capacity} tokens")
        if entry is None:
            x = self.embed(tokens, None if cache is None else cache.previous_tokens)
            x = F.dropout(x, self.config.dropout, self.training)  # (B, T, C)
            entry = 0, tap(taps, "embedding", 0, x)
        first_layer, x = entry
        rotary = self.rotary_at(start, end)
        blocks = list(self.blocks)[first_layer:]
        if self.checkpoint_activations and self.training and not taps:
            blocks = [layers.recomputed(block, self.config.dropout > 0) for block in blocks]
        for block in blocks:
            x = block(x, rotary, cache, mask, taps)
        if cache is not None:
            cache.advance(tokens)
        return x

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits of every next token, and their loss.

        Args:
            tokens: Ids (B, T); with those in the cache, at most block_size tokens.
            targets: Ids (B, T) of the tokens that follow; -1 is left out of the loss.
            cache: As in `run_blocks`.

        Returns:
            Logits (B, T, V), and the mean loss in nats per token, or None without targets. With
            targets, gradients flow through the loss alone.
        """
        return self.predict(self.run_blocks(tokens, cache), targets)

    def predict(self, x: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute what `forward` returns from the residual stream (B, T, C) after the blocks."""
        x = self.norm(x)
        V, padding = self.config.vocab_size, self.config.vocab_padding
        if padding:
            logits = layers.padded_logits(x, self.head.weight, padding)  # (B, T, V + padding)
        else:
            logits = self.head(x)  # (B, T, V)
        loss = None
        if targets is not None:
            loss = kernels.cross_entropy(logits.flatten(0, 1), targets.flatten())
            logits = logits.detach()  # compiled code would add zeros of their size to the gradient
        return logits[..., :V] if padding else logits, loss

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
            ValueError: If a name or layer does not exist, or a replacement has another shape.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise ValueError("tokens must be (B, T), as in torch.tensor([tokenizer.encode(text)])")
        if unknown := taps.keys() - set(self._tap_keys(TAP_NAMES)):
            names = dict.fromkeys(name for name, _ in self._tap_keys(TAP_NAMES))
            raise ValueError(
                f"there is no value {unknown.pop()!r} to tap; use (name, layer), with a name of "
                f"{', '.join(names)} and a layer from 0 to {self.config.n_layer - 1} "
                "(embedding: 0 only)"
            )
        with self.evaluating():
            return self.head(self.norm(self.run_blocks(tokens, taps=taps)))

    def run_with_cache(
        self, tokens: Tensor, *names: str
    ) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        """Compute the logits (B, T, V) of tokens (B, T), and return them with a pass's values.

        The values are by (name, layer); `names` are some of `TAP_NAMES`, or none for all.
        """
        values: dict[tuple[str, int], Tensor] = {}
        keys = self._tap_keys(names or TAP_NAMES)
        logits = self.run_with_taps(tokens, {key: partial(values.__setitem__, key) for key in keys})
        return logits, values

    def _tap_keys(self, names: tuple[str, ...]) -> list[tuple[str, int]]:
        """Return the (name, layer) of every value with one of these names."""
        layers = {"embedding": 1, "mlp": 0 if self.config.mlp == "none" else self.config.n_layer}
        counts = [(name, layers.get(name, self.config.n_layer)) for name in names]
        return [(name, layer) for name, count in counts for layer in range(count)]

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Return the attention weights (n_layer, B, H, T, T) of tokens (B, T) in float32."""
        maps: list[Tensor] = []
        taps: Taps = {("weights", layer): maps.append for layer in range(self.config.n_layer)}
        with self.evaluating():
            self.run_blocks(tokens, taps=taps)
        return torch.stack(maps).float()

    def make_cache(self, batch_size: int, length: int | None = None) -> KVCache:
        """Allocate an empty cache on the device of the weights and in their precision.

        On a CPU it is float32 at least, in which attention is much faster than in bf16 (LOG.md).
        `length` is its capacity in tokens, cut to block_size; None: block_size.
        """
        weight, block_size = self.token_embedding.weight, self.config.block_size
        dtype = weight.dtype
        if weight.device.type == "cpu":
            dtype = torch.promote_types(dtype, torch.float32)
        capacity = min(block_size, length or block_size)
        return KVCache(self.config, batch_size, capacity, weight.device, dtype)

    def make_decoder(self, batch_size: int, length: int | None = None) -> Decoder:
        """Return a decoder with an empty cache; the arguments are those of `make_cache`."""
        return Decoder(self, self.make_cache(batch_size, length))
