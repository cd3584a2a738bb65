"""The command, and below it one training run from top to bottom.

    python train.py                       the default run, on this Python's own library
    python train.py --help                what can be set
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

import cli
from config import Config, GPTConfig, TokenizerConfig, UserError, config_from


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(cfg) -> float:
    """One job of Hydra's; returns what a sweeper minimises, the best validation loss."""
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        import sweeps

        return sweeps.run_job(cfg, job, partial(train_composed, cfg, job))
    try:
        return train_composed(cfg, job)
    except (UserError, OmegaConfBaseException) as e:
        cli.fail(cli.sentence(e))
    except BrokenPipeError:  # caught here, because Hydra would print it
        cli.output_closed()


def train_composed(cfg, job) -> float:
    """Train as Hydra composed it, by the rest of this file: imported as a module, with torch."""
    from_first = cli.rank() > 0 and cfg.distributed == "auto"  # which tells the other ranks all
    if from_first and (cfg.dry_run is not False or cfg.prepare_only):
        return float("nan")
    config, resume = None, False
    if not from_first:
        config, resume = cli.to_config(cfg, list(job.overrides.task), starting_config)
        if config.prepare_only:
            prepare_only(config)
            return float("nan")
        if config.data.path and config.dry_run is False:
            from data.corpus import require_path

            require_path(config.data.path)  # before torch, which takes seconds to load
    loaded = "torch" in sys.modules  # by an earlier job of a sweep
    console, tokens = cli.Terminal(quiet=from_first or loaded), None
    try:
        with cli.waiting(console, "loading PyTorch") as done:
            if config and not loaded and begins_alone(config, resume):
                Thread(target=load, args=(config, done)).start()
                from data.prepare import prepare_text

                tokens = prepare_text(config, console, cli.printer(console))  # needs no torch
            from train import train
    except KeyboardInterrupt:
        os._exit(130)  # the usual end would wait for the other thread

    return train(config, resume, job.runtime.choices.get("experiment") or "default", tokens)


def begins_alone(config: Config, resume: bool) -> bool:
    """Whether a run begins in a new folder, on a text of its own, in this process alone."""
    return not (resume or config.init_from or config.dry_run is not False
                or "TORCHELASTIC_RUN_ID" in os.environ
                or (config.run_dir and os.path.exists(config.run_dir)))


def load(config: Config, done: Callable[[], None]) -> None:
    """Import what a run needs; call `done` when torch and the rest of this file are there."""
    with suppress(Exception):  # the main thread's import says why
        import_module("train")
        done()
        from training.wandb_record import wandb_mode

        if wandb_mode(config.wandb.mode) != "disabled":
            import_module("wandb")


def prepare_only(config: Config) -> None:
    """Prepare the text, and train nothing."""
    from data.prepare import prepare_text

    console, tokenizer = cli.Terminal(), None
    say = cli.printer(console)
    if config.init_from:
        from interop import starting_point

        tokenizer, _ = starting_point(Path(config.init_from), say)
    for line in prepare_text(config, console, say, tokenizer).summary():
        say(line)


def starting_config(init_from: str) -> tuple[str, GPTConfig, TokenizerConfig]:
    import interop

    return interop.starting_config(init_from)


def launch() -> None:
    """Run what is typed: one job, or those of a sweep."""
    if {"-m", "--multirun"} & set(sys.argv):
        import sweeps

        sweeps.run_sweep(main)
    else:
        main()


if __name__ == "__main__":
    # The command ends here. What follows takes seconds to import, with torch, and so waits until a
    # run begins: --help and mistakes are answered at once.
    cli.start(launch, cli.train_help, cli.check_arguments)
    sys.exit()

import gc
import shlex
from contextlib import nullcontext
from dataclasses import asdict
from math import inf, isfinite, nan

import torch

from attention_maps.snapshot import ABLATION_TOKENS, Snapshots
from benchmarks.plan import print_plan
from data.prepare import prepare_text
from data.tokens import Tokens
from files import METRICS, best_row, read_rows, with_best
from interop import starting_point
from model import GPT
from report.conclusion import conclude
from report.page import write_page
from training import checkpoint, runtime
from training.checkpoint import TrainState
from training.distributed import World, check, join
from training.optim import NotFinite, lr_factor, update
from training.record import MetricLogger, RunFolder, new_run_dir
from training.sharding import plain_copy
from training.summary import print_summary
from training.trainer import Trainer, set_up


