"""Training speed of GlassGPT, transformers' GPT-2 and nanoGPT's model at equal architecture.

    python -m benchmarks.throughput [sizes=4x128,6x384,12x768] [seconds=20] [rounds=2]
                                    [device=auto] [peers=eager]
    python -m benchmarks.throughput sizes=10M,124M,350M peers=compiled        # on a GPU

All take the same training steps (forward, backward, clipping, fused AdamW) on the same random
tokens, in turns, each time in a new process. With peers=eager, transformers runs as it is (eager,
float32) and under bf16 autocast, nanoGPT's model in plain PyTorch, and GlassGPT eager in float32
and as precision=auto compile=auto resolve for a run of 2,000 steps. With peers=compiled, all run
compiled in bf16.

The median step of `seconds`, and the median of the rounds count. Floating-point operations are
counted from the architecture, attention included. Their rate is compared with that of a matrix
product here in the same precision, and on a GPU with its data sheet.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness import (
    BYTES_PER_MB,
    ProcessResult,
    TrainingShape,
    median_step_seconds,
    read_options,
    run_command,
    run_in_process,
    select,
)
from config import GPU_VOCAB_MULTIPLE, OptimConfig, ResolvedConfig

if TYPE_CHECKING:
    from data.batches import Batches

CPU_SHAPES = {
    "4x128": TrainingShape(4, 4, 128, 64, 12, 65),
    "6x384": TrainingShape(6, 6, 384, 256, 16, 65),
    "12x768": TrainingShape(12, 12, 768, 1024, 1, 50257),
}
GPU_SHAPES = {
    "10M": TrainingShape(6, 6, 384, 256, 64, 65),
    "67M": TrainingShape(4, 12, 768, 1024, 16, 50257),
    "124M": TrainingShape(12, 12, 768, 1024, 16, 50257),
    "350M": TrainingShape(24, 16, 1024, 1024, 8, 50257),
}
THROUGHPUT_SHAPES = CPU_SHAPES | GPU_SHAPES
RUN_STEPS = 2000  # length of the run for which compile=auto decides
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0
RANDOM_TOKENS = 1 << 20
GPU_STEPS_PER_TIMING = 10  # a GPU should not wait for the host between steps


@dataclass
class ThroughputOptions:
    """Options of this benchmark."""

    sizes: str = ",".join(CPU_SHAPES)
    seconds: float = 20.0
    rounds: int = 2
    device: str = "auto"
    peers: str = "eager"


@dataclass
class StepMeasurement:
    """Duration of one training step, and the model it was measured with."""

    seconds: float
    parameters: int
    precision: str
    compiled: bool


class Runner(NamedTuple):
    """One way to train.

    Attributes:
        measure: Called with size, precision, compile, device and seconds.
        precision: Precision to train in.
        compile: Whether to compile.
    """

    measure: Callable[[str, str, bool | str, str, float], StepMeasurement]
    precision: str
    compile: bool | str


@dataclass
class ThroughputRow:
    """The rounds of one runner at one size; `ratio` is to the speed of the first runner."""

    seconds: float
    tokens_per_second: float
    ratio: float
    flops_per_second: float
    share_of_matmul: float
    memory: int
    precision: str
    compiled: bool
    parameters: int


@dataclass
class ThroughputResult:
    """Everything that this benchmark measures.

    Attributes:
        machine: The device.
        published_flops: Operations per second in bf16 by the GPU's data sheet, or None.
        matmul: Operations per second of a matrix product, by precision.
        sizes: Rows by size and runner.
    """

    machine: str
    published_flops: float | None
    matmul: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, dict[str, ThroughputRow]] = field(default_factory=dict)


def make_config(size: str, precision: str, compile: bool | str, device: str) -> ResolvedConfig:
    """Return the configuration of a run of `RUN_STEPS` steps, resolved for this machine."""
    from training.device import pick_precision
    from training.flops import model_size
    from training.plan import should_compile

    shape = THROUGHPUT_SHAPES[size]
    vocab_multiple = GPU_VOCAB_MULTIPLE if device.startswith("cuda") else 1
    model = replace(shape.model_config(bias=True), vocab_multiple=vocab_multiple)
    if compile == "auto":
        _, flops_per_token = model_size(model)
        run_flops = flops_per_token * shape.tokens_per_step * RUN_STEPS
        compile = should_compile(device, run_flops)
    return ResolvedConfig(
        device=device,
        precision=pick_precision(precision, device),
        compile=bool(compile),
        batch_size=shape.batch_size,
        max_steps=RUN_STEPS,
        shard=1,
        model=model,
        optim=OptimConfig(
            lr=LEARNING_RATE,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            grad_clip=GRAD_CLIP,
            schedule="constant",
            warmup_share=0,
        ),
    )


def measure_glassgpt(
    size: str, precision: str, compile: bool | str, device: str, seconds: float
) -> StepMeasurement:
    """Time the training step of train.py."""
    from train import train_step
    from training.device import configure_process
    from training.state import build_state
    from training.world import World

    config = make_config(size, precision, compile, device)
    configure_process(config)
    state = build_state(config, World(), lambda model: None)
    return time_steps(partial(train_step, state), state.model, config, seconds)


def measure_transformers(
    size: str, precision: str, compile: bool | str, device: str, seconds: float
) -> StepMeasurement:
    """Time a training step of transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    config = make_config(size, precision, compile, device)
    hf_config = GPT2Config(
        vocab_size=config.model.vocab_size,
        n_positions=config.model.block_size,
        n_embd=config.model.n_embd,
        n_layer=config.model.n_layer,
        n_head=config.model.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(hf_config)

    def compute_loss(forward: Callable, inputs: Any, targets: Any) -> Any:
        return forward(inputs, labels=inputs).loss  # it shifts the labels itself

    return measure_peer(model, compute_loss, config, seconds)


def measure_nanogpt(
    size: str, precision: str, compile: bool | str, device: str, seconds: float
) -> StepMeasurement:
    """Time a training step of nanoGPT's model, on a GPU with a padded vocabulary as in nanoGPT."""
    from benchmarks.plain import PlainGPT

    config = make_config(size, precision, compile, device)
    padded_vocab_size = config.model.vocab_size + config.model.vocab_padding

    def compute_loss(forward: Callable, inputs: Any, targets: Any) -> Any:
        return forward(inputs, targets)

    model = PlainGPT(replace(config.model, vocab_size=padded_vocab_size))
    return measure_peer(model, compute_loss, config, seconds)


def measure_peer(
    model: Any, compute_loss: Callable, config: ResolvedConfig, seconds: float
) -> StepMeasurement:
    """Time a training step of another model, with clipping and fused AdamW.

    Args:
        model: The model, a `torch.nn.Module`.
        compute_loss: Called with the model's forward pass, inputs and targets.
        config: Device, precision and batches.
        seconds: How long to measure.
    """
    import torch

    from kernels import autocast
    from train import micro_batches
    from training.world import World

    model.to(config.device)
    forward = torch.compile(model) if config.compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def train_step(step: int, inputs: Any, targets: Any) -> None:
        for x, y in micro_batches(inputs, targets, config, World()):
            with autocast(config.device, config.precision):
                loss = compute_loss(forward, x, y)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return time_steps(train_step, model, config, seconds)


def random_batches(config: ResolvedConfig) -> "Batches":
    """Return batches of random tokens."""
    import numpy as np

    from data.batches import Batches

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.model.vocab_size, RANDOM_TOKENS, dtype=np.uint16)
    return Batches(tokens, config.model.block_size, config.batch_size, seed=0)


