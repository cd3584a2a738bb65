"""Estimate the size of a model and the memory of a run.

A process needs its weights, their gradients, the optimizer's state, copies of weights, activations
and logits, but not all of them at the same time. docs/scaling.md says how far real runs were from
the estimate.
"""

from collections import Counter
from dataclasses import astuple, replace
from functools import cache
from math import ceil, prod

import torch

from config import GPTConfig, ResolvedConfig
from kernels import MAX_FLOAT32_LOGITS, SHORT_ATTENTION_MAX_TOKENS
from training.flops import count_flops_per_token
from training.world import count_owners, is_replicated_by_fsdp
from variants import build_model

FLOAT32_BYTES = 4
# Share of a device's memory that the estimate may reach before the model is sharded.
MAX_MEMORY_SHARE = 0.9
# Bytes of AdamW's two moments.
ADAMW_BYTES = 8
# Bytes per weight of a stack of matrices while Muon orthogonalizes it: the Nesterov momentum, the
# iterate before and after a product, and its Gram matrices.
MUON_WORKSPACE_BYTES = 14
# Blocks of a sharded model that a process has gathered at the same time: the one that computes, the
# next one, and the message in which that one arrived.
GATHERED_BLOCKS = 3


def model_size(config: GPTConfig) -> tuple[int, int]:
    """Count the parameters of a model, and the operations of a training step per token.

    Models of one and two layers are counted, because a deep one takes long to construct even
    without memory.
    """
    with torch.device("meta"):
        models = [build_model(replace(config, n_layer=n)) for n in (1, 2)]
    one_layer, two_layers = (model.num_parameters() for model in models)
    parameters = one_layer + (config.n_layer - 1) * (two_layers - one_layer)
    return parameters, count_flops_per_token(config)


def memory_needed(config: ResolvedConfig, processes: int) -> float:
    """Estimate the largest number of bytes that each process uses in training."""
    c = config.model
    parameters, _ = model_size(c)
    outside = weights_outside_blocks(c)
    has_fsdp_replicas = is_replicated_by_fsdp(config, processes)

    weights = gradients = FLOAT32_BYTES * parameters / config.shard

    # The start of the backward pass, when all activations exist, and its end, when all gradients do
    tokens = config.micro_batch_size(processes) * c.block_size
    start = copied_weight_bytes(config, parameters) + stored_logit_bytes(config, tokens)
    start += tokens * stored_activations(config)
    end = gradients + tokens * block_activations(config)
    if has_fsdp_replicas:
        start += FLOAT32_BYTES * parameters  # copied as if they came from other processes
    elif config.shard > 1:
        gathered = gathered_weight_bytes(config, parameters)
        start += gathered
        end += gathered + FLOAT32_BYTES * outside  # gradients that are not averaged yet
    if config.accumulate > 1:
        start += gradients

    average = average_memory(config, parameters, processes)
    update = update_memory(config, parameters, processes)
    return weights + state_memory(config, parameters, processes) + max(start, end, average, update)


# --- Optimizer ------------------------------------------------------------------------------------


def state_memory(config: ResolvedConfig, parameters: int, processes: int) -> float:
    """Return the bytes of the optimizers' state in each process."""
    c = config.model
    if config.optim.name == "muon":
        moments = ADAMW_BYTES * table_weights(c) / config.shard
        return moments + FLOAT32_BYTES * owned_weights(c, count_owners(config, processes))
    return ADAMW_BYTES * (parameters - ngram_weights(c)) / config.shard


