"""The global batch of a step, a pure function of (seed, step): each process takes its slice."""

import numpy as np

ROUNDS = 4


class Batches:
    """Batches of windows of a token array, in an order without state. Each epoch lays windows of
    block_size end to end from an offset of its own, round the end of the text to its beginning, and
    visits them in a shuffled order of its own; what does not fill a window is left out at a random
    place. So every token is seen equally often, in changing windows. A batch may span two
    epochs."""

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int):
        """tokens (N,) with N > block_size; batch_size sequences over all processes."""
        self.tokens, self.block_size = tokens, block_size
        self.batch_size, self.seed = batch_size, seed
        self.windows = len(tokens) // block_size  # in an epoch

    def starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin in the token array: (batch_size,)."""
        sample = step * self.batch_size + np.arange(self.batch_size)
        epochs, index = np.divmod(sample, self.windows)
        starts = np.empty_like(index)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            seeds = np.random.SeedSequence((self.seed, int(epoch)))
            key = seeds.generate_state(ROUNDS + 1, np.uint64)
            offset = int(key[-1] % np.uint64(len(self.tokens)))
            starts[now] = offset + shuffled(index[now], self.windows, key) * self.block_size
        return starts % len(self.tokens)

    def batch(self, step: int, rank: int = 0, processes: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, one token on, of a step: int64 (batch_size / processes, T) each."""
        rows = self.batch_size // processes
        starts = self.starts(step)[rank * rows : (rank + 1) * rows]
        at = starts[:, None] + np.arange(self.block_size + 1)  # (rows, T + 1)
        windows = self.tokens[at % len(self.tokens)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def shuffled(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """A pseudo-random permutation of range(size), at the given indices, in little memory. A Feistel
    network permutes the next power of four; what falls outside the range is permuted again until it
    falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains")."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = value[outside] >> half, value[outside] & low
        for round in range(ROUNDS):
            # 2^64 over the golden ratio: Fibonacci hashing
            mixed = (right + key[round]) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low)
        value[outside] = (left << half) | right
        outside = value >= size
    return value.astype(np.int64)
