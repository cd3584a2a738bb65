"""One training run, top to bottom; the command is the first block.

python train.py                       the default run, on this Python's own library
python train.py --help                what can be set
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the command, which answers mistakes before torch is imported below
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P and -I leave it out
    import common.wait_policy  # noqa: F401  measures from here on what other programs compute
    from common.signals import end_on_interrupt

    end_on_interrupt()  # without a traceback from an import
    import hydra

    import cli

    @hydra.main(version_base="1.3", config_path=str(cli.CONFIGS), config_name="config")
    def command(composed: "DictConfig") -> float | None:
        """Import this file, and train the run or the job of a sweep that Hydra has composed."""
        import train

        return train.main(composed)

    with cli.hydra_command():
        command()
    sys.exit()

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from math import nan
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

import cli
from common.errors import UserError
from common.launcher import process_rank
from common.terminal import exit_on_error, tolerate_errors
from common.text import pluralize
from config import Config, ResolvedConfig
from data.batches import Batches
from data.tokens import Tokens
from distributed.world import join
from kernels import autocast
from model import GPT
from run.checkpoints import Start
from run.locking import locked_run_dir
from run.loss_history import best_row
from run.row import Row
from run.run_dir import RunDir
from training import device, modes
from training.activity_timer import ActivityTimer
from training.checkpoint import Checkpoints
from training.compiler import compile_ahead, compile_model, explained_compiler_errors
from training.evaluate import evaluate, make_windows
from training.flops import speed_metrics
from training.intervals import is_attention_due, is_due, is_evaluation_due
from training.loss_scale import LossScaler
from training.losses import Losses
from training.optimizers import build_optimizers, clip_gradients
from training.plan import print_run, resolve
from training.profiling import TRAIN_STEP
from training.record import Record
from training.schedule import learning_rate_metrics, lr_factor, set_learning_rates
from training.stored_model import StoredModel
from training.text import prepare_text
from training.wandb_record import check_wandb
from training.world import Stopped, World
from variants import build_model

if TYPE_CHECKING:
    from glass.observer import Observer


def main(composed: DictConfig) -> float | None:
    """Train what Hydra has composed: a run, or a job of a sweep, whose failure ends only itself."""
    hydra = HydraConfig.get()
    os.chdir(hydra.runtime.cwd)  # relative paths begin here, whatever hydra.job.chdir is
    if hydra.mode == RunMode.MULTIRUN:
        from interop import read_starting_model
        from sweeps.jobs import run_job

        return run_job(composed, read_starting_model, run)
    with exit_on_error():
        job = cli.checked_runs.pop()
        if not job.config.run_dir and not cli.makes_no_run(job.config):
            job = job.in_folder(hydra.runtime.output_dir)
        return run(job)


def train_from(*settings: str) -> float:
    """Train one run with the settings of `python train.py`; return the best validation loss.

    Torch's settings and random state are restored afterwards. A W&B run that the caller has opened
    stays as it is, unless it belongs to a W&B sweep agent: then this run is logged into it.
    """
    from interop import read_starting_model

    return run(cli.read_job(settings, read_starting_model))


def run(job: cli.Job) -> float:
    """Train a configured job, or prepare, evaluate or plan it; return the best validation loss."""
    config = job.config
    is_first = process_rank() == 0 or config.distributed == "none"
    # Not a decorator: launchers of sweeps pickle this function, but cannot pickle an open context
    with device.restored_process():
        if config.prepare_only or config.eval_only:
            return run_mode(config) if is_first else nan
        with join(alone=config.distributed == "none") as world:
            config = world.broadcast(config)  # which only rank 0 has completed
            if config.dry_run:
                planned = world.on_rank_0(lambda: modes.find_planned_start(config, world.log))
                return train(config, None, planned, world)

            # Folder, which rank 0 locks
            with world.opened_on_rank_0(locked_run_dir(config)) as run_dir:
                # Start: step 0, or the newest checkpoint of a resumed run
                start = Start()
                if config.resume:
                    start = world.on_rank_0(lambda: run_dir.find_start(world.log))
                if start.recorded < config.max_steps:
                    return train(config, run_dir, start, world)
                if world.rank == 0:
                    return report_finished(config, run_dir, start, world.log)
                return nan


def run_mode(config: Config) -> float:
    """Do what prepare_only or eval_only asks for; return the loss, nan without one."""
    source = config.run_dir if config.eval_only and config.run_dir else config.init_from
    origin = open_starting_model(source, Start(), World().log)
    if config.prepare_only:
        prepare_text(config, World(), origin, Start())
        return nan
    assert origin  # check_config requires it
    return modes.evaluate_only(config, origin)


def train(requested: Config, run_dir: RunDir | None, start: Start, world: World) -> float:
    """Train a run from its start to its end; return the best validation loss, nan without one.

    After a stop signal it saves the run and raises `SystemExit` with 128 + the signal's number.
    Without a folder it only takes a few steps, and prints what all of them would cost.
    """
    # Machine: what is missing is reported before the text is prepared, which may take long
    device.pick_device(requested.device, world.size)
    world.on_rank_0(lambda: check_wandb(requested.wandb))
    glass = find_glass(requested, world.log)

    # Text, with the tokenizer of the checkpoint or of init_from if there is one
    origin = open_starting_model(requested.init_from, start, world.log)
    text = prepare_text(requested, world, origin, start)

    # Configuration, resolved on rank 0 because another machine could choose differently
    config = world.on_rank_0(lambda: resolve(requested, world.size, text, start.step))
    device.configure_process(config)

    # Model, on its device, whole or sharded; `compiled_model` is the same one, in fewer kernels
    model = make_model(config, origin, text)
    del origin  # which keeps its files open
    world.place(model, config)
    compiled_model = compile_model(model, config)

    # Optimizers, and what else a step changes and a checkpoint keeps
    optimizers = build_optimizers(model, config.optim, config.precision)
    scaler = LossScaler(config.precision)
    losses = Losses(model, config.device)
    take_step = partial(
        train_step,
        model=compiled_model,
        optimizers=optimizers,
        scaler=scaler,
        losses=losses,
        config=config,
        world=world,
    )

    # Batches; a dry run takes the first ones
    batches = text.task or Batches(
        text.train, config.model.block_size, config.batch_size, config.seed
    )
    print_run(config, text, world.size, world.log)
    if run_dir is None:
        with explained_compiler_errors():
            modes.measure_cost(take_step, batches, start.step, config, world)
        return nan

    # Checkpoints, and the windows on which the run is evaluated
    checkpoints = Checkpoints(run_dir, config, text, world, model, optimizers, scaler, losses)
    checkpoints.restore(start)
    validation, training = make_windows(text, config, world)

    # Record on rank 0: rows, W&B and the terminal; and what looks at the attention heads
    timer = ActivityTimer(config.device, start.manifest.seconds, start.step)
    with (
        world,  # first, because W&B may take long to start, and signals are noted meanwhile
        Record(config, run_dir, text, start, timer, world.console)
        if world.rank == 0
        else nullcontext() as record,
        explained_compiler_errors(),
    ):
        heads = glass.Observer(text, validation, record) if glass and record else None

        # Loop over the optimizer steps taken so far
        step = start.step
        row = Row()
        try:
            # Compile, while a signal can still end it at once
            if config.compile and step < config.max_steps:
                timer.switch("train")
                batch = batches.batch(step, world.rank, world.size)
                micro_batch = next(micro_batches(batch, config, world))
                compile_ahead(compiled_model, micro_batch, config, world)
            for step in range(start.recorded + 1, config.max_steps + 1):
                row = Row(start.manifest.metrics if step == start.step else {})

                # Step: batch, forward, backward, clip, update
                if step > start.step:
                    timer.switch("train")
                    batch = batches.batch(step - 1, world.rank, world.size)
                    take_step(step - 1, batch)
                    if is_due(config.log.every, step, config):
                        row |= losses.read_metrics()
                        row |= speed_metrics(timer.step_seconds(step), config, world.size)
                        row |= learning_rate_metrics(step - 1, config.optim, config.max_steps)

                # Evaluate: the loss on the validation split
                if is_evaluation_due(step, config):
                    timer.switch("evaluate")
                    losses.require_finite()
                    is_last = step == config.max_steps
                    row |= evaluate(model, validation, text.task, training if is_last else None)

                # Save: a checkpoint where one is due, or where the loss is the lowest so far
                checkpoints.save_if_due(step, row, timer)

                # Show: the progress bar and the losses
                if record:
                    record.show(step, row)

                # Look: what every attention head does, and a sample text
                row |= look(model, step, heads, record, timer, config, world)

                # Record: metrics.jsonl, W&B and the page
                if record:
                    record.write(step, row)
                if heads and row.is_scored:
                    timer.switch("attention")
                    heads.draw_page(step)

                # Stop: all ranks together, after they have waited for what rank 0 did alone
                has_waited = is_evaluation_due(step, config) or is_attention_due(step, config)
                world.check_stop(at_once=has_waited)
        except Stopped as stopped:
            checkpoints.save(step, row, timer, must_succeed=True)
            command = f"python train.py run_dir={shlex.quote(str(run_dir.path))} resume=true"
            world.log(f"stopped after {pluralize(step, 'step')}; to resume: {command}")
            raise SystemExit(stopped.exit_status) from None
    if record:
        checkpoints.prune()
        record.print_summary(heads.list_findings() if heads else None)
    return (checkpoints.best_row or Row()).get("val/loss", nan)


def open_starting_model(
    source: str | None, start: Start, log: Callable[[str], None]
) -> StoredModel | None:
    """Open the model whose weights and tokenizer a run begins with; None: it makes its own.

    That is its checkpoint, or the model that `source` names, which was downloaded before.
    """
    if start.checkpoint:
        from interop.stored import StoredRun

        return StoredRun(start.checkpoint)
    if source:
        from interop.loading import open_pinned

        return open_pinned(source, log=log)
    return None


def find_glass(config: Config, log: Callable[[str], None]) -> ModuleType | None:
    """Return what looks at the attention heads and draws the page; None without the folder glass/.

    It is optional, and imported only here.
    """
    if Path(__file__).with_name("glass").joinpath("observer.py").exists():
        from glass import observer

        return observer
    if config.attention.every:
        raise UserError(
            f"attention.every={config.attention.every} needs the folder glass/, which is missing: "
            "restore it, or set attention.every=0"
        )
    log("note     attention heads are not measured, because the folder glass/ is missing")
    return None


def make_model(config: ResolvedConfig, origin: StoredModel | None, text: Tokens) -> GPT:
    """Make the model of a run, with the weights of `origin` or with random ones of its seed."""
    torch.manual_seed(config.seed)
    model = build_model(config.model)
    model.checkpoint_activations = config.checkpoint_activations
    if origin:
        origin.copy_to(model)
    elif model.ngrams is not None:
        model.ngrams.keys.copy_(torch.from_numpy(text.ngrams))
    return model


@record_function(TRAIN_STEP)
def train_step(
    step: int,
    batch: tuple[np.ndarray, np.ndarray],
    model: nn.Module,
    optimizers: list[Optimizer],
    scaler: LossScaler,
    losses: Losses,
    config: ResolvedConfig,
    world: World,
) -> None:
    """Take the optimizer step after `step` others; all ranks take it together.

    It updates nothing if a gradient overflows in fp16. `batch` has the token ids of this rank and
    the token after each, (batch_size / processes, T) each. `losses` gets the mean loss of the
    global batch, and the gradient norms before clipping.

    Raises:
        UserError: If the loss or a gradient is not finite. On a CPU it is raised before the update.
            A GPU computes while Python goes on, so there the update is made and the error is raised
            at the next step, or before an evaluation or a checkpoint: it is never saved.
    """
    set_learning_rates(optimizers, lr_factor(step, config.optim, config.max_steps))

    # Forward and backward passes
    loss = torch.zeros((), device=config.device)
    for micro_step, (inputs, targets) in enumerate(micro_batches(batch, config, world)):
        device.seed_micro_step(config.seed, step, micro_step, world.rank)
        with autocast(config.device, config.precision):
            micro_loss = model(inputs, targets)[1]  # the logits are freed
        scaler.scale(micro_loss / config.accumulate).backward()
        loss += micro_loss.detach() / (config.accumulate * world.size)
    world.average_gradients(model)

    # Clipping
    norms = clip_gradients(model, config.optim.grad_clip, world, scaler.factor)
    loss = world.sum(loss)
    has_overflowed = scaler.has_overflowed(norms)
    losses.add(step, loss, norms, is_skipped=has_overflowed)

    # Update
    for optimizer in optimizers:
        if not has_overflowed:
            optimizer.step()
        optimizer.zero_grad()
    scaler.update(has_overflowed)


def micro_batches(
    batch: tuple[np.ndarray, np.ndarray], config: ResolvedConfig, world: World
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets (rows, T) of each micro-step, on the device."""
    x, y = (torch.from_numpy(ids) for ids in batch)
    is_gpu = config.device.startswith("cuda")
    if is_gpu:  # copied while the GPU is busy with the previous step, only from pinned memory
        x, y = x.pin_memory(), y.pin_memory()
    rows = config.batch_size // (config.accumulate * world.size)
    for micro_batch in zip(x.split(rows), y.split(rows)):
        inputs, targets = (ids.to(config.device, non_blocking=is_gpu) for ids in micro_batch)
        yield inputs, targets