def average_memory(config: ResolvedConfig, parameters: int, processes: int) -> float:
    """Return the bytes of gradients and messages while the gradients are averaged."""
    c = config.model
    outside = FLOAT32_BYTES * weights_outside_blocks(c)
    gradients = FLOAT32_BYTES * parameters / config.shard
    if processes == 1:
        return gradients

    # Muon's stacks travel together; the gradients of each are freed after they are copied.
    owned = collected = 0.0
    if config.optim.name == "muon":
        owners = count_owners(config, processes)
        owned = FLOAT32_BYTES * owned_weights(c, owners)
        largest = FLOAT32_BYTES * largest_stack(c)
        collected = owned + (outside + owners * owned + largest) / config.shard

    # FSDP2 averages the gradients outside of the blocks last; without it, all gradients but Muon's
    # are copied into one message.
    if config.shard > 1 or is_replicated_by_fsdp(config, processes):
        average = gradients + 3 * outside  # weights, gradients and the message
    elif config.optim.name == "muon":
        average = owned + 2 * outside
    else:
        average = 2 * gradients
    return max(collected, average)


def update_memory(config: ResolvedConfig, parameters: int, processes: int) -> float:
    """Return the bytes of gradients, and of Muon's updates, while the weights are updated."""
    c = config.model
    if config.optim.name != "muon":
        return FLOAT32_BYTES * parameters / config.shard
    owners = count_owners(config, processes)
    owned = owned_weights(c, owners)
    update = FLOAT32_BYTES * (owned + weights_outside_blocks(c) / config.shard)
    update += MUON_WORKSPACE_BYTES * largest_stack(c, owners)
    if processes > 1:  # the updates from all owners
        update += matmul_bytes(config) * owners * owned / config.shard
    return update


def owned_weights(c: GPTConfig, owners: int) -> int:
    """Count the weights of the matrices that the first of Muon's owners has, the most of all."""
    stacks = count_matrices(c)
    return sum(ceil(n / owners) * prod(shape) for shape, n in stacks.items())


def largest_stack(c: GPTConfig, owners: int = 1) -> int:
    """Count the weights of an owner's share of the largest stack, which it updates together."""
    stacks = count_matrices(c)
    return max(ceil(n / owners) * prod(shape) for shape, n in stacks.items())


def count_matrices(c: GPTConfig) -> Counter[tuple[int, ...]]:
    """Count the blocks' matrices by shape."""
    return Counter(c.n_layer * matrix_shapes(astuple(c)))


@cache
def matrix_shapes(settings: tuple) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices.

    Args:
        settings: The fields of a `GPTConfig`, which unlike it can be the key of a cache.
    """
    with torch.device("meta"):
        (block,) = build_model(replace(GPTConfig(*settings), n_layer=1)).blocks
    return [tuple(p.shape) for p in block.parameters() if p.dim() == 2]


# --- Weights --------------------------------------------------------------------------------------


def matmul_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of a number in matrix products."""
    return FLOAT32_BYTES if config.precision == "fp32" else 2


def table_weights(c: GPTConfig) -> int:
    """Count the weights of the embeddings, and of the output layer if it has its own."""
    tables = c.vocab_size * (1 if c.tie_embeddings else 2)
    positions = c.block_size if c.position == "learned" else 0
    return (tables + positions) * c.n_embd


def ngram_weights(c: GPTConfig) -> int:
    """Count the weights of the n-gram table."""
    return (c.ngram_rows or 0) * c.ngram_dim


def weights_outside_blocks(c: GPTConfig) -> int:
    """Count the weights outside of the blocks."""
    return table_weights(c) + ngram_weights(c)


def copied_weight_bytes(config: ResolvedConfig, parameters: int) -> float:
    """Return the bytes of copies of the weights that the backward pass reads.

    They are the joined projections, and what is converted to 16 bits or padded. Sharded blocks
    arrive converted.
    """
    c, number_bytes = config.model, matmul_bytes(config)
    in_blocks = parameters - weights_outside_blocks(c)
    projections = c.n_layer * c.n_embd * qkv_width(c)
    is_16_bit = config.precision != "fp32"

    copies = 0.0
    if is_16_bit or c.vocab_padding:
        copies += number_bytes * c.vocab_size * c.n_embd
    if not config.checkpoint_activations:
        copies += number_bytes * projections
    # Autocast keeps what it has converted until the forward pass ends; compiled code needs it in
    # the backward pass only.
    if is_16_bit and config.shard == 1 and not (config.checkpoint_activations and config.compile):
        copies += number_bytes * (in_blocks - projections)
    return copies