def train(config: Config | None, resume: bool, experiment: str, tokens: Tokens | None = None
          ) -> float:
    """Train as configured, or as rank 0 of several processes is, on the text of the configuration
    or its `tokens`; return the best validation loss (nan where none was measured).

    Raises:
        UserError: something that the user can mend; nothing was lost.
        SystemExit: 130 or 143 after a stop signal, with a checkpoint saved.
    """
    if config and config.dry_run is not False:
        print_plan(config, experiment)
        return nan
    with join(alone=config is not None and config.distributed == "none") as world:
        if world.size > 1:
            told, resume = world.tell((asdict(config), resume) if config else None)
            config = config_from(told)
        check(config, world.size)
        config = runtime.resolve_device(config, world.size)
        folder = None
        if world.rank == 0:
            path = Path(config.run_dir) if config.run_dir else new_run_dir(experiment)
            folder = RunFolder(path, new=not resume, made=not config.run_dir)
        run_dir = Path(world.tell(str(path) if folder else None))
        try:
            with runtime.enough_memory(config):
                return run(config, resume, experiment, run_dir, world, tokens)
        except NotFinite as e:
            raise UserError(f"{e}; {checkpoint.how_to_go_on(run_dir)} and a lower optim.lr"
                            f"{', or with on_nonfinite=skip' if e.at_once else ''}") from None
        except OSError as e:
            raise UserError(f"{e.filename or run_dir} cannot be read or written: "
                            f"{e.strerror or e}") from e
        finally:
            if folder:
                folder.release()


def run(config: Config, resume: bool, experiment: str, run_dir: Path, world: World,
        tokens: Tokens | None) -> float:
    """Set up, take the steps, sum up; returns and raises as `train`."""
    console, manifest, rows = cli.Terminal(quiet=world.rank > 0), {}, []
    say = cli.printer(console)
    if resume and world.rank == 0:
        manifest = checkpoint.to_resume(run_dir, config.resume, say)
        rows = with_best(read_rows(run_dir / METRICS), manifest.get("best"))
    manifest, rows = world.tell((manifest, rows))
    step = manifest.get("step", 0)
    recorded = bool(rows) and rows[-1]["step"] == step
    if manifest and not config.eval_only and (
            step > config.max_steps or (step == config.max_steps and recorded)):
        say(f"{run_dir} is finished: {step:,} steps are done, and max_steps={config.max_steps}; "
            "a larger max_steps extends it")
        return loss_of(best_row(rows))
    tokens, load_initial_weights = read_text(config, run_dir, manifest, console, tokens)
    trainer = set_up(config, run_dir, world, tokens, load_initial_weights, manifest, say)
    config, state = trainer.config, trainer.state
    if manifest and config.eval_only:
        loss, bits = trainer.validation.evaluate(trainer.model)
        say(f"after {state.step:,} steps: validation loss {loss:.4f} nats per token, "
            f"{bits:.4f} bits per byte")
        return loss
    if world.rank == 0:
        trainer.write_config(experiment)
    trainer.clock.switch(None)  # W&B takes its time to start
    logger = nullcontext() if world.rank else MetricLogger(
        run_dir, config, experiment, console, state.step, manifest.get("best"))
    with world.stop, logger as log:
        snapshots = None
        if log:
            state.restore_best(run_dir, log.rows, damaged=log.damaged)
            windows = trainer.validation.excerpt(ABLATION_TOKENS)
            snapshots = Snapshots(config, run_dir, tokens, windows, log.tolerate_io_errors)
        trainer.state = TrainState(**world.tell(asdict(state)))
        gc.freeze()  # what the imports made is not searched again at every collection
        try:
            with trainer.compiling_beside(say):
                take_steps(trainer, log, snapshots)
        except runtime.Stopped as stopped:
            trainer.save(last_chance=True)
            say(f"stopped after {trainer.state.step:,} steps; to go on: "
                f"python train.py run_dir={shlex.quote(str(run_dir))} resume=true")
            raise SystemExit(stopped.exit_status) from None
        finally:
            gc.unfreeze()  # so that a sweep's next job does without this one's garbage
    if log:
        for sentence in ["", *conclude(log.rows), ""]:
            cli.printer(console, wrap=True)(sentence)
        print_summary(say, run_dir, log.rows, snapshots.thresholds, trainer.clock.seconds,
                      trainer.validation)
    return loss_of(trainer.state.best)


def loss_of(row: dict | None) -> float:
    return row["val/loss"] if row else nan


def read_text(config: Config, run_dir: Path, manifest: dict, console: cli.Terminal,
              tokens: Tokens | None) -> tuple[Tokens, Callable[[GPT], None] | None]:
    """The text, unless it is there as `tokens`, for a run that goes on that with which it began;
    and what loads the weights of `init_from` for one that begins."""
    say, tokenizer, load_initial_weights = cli.printer(console), None, None
    folder = checkpoint.step_folder(run_dir, manifest["step"]) if manifest else None
    if folder and config.init_from:
        tokenizer = checkpoint.saved_tokenizer(folder)
    elif config.init_from:
        tokenizer, load_initial_weights = starting_point(Path(config.init_from), say)
    if tokens is None:
        tokens = prepare_text(config, console, say, tokenizer, whole=folder is not None)
    if folder:
        tokens = checkpoint.same_text(folder, manifest, tokens, config, say)
    for line in tokens.summary():
        say(line)
    return tokens, load_initial_weights