def look(
    model: GPT,
    step: int,
    heads: "Observer | None",
    record: Record | None,
    timer: ActivityTimer,
    config: ResolvedConfig,
    world: World,
) -> Row:
    """Measure the heads and generate a sample text on rank 0 if due; a signal ends both early."""
    if not is_attention_due(step, config):
        return Row()
    timer.switch("attention")
    world.check_stop()
    row = Row()
    plain_model = world.plain_copy(model)  # gathered on rank 0, None on the others
    with world.interruptible():
        if plain_model and heads:
            row = heads.look(plain_model, step)
        if plain_model and record:
            record.sample(plain_model, step)
    world.check_stop()
    return row


def report_finished(
    config: Config, run_dir: RunDir, start: Start, log: Callable[[str], None]
) -> float:
    """Draw the page of a finished run again; return the best validation loss, nan without one."""
    log(
        f"{run_dir.path} is finished after {pluralize(start.step, 'step')} (max_steps="
        f"{config.max_steps}); a larger max_steps extends it, with the learning-rate schedule "
        "recomputed for that length"
    )
    with tolerate_errors(f"drawing {run_dir.page}", log):
        if glass := find_glass(config, log):
            glass.write_page(run_dir)
    best = best_row([run_dir.checkpoint("best", log).manifest.row])
    return (best or Row()).get("val/loss", nan)
