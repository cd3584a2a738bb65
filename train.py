"""The command, and one training run, top to bottom.

python train.py                       the default run, on this Python's own library
python train.py --help                what can be set
"""

import shlex
import sys
from pathlib import Path

if __name__ == "__main__":  # PYTHONSAFEPATH, python -P and python -I leave out this folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from common.signals import end_on_interrupt
from common.wait_policy import choose_wait_policy  # measures from here on what others compute

if __name__ == "__main__":
    end_on_interrupt()  # without a traceback from an import below

import cli
from common.terminal import Terminal, error_sentence, exit_on_error, printer, tolerate_errors
from common.torchrun import process_rank
from config import Config, ResolvedConfig


def read_starting_model(name: str) -> Config:
    """Return the shape and the tokenizer of the model that `init_from` names."""
    choose_wait_policy(print)
    from interop import read_starting_model  # imports torch, which takes seconds

    return read_starting_model(name)


if __name__ == "__main__":
    request = cli.read_request(read_starting_model)  # answers --help and mistakes before torch
    choose_wait_policy(print)

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.profiler import record_function

import interop
from common.errors import UserError
from common.files import exists
from common.text import pluralize
from data.batches import Batches
from data.tasks.task import Task
from distributed.world import join
from glass.observer import Observer
from glass.page.write import write_page
from kernels import autocast
from run.run_dir import RunDir
from studies.study import report_sweep
from sweeps import jobs
from training import device, modes
from training.checkpoint import Checkpoints
from training.evaluate import Splits, evaluate, make_splits
from training.flops import speed_metrics, tokens_until
from training.inputs import init_weights, prepare_inputs
from training.optimizers import clip_gradients
from training.plan import print_run, resolve
from training.profiling import TRAIN_STEP
from training.run_folder import Progress, read_progress, run_folder
from training.schedule import (
    is_attention_due,
    is_due,
    is_evaluation_due,
    learning_rate_metrics,
    lr_factor,
    set_learning_rates,
)
from training.state import TrainingState, build_state
from training.stopwatch import Stopwatch
from training.wandb_record import check_wandb
from training.world import Stopped, World


def main(request: cli.Job | cli.CommandLine) -> None:
    """Train the run, or the runs of the sweep, that the command line asks for."""
    if isinstance(request, cli.Job):
        run(request)
    else:
        configure = partial(cli.configure, read_model=read_starting_model)
        jobs.run_sweep(request, configure, run, partial(report_sweep, request.settings))


def train_from(*settings: str) -> float:
    """Train one run with the settings of `python train.py`; return the best validation loss.

    Torch's settings and random state are restored afterwards. A W&B run that the caller has opened
    stays as it is, unless it belongs to a W&B sweep agent: then this run is logged into it.
    """
    return run(cli.read_job(settings, read_starting_model))


def run(job: cli.Job) -> float:
    """Train a configured job, or prepare, evaluate or plan it; return the best validation loss."""
    config = job.config
    is_first = process_rank() == 0 or config.distributed == "none"
    # Not a decorator: launchers of sweeps pickle this function, but cannot pickle an open context
    with device.restored_process():
        if config.prepare_only or config.eval_only or config.dry_run:
            return run_mode(job) if is_first else nan
        with join(alone=config.distributed == "none") as world:
            return train_run(job, world)


def run_mode(job: cli.Job) -> float:
    """Do what prepare_only, eval_only or dry_run asks for; return the loss, nan without one."""
    config, open_weights = job.config, interop.open_starting_weights
    if config.prepare_only:
        prepare_inputs(config, World(), Path(), Progress(), open_weights)
        return nan
    if config.eval_only:
        return modes.evaluate_only(config, open_weights)
    return modes.dry_run(config, open_weights, train_step, is_in_sweep=bool(job.swept))


def train_run(job: cli.Job, world: World) -> float:
    """Train or resume the run of a job, and return its best validation loss."""
    log = printer(Terminal())
    config = world.broadcast(job.config)
    opened = run_folder(config) if world.rank == 0 else nullcontext()
    with opened as folder:
        run_dir = world.broadcast(folder)
        progress = read_progress(config, RunDir(run_dir), log) if world.rank == 0 else None
        progress = world.broadcast(progress)
        if progress.first_step > config.max_steps:
            return _report_finished(config, run_dir, progress, log) if world.rank == 0 else nan
        with prepare(config, world, run_dir, progress) as prepared:
            return train(prepared)


