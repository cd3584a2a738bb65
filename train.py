"""The command, and one training run, top to bottom.

python train.py                       the default run, on this Python's own library
python train.py --help                what can be set
"""

import cli

if __name__ == "__main__":
    launch = cli.prepare_launch()  # answers --help and mistakes before torch takes seconds to load

import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import interop
import sweeps
from attention_maps.rendering import describe_run
from attention_maps.snapshot import ABLATION_TOKENS, Snapshots
from common.errors import UserError
from common.metrics import METRICS, best_row, read_rows
from config import Config
from data.batches import Batches
from data.ngrams import count_ngrams
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokens import Tokens, open_tokens, prepare_text
from model import GPT, autocast
from report.page import write_page
from training import checkpoint, device
from training.checkpoint import Checkpoints
from training.evaluate import evaluate, splits_of
from training.optimizers import build_optimizers, clip_gradients
from training.plan import print_run, resolve
from training.processes import Stopped, World, average_gradients, join, plain_copy, shard_model
from training.record import Record, Stopwatch, goes_on, print_losses, print_summary, run_folder
from training.schedule import learning_rate_metrics, lr_factor, set_learning_rates


def main(launch: cli.Launch) -> None:
    """Train the run, or the runs of the sweep, that the command line asks for."""
    if launch.job is None:
        sweeps.run_sweep(launch.command_line, run)
    else:
        run(launch.job)


def run(job: cli.Job) -> float:
    """Train one job, or only prepare its text; return the best validation loss."""
    waits_for_rank_0 = cli.process_rank() > 0 and job.config.distributed == "auto"
    if waits_for_rank_0 and job.config.prepare_only:
        return nan
    if waits_for_rank_0:
        return start(None)  # rank 0 broadcasts the configuration
    config = cli.configure(job, interop.read_starting_model, cli.printer(cli.Terminal()))
    if config.prepare_only:
        read_text(config, World(), Path(), {}, cli.Terminal())
        return nan
    return start(config, job.experiment)


def start(config: Config | None, experiment: str = "default") -> float:
    """Train in a folder, with the other processes of the run; returns as `train` does."""
    with join(alone=config is not None and config.distributed == "none") as world:
        config = world.broadcast(config)
        folder = run_folder(config, experiment) if world.rank == 0 else nullcontext()
        try:
            with folder as run_dir:
                return train(config, world, world.broadcast(run_dir))
        except TorchDynamoException as e:
            raise UserError(
                f"torch.compile failed here ({cli.first_line(e)[:200]}): use compile=false"
            ) from None


