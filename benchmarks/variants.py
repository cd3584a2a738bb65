"""What single settings change: speed and memory of GlassGPT's training step, and its profile.

    python -m benchmarks.variants [size=67M] [compile=1] [seconds=5] [profile=5] [device=auto]

The first row is what precision=auto chooses on a GPU, and bf16 on a CPU; it is compiled and has
padded logits. Other rows change the precision, torch.compile, checkpoint_activations,
model.vocab_multiple, or compute cross-entropy in one piece instead of chunks. Each runs in a
process of its own, on random tokens, as in benchmarks.throughput. A row that the device cannot run
has the error instead. With compile=0 all run eagerly.

The table is torch's profile of the first row: the operations that take most of the time.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.harness import (
    BYTES_PER_MB,
    ProcessResult,
    read_options,
    run_command,
    run_in_process,
    select,
)
from benchmarks.throughput import (
    THROUGHPUT_SHAPES,
    StepMeasurement,
    make_config,
    random_batches,
    time_steps,
)
from benchmarks.train_step import make_train_step
from common.terminal import error_sentence
from config import GPU_VOCAB_MULTIPLE, ResolvedConfig
from run.run_dir import RunDir
from training.profiling import WARM_UP_STEPS


@dataclass
class VariantOptions:
    """Options of this benchmark."""

    size: str = "67M"
    compile: int = 1
    seconds: float = 5.0
    profile: int = 5
    device: str = "auto"


class Variant(NamedTuple):
    """Settings of a training step."""

    precision: str
    compile: bool
    has_tf32: bool = True  # in float32, on a GPU that has it
    checkpoint_activations: bool = False
    vocab_multiple: int = GPU_VOCAB_MULTIPLE
    has_chunks: bool = True  # whether eager cross-entropy converts a part of the logits at a time


def make_variants(precision: str, compile: bool) -> dict[str, Variant]:
    """Return the variants by name; `precision` is the fastest of the device."""
    mode = "compiled" if compile else "eager"
    first = Variant(precision, compile)
    variants = {f"{precision}, {mode}": first}
    for other in ("bf16", "fp16", "fp32"):
        variants.setdefault(f"{other}, {mode}", first._replace(precision=other))
    exact = first._replace(precision="fp32", has_tf32=False)
    return variants | {
        f"fp32 without TF32, {mode}": exact,
        f"checkpoint_activations=true, {mode}": first._replace(checkpoint_activations=True),
        f"model.vocab_multiple=1, {mode}": first._replace(vocab_multiple=1),
        f"{precision}, eager": first._replace(compile=False),
        "cross-entropy in one piece, eager": first._replace(compile=False, has_chunks=False),
    }


def configure_variant(size: str, variant: Variant, device: str) -> ResolvedConfig:
    """Return the configuration of a variant."""
    config = make_config(size, variant.precision, variant.compile, device)
    return replace(
        config,
        checkpoint_activations=variant.checkpoint_activations,
        model=replace(config.model, vocab_multiple=variant.vocab_multiple),
    )


def measure_variant(size: str, variant: Variant, device: str, seconds: float) -> StepMeasurement:
    """Time the training step of a variant."""
    import torch

    import kernels
    from training.device import configure_process

    config = configure_variant(size, variant, device)
    configure_process(config)
    if not variant.has_tf32:
        torch.set_float32_matmul_precision("highest")
    if not variant.has_chunks:
        kernels.MAX_FLOAT32_LOGITS.clear()
    model, take_step = make_train_step(config)
    return time_steps(take_step, model, config, seconds)


def profile_variant(size: str, variant: Variant, device: str, steps: int) -> str:
    """Profile training steps as `profile=N` does, and return torch's table."""
    from training.activity_timer import ActivityTimer
    from training.device import configure_process
    from training.profiling import StepProfiler

    config = configure_variant(size, variant, device)
    config = replace(config, profile=steps, max_steps=WARM_UP_STEPS + steps)
    configure_process(config)
    _, take_step = make_train_step(config)
    batches = random_batches(config)
    timer = ActivityTimer(device, {})
    with TemporaryDirectory() as folder:
        profiler = StepProfiler(config, RunDir(Path(folder)).trace_file, timer, step=0)
        table, step = None, 0
        while table is None:
            timer.switch("train")
            take_step(step, batches.batch(step))
            step += 1
            table = profiler.advance(step)
    return table


def format_figures(config: ResolvedConfig, measured: ProcessResult) -> str:
    """Return speed and memory of a variant in one line."""
    from training.flops import speed_metrics

    metrics = speed_metrics(measured.value.seconds, config, processes=1)
    speed, mfu = metrics["train/tokens_per_second"], metrics.get("train/mfu")
    share = "" if mfu is None else f", MFU {mfu:.0%}"
    return f"{speed:,.0f} tok/s{share}, {measured.peak_memory / BYTES_PER_MB:,.0f} MB"


def main(argv: list[str]) -> None:
    """Measure all variants and a profile, and print them."""
    options = read_options(argv, VariantOptions)
    select("size", options.size, THROUGHPUT_SHAPES)
    from training.device import describe, pick_device, pick_precision

    device = pick_device(options.device)
    precision = pick_precision("auto", device) if device.startswith("cuda") else "bf16"
    variants = make_variants(precision, bool(options.compile))
    print(f"{describe(device)}, {options.size}")
    for name, variant in variants.items():
        try:
            measured = run_in_process(
                measure_variant, options.size, variant, device, options.seconds
            )
        except Exception as e:  # of the other process: too little memory, an error of a compiler
            print(f"{name}: FAILED, {error_sentence(e)}", flush=True)
            continue
        config = configure_variant(options.size, variant, device)
        print(f"{name}: {format_figures(config, measured)}", flush=True)
    first = next(iter(variants.values()))
    profile, _ = run_in_process(profile_variant, options.size, first, device, options.profile)
    print(profile)


if __name__ == "__main__":
    run_command(main, __doc__)
