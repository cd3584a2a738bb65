"""Recall of the values of keys."""

import numpy as np

from data.tasks.task import Sequences, Task


class Recall(Task):
    """List pairs of a key and a value, then each key again in another order with its value.

    Only the values in the second part count. Keys are the first half of the symbols.

    Reference: Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language
    Models".
    """

    metric_prefix = "recall_"

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        pairs, num_keys = self.data.pairs, self.data.num_symbols // 2
        keys = random.random((n, num_keys)).argsort(-1)[:, :pairs]  # distinct in each row
        values = random.integers(num_keys, self.data.num_symbols, size=(n, pairs))
        order = random.random((n, pairs)).argsort(-1)
        facts = np.stack((keys, values), axis=-1)  # (n, pairs, 2)
        questions = np.take_along_axis(facts, order[..., None], axis=1)
        tokens = np.concatenate((facts, questions), axis=1).reshape(n, 4 * pairs)
        positions = np.arange(1, 4 * pairs)  # of the predicted tokens
        is_answer = (positions > 2 * pairs) & (positions % 2 == 1)
        return Sequences(tokens, np.tile(is_answer, (n, 1)))