def train(config: Config, world: World, run_dir: Path) -> float:
    """Train as configured; return the best validation loss, nan where none was measured. Raises
    SystemExit, 130 or 143, after a stop signal, with a checkpoint saved."""
    console = cli.Terminal(quiet=world.rank > 0)
    log = cli.printer(console)
    manifest, rows = world.broadcast(saved_run(config, run_dir, log) if world.rank == 0 else None)
    step, row = manifest.get("step", 0), manifest.get("metrics", {})
    recorded = bool(rows) and rows[-1]["step"] == step
    if step + recorded > config.max_steps:
        return finished(config, run_dir, step, log) if world.rank == 0 else nan

    device.pick_device(config.device, world.size)  # before the text is prepared, which takes long
    text, load_initial_weights = read_text(config, world, run_dir, manifest, console)
    config = resolve(config, world, text, step)
    batches = Batches(text.train, config.model.block_size, config.batch_size, config.seed)
    splits = splits_of(text, config, world)
    model, forward, optimizers = build(config, world, load_initial_weights)
    checkpoints = Checkpoints(config, run_dir, world, log)
    guard, mean_loss = checkpoints.begin(model, optimizers, text)
    checkpoints.restore(manifest, rows)
    print_run(log, config, model, text, world.size)
    clock = Stopwatch(
        partial(device.synchronize, config.device),
        manifest.get("seconds", {}),
        tokens_seen(step, config),
    )

    with (
        world,
        (
            Record(config, run_dir, manifest.get("step", -1)) if world.rank == 0 else nullcontext()
        ) as record,
    ):
        snapshots = record and Snapshots(
            config, run_dir, text, splits[0].excerpt(ABLATION_TOKENS), record.tolerate_io_errors
        )
        try:
            while True:
                if not recorded:  # what a resumed run did before is not done again
                    if is_due(config.eval.every, step, config):
                        clock.switch("evaluate")
                        guard.flush()
                        row |= evaluate(model, splits, last=step == config.max_steps)
                    checkpoints.keep(step, row, clock)
                    look = is_due(config.attention.every, step, config)
                    undivided = plain_copy(model, world) if look else None  # on rank 0
                    world.check_stop()
                    if record:
                        observe(record, snapshots, undivided, {"step": step} | row, clock, world)
                    world.check_stop()
                if step == config.max_steps:
                    break

                clock.switch("train")
                x, y = batches.batch(step, world.rank, world.size)  # (batch_size / processes, T)
                set_learning_rates(optimizers, lr_factor(step, config.optim, config.max_steps))
                loss = torch.zeros((), device=config.device)
                for micro_step, batch in enumerate(micro_batches(x, y, config, world)):
                    device.seed_micro_step(config.seed, step, micro_step, world.rank)
                    with autocast(config.device, config.precision):
                        micro_loss = forward(*batch)[1]  # the logits are freed
                    (micro_loss / config.accumulate).backward()
                    loss += micro_loss.detach() / (config.accumulate * world.size)
                if config.shard == 1:  # FSDP2 does it in each backward pass
                    average_gradients(model, world)
                norms = clip_gradients(model, config.optim.grad_clip, world, config.shard)
                loss = world.sum(loss)
                guard.check(step, loss, norms)
                mean_loss.add(loss)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                step, row, recorded = step + 1, {}, False
                if record:
                    record.advance(step)
                if is_due(config.log.every, step, config):
                    row = {
                        "train/loss": mean_loss.read(),
                        "train/grad_norm": norms.norm().item(),
                        "train/tokens_per_second": clock.speed(tokens_seen(step, config)),
                        **learning_rate_metrics(optimizers),
                    }
        except Stopped as stopped:
            checkpoints.save(step, row, clock, last_chance=True)
            log(
                f"stopped after {step:,} steps; to go on: "
                f"python train.py run_dir={shlex.quote(str(run_dir))} resume=true"
            )
            raise SystemExit(stopped.exit_status) from None
    if record:
        sum_up(record, checkpoints, clock)
    return loss_of(checkpoints.best)


def is_due(every: int, step: int, config: Config) -> bool:
    """True at the last step, and after each `every` steps (0: at the last alone)."""
    return step == config.max_steps or (every > 0 and step % every == 0)


def tokens_seen(step: int, config: Config) -> int:
    return step * config.batch_size * config.model.block_size


def loss_of(row: dict | None) -> float:
    return row["val/loss"] if row else nan


def saved_run(config: Config, run_dir: Path, log: Callable[[str], None]) -> tuple[dict, list[dict]]:
    """The manifest of the checkpoint to go on from, {} for a new run, and the rows up to it."""
    if not goes_on(config):
        return {}, []
    rows = read_rows(run_dir / METRICS)
    if not checkpoint.saved_steps(run_dir):
        if config.resume == "auto":
            return {}, []
        raise UserError(
            f"run_dir={run_dir} was stopped before its first checkpoint: "
            "start it again with resume=auto"
        )
    _, manifest = checkpoint.find_checkpoint(run_dir, "last", log)
    return manifest, [row for row in rows if row["step"] <= manifest["step"]]


def finished(config: Config, run_dir: Path, step: int, log: Callable[[str], None]) -> float:
    """Say that all steps are done, and draw the page where the run was killed before that."""
    log(
        f"{run_dir} is finished: {step:,} steps are done, and max_steps={config.max_steps}; "
        "a larger max_steps extends it"
    )
    page, record = run_dir / "report.html", run_dir / METRICS
    if not page.exists() or page.stat().st_mtime_ns < record.stat().st_mtime_ns:
        write_page(run_dir)
    return loss_of(best_row(read_rows(record)))


