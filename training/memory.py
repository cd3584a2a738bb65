"""Bound the memory of a run by its sizes, without building a model or taking a step.

docs/scaling.md compares the bound with measured peaks.
"""

from dataclasses import replace

from config import ResolvedConfig
from kernels import DTYPES, MAX_FLOAT32_LOGITS, SHORT_ATTENTION_MAX_TOKENS
from training.flops import model_size

FLOAT32_BYTES = 4
KEY_BYTES = 8  # of an n-gram
# Numbers for each parameter: weight, gradient and AdamW's two moments; and what else a step makes
# of them: the gradients' message to other processes, or Muon's updates.
NUMBERS_PER_PARAMETER = 4
NUMBERS_PER_UPDATE = 2
# Copies of a block that a process of a sharded model has at once: the weights of the one that
# computes and of the next one, the message in which those arrived, and gradients. Outside of the
# blocks: weights, gradients and their message.
GATHERED_BLOCKS = 4
GATHERED_OUTSIDE = 3
# Numbers that the backward pass needs of each token: for a channel of a block and of its heads, for
# a channel of its MLP, for a token that a head attends to, and for a logit. In 16 bits they take
# half the memory, but half of the first ones stay in float32.
NUMBERS_PER_CHANNEL = 7
NUMBERS_PER_HIDDEN_CHANNEL = 3
NUMBERS_PER_ATTENTION_WEIGHT = 3
NUMBERS_PER_LOGIT = 2


def memory_bound(config: ResolvedConfig, processes: int) -> float:
    """Return the most bytes, about, that the tensors of each process take in a training step."""
    model, table = config.model, 0
    if processes == 1 and model.ngrams > 1:  # whose gradient has only the rows that occur
        table = _table_bytes(config)
        model = replace(model, ngram_rows=1)
    one_layer, two_layers = (model_size(replace(model, n_layer=n))[0] for n in (1, 2))
    block = two_layers - one_layer
    outside = one_layer - block
    parameters = outside + model.n_layer * block

    needed = NUMBERS_PER_PARAMETER * parameters / config.shard
    if config.shard > 1:
        needed += GATHERED_BLOCKS * block + GATHERED_OUTSIDE * outside
    elif config.precision != "fp32":
        needed += parameters / 2  # copies in 16 bits
    update = 0.0
    if config.optim.name == "muon":  # gathers whole matrices
        update = NUMBERS_PER_UPDATE * parameters
    elif processes > 1:
        update = NUMBERS_PER_UPDATE * parameters / config.shard
    needed += max(update, _count_activations(config, processes))
    return table + FLOAT32_BYTES * needed


def _count_activations(config: ResolvedConfig, processes: int) -> float:
    """Count the numbers in float32 that the backward pass needs at most."""
    model, device = config.model, config.device.partition(":")[0]
    tokens = config.micro_batch_size(processes) * model.block_size
    size = DTYPES[config.precision].itemsize / FLOAT32_BYTES
    heads = model.n_head * max(model.key_dim, model.value_dim)
    layer = (1 + size) / 2 * NUMBERS_PER_CHANNEL * (model.n_embd + heads)
    layer += size * NUMBERS_PER_HIDDEN_CHANNEL * model.hidden_dim
    is_short = size < 1 and model.block_size <= SHORT_ATTENTION_MAX_TOKENS
    if device != "cuda" and (is_short or model.dropout > 0):  # otherwise a kernel recomputes them
        layer += size * NUMBERS_PER_ATTENTION_WEIGHT * model.n_head * model.block_size
    logits = tokens * (model.vocab_size + model.vocab_padding)
    in_float32 = min(logits, MAX_FLOAT32_LOGITS.get(device, logits))

    kept = model.n_layer * (model.n_embd if config.checkpoint_activations else layer)
    return tokens * (kept + layer) + NUMBERS_PER_LOGIT * (size * logits + in_float32)


def _table_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of a table of n-grams and of its sparse gradients in one process."""
    model = config.model
    rows = model.ngram_rows or 0
    used = min(rows, config.micro_batch_size() * model.block_size * (model.ngrams - 1))
    # The gradient keeps the rows of each micro-batch, and is copied to add them up
    gradient = 2 * config.accumulate * used * (KEY_BYTES + FLOAT32_BYTES * model.ngram_dim)
    return rows * (KEY_BYTES + FLOAT32_BYTES * (model.ngram_dim + 1)) + gradient
