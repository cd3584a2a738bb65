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
product here in the same precision.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    BYTES_PER_MB,
    ProcessResult,
    TrainingShape,
    measure_matmul_rate,
    median_step_seconds,
    read_options,
    run_command,
    run_in_process,
    select,
)
from benchmarks.train_step import make_train_step
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


class StepMeasurement(NamedTuple):
    """Duration of one training step, and the model it was measured with."""

    seconds: float
    parameters: int
    precision: str
    compiled: bool


class Runner(NamedTuple):
    """One way to train."""

    # Called with size, precision, compile, device and seconds
    measure: Callable[[str, str, bool | str, str, float], StepMeasurement]
    precision: str
    compile: bool | str


class ThroughputRow(NamedTuple):
    """The rounds of one runner at one size."""

    seconds: float
    memory: int  # bytes
    measurement: StepMeasurement  # of the first round


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
        optim=OptimConfig(schedule="constant", warmup_share=0),
    )


def measure_glassgpt(
    size: str, precision: str, compile: bool | str, device: str, seconds: float
) -> StepMeasurement:
    """Time the training step of train.py."""
    from training.device import configure_process

    config = make_config(size, precision, compile, device)
    configure_process(config)
    model, take_step = make_train_step(config)
    return time_steps(take_step, model, config, seconds)


def measure_transformers(
    size: str, precision: str, compile: bool | str, device: str, seconds: float
) -> StepMeasurement:
    """Time a training step of transformers' GPT-2."""
    from benchmarks.peers import build_transformers

    config = make_config(size, precision, compile, device)

    def compute_loss(forward: Callable, inputs: Any, targets: Any) -> Any:
        # It shifts the labels itself
        return forward(inputs, labels=inputs, use_cache=False).loss

    return measure_peer(build_transformers(config.model), compute_loss, config, seconds)


def measure_nanogpt(
    size: str, precision: str, compile: bool | str, device: str, seconds: float
) -> StepMeasurement:
    """Time a training step of nanoGPT's model, on a GPU with a padded vocabulary as in nanoGPT."""
    from benchmarks.peers import PlainGPT

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

    `compute_loss` is called with the model's forward pass, inputs and targets.
    """
    import torch

    from kernels import autocast
    from train import micro_batches
    from training.world import World

    model.to(config.device)
    forward = torch.compile(model) if config.compile else model
    optim = config.optim
    betas = (optim.beta1, optim.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), optim.lr, betas, weight_decay=optim.weight_decay, fused=True
    )

    def train_step(step: int, batch: tuple) -> None:
        for x, y in micro_batches(batch, config, World()):
            with autocast(config.device, config.precision):
                loss = compute_loss(forward, x, y)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
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
    """Time training steps of a model on batches of random tokens.

    `train_step` is called with the number of the step and its batch: inputs and targets
    (batch_size, T).
    """
    from training.device import synchronize

    batches = random_batches(config)
    numbers = itertools.count()

    def take_step() -> None:
        step = next(numbers)
        train_step(step, batches.batch(step))

    steps_per_timing = GPU_STEPS_PER_TIMING if config.device.startswith("cuda") else 1
    step_seconds = median_step_seconds(
        take_step, seconds, lambda: synchronize(config.device), steps_per_timing
    )
    parameters = sum(p.numel() for p in model.parameters())
    return StepMeasurement(step_seconds, parameters, config.precision, config.compile)


# What is compared, by name, the others with the first.
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
    return {precision: measure_matmul_rate(device, precision) for precision in ("fp32", "bf16")}


def main(argv: list[str]) -> dict[str, dict[str, ThroughputRow]]:
    """Measure all runners at all sizes, print a table for each size and return the figures."""
    options = read_options(argv, ThroughputOptions)
    (runners,) = select("peers", options.peers, PEERS).values()
    sizes = select("sizes", options.sizes, THROUGHPUT_SHAPES)
    from training.device import describe, pick_device

    device = pick_device(options.device)
    matmul, _ = run_in_process(measure_matmul_rates, device)
    print(
        f"{describe(device)}; matrix products: {matmul['fp32'] / 1e9:,.0f} GFLOP/s in float32, "
        f"{matmul['bf16'] / 1e9:,.0f} in bf16"
    )
    figures = {}
    for size in sizes:
        rounds: dict[str, list[ProcessResult]] = {name: [] for name in runners}
        for _ in range(options.rounds):
            for name, runner in runners.items():
                args = (size, runner.precision, runner.compile, device, options.seconds)
                rounds[name].append(run_in_process(runner.measure, *args))
        figures[size] = {name: summarize(results) for name, results in rounds.items()}
        Console().print(make_table(size, figures[size], matmul))
    return figures


def summarize(rounds: list[ProcessResult]) -> ThroughputRow:
    """Reduce the rounds of a runner, each a `StepMeasurement` and the memory, to one row."""
    return ThroughputRow(
        seconds=median(measurement.seconds for measurement, _ in rounds),
        memory=max(peak_memory for _, peak_memory in rounds),
        measurement=rounds[0].value,
    )


def make_table(size: str, rows: dict[str, ThroughputRow], matmul: dict[str, float]) -> Table:
    """Show the runners at one size; `matmul` has the rate of a matrix product by precision."""
    from training.flops import model_size

    shape = THROUGHPUT_SHAPES[size]
    _, flops_per_token = model_size(shape.model_config(bias=True))
    first = next(iter(rows.values()))
    table = Table(
        title=f"{shape.n_layer} layers of width {shape.n_embd}, "
        f"{first.measurement.parameters / 1e6:.1f} M parameters, {shape.batch_size} × "
        f"{shape.block_size} tokens per step"
    )
    table.add_column("")
    for column in ("tok/s", "ratio", "GFLOP/s", "of matmul", "memory"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        _, _, precision, is_compiled = row.measurement
        label = name
        if name.endswith("auto"):
            label += f" ({precision}, {'compiled' if is_compiled else 'eager'})"
        tokens_per_second = shape.tokens_per_step / row.seconds
        flops_per_second = tokens_per_second * flops_per_token
        table.add_row(
            label,
            f"{tokens_per_second:,.0f}",
            f"{first.seconds / row.seconds:.2f}x",
            f"{flops_per_second / 1e9:,.0f}",
            f"{flops_per_second / matmul[precision]:.0%}",
            f"{row.memory / BYTES_PER_MB:,.0f} MB",
        )
    return table


if __name__ == "__main__":
    run_command(main, __doc__)
