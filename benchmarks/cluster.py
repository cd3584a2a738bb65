"""Simulate a training step on 1 to 1,024 GPUs: what limits it, and the memory of a GPU.

    python -m benchmarks.cluster [only=memory,limits,check] [gpu=H100] [network=NDR]
                                 [utilization=0.5] [optim=adamw] [json=FILE]

gpu: H100, A100, H100-HBM2e or A100-40GB; network: NDR or HDR InfiniBand, or Ethernet. memory: the
estimated memory of one GPU; limits: a step with a fixed number of tokens per GPU, and with a fixed
batch; check: the error of the simulation for published speeds. Nothing is measured.
benchmarks/step_time.py and benchmarks/hardware.py state the assumptions; docs/scaling.md contains
the tables.
"""

from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.hardware import GPUS, GPUS_PER_MACHINE, NETWORKS, Cluster
from benchmarks.harness import Options, read_options, run_command, select, write_json
from benchmarks.published import MODELS as PUBLISHED_MODELS
from benchmarks.published import check_predictions, format_predictions, predict_published
from benchmarks.step_time import make_config, simulate_step
from config import GPTConfig, OptimConfig, ResolvedConfig
from kernels import MAX_FLOAT32_LOGITS
from training.flops import model_size, tokens_per_step
from training.memory import MAX_MEMORY_SHARE, memory_needed

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
class ClusterOptions(Options):
    """Options of this simulation."""

    only: str = ",".join(PARTS)
    gpu: str = "H100"
    network: str = "NDR"
    utilization: float = 0.5
    optim: str = "adamw"


class Scenario(NamedTuple):
    """A model on a number of GPUs, sharded over some of them."""

    model: str
    processes: int
    shard: int
    is_batch_fixed: bool


@dataclass
class Result:
    """The simulated step of a scenario."""

    model: str
    processes: int
    shard: int
    is_batch_fixed: bool
    tokens_per_step: int
    compute: float  # seconds, like the next three
    exposed: float
    optimizer: float
    seconds: float
    compute_share: float
    tokens_per_second: float
    memory: float  # estimated bytes of a GPU
    limit: str  # "memory", "compute", "bandwidth", "latency" or "optimizer"


class MarkdownTable(NamedTuple):
    """A table as Markdown, and its figures."""

    text: str
    figures: list[dict]


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
    select("optim", options.optim, dict.fromkeys(("adamw", "muon")))
    config = replace(config, optim=OptimConfig(name=options.optim))

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
    tokens = tokens_per_step(config)
    return Result(
        *scenario,
        tokens,
        *step,
        step.seconds,
        compute_share,
        tokens / step.seconds,
        memory,
        limit,
    )


def format_results(results: list[Result]) -> str:
    """Return a Markdown table: a row for a model and a number of GPUs, columns for `shard`."""
    lines = [
        "| parameters | GPUs | memory | `shard=1` | `shard=8` | `shard=all` "
        "| fixed batch, `shard=1` | `shard=8` | `shard=all` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, group in groupby(results, key=lambda result: (result.model, result.processes)):
        rows = list(group)
        model, processes = key
        shards = [1, GPUS_PER_MACHINE, processes if processes > GPUS_PER_MACHINE else None]
        cells = []
        for is_batch_fixed in (False, True):
            by_shard = {r.shard: r for r in rows if r.is_batch_fixed == is_batch_fixed}
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


def estimate_models() -> MarkdownTable:
    """Estimate the memory on one GPU, without and with recomputed activations."""
    lines = [
        "| model | sequences | weights, gradients, AdamW | estimate | `checkpoint_activations` |",
        "|---|---|---|---|---|",
    ]
    figures = []
    for name, (model, sequences) in MEMORY_MODELS.items():
        parameters, _ = model_size(model)
        config = make_config(model, 1, 1, sequences)
        configs = {
            "estimate": config,
            "checkpointed": replace(config, checkpoint_activations=True),
        }
        memory = {"stored": float(BYTES_PER_PARAMETER * parameters)}
        memory |= {mode: estimate_memory(config, 1) for mode, config in configs.items()}
        cells = " | ".join(f"{size / 1e9:,.1f} GB" for size in memory.values())
        lines.append(f"| {name} | {sequences} | {cells} |")
        figures.append({"model": name, "sequences": sequences, **memory})
    return MarkdownTable("\n".join(lines), figures)


def make_table(part: str, options: ClusterOptions) -> MarkdownTable:
    """Simulate a part.

    Args:
        part: One of `PARTS`.
        options: The options of a simulation.

    Raises:
        AssertionError: A predicted speed differs too much from the published one.
    """
    if part == "memory":
        return estimate_models()
    if part == "check":
        predictions = predict_published()
        check_predictions(predictions)
        figures = [{**p.row._asdict(), "predicted": p.speed} for p in predictions]
        return MarkdownTable(format_predictions(predictions), figures)
    results = [simulate_scenario(scenario, options) for scenario in list_scenarios()]
    return MarkdownTable(format_results(results), [asdict(result) for result in results])


def main(argv: list[str]) -> dict[str, list[dict]]:
    """Print the tables as Markdown, and return their figures."""
    options = read_options(argv, ClusterOptions)
    figures = {}
    for part in select("only", options.only, dict.fromkeys(PARTS)):
        table = make_table(part, options)
        print(f"{table.text}\n")
        figures[part] = table.figures
    write_json(options.json, figures)
    return figures


if __name__ == "__main__":
    run_command(main, __doc__)