@dataclass(frozen=True)
class Run:
    """The objects that live as long as a run, in each process."""

    progress: Progress
    state: TrainingState
    checkpoints: Checkpoints
    batches: Batches | Task
    splits: Splits
    clock: Stopwatch
    observer: Observer | None  # on rank 0


@contextmanager
def prepare(config: Config, world: World, run_dir: Path, progress: Progress) -> Iterator[Run]:
    """Prepare the text, build or restore the model, open the record; print a summary at the end."""
    log = printer(Terminal(quiet=world.rank > 0))

    # Text, after the checks of the device and of W&B
    device.pick_device(config.device, world.size)
    if world.rank == 0:
        check_wandb(config.wandb)
    world.wait()
    initial, text = prepare_inputs(config, world, run_dir, progress, interop.open_starting_weights)
    resolved = resolve(config, world.size, text, progress.step) if world.rank == 0 else None
    resolved = world.broadcast(resolved)  # another machine could choose differently

    # Model
    device.configure_process(resolved)
    state = build_state(resolved, world, partial(init_weights, initial=initial, text=text))
    checkpoints = Checkpoints(run_dir, state, text, log)
    if progress.manifest:
        checkpoints.restore(progress.manifest)
    print_prose = printer(Terminal(quiet=world.rank > 0), wrap=True)
    print_run(print_prose, resolved, state.model.num_parameters(), text, world.size)

    # Batches, evaluation and record
    batches = text.task or Batches(
        text.train, resolved.model.block_size, resolved.batch_size, resolved.seed
    )
    splits = make_splits(text, resolved, world)
    synchronize = partial(device.synchronize, resolved.device)
    clock = Stopwatch(synchronize, progress.seconds, tokens_until(progress.step, resolved))
    with world:
        opened: AbstractContextManager[Observer | None] = nullcontext()
        if world.rank == 0:
            recorded_step = progress.step if progress.manifest else -1
            opened = Observer(resolved, run_dir, text, splits.validation, clock, recorded_step)
        with opened as observer:
            yield Run(progress, state, checkpoints, batches, splits, clock, observer)
    if observer:
        checkpoints.prune()
        observer.print_summary()


def train(run: Run) -> float:
    """Take the remaining steps, and return the best validation loss (nan without one).

    After a stop signal it saves the run and raises `SystemExit` with 128 + the signal's number.
    """
    state, checkpoints, observer, clock = run.state, run.checkpoints, run.observer, run.clock
    config, world = state.config, state.world
    step, row = run.progress.step, run.progress.metrics
    try:
        if config.compile and step < config.max_steps:
            clock.switch("train")
            state.compile_ahead(*run.batches.batch(step, world.rank, world.size))
        for step in range(run.progress.first_step, config.max_steps + 1):  # steps taken so far
            row = dict(run.progress.metrics) if step == run.progress.step else {}
            snapshot = None

            # Step: batch, forward, backward, clip, update
            if step > run.progress.step:
                clock.switch("train")
                inputs, targets = run.batches.batch(step - 1, world.rank, world.size)
                result = train_step(state, step - 1, inputs, targets)
                if is_due(config.log.every, step, config):
                    row = _training_metrics(run, step, result)

            # Evaluate: the loss on the validation split
            if is_evaluation_due(step, config):
                clock.switch("evaluate")
                state.guard.flush()
                row |= evaluate(state.model, run.splits, is_last=step == config.max_steps)

            # Save: a checkpoint where one is due, or where the loss is the lowest so far
            checkpoints.save_if_due(step, row, clock)

            # Log: the progress bar and the losses
            if observer:
                observer.show(step, row)

            # Snapshot: what every attention head does, where one is due or an induction head forms
            if is_attention_due(step, config):
                world.check_stop()
                model = world.plain_copy(state.model)  # gathered on rank 0, None on the others
                with world.interruptible():
                    snapshot = observer.snapshot(model, step) if observer and model else None
                world.check_stop()
                del model

            # Record: metrics.jsonl, W&B and the page
            if observer:
                observer.write(step, row, snapshot)

            # Stop: all ranks together, after they have waited for what rank 0 did alone
            has_waited = is_evaluation_due(step, config) or is_attention_due(step, config)
            world.check_stop(at_once=has_waited)
    except Stopped as stopped:
        checkpoints.save(step, row, clock, must_succeed=True)
        command = f"python train.py run_dir={shlex.quote(str(checkpoints.run_dir))} resume=true"
        checkpoints.log(f"stopped after {pluralize(step, 'step')}; to resume: {command}")
        raise SystemExit(stopped.exit_status) from None
    except TorchDynamoException as e:
        reason = error_sentence(e)[:200]
        raise UserError(f"torch.compile failed here ({reason}): use compile=false") from None
    return (checkpoints.best_row or {}).get("val/loss", nan)


