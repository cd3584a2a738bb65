"""Simulate the duration of a training step on a cluster of GPUs; nothing is measured.

Assumptions:

- A block takes the time of its matrix products, at the share `utilization` of the data sheet's
  rate, and the time in which all other operations read and write their tensors (`MOVED_BYTES`).
  Neither rate depends on the size of the micro-batch.
- Collectives take the time that benchmarks/hardware.py estimates.
- A block of a sharded model is gathered while the block before computes, and its gradients are
  reduced while the next one computes; the collectives of a group run one after the other. Only the
  time in which they run and nothing computes is added. Collectives do not slow the compute that
  hides them.
- The gradients of a complete model are averaged after the last backward pass.
- The optimizer reads and writes its tensors once.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache
from typing import NamedTuple

import torch

from benchmarks.hardware import BANDWIDTH_SHARE, Cluster
from config import GPTConfig, ResolvedConfig
from training.flops import model_size
from training.optimizers import NEWTON_SCHULZ_STEPS
from variants import build_model

# Bytes that the forward and backward passes move outside of matrix products and fused attention:
# for each token, layer and channel, by (MLP, is compiled), and for each logit. Counted on a CPU:
# the tensors of every eager operation, with torch's cross-entropy, and of the kernels of
# torch.compile.
MOVED_BYTES = {
    ("gelu", False): 215,
    ("gelu", True): 169,
    ("swiglu", False): 702,
    ("swiglu", True): 205,
}
MOVED_LOGIT_BYTES = {False: 46, True: 12}
# Bytes per parameter that AdamW and the clipping of gradients move: each gradient is read for its
# norm, and read and written when it is scaled; weight, gradient and two moments are read; and
# weight and moments are written.
OPTIMIZER_BYTES = 4 + 8 + 16 + 12
# Bytes per parameter of Muon's matrices: the update is read, the weight is read and written; and by
# their owner, the gradient is read for its norm, read and written when it is scaled, and read; the
# momentum is read and written, and the update is written in bf16.
MUON_WEIGHT_BYTES = 2 + 8
MUON_STATE_BYTES = 4 + 8 + 4 + 8 + 2


class Engine(NamedTuple):
    """How an engine communicates and recomputes; the defaults are GlassGPT's in bf16."""

    block_weight_bytes: int = 2
    outside_weight_bytes: int = 4  # embeddings and head
    gradient_bytes: int = 4
    gathers_again: bool = True  # in the backward pass
    recomputed: float = 0.0  # share of the blocks' forward pass that the backward pass repeats


GLASSGPT = Engine()


class Part(NamedTuple):
    """Size of a part of a model."""

    parameters: int
    flops: int  # of a training step, per token
    matrices: Sequence[tuple[int, ...]] = ()  # shapes, for Muon


class Step(NamedTuple):
    """Seconds of a training step."""

    compute: float  # forward and backward passes
    exposed: float  # communication that no compute hides
    optimizer: float

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.compute + self.exposed + self.optimizer


class Work(NamedTuple):
    """Seconds of a micro-step: compute and collectives of a block, and of all outside of them."""

    layers: int
    block_forward: float
    block_backward: float
    head: float  # forward and backward
    gather_block: float
    gather_outside: float
    gathers_again: bool
    reduce_block: float  # within the shards' group
    reduce_outside: float
    average_block: float  # across replicas
    average_outside: float

    @property
    def compute(self) -> float:
        """Seconds of the forward and backward passes."""
        return self.layers * (self.block_forward + self.block_backward) + self.head


def make_config(
    model: GPTConfig,
    processes: int,
    shard: int,
    sequences: int,
    accumulate: int = 1,
    is_compiled: bool = True,
) -> ResolvedConfig:
    """Return a run in bf16 on GPUs with `sequences` per micro-step and process."""
    return ResolvedConfig(
        device="cuda",
        precision="bf16",
        compile=is_compiled,
        shard=shard,
        batch_size=sequences * accumulate * processes,
        accumulate=accumulate,
        model=model,
    )


class Update(NamedTuple):
    """Work of the optimizer on each GPU."""

    moved: float  # bytes
    flops: float = 0.0
    communication: float = 0.0  # seconds


@cache
def count_parts(settings: tuple) -> tuple[Part, Part]:
    """Count a block of a model, and all that is outside of the blocks.

    Args:
        settings: The fields of a `GPTConfig`, which unlike it can be the key of a cache.
    """
    model = GPTConfig(*settings)
    one_layer = Part(*model_size(replace(model, n_layer=1)))
    two_layers = Part(*model_size(replace(model, n_layer=2)))
    parameters = two_layers.parameters - one_layer.parameters
    flops = two_layers.flops - one_layer.flops
    with torch.device("meta"):
        (layer,) = build_model(replace(model, n_layer=1)).blocks
    block = Part(parameters, flops, [tuple(p.shape) for p in layer.parameters() if p.dim() == 2])
    return block, Part(one_layer.parameters - parameters, one_layer.flops - flops)


