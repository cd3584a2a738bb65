"""The command, and below it one training run from top to bottom.

    python train.py                       the default run, on this Python's own library
    python train.py --help                what can be set
"""

import sys
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

import cli
from config import Config, GPTConfig, UserError, config_yaml, read_config


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
    if cli.rank() and cfg.distributed == "auto" and cfg.dry_run is False:
        from training.follower import follow

        return follow()
    config, resume = cli.to_config(cfg, list(job.overrides.task), hf_config)
    if config.prepare_only:
        from data.prepare import prepare_text

        console, tokenizer = cli.Terminal(), None
        say = cli.printer(console)
        if config.init_from:
            from interop import starting_point

            tokenizer, _ = starting_point(Path(config.init_from), say)
        prepare_text(config, console, say, tokenizer)
        return float("nan")
    from train import train

    return train(config, resume, job.runtime.choices.get("experiment") or "default")


def hf_config(folder: Path) -> GPTConfig:
    from interop import model_config

    return model_config(folder)


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
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, nan

import torch

from attention_maps.snapshot import ABLATION_TOKENS, Snapshots
from benchmarks.plan import print_plan
from data.batches import Batches
from data.tokens import Tokens, prepare
from files import METRICS, atomic_write, best_row, read_rows, with_best
from interop import starting_point
from model import GPT
from report.page import write_page
from training import checkpoint, runtime
from training.checkpoint import Checkpoints, TrainState
from training.distributed import Team, join
from training.evaluate import Validation
from training.optim import (
    NotFinite,
    Watch,
    build_optimizers,
    load_optimizer_tensors,
    lr_factor,
    partition_parameters,
    rate_rises_again,
    update,
)
from training.record import MetricLogger, RunFolder, Stopwatch, new_run_dir
from training.summary import print_run, print_summary


@dataclass
class Trainer:
    """What a run trains with, and where it stands."""

    config: Config
    run_dir: Path
    team: Team
    tokens: Tokens
    batches: Batches
    model: GPT
    forward: Callable  # the model, or the model compiled
    optimizers: list[torch.optim.Optimizer]
    validation: Validation
    state: TrainState
    clock: Stopwatch
    watch: Watch
    checkpoints: Checkpoints

    @property
    def step_tokens(self) -> int:
        return self.config.batch_size * self.config.model.block_size

    def is_due(self, every: int) -> bool:
        """Whether what comes every so many steps, 0 being never, and at the last, comes now."""
        step = self.state.step
        return step == self.config.max_steps or (every > 0 and step % every == 0)

    def save(self, last_chance: bool = False) -> bool:
        """Save this step, unless it is saved; whether it is now."""
        self.state.skipped = self.watch.counts()
        self.clock.switch("save")
        self.state.seconds = self.clock.seconds
        return self.checkpoints.save(self.state, last_chance)


def train(config: Config, resume: bool, experiment: str) -> float:
    """Train as configured; return the best validation loss (nan where none was measured).

    Raises:
        UserError: something that the user can mend; nothing was lost.
        SystemExit: 130 or 143 after a stop signal, with a checkpoint saved.
    """
    if config.dry_run is not False:
        print_plan(config, experiment)
        return nan
    with join(config) as team:
        config = team.resolve_device(config)
        run_dir = Path(config.run_dir) if config.run_dir else new_run_dir(experiment)
        folder = RunFolder(run_dir, new=not resume, made=not config.run_dir)
        try:
            with runtime.enough_memory(config):
                return run(config, resume, experiment, run_dir, team)
        except NotFinite as e:
            raise UserError(f"{e}; {checkpoint.how_to_go_on(run_dir)} and a lower optim.lr"
                            f"{', or with on_nonfinite=skip' if e.at_once else ''}") from None
        except OSError as e:
            raise UserError(f"{e.filename or run_dir} cannot be read or written: "
                            f"{e.strerror or e}") from e
        finally:
            folder.release()