def time_steps(
    train_step: Callable, model: Any, config: ResolvedConfig, seconds: float
) -> StepMeasurement:
    """Time training steps on batches of random tokens.

    Args:
        train_step: Called with the number of the step, inputs and targets (batch_size, T).
        model: The model that it trains.
        config: Its configuration.
        seconds: How long to measure.
    """
    from training.device import synchronize

    batches = random_batches(config)
    numbers = itertools.count()

    def take_step() -> None:
        step = next(numbers)
        train_step(step, *batches.batch(step))

    steps_per_timing = GPU_STEPS_PER_TIMING if config.device.startswith("cuda") else 1
    step_seconds = median_step_seconds(
        take_step, seconds, lambda: synchronize(config.device), steps_per_timing
    )
    parameters = sum(p.numel() for p in model.parameters())
    return StepMeasurement(step_seconds, parameters, config.precision, config.compile)


# What is compared, by name. The others are compared with the first.
EAGER_RUNNERS = {
    "transformers": Runner(measure_transformers, "fp32", False),
    "transformers, bf16": Runner(measure_transformers, "bf16", False),
    "nanoGPT's model": Runner(measure_nanogpt, "fp32", False),
    "GlassGPT, eager float32": Runner(measure_glassgpt, "fp32", False),
    "GlassGPT, auto": Runner(measure_glassgpt, "auto", "auto"),
}
COMPILED_RUNNERS = {
    "nanoGPT's model": Runner(measure_nanogpt, "bf16", True),
    "GlassGPT": Runner(measure_glassgpt, "bf16", True),
    "transformers": Runner(measure_transformers, "bf16", True),
}
PEERS = {"eager": EAGER_RUNNERS, "compiled": COMPILED_RUNNERS}