def read_text(
    config: Config, world: World, run_dir: Path, manifest: dict, console: cli.Terminal
) -> tuple[Tokens, Callable[[GPT], object]]:
    """The text, which rank 0 alone checks and prepares; and what fills a new model."""
    log, tokenizer, load_initial_weights = cli.printer(console), None, lambda model: None
    if manifest:
        folder = checkpoint.step_folder(run_dir, manifest["step"])
        tokenizer = load_tokenizer(folder / checkpoint.TOKENIZER)
    elif config.init_from:
        tokenizer, load_initial_weights = interop.open_starting_weights(Path(config.init_from), log)
    text = check_text(config, manifest, tokenizer, console) if world.rank == 0 else None
    known = world.broadcast(text and (text.folder.name, text.name, text.fingerprint))
    # On another machine the cache may be another one.
    text = text or open_tokens(*known) or check_text(config, manifest, tokenizer, console)
    for line in text.summary():
        log(line)
    c = config.model
    if c.ngrams < 2 or config.init_from or (manifest and c.ngram_rows):  # weights bring their own
        return text, load_initial_weights
    keys = count_ngrams(text.train, text.tokenizer.vocab_size, c) if world.rank == 0 else None
    keys = world.broadcast(keys)
    return replace(text, ngrams=keys), lambda model: model.ngrams.keys.copy_(torch.from_numpy(keys))


def check_text(
    config: Config, manifest: dict, tokenizer: Tokenizer | None, console: cli.Terminal
) -> Tokens:
    """The text, checked to be that of the run that goes on, with that run's tokenizer."""
    # A run goes on with its own vocabulary, which another version might learn otherwise.
    log, own = cli.printer(console), tokenizer if config.init_from else None
    text = prepare_text(config, console, log, own, verify_all=bool(manifest))
    if manifest and manifest["fingerprint"] != text.fingerprint:
        raise UserError(
            "the text, or how it is prepared, has changed since the run began "
            f"(fingerprint {manifest['fingerprint'][:16]} then, "
            f"{text.fingerprint[:16]} now): restore it, or start a new run"
        )
    if tokenizer and tokenizer.to_json() != text.tokenizer.to_json():
        text = prepare_text(config, console, log, tokenizer, verify_all=True)
    return text


def build(
    config: Config, world: World, load_initial_weights: Callable[[GPT], object]
) -> tuple[GPT, Callable, list[torch.optim.Optimizer]]:
    """The model on its device or divided among the ranks, its forward passes, its optimizers."""
    device.set_up(config)
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    load_initial_weights(model)
    forward, mesh = shard_model(model, config, world.size)
    return model, forward, build_optimizers(model, config.optim, config.precision, mesh)


def micro_batches(
    x: np.ndarray, y: np.ndarray, config: Config, world: World
) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs and targets x, y (batch_size / processes, T) of each micro-step, on the device."""
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    if config.device.startswith("cuda"):  # copied while the GPU does the step before
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    rows = config.micro_batch_size(world.size)
    for batch in zip(inputs.split(rows), targets.split(rows)):
        yield tuple(part.to(config.device, non_blocking=True) for part in batch)


def observe(
    record: Record,
    snapshots: Snapshots,
    model: GPT | None,
    row: dict,
    clock: Stopwatch,
    world: World,
) -> None:
    """Look at the heads of the model, where one is given, and write the row of this step."""
    step = row["step"]
    last = step == record.config.max_steps
    row = {"step": step, "tokens": tokens_seen(step, record.config)} | row
    if len(row) > 2:
        record.show(row)  # what is below takes a while
    if model is not None:
        clock.switch("attention")
        record.doing("measuring what each head is worth" if last else "looking at attention")
        try:
            world.at_once = True
            metrics, sample = snapshots.take(model, step, record.rows)
        except Stopped:
            return  # the row is left to the resumed run
        finally:
            world.at_once = False
        row |= metrics
        if sample is not None:
            record.sample(step, sample)
    if len(row) > 2:
        clock.switch(None)
        record.write(row | clock.metrics())
    if model is not None:
        clock.switch("attention")
        with record.tolerate_io_errors():
            if not (record.run_dir / "report.html").exists():
                record.log(
                    f"page     {record.run_dir / 'report.html'} (open it in a browser; it "
                    "updates itself)"
                )
            record.doing("drawing the page")
            record.wandb.page(
                write_page(record.run_dir), record.rows[-1], describe_run(record.rows), last
            )


def sum_up(record: Record, checkpoints: Checkpoints, clock: Stopwatch) -> None:
    """Leave all in order, and print what came of a run."""
    checkpoints.tidy()
    clock.switch(None)
    record.log("")
    print_losses(record.log, record.rows)
    for finding in describe_run(record.rows):
        cli.printer(record.console, wrap=True)(str(finding))
    record.log("")
    print_summary(record.log, record.run_dir, clock.seconds)


if __name__ == "__main__":
    cli.run(partial(main, launch))