def run(config: Config, resume: bool, experiment: str, run_dir: Path, team: Team) -> float:
    """Set up, take the steps, sum up; returns and raises as `train`."""
    console = cli.Terminal()
    say = cli.printer(console)
    folder, manifest = checkpoint.to_resume(run_dir, config.resume, say) if resume else (None, {})
    trainer = set_up(config, run_dir, team, folder, manifest, say)
    config, state = trainer.config, trainer.state
    if folder and config.eval_only:
        loss, bits = trainer.validation.evaluate(trainer.model)
        say(f"after {state.step:,} steps: validation loss {loss:.4f} nats per token, "
            f"{bits:.4f} bits per byte")
        return loss
    if folder:
        rows = with_best(read_rows(run_dir / METRICS), manifest["best"])
        recorded = bool(rows) and rows[-1]["step"] == state.step
        if state.step > config.max_steps or (state.step == config.max_steps and recorded):
            say(f"{run_dir} is finished: {state.step:,} steps are done, and "
                f"max_steps={config.max_steps}; a larger max_steps extends it")
            return loss_of(best_row(rows))
        go_on(trainer, folder, manifest, say)
    compile_and_announce(trainer, say)
    with atomic_write(run_dir / "config.yaml") as part:  # first: what has one can be resumed
        part.write_text(config_yaml(trainer.config), encoding="utf-8")
    trainer.clock.switch(None)  # W&B takes its time to start
    with team.stop, MetricLogger(run_dir, trainer.config, experiment, console, state.step,
                                 manifest.get("best")) as log:
        state.restore_best(run_dir, log.rows, damaged=log.damaged)
        windows = trainer.validation.excerpt(ABLATION_TOKENS)
        snapshots = Snapshots(trainer.config, run_dir, trainer.tokens, windows,
                              log.tolerate_io_errors)
        gc.freeze()  # what the imports made is not searched again at every collection
        try:
            take_steps(trainer, log, snapshots)
        except runtime.Stopped as stopped:
            trainer.save(last_chance=True)
            log.say(f"stopped after {state.step:,} steps; to go on: "
                    f"python train.py run_dir={shlex.quote(str(run_dir))} resume=true")
            raise SystemExit(stopped.exit_status) from None
    print_summary(say, run_dir, log.rows, trainer.clock.seconds, trainer.validation)
    return loss_of(state.best)


def loss_of(row: dict | None) -> float:
    return row["val/loss"] if row else nan


def set_up(config: Config, run_dir: Path, team: Team, folder: Path | None, manifest: dict,
           say: Callable[[str], None]) -> Trainer:
    """The text, the model and the optimizers of a new run, or of one as its checkpoint has it."""
    tokenizer, load_initial_weights = None, None
    if folder and config.init_from:
        tokenizer = checkpoint.tokenizer_of(folder)
    elif config.init_from:
        tokenizer, load_initial_weights = starting_point(Path(config.init_from), say)

    # The text: for a run that goes on, the text that it began with.
    tokens = prepare(config.data, config.tokenizer, say, tokenizer,
                     whole=folder is not None)
    if folder:
        tokens = checkpoint.same_text(folder, manifest, tokens, config, say)
    config = fit_to_text(config, tokens)
    for line in tokens.summary():
        say(line)

    # The model and its optimizers.
    if folder:
        checkpoint.check_model(folder, config.model)
    runtime.check_memory(config)
    torch.manual_seed(config.seed)
    model = GPT(config.model).to(config.device)
    if load_initial_weights:
        load_initial_weights(model)
    mine = team.divide(partition_parameters(model, config.optim, team.size))
    optimizers = build_optimizers(model, config.optim, config.precision, mine)
    block_size = config.model.block_size
    batches = Batches(tokens.train, block_size, config.batch_size, config.seed)
    validation = Validation(tokens.val, tokens.tokenizer, block_size, config.device,
                            config.precision, team, config.data)

    # Where the run stands.
    state = TrainState.after(manifest, tokens.fingerprint)
    if folder:
        checkpoint.load_weights(model, folder / checkpoint.MODEL)
    team.order("start")  # the other processes build the same
    started = {"config": asdict(config), "tokenizer": tokens.tokenizer.to_json(),
               "fingerprint": tokens.fingerprint}
    team.broadcast_bytes(json.dumps(started).encode())
    team.broadcast_weights(of_first=True)
    clock = Stopwatch(partial(runtime.synchronize, config.device), state.seconds)
    return Trainer(
        config, run_dir, team, tokens, batches, model, model, optimizers, validation, state, clock,
        Watch(model, config.on_nonfinite, *state.skipped),
        Checkpoints(config, run_dir, model, optimizers, tokens.tokenizer, team, say))


def fit_to_text(config: Config, tokens: Tokens) -> Config:
    """The configuration with the vocabulary of the text.

    Raises:
        UserError: the text is too short for the model, or has another vocabulary.
    """
    model, vocab_size = config.model, tokens.tokenizer.vocab_size
    for split, ids in (("training", tokens.train), ("validation", tokens.val)):
        if len(ids) <= model.block_size:
            by_characters = config.tokenizer.name == "char" or config.init_from
            raise UserError(
                f"the {split} split has {len(ids)} tokens, too few for "
                f"model.block_size={model.block_size}: give more text, lower model.block_size"
                f"{'' if by_characters else ', or take tokenizer=char'}")
    # A model of others may have more ids than its tokenizer.
    spare = bool(config.init_from) and (model.vocab_size or 0) > vocab_size
    if model.vocab_size not in (None, vocab_size) and not spare:
        raise UserError(f"model.vocab_size={model.vocab_size} is not the tokenizer's {vocab_size}: "
                        "leave it out")
    return replace(config, model=replace(model, vocab_size=model.vocab_size or vocab_size))


