"""N-gram embeddings: a learned vector for each n-gram that the training text has often."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from config import GPTConfig

NO_NGRAM = -1  # key or number of an n-gram that has no row of its own


class NGramEmbedding(nn.Module):
    """Sum of one table row for each n-gram of 2 … n tokens that ends at a token.

    The frequent n-grams are stored in `keys`, which `data.ngrams.count_ngrams` computes: the key of
    an n-gram is parent · V + its last token. The parent stands for the tokens before the last: a
    token id, or V + the place in `keys` of a shorter n-gram.

    Each frequent n-gram has its own row of the table. Of each length, all rare n-grams share one
    row, and all incomplete n-grams, which would begin before the text, share another.

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
