"""Simulate a training step on 1 to 1,024 GPUs: what limits it, and the memory of a GPU.

    python -m benchmarks.cluster [only=weak,strong,check] [gpu=H100] [network=NDR]
                                 [utilization=0.5] [optim=adamw] [json=FILE]

gpu: H100, A100, H100-HBM2e or A100-40GB; network: NDR or HDR InfiniBand, or Ethernet. weak: a fixed
number of tokens per GPU; strong: a fixed batch; check: the error of the simulation for published
speeds. Nothing is measured. benchmarks/step_time.py and benchmarks/hardware.py state the
assumptions; docs/scaling.md contains the tables.
"""

from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import NamedTuple

from benchmarks.hardware import GPUS, GPUS_PER_MACHINE, NETWORKS, Cluster
from benchmarks.harness import Options, read_options, run_command, select, write_json
from benchmarks.published import check_predictions, format_predictions, predict_published
from benchmarks.step_time import make_config, simulate_step
from config import OptimConfig
from model_config import GPTConfig
from training.flops import tokens_per_step
from training.plan import MAX_MEMORY_SHARE, memory_needed

PARTS = ("weak", "strong", "check")
PROCESSES = (1, 8, 64, 256, 1024)
TOKENS_PER_GPU = 8192  # in a micro-step
SEQUENCES_PER_BATCH = 1024  # if the batch is fixed
MIN_COMPUTE_SHARE = 0.9  # from here on, a step is limited by compute
MODELS = {
    "124 M": GPTConfig(50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),
    "1.2 G": GPTConfig(50257, block_size=2048, n_layer=22, n_head=16, n_embd=2048),
    "7 G": GPTConfig(
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
    sequences: int  # per micro-step and GPU
    accumulate: int


@dataclass
class Result:
    """What is simulated of a scenario."""

    model: str
    processes: int
    shard: int
    tokens_per_step: int
    compute: float  # seconds, like the next three
    exposed: float
    optimizer: float
    seconds: float
    compute_share: float
    tokens_per_second: float
    memory: float  # bytes of a GPU, as planned
    limit: str  # "memory", "compute", "bandwidth", "latency" or "optimizer"


class MarkdownTable(NamedTuple):
    """A table as Markdown, and its figures."""

    text: str
    figures: list[dict]


def list_scenarios(is_batch_fixed: bool) -> list[Scenario]:
    """List the scenarios of a table: with a fixed batch, or with fixed tokens per GPU."""
    scenarios = []
    for name, model in MODELS.items():
        for processes in PROCESSES:
            sequences = TOKENS_PER_GPU // model.block_size
            accumulate = 1
            if is_batch_fixed:
                sequences = min(sequences, SEQUENCES_PER_BATCH // processes)
                accumulate = SEQUENCES_PER_BATCH // (sequences * processes)
            for shard in sorted({1, min(processes, GPUS_PER_MACHINE), processes}):
                scenarios.append(Scenario(name, processes, shard, sequences, accumulate))
    return scenarios


def simulate_scenario(scenario: Scenario, options: ClusterOptions) -> Result:
    """Simulate a step of a scenario and plan its memory."""
    gpu = select("gpu", options.gpu, GPUS)[options.gpu]
    network = select("network", options.network, NETWORKS)[options.network]
    cluster = Cluster(gpu, network, scenario.processes, options.utilization)
    _, processes, shard, sequences, accumulate = scenario
    config = make_config(MODELS[scenario.model], processes, shard, sequences, accumulate)
    select("optim", options.optim, dict.fromkeys(("adamw", "muon")))
    config = replace(config, optim=OptimConfig(name=options.optim))
    step = simulate_step(config, cluster)
    memory = memory_needed(config, processes)
    without_latency = simulate_step(config, cluster._replace(has_latency=False))
    latency = step.exposed - without_latency.exposed

    if memory > MAX_MEMORY_SHARE * gpu.memory:
        limit = "memory"
    elif step.compute >= MIN_COMPUTE_SHARE * step.seconds:
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
        scenario.model,
        processes,
        shard,
        tokens,
        *step,
        step.seconds,
        step.compute / step.seconds,
        tokens / step.seconds,
        memory,
        limit,
    )


def format_results(results: list[Result]) -> str:
    """Return a Markdown table: a row for a model and a number of GPUs, columns for `shard`."""
    lines = [
        "| parameters | GPUs | tokens per step | `shard=1` | `shard=8` | `shard=all` |",
        "|---|---|---|---|---|---|",
    ]
    for key, group in groupby(results, key=lambda result: (result.model, result.processes)):
        rows = list(group)
        cells = {row.shard: format_result(row) for row in rows}
        columns = [cells[1], cells.get(GPUS_PER_MACHINE, ""), cells[rows[-1].shard]]
        if rows[-1].shard <= GPUS_PER_MACHINE:  # all is 1 or 8
            columns[2] = ""
        model, processes = key
        lines.append(
            f"| {model} | {processes:,} | {rows[0].tokens_per_step:,} | {' | '.join(columns)} |"
        )
    return "\n".join(lines)


def format_result(result: Result) -> str:
    """Return a cell: the share of the step that computes, its limit if another, and the memory."""
    memory = f"{result.memory / 1e9:,.0f} GB"
    if result.limit == "memory":
        return f"needs {memory}"
    limit = "" if result.limit == "compute" else f" ({result.limit})"
    return f"{result.compute_share:.0%}{limit}, {memory}"


def make_table(part: str, options: ClusterOptions) -> MarkdownTable:
    """Simulate a part.

    Args:
        part: One of `PARTS`.
        options: The options; for the check they play no role.

    Raises:
        AssertionError: A predicted speed differs too much from the published one.
    """
    if part == "check":
        predictions = predict_published()
        check_predictions(predictions)
        figures = [{**p.row._asdict(), "predicted": p.speed} for p in predictions]
        return MarkdownTable(format_predictions(predictions), figures)
    scenarios = list_scenarios(is_batch_fixed=part == "strong")
    results = [simulate_scenario(scenario, options) for scenario in scenarios]
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