def take_steps(trainer: Trainer, log: MetricLogger | None, snapshots: Snapshots | None) -> None:
    """Train up to max_steps; rank 0 has the log and takes the snapshots.

    Raises:
        Stopped: a signal came; the step that is going on has been finished, and is not saved.
    """
    config, world, state, clock = trainer.config, trainer.world, trainer.state, trainer.clock
    logged = state.step, clock.read()
    recorded = world.tell(log.has(state.step) if log else None)
    while True:
        last = state.step == config.max_steps
        if not recorded:  # a resumed run does what was not
            observe(trainer, log, snapshots)
        if last:
            break
        world.check()
        if world.save_asked:
            world.save_asked = False
            if trainer.save() and log:
                log.say(f"asked to save, and saved after {state.step:,} steps")

        clock.switch("train")
        x, y = (torch.from_numpy(part)  # (batch_size / processes, T) each
                for part in trainer.batches.batch(state.step, world.rank, world.size))
        trainer.compile_when_due(x, y, log)
        loss, grad_norm, finite = update(trainer.forward, trainer.model, trainer.optimizers, x, y,
                                         config, state.step, world)
        state.step += 1
        recorded = False
        trainer.watch.note(state.step, finite)
        if log:
            log.advance(state.step)
        state.metrics = {}
        if trainer.is_due(config.log.every):
            seconds = clock.read()
            tokens = (state.step - logged[0]) * trainer.step_tokens
            state.metrics = {
                "train/loss": loss.item(),
                "train/lr": config.optim.lr * lr_factor(state.step - 1, config.optim,
                                                        config.max_steps),
                "train/grad_norm": grad_norm.item(),
                "train/tokens_per_second": tokens / (seconds - logged[1])}
            if config.on_nonfinite == "skip":
                state.metrics = {k: v for k, v in state.metrics.items() if isfinite(v)}
                state.metrics["train/skipped"], _ = trainer.watch.counts()
            logged = state.step, seconds


def observe(trainer: Trainer, log: MetricLogger | None, snapshots: Snapshots | None) -> None:
    """Save and evaluate where that is due, and have rank 0 record this step.

    Raises:
        Stopped: a signal came meanwhile; the row is left to the resumed run.
    """
    config, world, state = trainer.config, trainer.world, trainer.state
    step, row = state.step, dict(state.metrics)
    if step and trainer.is_due(config.checkpoint.every):
        trainer.save()  # first, so that nothing that only looks at the run can cost it the step
    if trainer.is_due(config.eval.every):
        trainer.clock.switch("evaluate")
        if log:
            log.doing("evaluating")
        loss, bits = trainer.validation.evaluate(trainer.model, world.check)
        row |= {"val/loss": loss, "val/bits_per_byte": bits}
        improved = loss < (state.best["val/loss"] if state.best else inf)
        if step and improved and trainer.save():
            state.best = {**trainer.totals, **row, **state.text_mark()}
            if log:
                with log.tolerate_io_errors():
                    checkpoint.write_pointer(trainer.run_dir, "best", step)
    if trainer.is_due(config.attention.every):
        trainer.clock.switch("attention")
        world.first(record, trainer, log, row, snapshots, plain_copy(trainer.model, world))
    elif log:
        record(trainer, log, row)


def record(trainer: Trainer, log: MetricLogger, row: dict, snapshots: Snapshots | None = None,
           model: GPT | None = None) -> None:
    """Take a snapshot of the model, where one is given, and write the row of this step.

    Raises:
        Stopped: a signal came meanwhile.
    """
    config, state, clock, images = trainer.config, trainer.state, trainer.clock, {}
    last = state.step == config.max_steps
    if row:
        log.show({**trainer.totals, **row})  # what is below takes a while
    if snapshots:
        log.doing("measuring what each head is worth" if last else "looking at attention")
        metrics, images, text = snapshots.take(model, state.step, log.rows,
                                               trainer.world.stop.check)
        row |= metrics
        if text is not None:
            log.sample(state.step, text)
    if row:
        clock.switch(None)
        log.write({**trainer.totals, **clock.metrics(), **row, **state.text_mark()}, images)
    if images:
        clock.switch("attention")
        with log.tolerate_io_errors():
            if not (trainer.run_dir / "report.html").exists():
                log.say(f"page     {trainer.run_dir / 'report.html'} (open it in a browser; it "
                        "updates itself)")
            log.doing("drawing the page")
            log.page(write_page(trainer.run_dir), last=last)
    if trainer.checkpoints.saved == state.step:
        checkpoint.prune(trainer.run_dir, config.checkpoint.keep, state.kept)
