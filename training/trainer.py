"""What a run trains with: the model, on its device or sharded over the ranks, its optimizers, data
and state; of a new run, or of one that goes on from a checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would: a second that is loading, not training
from torch import Tensor

import cli
from config import Config, UserError, config_yaml, read_config, read_experiment
from data.batches import Batches
from data.tokens import Tokens
from files import atomic_write, printable
from model import GPT
from training import checkpoint, runtime
from training.checkpoint import Checkpoints, TrainState
from training.compiling import Builder, compile_model
from training.distributed import World
from training.evaluate import Validation
from training.optim import Watch, build_optimizers, load_optimizer_tensors, rate_rises_again
from training.record import MetricLogger, Stopwatch
from training.sharding import compile_parts, shard_model
from training.summary import print_run


@dataclass
class Trainer:
    """What a run trains with, and where it stands."""

    config: Config
    run_dir: Path
    world: World
    batches: Batches
    model: GPT
    forward: Callable  # the model; from `eager_steps` on, compiled; of several ranks, wrapped
    optimizers: list[torch.optim.Optimizer]
    validation: Validation
    state: TrainState
    clock: Stopwatch
    watch: Watch
    checkpoints: Checkpoints
    builder: Builder | None = None  # compiles beside the first steps

    @property
    def step_tokens(self) -> int:
        return self.config.batch_size * self.config.model.block_size

    @property
    def totals(self) -> dict[str, int]:
        return {"step": self.state.step, "tokens": self.state.step * self.step_tokens}

    def is_due(self, every: int) -> bool:
        """Whether what comes every so many steps, 0 being never, and at the last, comes now."""
        step = self.state.step
        return step == self.config.max_steps or (every > 0 and step % every == 0)

    def write_config(self, experiment: str = "") -> None:
        """Write config.yaml in the run's folder: what has one can be resumed. Its first line names
        the experiment that the run began with, and stays."""
        path = self.run_dir / "config.yaml"
        name = read_experiment(path) if path.exists() else experiment
        first = f"# experiment={printable(name, one_line=True)}\n" if name else ""
        with atomic_write(path) as part:
            part.write_text(first + config_yaml(self.config), encoding="utf-8")

    @contextmanager
    def compiling_beside(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within this, another process compiles the model, where the next steps are eager ones."""
        steps = self.config.eager_steps
        if not self.config.compile or self.state.step >= steps:
            yield
            return
        say(f"compiling beside the first {steps:,} steps, which are slower")
        with Builder(self.run_dir, self.config.micro_batch()) as self.builder:
            yield

    def compile_when_due(self, x: Tensor, y: Tensor, log: MetricLogger | None) -> None:
        """From `eager_steps` on, have the model compiled for batches like x, y (sequences, T).

        Where that fails it stays eager.

        Raises:
            Stopped: a signal came while the other process was waited for.
        """
        due = self.config.compile and self.state.step >= self.config.eager_steps
        if not due or self.forward is not self.model or self.world.size > 1:
            return
        began, (x, y) = time.perf_counter(), (
            part[:self.config.micro_batch()].to(self.config.device) for part in (x, y))
        with cli.waiting(log.console, "compiling"):
            if self.builder:
                self.builder.wait(self.world.check)
            self.forward, worked = compile_model(self.model, x, y, self.config.precision, log.say,
                                                 runtime.graphs_are_safe(self.config))
        if worked:
            log.say(f"compiled; {time.perf_counter() - began:.0f} s waited for it")
        else:
            self.config = self.checkpoints.config = replace(self.config, compile=False)
            self.write_config()

    def save(self, last_chance: bool = False) -> bool:
        """Save this step, unless it is saved; whether it is now."""
        self.state.skipped = self.watch.counts()
        self.clock.switch("save")
        self.state.seconds = self.clock.seconds
        return self.checkpoints.save(self.state, last_chance)


