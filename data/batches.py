"""Draw training batches. The batch of a step is a pure function of the seed and the step."""

import numpy as np

NO_TARGET = -1  # target of a position that has nothing to predict
FEISTEL_ROUNDS = 4  # Luby & Rackoff 1988: four rounds make a strong pseudo-random permutation


class Batches:
    """Batches of token windows in a random order that needs no saved state.

    Each epoch lays windows of `block_size` tokens end to end, from a random offset and around the
    end of the text, and visits them in a random order. The tokens that do not fill a window are
    left out at a random place, so every token is seen equally often, in changing windows.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int) -> None:
        """Make batches of `batch_size` windows, over all processes, from ids (N > block_size,)."""
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.windows_per_epoch = len(tokens) // block_size

    def window_starts(self, step: int) -> np.ndarray:
        """Return the position in the token array at which each window begins: (batch_size,)."""
        sample = step * self.batch_size + np.arange(self.batch_size)
        epochs, window = np.divmod(sample, self.windows_per_epoch)
        starts = np.empty_like(window)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            seeds = np.random.SeedSequence((self.seed, int(epoch)))
            key = seeds.generate_state(FEISTEL_ROUNDS + 1, np.uint64)
            offset = int(key[-1] % np.uint64(len(self.tokens)))
            position = permute(window[in_epoch], self.windows_per_epoch, key)
            starts[in_epoch] = offset + position * self.block_size
        return starts % len(self.tokens)

    def batch(self, step: int, rank: int = 0, processes: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return one process's inputs and targets of a step, counted from 0.

        Both are int64 arrays of (batch_size / processes, T). Targets are the inputs shifted by one
        token.
        """
        rows = self.batch_size // processes
        starts = self.window_starts(step)[rank * rows : (rank + 1) * rows]
        positions = starts[:, None] + np.arange(self.block_size + 1)  # (rows, T + 1)
        windows = self.tokens[positions % len(self.tokens)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Map indices through a pseudo-random permutation of range(size) without storing it.

    A Feistel network with round keys (uint64) permutes the next power of four. Values that fall
    outside the range are permuted again until they fall inside ("cycle walking").

    Reference: Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains".
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left = value[outside] >> half_bits
        right = value[outside] & low_mask
        for round_key in key[:FEISTEL_ROUNDS]:
            # 2^64 over the golden ratio: Fibonacci hashing
            mixed = (right + round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low_mask)
        value[outside] = (left << half_bits) | right
        outside = value >= size
    return value.astype(np.int64)