def measure_matmul_rates(device: str) -> dict[str, float]:
    """Return the operations per second of a matrix product on a device, by precision."""
    from training.flops import measure_matmul_rate

    return {precision: measure_matmul_rate(device, precision) for precision in ("fp32", "bf16")}


def main(argv: list[str]) -> dict[str, Any]:
    """Measure all runners at all sizes, print a table for each size and return the figures."""
    options = read_options(argv, ThroughputOptions)
    (runners,) = select("peers", options.peers, PEERS).values()
    sizes = select("sizes", options.sizes, THROUGHPUT_SHAPES)
    from training.device import describe, pick_device
    from training.flops import PUBLISHED_16_BIT_FLOPS

    device = pick_device(options.device)
    published_flops = PUBLISHED_16_BIT_FLOPS.get(describe(device))
    console, result = Console(), ThroughputResult(describe(device), published_flops)
    with Progress(console=console, transient=True) as progress:
        total = len(sizes) * options.rounds * len(runners) + 1
        task = progress.add_task("matrix products", total=total)
        result.matmul, _ = run_in_process(measure_matmul_rates, device)
        progress.advance(task)
        console.print(
            f"{result.machine}; matrix products: {result.matmul['fp32'] / 1e9:,.0f} GFLOP/s in "
            f"float32, {result.matmul['bf16'] / 1e9:,.0f} in bf16"
        )
        for size in sizes:
            rounds: dict[str, list[ProcessResult]] = {name: [] for name in runners}
            for _ in range(options.rounds):
                for name, runner in runners.items():
                    progress.update(task, description=f"{size}: {name}")
                    args = (size, runner.precision, runner.compile, device, options.seconds)
                    rounds[name].append(run_in_process(runner.measure, *args))
                    progress.advance(task)
            result.sizes[size] = summarize(size, rounds, result.matmul)
            console.print(make_table(size, result.sizes[size], published_flops))
    return asdict(result)


def summarize(
    size: str, rounds: dict[str, list[ProcessResult]], matmul: dict[str, float]
) -> dict[str, ThroughputRow]:
    """Reduce the rounds of each runner to one row.

    Args:
        size: Key of `THROUGHPUT_SHAPES`.
        rounds: A `StepMeasurement` and the memory of each round, by runner.
        matmul: Operations per second of a matrix product, by precision.
    """
    from training.flops import model_size

    shape = THROUGHPUT_SHAPES[size]
    tokens = shape.tokens_per_step
    _, flops_per_token = model_size(shape.model_config(bias=True))
    median_seconds = {
        name: median(measurement.seconds for measurement, _ in measurements)
        for name, measurements in rounds.items()
    }
    first_seconds = next(iter(median_seconds.values()))
    rows = {}
    for name, measurements in rounds.items():
        seconds = median_seconds[name]
        measurement: StepMeasurement = measurements[0].value
        flops_per_second = flops_per_token * tokens / seconds
        rows[name] = ThroughputRow(
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            ratio=first_seconds / seconds,
            flops_per_second=flops_per_second,
            share_of_matmul=flops_per_second / matmul[measurement.precision],
            memory=max(peak_memory for _, peak_memory in measurements),
            precision=measurement.precision,
            compiled=measurement.compiled,
            parameters=measurement.parameters,
        )
    return rows


def make_table(size: str, rows: dict[str, ThroughputRow], published_flops: float | None) -> Table:
    """Show the runners at one size; `published_flops` is the rate in a GPU's data sheet."""
    shape = THROUGHPUT_SHAPES[size]
    parameters = next(iter(rows.values())).parameters
    table = Table(
        title=f"{shape.n_layer} layers of width {shape.n_embd}, {parameters / 1e6:.1f} M "
        f"parameters, {shape.batch_size} × {shape.block_size} tokens per step"
    )
    columns = ["tok/s", "ratio", "GFLOP/s", "of matmul", "memory"]
    if published_flops:
        columns.append("of data sheet")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        label = name
        if name.endswith("auto"):
            label += f" ({row.precision}, {'compiled' if row.compiled else 'eager'})"
        cells = [
            label,
            f"{row.tokens_per_second:,.0f}",
            f"{row.ratio:.2f}x",
            f"{row.flops_per_second / 1e9:,.0f}",
            f"{row.share_of_matmul:.0%}",
            f"{row.memory / BYTES_PER_MB:,.0f} MB",
        ]
        if published_flops:
            cells.append(f"{row.flops_per_second / published_flops:.0%}")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    run_command(main, __doc__)
