"""Simulate a training step on 1 to 1,024 GPUs: what limits it, and the memory of a GPU.

    python -m benchmarks.cluster [only=memory,limits,check] [gpu=H100] [network=NDR]
                                 [utilization=0.5]

gpu: H100, A100, H100-HBM2e or A100-40GB; network: NDR or HDR InfiniBand, or Ethernet. memory: the
estimated memory of one GPU; limits: a step with a fixed number of tokens per GPU, and with a fixed
batch; check: the error of the simulation for published speeds. Nothing is measured. docs/scaling.md
contains the tables.

Assumptions:

- A block takes the time of its matrix products, at the share `utilization` of the data sheet's
  rate, and the time in which all other operations read and write their tensors (`MOVED_BYTES`).
  Neither rate depends on the size of the micro-batch.
- A collective of n ranks with B bytes uses NCCL's rings: B (n - 1) / n at `BANDWIDTH_SHARE` of the
  slowest link, and a latency for each of the n - 1 steps. NCCL builds a ring for each network card,
  so a group with 8 ranks in each machine uses 8 cards. An all-reduce takes twice as long, or uses a
  tree if that has less latency.
- A block of a sharded model is gathered while the block before computes, and its gradients are
  reduced while the next one computes; the collectives of a group run one after the other. Only the
  time in which they run and nothing computes is added. Collectives do not slow the compute that
  hides them.
- The gradients of a complete model are averaged after the last backward pass.
- The optimizer, AdamW, reads and writes its tensors once.

The published speeds (published.csv, read on 26 November 2026) are those of
github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, without float8, and
docs/performance.md of August 2024, where the network of the A100s is not stated; and of
github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: all rows with 2,048 tokens in
bf16 that do not checkpoint activations, except one: 15,555 tokens per second of MPT 1B on 32 A100s,
18% below its neighbors on 16 and on 64.
"""

import csv
import math
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.harness import read_options, run_command, select
from common.text import pluralize
from config import GPTConfig, ResolvedConfig
from kernels import MAX_FLOAT32_LOGITS
from training.flops import PUBLISHED_16_BIT_FLOPS, model_size, tokens_per_step
from training.memory import MAX_MEMORY_SHARE, memory_needed

GPUS_PER_MACHINE = 8
# Share of the data sheet's bandwidth, of links and of memory, that is reached: an assumption.
BANDWIDTH_SHARE = 0.8
# Seconds of a collective's start, and of each step of a ring or tree within and between machines:
# constants by which NCCL chooses its algorithms (src/graph/tuning.cc, protocol Simple).
BASE_SECONDS = 8.4e-6
RING_SECONDS = (3.4e-6, 14e-6)
TREE_SECONDS = (4.0e-6, 14e-6)


class Gpu(NamedTuple):
    """Figures of a data sheet, in operations or bytes per second."""

    flops: float  # dense bf16
    memory_bandwidth: float
    nvlink: float  # each way
    memory: float  # bytes


