"""The modes of train.py that do not train: evaluate a model, plan a run."""

import time
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np

from common.settings import format_settings
from common.text import format_loss, format_magnitude, format_minutes, pluralize
from common.torchrun import count_processes
from config import Config, ResolvedConfig
from run.locking import check_run_dir
from run.run_dir import Log, RunDir
from run.start import Start, find_start
from training import device
from training.evaluate import evaluate, make_windows
from training.flops import estimate_step_seconds, model_size, tokens_per_step
from training.loss_scale import LossScaler
from training.losses import Losses
from training.memory import memory_bound
from training.optimizers import build_optimizers
from training.plan import fits, print_run, resolve
from training.stored_model import StoredModel
from training.task_metrics import describe_task, measure_task
from training.text import prepare_text
from training.wandb_record import check_wandb
from training.world import World
from variants import build_model

# A step that is estimated to take longer, in seconds, is not timed.
MAX_STEP_SECONDS = 5
# Seconds after which no further step is timed. It matters only if the peak rate is unknown, because
# the duration of a step cannot be estimated beforehand then.
MAX_TIMING_SECONDS = 60
# The first steps are slower, and the fastest of the others was interrupted least by other programs.
WARM_UP_STEPS, TIMED_STEPS = 2, 5


def evaluate_only(config: Config, stored: StoredModel) -> float:
    """Print and return the validation loss of a model: a run's best one, or that of init_from.

    The run is only read: nothing in its folder changes, and it may still be training.
    """
    world = World()
    device.pick_device(config.device)  # refuse a missing one before the text is prepared
    text = prepare_text(config, world, stored, Start())

    # Windows of a text that is shorter than the context would be padded to it
    length = min(config.model.block_size, len(text.train) - 1, len(text.val) - 1)
    model_settings = replace(config.model, block_size=max(1, length))
    resolved = resolve(replace(config, model=model_settings, compile=False), 1, text)
    device.configure_process(resolved)
    model = build_model(resolved.model)
    stored.copy_to(model)
    model.to(resolved.device)

    validation, _ = make_windows(text, resolved, world)
    metrics = evaluate(model, validation)
    manifest = stored.manifest
    source = config.run_dir or config.init_from
    step = f"step {manifest.step:,}, " if manifest else ""
    world.log(f"model    {source}, {step}{pluralize(model.num_parameters(), 'parameter')}")
    loss = format_loss(metrics["val/loss"], metrics.get("val/bits_per_byte"))
    world.log(f"loss     {loss}")
    world.log(f"         over {pluralize(validation.num_targets, 'validation token')}")
    if text.task:
        for line in describe_task(measure_task(text.task, model, is_last=True)):
            world.log(line)
    if manifest and manifest.fingerprint != text.fingerprint:
        world.log(
            "note     the run was trained on another text, or this one has changed since then, so "
            "the training text may contain parts of this validation split"
        )
    return metrics["val/loss"]


def find_planned_start(config: Config, log: Log) -> Start:
    """Return the start of a run that is only planned; refuse a folder that it could not have."""
    if not config.run_dir:
        return Start()
    run_dir = RunDir(Path(config.run_dir))
    check_run_dir(config, run_dir)
    return find_start(run_dir, log) if config.resume else Start()


def dry_run(
    config: Config,
    start: Start,
    origin: StoredModel | None,
    train_step: Callable,
    is_in_sweep: bool = False,
) -> float:
    """Print a run's size, memory, operations and time, and what each `auto` became; return nan.

    Mistakes are reported as the run would report them. Only the prepared text is written, to the
    cache; of a large text just the beginning is read. For a job of a sweep, the last line printed
    sums up the others.
    """
    world = World()
    processes = count_processes(alone=config.distributed == "none")
    device.pick_device(config.device, processes)
    wandb = replace(config.wandb, mode=check_wandb(config.wandb))
    text = prepare_text(config, world, origin, start)
    resolved = resolve(config, processes, text, start.step)
    device.configure_process(resolved)

    # Size, memory and time
    parameters, flops_per_token = model_size(resolved.model)
    num_steps = max(0, config.max_steps - start.step)
    num_tokens = num_steps * tokens_per_step(resolved)
    memory = memory_bound(resolved, processes)
    available = device.device_memory(resolved.device, processes)
    step_seconds, source = time_step(resolved, processes, train_step)
    duration = "unknown" if step_seconds is None else format_minutes(step_seconds * num_steps)

    memory_text = format_magnitude(memory, None, "B")
    flops = f"{num_tokens * flops_per_token:.2e} FLOPs"
    if is_in_sweep:
        world.log(f"{pluralize(parameters, 'parameter')}, {memory_text}, {flops}, {duration}")
        return nan
    print_run(resolved, text, processes, world.log)
    of_device = f" of {available / 1e9:,.1f} GB" if available else ""
    each = " in each process" if processes > 1 else ""
    world.log(
        f"memory   at most about {memory_text}{of_device} for the tensors of a step{each}; PyTorch "
        "(0.4 GB on a CPU), memory that it keeps for reuse, evaluation and snapshots come on top"
    )
    world.log(
        f"compute  {flops} for {pluralize(num_tokens, 'token')} in {pluralize(num_steps, 'step')}"
    )
    world.log(f"time     about {duration}, without evaluations and snapshots ({source})")
    if choices := list_choices(config, replace(resolved, wandb=wandb)):
        world.log(f"auto     {' '.join(choices)}")
    return nan


def list_choices(config: Config, resolved: ResolvedConfig) -> list[str]:
    """Return what each setting that is `auto` became, as it would be typed."""
    chosen = format_settings(resolved)
    return [
        f"{key}={chosen[key]}"
        for key, value in format_settings(config).items()
        if value == "auto" and chosen[key] != "auto"
    ]


def time_step(
    config: ResolvedConfig, processes: int, train_step: Callable
) -> tuple[float | None, str]:
    """Return the seconds of an optimizer step, None if unknown, and how they are known.

    This process takes a few steps of its share of the batch, with random tokens, unless a step
    would take long or more memory than there is.
    """
    estimate = estimate_step_seconds(config, processes)
    alone = replace(config, batch_size=config.batch_size // processes, shard=1, compile=False)
    memory = device.device_memory(config.device, processes=1)
    is_too_large = memory is not None and not fits(alone, 1, memory)
    if is_too_large or (estimate or 0) > MAX_STEP_SECONDS:
        return estimate, "a rough estimate" if estimate else "too large to be timed"
    world = World()
    model = build_model(alone.model)
    model.checkpoint_activations = alone.checkpoint_activations
    world.place(model, alone)
    optimizers = build_optimizers(model, alone.optim, alone.precision)
    scaler = LossScaler(alone.precision)
    losses = Losses(model, alone.device)
    shape = (alone.batch_size, alone.model.block_size)
    tokens = np.random.default_rng(0).integers(alone.model.vocab_size, size=shape)
    seconds = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        train_step(0, (tokens, tokens), model, optimizers, scaler, losses, alone, world)
        device.synchronize(alone.device)
        seconds.append(time.perf_counter() - start)
        if sum(seconds) > MAX_TIMING_SECONDS:
            break
    step_seconds = min(seconds[WARM_UP_STEPS:] or seconds)
    eager = ", not compiled" if config.compile else ""
    return step_seconds, f"{1000 * step_seconds:,.0f} ms per step, timed{eager}"