def gathered_weight_bytes(config: ResolvedConfig, parameters: int) -> float:
    """Return the bytes of other processes' weights that a process has in the backward pass."""
    c = config.model
    outside = weights_outside_blocks(c)
    block = (parameters - outside) / c.n_layer
    return FLOAT32_BYTES * outside + GATHERED_BLOCKS * matmul_bytes(config) * block


def qkv_width(c: GPTConfig) -> int:
    """Return the number of channels of the queries, keys and values of all heads."""
    return (c.n_head + c.kv_heads) * c.key_dim + c.kv_heads * c.value_dim


# --- Activations ----------------------------------------------------------------------------------


def stored_logit_bytes(config: ResolvedConfig, tokens: int) -> int:
    """Return the bytes of the logits of some tokens, of their gradient and of the head's.

    The logits are freed when the gradient of the output layer's weight is computed.
    """
    c, number_bytes = config.model, matmul_bytes(config)
    logits = number_bytes * tokens * (c.vocab_size + c.vocab_padding)
    head_gradient = FLOAT32_BYTES * c.vocab_size * c.n_embd
    copies = 2
    if not config.compile and config.device.partition(":")[0] not in MAX_FLOAT32_LOGITS:
        copies += 2 * FLOAT32_BYTES // number_bytes  # torch's cross-entropy computes in float32
    return max(copies * logits, logits + head_gradient)


def stored_activations(config: ResolvedConfig) -> float:
    """Return the bytes per token that the blocks keep from the forward to the backward pass."""
    c = config.model
    block = block_activations(config)
    if config.checkpoint_activations:  # the inputs of all blocks, and one block computed again
        return c.n_layer * FLOAT32_BYTES * c.n_embd + block
    return c.n_layer * block


def block_activations(config: ResolvedConfig) -> float:
    """Return the bytes per token that a block keeps from the forward to the backward pass.

    They are the operands of matrix products, in the precision of these, and the residual stream in
    float32. Compiled code computes some of the others again.
    """
    c, number_bytes = config.model, matmul_bytes(config)
    residual_stream = (FLOAT32_BYTES + number_bytes) * c.n_embd  # also normalized
    stored = residual_stream + attention_activations(config)
    if c.mlp != "none":
        # The hidden layer before and after its non-linearity; SwiGLU's gate, and their product
        hidden_layers = 2
        if c.mlp == "swiglu":
            hidden_layers = 3 if config.compile else 4
        stored += residual_stream + number_bytes * hidden_layers * c.hidden_dim
    if c.dropout:
        stored += 2 * number_bytes * c.n_embd
    return stored


def attention_activations(config: ResolvedConfig) -> float:
    """Return the bytes per token that an attention layer keeps besides its input."""
    c, number_bytes = config.model, matmul_bytes(config)
    is_16_bit = config.precision != "fp32"
    queries_and_keys = (c.n_head + c.kv_heads) * c.key_dim
    outputs = c.n_head * c.value_dim

    stored = number_bytes * (qkv_width(c) + outputs)
    if is_16_bit:  # converted to float32, and back for W_O
        stored += number_bytes * outputs
    if c.is_rotary or c.qk_norm:
        stored += number_bytes * queries_and_keys
    if c.qk_norm and not config.compile:
        stored += FLOAT32_BYTES * queries_and_keys
    if c.smear_keys:
        stored += FLOAT32_BYTES * queries_and_keys
    if c.gate_dim:
        stored += number_bytes * (c.gate_dim + c.n_embd) + FLOAT32_BYTES * outputs

    # The attention weights, which some kernels of a CPU keep
    is_short = is_16_bit and c.block_size <= SHORT_ATTENTION_MAX_TOKENS
    if config.device == "cpu" and (is_short or c.dropout):
        copies = 3 if c.dropout else 1
        stored += copies * number_bytes * c.n_head * c.block_size
    return stored
