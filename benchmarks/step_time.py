"""A model of the duration of a training step on a cluster of GPUs; nothing is measured.

Assumptions:

- A block takes the time of its matrix products, at the share `utilization` of the data sheet's
  rate, and the time in which all other operations read and write their tensors (`MOVED_BYTES`).
  Neither rate depends on the size of the micro-batch.
- A collective of n ranks on m machines with B bytes takes NCCL's ring: B (n - 1) / n at
  `BANDWIDTH_SHARE` of the slowest link, and a latency for each of the n - 1 steps. A ring enters a
  machine through one network card, so a group that has 8 ranks in a machine uses 8 cards. An
  all-reduce is twice as long, or takes a tree if that has less latency.
- A block is gathered while the block before computes, and its gradients are reduced while the next
  one computes; the collectives of a group run one after the other. What no compute hides counts.
  Collectives do not slow the compute that hides them.
- The optimizer reads and writes its tensors once.
"""

import math
from dataclasses import astuple, replace
from functools import cache
from typing import NamedTuple

from config import ResolvedConfig
from model_config import GPTConfig
from training.flops import PUBLISHED_BF16_FLOPS
from training.plan import model_size

GPUS_PER_MACHINE = 8
# Share of the data sheet's bandwidth, of links and of memory, that is reached: an assumption.
BANDWIDTH_SHARE = 0.8
# Bytes that the forward and backward passes move outside of matrix products and fused attention:
# for each token, layer and channel, by (MLP, is compiled), and for each logit. Counted on a CPU:
# the tensors of every eager operation, and of the kernels of torch.compile.
MOVED_BYTES = {
    ("gelu", False): 215,
    ("gelu", True): 169,
    ("swiglu", False): 702,
    ("swiglu", True): 205,
}
MOVED_LOGIT_BYTES = {False: 46, True: 12}
# Seconds of a collective's start, and of each step of a ring or tree within and between machines:
# constants by which NCCL chooses its algorithms (src/graph/tuning.cc, protocol Simple).
BASE_SECONDS = 8.4e-6
RING_SECONDS = (3.4e-6, 14e-6)
TREE_SECONDS = (4.0e-6, 14e-6)
# Bytes per parameter that AdamW and the clipping of gradients move: each gradient is read for its
# norm, read and written when it is scaled; then weight, gradient and two moments are read, and
# weight and moments are written.
OPTIMIZER_BYTES = 4 + 8 + 16 + 12


class Gpu(NamedTuple):
    """Figures of a data sheet, in operations or bytes per second."""

    flops: float  # dense bf16
    memory_bandwidth: float
    nvlink: float  # each way
    memory: float  # bytes


GPUS = {
    # The H100 of torchtitan's cluster, with slower memory.
    "H100-HBM2e": Gpu(PUBLISHED_BF16_FLOPS["NVIDIA H100 80GB HBM3"], 2.4e12, 450e9, 96e9),
    "H100": Gpu(PUBLISHED_BF16_FLOPS["NVIDIA H100 80GB HBM3"], 3.35e12, 450e9, 80e9),
    "A100-40GB": Gpu(PUBLISHED_BF16_FLOPS["NVIDIA A100-SXM4-40GB"], 1.555e12, 300e9, 40e9),
    "A100": Gpu(PUBLISHED_BF16_FLOPS["NVIDIA A100-SXM4-80GB"], 2.04e12, 300e9, 80e9),
}
# Bytes per second and GPU, each way. Ethernet is one port of 100 Gb/s for a machine of 8 GPUs.
NETWORKS = {"NDR": 50e9, "HDR": 25e9, "Ethernet": 12.5e9 / GPUS_PER_MACHINE}


class Cluster(NamedTuple):
    """GPUs, their network, and the share of the data sheet's rate that a block reaches."""

    gpu: Gpu
    network: float
    processes: int
    utilization: float
    has_latency: bool = True

    def group(self, ranks: int, stride: int = 1) -> "Group":
        """Return the links between every `stride`-th of neighboring ranks."""
        per_machine = min(ranks, max(1, GPUS_PER_MACHINE // stride))
        machines = math.ceil(ranks / per_machine)
        bandwidth = self.gpu.nvlink
        if machines > 1:
            bandwidth = min(bandwidth, per_machine * self.network)
        return Group(ranks, machines, BANDWIDTH_SHARE * bandwidth, self.has_latency)


class Group(NamedTuple):
    """Ranks that take part in a collective."""

    ranks: int
    machines: int
    bandwidth: float  # bytes per second
    has_latency: bool

    def scatter_seconds(self, size: float) -> float:
        """Return the time of an all-gather to `size` bytes, or of a reduce-scatter from them."""
        if self.ranks == 1 or size == 0:
            return 0.0
        within, between = RING_SECONDS
        steps = self.machines - 1
        latency = BASE_SECONDS + (self.ranks - 1 - steps) * within + steps * between
        return size * (self.ranks - 1) / self.ranks / self.bandwidth + latency * self.has_latency

    def all_reduce_seconds(self, size: float) -> float:
        """Return the time of an all-reduce of `size` bytes, by a ring or by a tree."""
        if self.ranks == 1 or size == 0:
            return 0.0
        within, between = TREE_SECONDS
        levels = math.log2(self.machines)
        tree = BASE_SECONDS + 2 * ((self.ranks / self.machines - 1) * within + levels * between)
        transfer = 2 * size * (self.ranks - 1) / self.ranks / self.bandwidth
        return min(2 * self.scatter_seconds(size), transfer + tree * self.has_latency)


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


@cache
def count_parts(settings: tuple) -> tuple[Part, Part]:
    """Count a block of a model, and all that is outside of the blocks.

    Args:
        settings: The fields of a `GPTConfig`, which unlike it can be the key of a cache.
    """
    model = GPTConfig(*settings)
    one_layer = Part(*model_size(replace(model, n_layer=1)))
    two_layers = Part(*model_size(replace(model, n_layer=2)))
    block = Part(two_layers.parameters - one_layer.parameters, two_layers.flops - one_layer.flops)
    return block, Part(one_layer.parameters - block.parameters, one_layer.flops - block.flops)


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
        average_block=replicas.all_reduce_seconds(block_gradients / config.shard),
        average_outside=replicas.all_reduce_seconds(outside_gradients / config.shard),
    )


def simulate_micro_step(work: Work) -> float:
    """Return the seconds of a forward and backward pass with overlapped communication.

    The variables `gpu`, `shards` and `replicas` are the times from which on the GPU, the links of
    the shards' group and those between replicas are free.
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
    """Return the duration of a training step with AdamW."""
    work = plan_work(config, cluster, engine)
    exposed = simulate_micro_step(work) - work.compute
    if config.shard > 1:  # a complete model communicates in the last micro-step only
        exposed *= config.accumulate
    block, outside = count_parts(astuple(config.model))
    parameters = config.model.n_layer * block.parameters + outside.parameters
    moved = OPTIMIZER_BYTES * parameters / config.shard
    optimizer = moved / (BANDWIDTH_SHARE * cluster.gpu.memory_bandwidth)
    return Step(config.accumulate * work.compute, exposed, optimizer)