def plan_work(config: ResolvedConfig, cluster: Cluster, engine: Engine = GLASSGPT) -> Work:
    """Return the durations of which a micro-step consists."""
    model = config.model
    block, outside = count_parts(astuple(model))

    # Seconds of the matrix products and of all other operations
    tokens = config.micro_batch_size(cluster.processes) * model.block_size
    seconds_per_flop = tokens / (cluster.utilization * cluster.gpu.flops)
    seconds_per_byte = tokens / (BANDWIDTH_SHARE * cluster.gpu.memory_bandwidth)
    block_bytes = model.n_embd * MOVED_BYTES[model.mlp, config.compile]
    logit_bytes = (model.vocab_size or 0) * MOVED_LOGIT_BYTES[config.compile]
    block_seconds = seconds_per_flop * block.flops + seconds_per_byte * block_bytes
    head_seconds = seconds_per_flop * outside.flops + seconds_per_byte * logit_bytes
    recomputed = 1.0 if config.checkpoint_activations else engine.recomputed

    # Seconds of the collectives
    shards = cluster.group(config.shard)
    replicas = cluster.group(cluster.processes // config.shard, config.shard)
    block_gradients = engine.gradient_bytes * block.parameters
    outside_gradients = engine.gradient_bytes * outside.parameters
    average_block = average_outside = 0.0
    if config.shard > 1:
        average_block = replicas.all_reduce_seconds(block_gradients / config.shard)
        average_outside = replicas.all_reduce_seconds(outside_gradients / config.shard)
    return Work(
        layers=model.n_layer,
        block_forward=block_seconds / 3,
        block_backward=block_seconds * (2 + recomputed) / 3,
        head=head_seconds,
        gather_block=shards.scatter_seconds(engine.block_weight_bytes * block.parameters),
        gather_outside=shards.scatter_seconds(engine.outside_weight_bytes * outside.parameters),
        gathers_again=engine.gathers_again,
        reduce_block=shards.scatter_seconds(block_gradients),
        reduce_outside=shards.scatter_seconds(outside_gradients),
        average_block=average_block,
        average_outside=average_outside,
    )


def simulate_micro_step(work: Work) -> float:
    """Return the seconds of a forward and backward pass with overlapped communication.

    The variables `gpu`, `shards` and `replicas` are the times at which the GPU, the links within
    the group of shards, and the links between replicas become free.
    """
    # Forward pass: a block is gathered while the block before computes
    shards = work.gather_outside
    gpu = block_start = 0.0
    for _ in range(work.layers):
        shards = max(shards, block_start) + work.gather_block
        block_start = max(gpu, shards)
        gpu = block_start + work.block_forward
    gpu += work.head

    # Backward pass: also, the gradients of the block before are reduced and averaged
    replicas = 0.0
    for layer in range(work.layers):
        gathered = 0.0
        if work.gathers_again:
            shards = gathered = max(shards, block_start) + work.gather_block
        if layer > 0:
            shards = max(shards, gpu) + work.reduce_block
            replicas = max(replicas, shards) + work.average_block
        block_start = max(gpu, gathered)
        gpu = block_start + work.block_backward

    # What remains when all is computed: the last block, and what is outside of the blocks
    shards = max(shards, gpu) + work.reduce_block
    replicas = max(replicas, shards) + work.average_block
    shards += work.reduce_outside
    return max(replicas, shards) + work.average_outside


def simulate_step(config: ResolvedConfig, cluster: Cluster, engine: Engine = GLASSGPT) -> Step:
    """Return the duration of a training step."""
    work = plan_work(config, cluster, engine)
    exposed = config.accumulate * (simulate_micro_step(work) - work.compute)
    update = plan_muon(config, cluster)
    if config.optim.name != "muon":
        block, outside = count_parts(astuple(config.model))
        parameters = config.model.n_layer * block.parameters + outside.parameters
        update = plan_adamw(parameters, config, cluster)
    memory_bandwidth = BANDWIDTH_SHARE * cluster.gpu.memory_bandwidth
    optimizer = update.moved / memory_bandwidth
    optimizer += update.flops / (cluster.utilization * cluster.gpu.flops)
    return Step(config.accumulate * work.compute, exposed + update.communication, optimizer)


def plan_adamw(parameters: int, config: ResolvedConfig, cluster: Cluster) -> Update:
    """Return the work of AdamW; the gradients of a complete model are averaged in one message."""
    moved = OPTIMIZER_BYTES * parameters / config.shard
    everyone = cluster.group(cluster.processes)
    averaged = 4 * parameters if config.shard == 1 else 0
    return Update(moved, communication=everyone.all_reduce_seconds(averaged))


def plan_muon(config: ResolvedConfig, cluster: Cluster) -> Update:
    """Return the work of Muon, and of AdamW for the other parameters.

    Complete models divide the matrices of equal shape among the processes: their gradients are
    reduce-scattered to the owners after the backward pass, and the updates all-gathered in bf16,
    both padded so that each owner has the same number of matrices. Of a sharded model, each process
    gathers the momenta in float32 and orthogonalizes all of them.
    """
    block, outside = count_parts(astuple(config.model))
    layers = config.model.n_layer
    owners = cluster.processes if config.shard == 1 else 1
    everyone, shards = cluster.group(cluster.processes), cluster.group(config.shard)
    matrix_parameters = layers * sum(math.prod(shape) for shape in block.matrices)
    other_parameters = layers * block.parameters + outside.parameters - matrix_parameters

    flops = communication = 0.0
    for (rows, columns), per_block in Counter(block.matrices).items():
        share = math.ceil(layers * per_block / owners)
        flops += share * newton_schulz_flops(rows, columns)
        stack = share * owners * rows * columns
        if config.shard == 1:
            communication += everyone.scatter_seconds(4 * stack)
            communication += everyone.scatter_seconds(2 * stack)
        else:
            communication += shards.scatter_seconds(4 * stack)
    others = plan_adamw(other_parameters, config, cluster)
    moved = others.moved + MUON_WEIGHT_BYTES * matrix_parameters / config.shard
    moved += MUON_STATE_BYTES * matrix_parameters / (owners * config.shard)
    return Update(moved, flops, communication + others.communication)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the operations that orthogonalize a matrix."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * 2 * small**2 * (2 * large + small)
