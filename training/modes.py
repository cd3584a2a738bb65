"""Evaluate a model, or measure what a run would cost, instead of training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.text import format_loss, format_minutes, pluralize
from config import Config, ResolvedConfig
from data.batches import Batches
from data.synthetic import Task
from run.checkpoints import Start
from run.locking import check_run_dir
from run.run_dir import Log, RunDir
from training import device
from training.activity_timer import ActivityTimer
from training.display import SHOWN_METRICS
from training.evaluate import evaluate, make_windows
from training.flops import memory_metrics, model_size
from training.plan import resolve
from training.stored_model import StoredModel
from training.task_metrics import describe_task, measure_task
from training.text import prepare_text
from training.world import World
from variants import build_model

DRY_RUN_STEPS = 3


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
    return run_dir.find_start(log) if config.resume else Start()


def measure_cost(
    take_step: Callable,
    batches: Batches | Task,
    start: int,
    config: ResolvedConfig,
    world: World,
) -> None:
    """Take three steps of a run, after `start` others, and print what all that remain would cost.

    It is the last line. The first step is not timed: it compiles code and allocates memory.
    """
    timer = ActivityTimer(config.device, {}, start)
    timer.switch("train")
    for step in range(start, start + DRY_RUN_STEPS):
        take_step(step, batches.batch(step, world.rank, world.size))
        if step == start:
            timer.step_seconds(step + 1)
    seconds = timer.step_seconds(step + 1)
    steps = max(0, config.max_steps - start)
    parameters, _ = model_size(config.model)
    metrics = {"train/ms_per_step": 1000 * seconds} | memory_metrics(config.device)
    cost = [
        pluralize(parameters, "parameter"),
        f"{pluralize(steps, 'step')} in {format_minutes(steps * seconds)}",
        *(SHOWN_METRICS[key](value) for key, value in metrics.items()),
    ]
    world.log(f"cost     {', '.join(cost)}")
