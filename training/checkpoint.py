"""Checkpoints: written completely or not at all, verified by hash before use, never pickled."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import SharedError
from common.files import exists, list_folder, sync
from common.terminal import tolerate_errors
from config import ResolvedConfig
from data.tokenizer import save_tokenizer
from data.tokens import Tokens
from model import GPT
from run.checkpoints import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    Manifest,
    Start,
    write_manifest,
)
from run.config_file import config_yaml, read_config
from run.loss_history import best_row
from run.row import Row
from run.run_dir import RunDir
from training.activity_timer import ActivityTimer
from training.intervals import is_due
from training.loss_scale import LossScaler
from training.losses import Losses
from training.safetensors_files import load_values, save_values
from training.schedule import describe_rise
from training.sharding import full_tensor, shard_like
from training.world import World


@dataclass(eq=False)
class Checkpoints:
    """Saves what a step of a run changes, and restores it; all ranks call a method together.

    The newest checkpoints are kept, and the best. `last_step` is that of the newest one, or None;
    `best_row` has the metrics of the one with the lowest validation loss, or None.
    """

    run_dir: RunDir
    config: ResolvedConfig
    text: Tokens
    world: World
    model: GPT
    optimizers: list[Optimizer]
    scaler: LossScaler
    losses: Losses
    last_step: int | None = None
    best_row: Row | None = None

    def restore(self, start: Start) -> None:
        """Restore all but the weights from the checkpoint of a start; set damaged ones aside."""
        checkpoint = start.checkpoint
        if checkpoint is None:
            return
        path = checkpoint.folder / OPTIMIZER_FILE
        load_optimizer_state(self.optimizers, self.model, path)
        self.world.wait()
        self.losses.restore(start.manifest.losses)
        self.scaler.restore(start.manifest.loss_scale)
        self.last_step = start.step
        self.best_row = self.world.on_rank_0(lambda: self._find_best(checkpoint))
        self.prune()
        self.world.log(f"resuming at step {start.step:,}")
        earlier = read_config(checkpoint.folder / CONFIG_FILE)
        if note := describe_rise(start.step, earlier, self.config):
            self.world.log(note)

    def _find_best(self, newest: Checkpoint) -> Row | None:
        """Return the metrics of the best intact checkpoint up to the newest, None without a loss.

        Damaged ones, which are those after it and those that may be better, are set aside.
        """
        damaged = [step for step in self.run_dir.steps() if step > newest.step]
        preferred = self.run_dir.preferred_steps("best")
        best = newest  # which was verified at the start
        if preferred[0] != newest.step:
            best = self.run_dir.checkpoint("best", self.world.log)
        damaged += takewhile(lambda step: step != best.step, preferred)
        for step in sorted(set(damaged)):
            kept_as = self.run_dir.set_aside(step)
            self.world.log(f"the damaged checkpoint of step {step:,} is kept as {kept_as}")
        return best_row([best.manifest.row])

    def save_if_due(self, step: int, row: dict[str, float], timer: ActivityTimer) -> None:
        """Save a step if `checkpoint.every` says so, at the last step, or at a new best loss."""
        lowest = self.best_row["val/loss"] if self.best_row else inf
        is_best = row.get("val/loss", inf) < lowest
        if step and (is_best or is_due(self.config.checkpoint.every, step, self.config)):
            self.save(step, row, timer, must_succeed=step == self.config.max_steps)

    def save(
        self, step: int, row: dict[str, float], timer: ActivityTimer, must_succeed: bool = False
    ) -> None:
        """Save a step, unless that was done before.

        A checkpoint that cannot be written costs a note, or raises `UserError` if it must succeed.
        """
        if self.last_step == step:
            return
        self.losses.require_finite()
        timer.switch("save")
        values = self._gather()
        manifest = Manifest(
            step,
            timer.seconds,
            row,
            self.text.fingerprint,
            self.losses.state(),
            self.scaler.state(),
        )
        problem = self.world.on_rank_0(lambda: self._write(manifest, values))
        if problem is None:
            self.last_step = step
            earlier = [self.best_row] if self.best_row else []
            self.best_row = best_row([*earlier, manifest.row])
            self.prune()
        elif must_succeed:
            raise SharedError(problem)
        else:
            self.world.log(f"{problem}; training continues")

    def _gather(self) -> dict[str, dict[str, Any]]:
        """Return the values of each file, complete and on the CPU; none on ranks other than 0."""
        # In one order, because all ranks gather together
        weights = sorted(self.model.tensors().items())
        complete = {
            MODEL_FILE: ((name, full_tensor(tensor.detach())) for name, tensor in weights),
            OPTIMIZER_FILE: optimizer_state(self.optimizers, self.model),
        }
        gathered: dict[str, dict[str, Any]] = {}
        for file_name, values in complete.items():
            gathered[file_name] = {}
            for name, value in values:
                if self.world.rank == 0:
                    is_tensor = isinstance(value, Tensor)
                    gathered[file_name][name] = value.cpu().contiguous() if is_tensor else value
        return gathered

    def _write(self, manifest: Manifest, values: dict[str, dict[str, Any]]) -> str | None:
        """Write checkpoints/step_XXXXXXXX, or leave nothing and return what went wrong.

        The folder gets its name only after each of its bytes, and of the run's record up to this
        step, is on the disk.
        """
        folder = self.run_dir.checkpoint_folder(manifest.step)
        part = self.run_dir.part_checkpoint
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a save that was interrupted
            part.mkdir(parents=True)
            for file_name, named_values in values.items():
                save_values(named_values, part / file_name)
            save_tokenizer(self.text.tokenizer, part / TOKENIZER_FILE)
            (part / CONFIG_FILE).write_text(config_yaml(self.config), encoding="utf-8")
            write_manifest(part, manifest)
            for path in [*list_folder(part), part]:
                sync(path)
            metrics, samples = self.run_dir.metrics_file, self.run_dir.samples_file
            for path in (metrics, samples, self.run_dir.snapshots, self.run_dir.path):
                with tolerate_errors(f"syncing {path}", self.world.log):
                    if exists(path):
                        sync(path)
            part.rename(folder)
            sync(folder.parent)
            return None
        except (OSError, SafetensorError) as e:
            return (
                f"the checkpoint of step {manifest.step} could not be written in "
                f"{self.run_dir.path} ({e}); earlier checkpoints are unchanged"
            )
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def prune(self) -> None:
        """Write which checkpoints are `last` and `best`, and remove those that are not kept.

        What fails is retried at the next call.
        """
        if self.world.rank > 0:
            return
        best_step = int(self.best_row["step"]) if self.best_row else None
        with tolerate_errors("removing old checkpoints", self.world.log):
            for name, named in (("last", self.last_step), ("best", best_step)):
                if named is not None:
                    self.run_dir.write_pointer(name, named)
            old_steps = self.run_dir.steps()[: -self.config.checkpoint.keep]
            self.run_dir.remove_checkpoints(step for step in old_steps if step != best_step)


# --- the optimizers' state ------------------------------------------------------------------------


@torch.no_grad()
def optimizer_state(optimizers: list[Optimizer], model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the complete state of each parameter by name, such as `head.weight/exp_avg`.

    It is whatever the optimizers keep: tensors, numbers or None. All ranks take it together.
    """
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for p in _parameters(optimizer):
            for field, value in optimizer.state[p].items():
                is_tensor = isinstance(value, Tensor)
                yield f"{names[p]}/{field}", full_tensor(value) if is_tensor else value


@torch.no_grad()
def load_optimizer_state(optimizers: list[Optimizer], model: nn.Module, path: Path) -> None:
    """Restore the state that `optimizer_state` returned, bit for bit."""
    stored = _read_states(path)
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        params = _parameters(optimizer)
        states = [_own_part(p, stored.get(names[p], {})) for p in params]
        numbered = {number: state for number, state in enumerate(states) if state}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        for p, state in zip(params, states):
            for field, value in state.items():
                if isinstance(value, Tensor):  # torch has moved it, and may have changed its type
                    value = value.to(optimizer.state[p][field].device)
                optimizer.state[p][field] = value


def _read_states(path: Path) -> dict[str, dict[str, Any]]:
    """Return the complete state of each parameter by its name: values by their fields."""
    states: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in load_values(path).items():
        name, _, field = key.partition("/")
        states[name][field] = value
    return states


def _own_part(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a parameter's state, in memory of its own."""
    return {
        field: shard_like(p, value).clone() if isinstance(value, Tensor) else value
        for field, value in state.items()
    }


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
