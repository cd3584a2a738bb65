"""Optional parts of a model: sink logits, gates, smeared keys and n-gram embeddings.

The plain model (model.py) knows none of them. Models with these kinds of attention decode through
`GPT.run_blocks`, not in the fewer calls of `generation.decoder`.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from common.errors import UserError
from common.text import pluralize
from config import GPTConfig, ModelConfig
from model import GPT, Context, SelfAttention, attention_weights, causal_mask, rotate

SMEAR_START = 2.0  # a key's own share in its smeared key begins at σ(2) = 88%
# Sink logits are this times their parameters, so that they grow as fast as queries × keys.
SINK_SCALE = 10.0
NO_NGRAM = -1  # key or number of an n-gram that has no row of its own
MAX_COUNTED_TOKENS = 1 << 25  # of the training split's beginning; a limit to the memory


def build_model(config: GPTConfig) -> GPT:
    """Build the model of a configuration, with random weights."""
    ngrams = NGramEmbedding(config) if config.ngrams > 1 else None
    attention = VariantAttention if config.has_variant_attention else SelfAttention
    return GPT(config, attention, ngrams)


# --- Attention ------------------------------------------------------------------------------------


class VariantAttention(SelfAttention):
    """Attention with sink logits, smeared keys or gates.

    Reference: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", and
    gpt-oss (sink logits); Olsson et al. 2022, "In-context Learning and Induction Heads" (smeared
    keys); Qiu et al. 2025, "Gated Attention for Large Language Models".
    """

    is_plain = False

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        H, G, C = config.n_head, config.kv_heads, config.n_embd
        self.sink = nn.Parameter(torch.zeros(H)) if config.attention_sink else None
        self.smear = nn.Parameter(torch.full((G,), SMEAR_START)) if config.smear_keys else None
        self.W_gate = nn.Linear(C, config.gate_dim) if config.gate_dim else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Compute the update ΔE (B, T, C) of the residual stream, as `SelfAttention.forward`.

        Raises:
            UserError: Keys are smeared, and the first one needs a key that the cache lacks.
        """
        if self.smear is not None and context.cache is not None and context.cache.length:
            raise UserError(
                "a model with model.smear_keys=true cannot continue from cached keys, as patching "
                "does: run whole texts"
            )
        q, k, v = self.project(x, context.rotary)
        y = self.attend(q, k, v, context).to(x.dtype)  # (B, T, H, d_v)
        if self.W_gate is not None:
            y = y * self.gates(x)
        y = context.tap("heads", self.layer, y).flatten(2)  # (B, T, H · d_v)
        return F.dropout(self.W_O(y), self.config.dropout, self.training)  # (B, T, C)

    def project(self, x: Tensor, rotary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values as `SelfAttention.project` does, and smear the keys.

        Each key is mixed with that of the token before, 0 for the first, and then rotated.
        """
        if self.smear is None:
            return super().project(x, rotary)
        q, k, v = super().project(x)
        own_share = self.smear.sigmoid()[:, None, None].to(k.dtype)  # (G, 1, 1)
        k = own_share * k + (1 - own_share) * F.pad(k[:, :, :-1], (0, 0, 1, 0))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q, k, v

    def gates(self, x: Tensor) -> Tensor:
        """Compute the factors (B, T, H, 1 or d_v) of the heads' outputs from the normalized x."""
        assert self.W_gate is not None
        return self.W_gate(x).sigmoid().unflatten(-1, (self.config.n_head, -1))

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the outputs (B, H, T, d_v) of the heads with the fastest kernel."""
        if self.sink is None:
            return super().fused(q, k, v, mask)
        T, T_k = q.shape[2], k.shape[2]
        if mask is None and T_k == T:
            mask = causal_mask(T, T, q.device)
        q, k, mask, scale = with_sink_key(q, k, mask, self.sink)
        # The fastest kernels need d_v = d_k, so the values get a channel too.
        v = F.pad(v, (0, 1, 1, 0))  # (B, G, 1 + T_k, d_v + 1)
        dropout = self.config.dropout if self.training else 0.0
        return kernels.attend(q, k, v, mask, dropout, scale)[..., :-1]

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Compute the attention weights (B, H, T, T_k), whose rows sum to less with a sink."""
        if self.sink is None:
            return super().weights(q, k, mask)
        return attention_weights(*with_sink_key(q, k, mask, self.sink))[..., 1:]


def with_sink_key(
    q: Tensor, k: Tensor, mask: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Put a key in front of k (…, G, T_k, d_k) whose score is the logit of `sink` (H,).

    One more channel gives it that score: it is the sink logit in queries, 1 in the sink's key and 0
    in other keys. Its value is 0, which the caller adds. The scale 1/√d_k of the scores, which is
    returned too, does not count that channel.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    logits = SINK_SCALE * sink[:, None, None] / scale  # (H, 1, 1)
    logits = logits.to(q.dtype).expand(*q.shape[:-1], 1)  # (…, H, T_q, 1)
    q = torch.cat((q, logits), dim=-1)  # (…, H, T_q, d_k + 1)
    k = F.pad(k, (0, 1, 1, 0))  # (…, G, 1 + T_k, d_k + 1)
    k[..., 0, -1] = 1
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)  # True, or 0 to be added
    return q, k, mask, scale


# --- N-gram embeddings ----------------------------------------------------------------------------


class NGramEmbedding(nn.Module):
    """Sum of one table row for each n-gram of 2 … n tokens that ends at a token.

    Each frequent n-gram, whose key `count_ngrams` computes, has its own row of the table. Of each
    length, all rare n-grams share one row, and all incomplete n-grams, which contain a missing
    token, share another. Tokens before the text and hidden tokens are missing.

    Reference: Huang et al. 2025, "Over-Tokenized Transformer", which hashes all n-grams instead.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size is None or config.ngram_rows is None:
            raise UserError(
                "model.ngram_rows is not set: set it to the number of n-grams in the table"
            )
        self.n = config.ngrams
        self.vocab_size = config.vocab_size
        self.untouched_channels = config.n_embd - config.ngram_dim
        self.shared_rows = 2 * (self.n - 1)
        self.register_buffer("keys", torch.zeros(config.ngram_rows, dtype=torch.int64))
        self.table = nn.Parameter(
            torch.zeros(self.shared_rows + config.ngram_rows, config.ngram_dim)
        )
        self.sparse = False  # whether the table's gradient is a sparse tensor of the rows used

    def forward(
        self, tokens: Tensor, previous: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Return what the n-grams add to the embeddings of tokens (B, T): vectors (B, T, C).

        The last `untouched_channels` are zero. The arguments are those of `GPT.embed`.
        """
        rows = self.look_up(tokens, previous, hidden)  # (B, T, n - 1)
        x = F.embedding_bag(rows.flatten(0, 1), self.table, mode="sum", sparse=self.sparse)
        x = x.unflatten(0, rows.shape[:2])  # (B, T, ngram_dim)
        return F.pad(x, (0, self.untouched_channels))  # (B, T, C)

    def look_up(self, tokens: Tensor, previous: Tensor | None, hidden: Tensor | None) -> Tensor:
        """Return the table's rows (B, T, n - 1) of the n-grams that end at each token."""
        T = tokens.shape[1]
        tokens, is_missing = self._with_context(tokens, previous, hidden)  # (B, n - 1 + T)
        rows = []
        prefix = tokens  # of the n-gram that ends at each token: its number, at first a token id
        is_incomplete = is_missing  # whether that n-gram has a missing token
        for shorter_lengths in range(self.n - 1):
            # The n-gram that ends at a token continues the one that ends at the token before.
            tokens, is_incomplete = tokens[:, 1:], is_incomplete[:, :-1]
            keys = (prefix[:, :-1] * self.vocab_size + tokens).masked_fill(is_incomplete, NO_NGRAM)
            place = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
            is_frequent = self.keys[place] == keys
            shared_row = 2 * shorter_lengths + is_incomplete
            row = torch.where(is_frequent, self.shared_rows + place, shared_row)
            rows.append(row[:, -T:])
            prefix = torch.where(is_frequent, self.vocab_size + place, NO_NGRAM)
            is_incomplete = is_incomplete | is_missing[:, -tokens.shape[1] :]
        return torch.stack(rows, dim=-1)

    def _with_context(
        self, tokens: Tensor, previous: Tensor | None, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Put the n - 1 tokens before in front of tokens, and mark those that cannot be read."""
        length = self.n - 1 + tokens.shape[1]
        if previous is not None:
            tokens = torch.cat((previous[:, -(self.n - 1) :], tokens), dim=1)
        if hidden is None:
            is_missing = torch.zeros_like(tokens, dtype=torch.bool)
        else:
            is_missing = hidden[:, -tokens.shape[1] :]
        absent = length - tokens.shape[1]  # tokens before the beginning of the text
        return F.pad(tokens, (absent, 0)), F.pad(is_missing, (absent, 0), value=True)


def count_ngrams(tokens: np.ndarray, vocab_size: int, config: ModelConfig) -> np.ndarray:
    """Return the keys (int64, ascending) of the n-grams that are frequent at a text's beginning.

    The key of an n-gram is parent · V + its last token. The parent stands for the tokens before the
    last: a token id, or V + the place in the keys of a shorter n-gram. Every part of a frequent
    n-gram is frequent, and parents come before their children, so that one ascending list holds
    the n-grams of all lengths.
    """
    tokens = np.asarray(tokens[:MAX_COUNTED_TOKENS], np.int64)
    keys: list[np.ndarray] = []  # of each length
    n_keys = highest_count = 0
    prefixes = tokens  # number of the n-gram that ends at each token, at first the token's id
    for _ in range(config.ngrams - 1):
        tokens, prefixes = tokens[1:], prefixes[:-1]
        continues = prefixes != NO_NGRAM  # whether the n-gram before is frequent
        candidates, which, counts = np.unique(
            prefixes[continues] * vocab_size + tokens[continues],
            return_inverse=True,
            return_counts=True,
        )
        highest_count = counts.max(initial=highest_count)
        is_frequent = counts >= config.ngram_count
        place = n_keys + np.cumsum(is_frequent) - 1
        numbers = np.where(is_frequent, vocab_size + place, NO_NGRAM)
        prefixes = np.full(len(tokens), NO_NGRAM)
        prefixes[continues] = numbers[which]
        keys.append(candidates[is_frequent])
        n_keys += int(is_frequent.sum())
    if n_keys == 0 and highest_count:
        raise UserError(
            f"model.ngram_count={config.ngram_count} leaves no n-gram, because the most frequent "
            f"one in the training text occurs {pluralize(int(highest_count), 'time')}: set "
            f"model.ngram_count to at most {highest_count}, or model.ngrams=0"
        )
    return np.concatenate(keys)