GPUS = {
    # The H100 of torchtitan's cluster, with slower memory.
    "H100-HBM2e": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA H100 80GB HBM3"], 2.4e12, 450e9, 96e9),
    "H100": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA H100 80GB HBM3"], 3.35e12, 450e9, 80e9),
    "A100-40GB": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA A100-SXM4-40GB"], 1.555e12, 300e9, 40e9),
    "A100": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA A100-SXM4-80GB"], 2.04e12, 300e9, 80e9),
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
        """Return the links of a group of ranks that are `stride` apart."""
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


# --- a training step ------------------------------------------------------------------------------

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
    parameters = two_layers.parameters - one_layer.parameters
    flops = two_layers.flops - one_layer.flops
    block = Part(parameters, flops)
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
    parameters, _ = model_size(config.model)
    if config.shard == 1:  # the gradients are averaged in one message
        exposed += cluster.group(cluster.processes).all_reduce_seconds(4 * parameters)
    moved = OPTIMIZER_BYTES * parameters / config.shard
    optimizer = moved / (BANDWIDTH_SHARE * cluster.gpu.memory_bandwidth)
    return Step(config.accumulate * work.compute, exposed, optimizer)


# --- published speeds -----------------------------------------------------------------------------

MAX_ERROR = 0.15
# Smaller micro-steps are predicted, but not checked: matrix products are slower then, which the
# simulation ignores.
MIN_CHECKED_TOKENS = 8192
BISECTIONS = 20
LLAMA = GPTConfig(
    128_256,
    block_size=8192,
    n_layer=32,
    n_head=32,
    n_kv_head=8,
    n_embd=4096,
    mlp_hidden=14336,
    norm="rmsnorm",
    position="rope",
    mlp="swiglu",
    tie_embeddings=False,
)
MPT = GPTConfig(50368, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
PUBLISHED_MODELS = {
    "Llama 3 8B": LLAMA,
    "Llama 3 70B": replace(LLAMA, n_layer=80, n_head=64, n_embd=8192, mlp_hidden=28672),
    "MPT 13B": replace(MPT, n_layer=40, n_head=40, n_embd=5120),
    "MPT 7B": MPT,
    "MPT 3B": replace(MPT, n_head=20, n_embd=2560),
    "MPT 1B": replace(MPT, n_layer=24, n_head=16, n_embd=2048),
    "MPT 760M": replace(MPT, n_layer=24, n_head=12, n_embd=1536),
    "MPT 350M": replace(MPT, n_layer=24, n_head=16, n_embd=1024),
    "MPT 125M": replace(MPT, n_layer=12, n_head=12, n_embd=768),
}
# Operations of a Llama block's forward pass per token, halved: weights of its matrices in the order
# wq, wk, wv, wo, w1, w3, w2, and the products of its attention.
LLAMA_PRODUCTS = [16_777_216, 4_194_304, 4_194_304, 16_777_216, 58_720_256, 58_720_256, 58_720_256]
LLAMA_ATTENTION = 32 * (128 + 128) * 8192
REPEATED_BY_OP = sum(LLAMA_PRODUCTS[1::2]) / (sum(LLAMA_PRODUCTS) + LLAMA_ATTENTION)
ENGINES = {
    # Torchtitan's activation checkpointing: "selective op" repeats every second matrix product,
    # "selective layer" every second block
    "selective op": Engine(outside_weight_bytes=2, recomputed=REPEATED_BY_OP),
    "selective layer": Engine(outside_weight_bytes=2, recomputed=0.5),
    "full": Engine(outside_weight_bytes=2, recomputed=1.0),
    # llm-foundry's sharding: SHARD_GRAD_OP keeps what the forward pass gathered; PURE reduces
    # gradients in bf16
    "FULL_SHARD": Engine(outside_weight_bytes=2),
    "SHARD_GRAD_OP": Engine(outside_weight_bytes=2, gathers_again=False),
    "PURE": Engine(outside_weight_bytes=2, gradient_bytes=2),
}


class Row(NamedTuple):
    """A row of published.csv; the model is sharded over all GPUs."""

    program: str
    gpu: str
    network: str
    model: str
    setting: str
    mode: str  # "eager" or "compiled"
    gpus: int
    sequences: int  # per GPU and micro-step
    accumulate: int
    speed: float  # tokens per second and GPU


class Prediction(NamedTuple):
    """A published speed and the predicted one."""

    row: Row
    speed: float  # tokens per second and GPU, predicted
    utilization: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the predicted speed."""
        return self.speed / self.row.speed - 1

    @property
    def is_checked(self) -> bool:
        """True if the simulation should hold for the row."""
        tokens = self.row.sequences * PUBLISHED_MODELS[self.row.model].block_size
        return tokens >= MIN_CHECKED_TOKENS


def read_published() -> list[Row]:
    """Read published.csv."""
    with (Path(__file__).parent / "published.csv").open(newline="") as file:
        _, *lines = csv.reader(file)
    return [
        Row(program, gpu, network, model, setting, mode, *map(int, numbers))
        for program, gpu, network, model, setting, mode, *numbers in lines
    ]


def predict_speed(row: Row, utilization: float) -> float:
    """Return the tokens per second and GPU that the simulation predicts for a row."""
    config = make_config(
        PUBLISHED_MODELS[row.model],
        row.gpus,
        row.gpus,
        row.sequences,
        row.accumulate,
        row.mode == "compiled",
    )
    cluster = Cluster(GPUS[row.gpu], NETWORKS[row.network], row.gpus, utilization)
    step = simulate_step(config, cluster, ENGINES[row.setting])
    return tokens_per_step(config) / row.gpus / step.seconds


def fit_utilization(row: Row) -> float:
    """Return the utilization with which the simulation predicts the speed of a row."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if predict_speed(row, middle) < row.speed:
            low = middle
        else:
            high = middle
    return high


def predict_published() -> list[Prediction]:
    """Fit the utilization to the first row of each program and GPU, and predict the others."""
    predictions = []
    for _, group in groupby(read_published(), key=lambda row: (row.program, row.gpu)):
        fitted, *others = group
        utilization = fit_utilization(fitted)
        for row in (fitted, *others):
            speed = predict_speed(row, utilization)
            predictions.append(Prediction(row, speed, utilization, row is fitted))
    return predictions


def check_predictions(predictions: list[Prediction]) -> None:
    """Raise `AssertionError` if a checked speed is more than `MAX_ERROR` off."""
    for prediction in predictions:
        assert abs(prediction.error) <= MAX_ERROR or not prediction.is_checked, (
            f"{prediction.row}: the predicted speed is {prediction.error:+.1%} off"
        )


def format_predictions(predictions: list[Prediction]) -> str:
    """Return a Markdown table with the range of the errors for each program and GPU."""
    lines = [
        "| program, GPU | utilization | fitted to | predicted | models | GPUs | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, series in groupby(predictions, key=lambda prediction: prediction.row[:2]):
        fitted, *others = series
        row = fitted.row
        for is_checked in (True, False):
            group = [prediction for prediction in others if prediction.is_checked == is_checked]
            if not group:
                continue
            models = list(dict.fromkeys(prediction.row.model for prediction in group))
            cells = [
                f"{row.program}, {row.gpu}",
                f"{fitted.utilization:.2f}",
                f"{row.model} on {row.gpus}",
                pluralize(len(group), "speed"),
                format_range(models),
                format_range(sorted({prediction.row.gpus for prediction in group})),
                format_range([f"{error:+.0%}" for error in sorted(p.error for p in group)]),
            ]
            if not is_checked:
                cells[3] += f", micro-steps of fewer than {MIN_CHECKED_TOKENS:,} tokens"
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_range(values: list) -> str:
    """Return the first and the last value."""
    first, last = str(values[0]), str(values[-1])
    return first if first == last else f"{first} to {last}"


# --- the tables -----------------------------------------------------------------------------------

PARTS = ("memory", "limits", "check")
PROCESSES = (1, 8, 64, 256, 1024)
TOKENS_PER_GPU = 8192  # in a micro-step
SEQUENCES_PER_BATCH = 1024  # if the batch is fixed
MIN_COMPUTE_SHARE = 0.9  # from here on, a step is limited by compute
MODELS = {
    "124 M": GPTConfig(50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),
    "1.2 B": GPTConfig(50257, block_size=2048, n_layer=22, n_head=16, n_embd=2048),
    "7 B": GPTConfig(
        32000,
        block_size=4096,
        n_layer=32,
        n_head=32,
        n_embd=4096,
        mlp_hidden=11008,
        norm="rmsnorm",
        position="rope",
        mlp="swiglu",
        tie_embeddings=False,
    ),
}


# Models whose memory on one GPU is estimated, each with the sequences of a micro-step.
GPT2 = replace(MODELS["124 M"], bias=True)
MEMORY_MODELS = {
    "GPT-2, 124 M": (GPT2, 16),
    "GPT-2 medium, 355 M": (replace(GPT2, n_layer=24, n_head=16, n_embd=1024), 16),
    "GPT-2 XL, 1.56 B": (replace(GPT2, n_layer=48, n_head=25, n_embd=1600), 8),
    "Llama 3, 8 B, 8,192 tokens": (PUBLISHED_MODELS["Llama 3 8B"], 1),
}
BYTES_PER_PARAMETER = 16  # weight, gradient, and AdamW's two moments in float32


@dataclass
class ClusterOptions:
    """Options of this simulation."""

    only: str = ",".join(PARTS)
    gpu: str = "H100"
    network: str = "NDR"
    utilization: float = 0.5


class Scenario(NamedTuple):
    """A model on a number of GPUs, sharded over some of them."""

    model: str
    processes: int
    shard: int
    is_batch_fixed: bool


class Result(NamedTuple):
    """The simulated step of a scenario."""

    scenario: Scenario
    compute_share: float  # of the duration
    memory: float  # estimated bytes of a GPU
    limit: str  # "memory", "compute", "bandwidth", "latency" or "optimizer"


def list_scenarios() -> list[Scenario]:
    """List the scenarios of the table in its order."""
    scenarios = []
    for name in MODELS:
        for processes in PROCESSES:
            for is_batch_fixed in (False, True):
                for shard in sorted({1, min(processes, GPUS_PER_MACHINE), processes}):
                    scenarios.append(Scenario(name, processes, shard, is_batch_fixed))
    return scenarios


def simulate_scenario(scenario: Scenario, options: ClusterOptions) -> Result:
    """Simulate a step of a scenario and estimate its memory."""
    name, processes, shard, is_batch_fixed = scenario
    model = MODELS[name]
    sequences = TOKENS_PER_GPU // model.block_size
    accumulate = 1
    if is_batch_fixed:
        sequences = min(sequences, SEQUENCES_PER_BATCH // processes)
        accumulate = SEQUENCES_PER_BATCH // (sequences * processes)
    config = make_config(model, processes, shard, sequences, accumulate)
    gpu = select("gpu", options.gpu, GPUS)[options.gpu]
    network = select("network", options.network, NETWORKS)[options.network]
    cluster = Cluster(gpu, network, processes, options.utilization)
    step = simulate_step(config, cluster)
    memory = estimate_memory(config, processes)
    without_latency = simulate_step(config, cluster._replace(has_latency=False))
    latency = step.exposed - without_latency.exposed
    compute_share = step.compute / step.seconds

    if memory > MAX_MEMORY_SHARE * gpu.memory:
        limit = "memory"
    elif round(compute_share, 2) >= MIN_COMPUTE_SHARE:  # as the table shows it
        limit = "compute"
    else:
        losses = {
            "latency": latency,
            "bandwidth": without_latency.exposed,
            "optimizer": step.optimizer,
        }
        limit = max(losses, key=losses.__getitem__)
    return Result(scenario, compute_share, memory, limit)


def format_results(results: list[Result]) -> str:
    """Return a Markdown table: a row for a model and a number of GPUs, columns for `shard`."""
    lines = [
        "| parameters | GPUs | memory | `shard=1` | `shard=8` | `shard=all` "
        "| fixed batch, `shard=1` | `shard=8` | `shard=all` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, group in groupby(results, key=lambda result: result.scenario[:2]):
        rows = list(group)
        model, processes = key
        shards = [1, GPUS_PER_MACHINE, processes if processes > GPUS_PER_MACHINE else None]
        cells = []
        for is_batch_fixed in (False, True):
            by_shard = {r.scenario.shard: r for r in rows if r.scenario[3] == is_batch_fixed}
            if not is_batch_fixed:
                sizes = [f"{result.memory / 1e9:,.0f}" for result in by_shard.values()]
                cells.append(f"{' / '.join(sizes)} GB")
            for shard in shards:
                cells.append(format_result(by_shard[shard]) if shard in by_shard else "")
        lines.append(f"| {model} | {processes:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_result(result: Result) -> str:
    """Return a cell: the share of compute, and the letter of the limit if it is another one."""
    if result.limit == "memory":
        return "M"
    limit = "" if result.limit == "compute" else f" {result.limit[0].upper()}"
    return f"{result.compute_share:.0%}{limit}"


def estimate_memory(config: ResolvedConfig, processes: int) -> float:
    """Estimate the bytes of a GPU, with or without one: on a CPU, with the chunks of a GPU."""
    with patch.dict(MAX_FLOAT32_LOGITS, cpu=MAX_FLOAT32_LOGITS["cuda"]):
        return memory_needed(replace(config, device="cpu"), processes)


def estimate_models() -> str:
    """Return a Markdown table of the memory on one GPU, without and with checkpoints."""
    lines = [
        "| model | sequences | weights, gradients, AdamW | estimate | `checkpoint_activations` |",
        "|---|---|---|---|---|",
    ]
    for name, (model, sequences) in MEMORY_MODELS.items():
        config = make_config(model, 1, 1, sequences)
        sizes = [
            BYTES_PER_PARAMETER * model_size(model)[0],
            estimate_memory(config, 1),
            estimate_memory(replace(config, checkpoint_activations=True), 1),
        ]
        cells = " | ".join(f"{size / 1e9:,.1f} GB" for size in sizes)
        lines.append(f"| {name} | {sequences} | {cells} |")
    return "\n".join(lines)


def make_table(part: str, options: ClusterOptions) -> str:
    """Return the Markdown table of one of `PARTS`.

    Raises:
        AssertionError: A predicted speed differs too much from the published one.
    """
    if part == "memory":
        return estimate_models()
    if part == "check":
        predictions = predict_published()
        check_predictions(predictions)
        return format_predictions(predictions)
    return format_results([simulate_scenario(scenario, options) for scenario in list_scenarios()])


def main(argv: list[str]) -> None:
    """Print the tables as Markdown."""
    options = read_options(argv, ClusterOptions)
    for part in select("only", options.only, dict.fromkeys(PARTS)):
        print(f"{make_table(part, options)}\n")


if __name__ == "__main__":
    run_command(main, __doc__)