class StepResult(NamedTuple):
    """Measurements of an optimizer step, on the device."""

    loss: Tensor  # mean over the global batch: ()
    gradient_norms: Tensor  # of each parameter, before clipping: (parameters,)


@record_function(TRAIN_STEP)
def train_step(
    state: TrainingState, step: int, inputs: np.ndarray, targets: np.ndarray
) -> StepResult:
    """Take one optimizer step, which updates nothing if a gradient overflows in fp16.

    Args:
        state: The model, the optimizers and the ranks that take the step together.
        step: Number of optimizer steps taken before this one.
        inputs: Token ids of this rank, (batch_size / processes, T).
        targets: The token after each input, of the same shape.

    Raises:
        UserError: If the loss or a gradient is not finite. On a CPU it is raised before the update.
            A GPU computes while Python goes on, so there the update is made and the error is raised
            at the next step, or before an evaluation or a checkpoint: it is never saved.
    """
    config, world = state.config, state.world
    set_learning_rates(state.optimizers, lr_factor(step, config.optim, config.max_steps))

    # Forward and backward passes
    loss = torch.zeros((), device=config.device)
    for micro_step, batch in enumerate(micro_batches(inputs, targets, config, world)):
        device.seed_micro_step(config.seed, step, micro_step, world.rank)
        with autocast(config.device, config.precision):
            micro_loss = state.forward(*batch)[1]  # the logits are freed
        state.scaler.scale(micro_loss / config.accumulate).backward()
        loss += micro_loss.detach() / (config.accumulate * world.size)
    world.average_gradients(state.model)

    # Clipping
    norms = clip_gradients(
        state.model, config.optim.grad_clip, world.join_norms, state.scaler.factor
    )
    loss = world.sum(loss)
    has_overflowed = state.scaler.has_overflowed(norms)
    state.guard.check(step, loss, norms[:0] if has_overflowed else norms)
    state.mean_loss.add(loss)

    # Update
    for optimizer in state.optimizers:
        if not has_overflowed:
            optimizer.step()
        optimizer.zero_grad()
    state.scaler.update(has_overflowed)
    return StepResult(loss, norms)


def micro_batches(
    inputs: np.ndarray, targets: np.ndarray, config: ResolvedConfig, world: World
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets (rows, T) of each micro-step, on the device."""
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    if config.device.startswith("cuda"):  # copied while the GPU is busy with the previous step
        x, y = x.pin_memory(), y.pin_memory()
    rows = config.micro_batch_size(world.size)
    for micro_x, micro_y in zip(x.split(rows), y.split(rows)):
        yield (
            micro_x.to(config.device, non_blocking=True),
            micro_y.to(config.device, non_blocking=True),
        )


def _training_metrics(run: Run, step: int, result: StepResult) -> dict[str, float]:
    state = run.state
    speed = run.clock.speed(tokens_until(step, state.config))
    metrics = {"train/loss": state.mean_loss.read()}
    grad_norm = result.gradient_norms.norm().item()
    if isfinite(grad_norm):  # otherwise fp16 overflowed, and the step was skipped
        metrics["train/grad_norm"] = grad_norm
    return {
        **metrics,
        **speed_metrics(speed, state.config, state.world.size),
        **learning_rate_metrics(state.optimizers),
    }


def _report_finished(
    config: Config, run_dir: Path, progress: Progress, log: Callable[[str], None]
) -> float:
    """Return the best validation loss, nan without one; draw the page if a kill prevented that."""
    log(
        f"{run_dir} is finished after {pluralize(progress.step, 'step')} (max_steps="
        f"{config.max_steps}); a larger max_steps extends it, with the learning-rate schedule "
        "recomputed for that length"
    )
    folder = RunDir(run_dir)
    page, metrics = folder.page, folder.metrics_file
    with tolerate_errors(f"drawing {page}", log):
        if not exists(page) or page.stat().st_mtime_ns < metrics.stat().st_mtime_ns:
            write_page(run_dir)
    return (folder.best_row() or {}).get("val/loss", nan)


if __name__ == "__main__":
    exit_on_error(partial(main, request))