def go_on(trainer: Trainer, folder: Path, manifest: dict, say: Callable[[str], None]) -> None:
    """Load the optimizers' state from the checkpoint, and tell what differs from before."""
    config, team, step = trainer.config, trainer.team, trainer.state.step
    team.order("load")
    tensors = team.broadcast_tensors(checkpoint.load_tensors(folder / checkpoint.OPTIMIZER))
    load_optimizer_tensors(trainer.optimizers, trainer.model, tensors)
    checkpoint.discard_after(trainer.run_dir, step)
    trainer.checkpoints.saved = step
    say(f"going on after {step:,} steps")
    for line in rate_rises_again(step, read_config(folder / checkpoint.CONFIG), config):
        say(line)
    before, now = manifest["machine"], runtime.numerics_id(config, team.size)
    if before not in ("", now):
        say("note: the last bits may differ from those of a run that was not stopped: it was saved "
            f"on {before}, and this is {now}")


def compile_and_announce(trainer: Trainer, say: Callable[[str], None]) -> None:
    """Compile the model where that is configured or pays; print what is going to be trained."""
    config, team, why = trainer.config, trainer.team, ""
    trainer.clock.switch("train")
    if config.compile == "auto":
        steps = config.max_steps - trainer.state.step
        operations = trainer.model.flops_per_token() * trainer.step_tokens * steps / team.size
        pays, why = runtime.compile_pays(config.device, operations)
        config = replace(config, compile=pays)
    print_run(say, config, trainer.model, trainer.tokens, trainer.validation, team.size, why)
    if config.compile:
        team.order("compile")
        rows = config.batch_size // config.accumulate // team.size
        x, y = (torch.from_numpy(part[:rows]).to(config.device)
                for part in trainer.batches.batch(trainer.state.step))
        trainer.forward, worked = runtime.compile_model(trainer.model, x, y, config.precision, say)
        config = replace(config, compile=worked)
    trainer.config = trainer.checkpoints.config = config


def take_steps(trainer: Trainer, log: MetricLogger, snapshots: Snapshots) -> None:
    """Train up to max_steps.

    Raises:
        Stopped: a signal came; the step that is going on has been finished, and is not saved.
    """
    config, team, state, clock = trainer.config, trainer.team, trainer.state, trainer.clock
    logged = state.step, clock.read()
    while True:
        last = state.step == config.max_steps
        if not log.has(state.step):  # a resumed run does what was not recorded
            observe(trainer, log, snapshots)
        if last:
            break
        team.stop.check()
        if team.stop.save_asked:
            team.stop.save_asked = False
            saved = trainer.save()
            log.say("asked to save" + (f", and saved after {state.step:,} steps" if saved else ""))

        clock.switch("train")
        team.order("step", state.step)
        x, y = (torch.from_numpy(part)  # (batch_size / processes, T) each
                for part in trainer.batches.batch(state.step, team.rank, team.size))
        loss, grad_norm, finite = update(trainer.forward, trainer.model, trainer.optimizers, x, y,
                                         config, state.step, team)
        state.step += 1
        trainer.watch.note(state.step, finite)
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


def observe(trainer: Trainer, log: MetricLogger, snapshots: Snapshots) -> None:
    """Save, evaluate and take a snapshot where that is due, and write the row of this step.

    Raises:
        Stopped: a signal came meanwhile; the row is left to the resumed run.
    """
    config, run_dir, state, clock = trainer.config, trainer.run_dir, trainer.state, trainer.clock
    step, stop, row, images = state.step, trainer.team.stop, dict(state.metrics), {}
    totals = {"step": step, "tokens": step * trainer.step_tokens}
    if step and trainer.is_due(config.checkpoint.every):
        trainer.save()  # first, so that nothing that only looks at the run can cost it the step
    if trainer.is_due(config.eval.every):
        clock.switch("evaluate")
        loss, bits = trainer.validation.evaluate(trainer.model, stop.check)
        row |= {"val/loss": loss, "val/bits_per_byte": bits}
        improved = loss < (state.best["val/loss"] if state.best else inf)
        if step and improved and trainer.save():
            state.best = {**totals, **row, **state.text_mark()}
            with log.tolerate_io_errors():
                checkpoint.write_pointer(run_dir, "best", step)
    if trainer.is_due(config.attention.every):
        clock.switch("attention")
        metrics, images, text = snapshots.take(trainer.model, step, log.rows, stop.check)
        row |= metrics
        if text is not None:
            log.sample(step, text)
    if row:
        clock.switch(None)
        log.write({**totals, **clock.metrics(), **row, **state.text_mark()}, images)
    if images:
        clock.switch("attention")
        with log.tolerate_io_errors():
            log.page(write_page(run_dir), last=step == config.max_steps)
    if trainer.checkpoints.saved == step:
        checkpoint.prune(run_dir, config.checkpoint.keep, state.kept)