def set_up(config: Config, run_dir: Path, world: World, tokens: Tokens,
           load_initial_weights: Callable[[GPT], None] | None, manifest: dict,
           say: Callable[[str], None]) -> Trainer:
    """The model and the optimizers of a new run, or as the checkpoint of `manifest` has them."""
    config = fit_to_text(config, tokens)
    state = TrainState.after(manifest, world.tell(tokens.fingerprint))
    if state.fingerprint != tokens.fingerprint:
        raise UserError(f"the text here ({tokens.name}) is another than that of process 0 "
                        f"(fingerprint {tokens.fingerprint[:16]} here, {state.fingerprint[:16]} "
                        "there): give every machine the same text by data=text data.path=PATH")
    folder = checkpoint.step_folder(run_dir, state.step) if manifest else None
    if folder:
        checkpoint.check_model(folder, config.model)
    block_size = config.model.block_size
    batches = Batches(tokens.train, block_size, config.batch_size, config.seed)
    validation = Validation(tokens.val, tokens.tokenizer, block_size, config.device,
                            config.precision, world, config.data)
    config, parameters, why = runtime.resolve_size(config, world.size, state.step)
    if not (folder and config.eval_only):
        print_run(say, config, parameters, tokens, validation, world.size, why)
    clock = Stopwatch(partial(runtime.synchronize, config.device), state.seconds)
    clock.switch("train")
    runtime.keep_freed_memory()
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    if load_initial_weights:
        load_initial_weights(model)
    if config.compile and world.size > 1:  # the parts, before they are sharded
        config = replace(config, compile=compile_parts(model, config, world, say))
    forward, mesh = shard_model(model, config, world.size)
    optimizers = build_optimizers(model, config.optim, config.precision, mesh)
    checkpoints = Checkpoints(config, run_dir, model, optimizers, tokens.tokenizer, world, say)
    if folder:
        checkpoint.load_weights(model, folder / checkpoint.MODEL)
        if not config.eval_only:
            load_optimizer_tensors(optimizers, model, folder / checkpoint.OPTIMIZER)
            checkpoints.saved = state.step
            going_on(config, run_dir, world, manifest, say)
    watch = Watch(model, config.on_nonfinite, *state.skipped)
    return Trainer(config, run_dir, world, batches, model, forward, optimizers, validation, state,
                   clock, watch, checkpoints)


def fit_to_text(config: Config, tokens: Tokens) -> Config:
    """The configuration with the vocabulary of the text.

    Raises:
        UserError: the text is too short for the model, or has another vocabulary.
    """
    model, vocab_size = config.model, tokens.tokenizer.vocab_size
    for split, ids in (("training", tokens.train), ("validation", tokens.val)):
        if len(ids) <= model.block_size:
            by_characters = config.tokenizer.name == "char" or config.init_from
            ways = ("more text or a lower model.block_size" if by_characters else
                    "more text, a lower model.block_size, or tokenizer=char")
            raise UserError(f"the {split} split has {len(ids)} tokens, too few for "
                            f"model.block_size={model.block_size}: give {ways}")
    # A model of others may have more ids than its tokenizer.
    spare = bool(config.init_from) and (model.vocab_size or 0) > vocab_size
    if model.vocab_size not in (None, vocab_size) and not spare:
        raise UserError(f"model.vocab_size={model.vocab_size} is not the tokenizer's {vocab_size}: "
                        "leave it out")
    return replace(config, model=replace(model, vocab_size=model.vocab_size or vocab_size))


def going_on(config: Config, run_dir: Path, world: World, manifest: dict,
             say: Callable[[str], None]) -> None:
    """Remove what came after the checkpoint, and tell what differs from before."""
    step, before = manifest["step"], manifest["machine"]
    if world.rank == 0:
        checkpoint.discard_after(run_dir, step)
    say(f"resuming at step {step:,}")
    kept = read_config(checkpoint.step_folder(run_dir, step) / checkpoint.CONFIG)
    for line in rate_rises_again(step, kept, config):
        say(line)
    if before not in ("", now := runtime.numerics_id(config, world.size)):
        say(f"note: the run was saved on {before}, and this is {now}, so the last bits may differ "
            "from those of a run that never stopped")
