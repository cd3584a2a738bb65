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
    table_bytes = 0
    if processes == 1 and config.model.ngrams > 1:  # whose gradient has only the rows that occur
        table_bytes = _table_bytes(config)
        config = replace(config, model=replace(config.model, ngram_rows=1))
    parameters, _ = model_size(config.model)
    deeper, _ = model_size(replace(config.model, n_layer=config.model.n_layer + 1))
    block = deeper - parameters
    outside = parameters - config.model.n_layer * block

    kept = NUMBERS_PER_PARAMETER * parameters / config.shard
    if config.shard > 1:
        kept += GATHERED_BLOCKS * block + GATHERED_OUTSIDE * outside
    elif config.precision != "fp32":
        kept += parameters / 2  # copies in 16 bits
    update = 0.0
    if config.optim.name == "muon":  # gathers whole matrices
        update = NUMBERS_PER_UPDATE * parameters
    elif processes > 1:
        update = NUMBERS_PER_UPDATE * parameters / config.shard
    activations = _count_activations(config, processes)
    return table_bytes + FLOAT32_BYTES * (kept + max(update, activations))


def _count_activations(config: ResolvedConfig, processes: int) -> float:
    """Count the numbers in float32 that the backward pass needs at most."""
    model = config.model
    tokens = config.micro_batch_size(processes) * model.block_size
    layer = _count_layer(config)
    kept_of_layer = model.n_embd if config.checkpoint_activations else layer
    layers = model.n_layer * kept_of_layer + layer  # and the one that computes

    logits = tokens * (model.vocab_size + model.vocab_padding)
    most_in_float32 = MAX_FLOAT32_LOGITS.get(_device_type(config), logits)
    in_float32 = min(logits, most_in_float32)
    return tokens * layers + NUMBERS_PER_LOGIT * (_size(config) * logits + in_float32)


def _count_layer(config: ResolvedConfig) -> float:
    """Count the numbers in float32 that the backward pass needs of a token in one layer."""
    model = config.model
    size = _size(config)
    heads = model.n_head * max(model.key_dim, model.value_dim)
    channels = NUMBERS_PER_CHANNEL * (model.n_embd + heads) * (1 + size) / 2
    hidden_channels = NUMBERS_PER_HIDDEN_CHANNEL * model.hidden_dim * size
    weights = 0.0
    is_short = size < 1 and model.block_size <= SHORT_ATTENTION_MAX_TOKENS
    is_written_out = is_short or model.dropout > 0
    if is_written_out and _device_type(config) != "cuda":  # otherwise a kernel recomputes them
        weights = NUMBERS_PER_ATTENTION_WEIGHT * model.n_head * model.block_size * size
    return channels + hidden_channels + weights


def _size(config: ResolvedConfig) -> float:
    """Return the size of an activation relative to a number in float32."""
    return DTYPES[config.precision].itemsize / FLOAT32_BYTES


def _device_type(config: ResolvedConfig) -> str:
    return config.device.partition(":")[0]


def _table_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of a table of n-grams and of its sparse gradients in one process."""
    model = config.model
    row_bytes = KEY_BYTES + FLOAT32_BYTES * (model.ngram_dim + 1)
    gradient_row_bytes = KEY_BYTES + FLOAT32_BYTES * model.ngram_dim
    rows = model.ngram_rows or 0
    lookups = config.micro_batch_size() * model.block_size * (model.ngrams - 1)
    # The gradient keeps the rows of each micro-batch, and is copied to add them up
    gradient_rows = 2 * config.accumulate * min(rows, lookups)
    return rows * row_bytes + gradient_rows * gradient_row_bytes
