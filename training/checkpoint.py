"""Checkpoints: written completely or not at all, verified by hash before use, never pickled."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
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
from data.tokenizer import save_tokenizer
from data.tokens import Tokens
from model import GPT
from run.checkpoints import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    Manifest,
    write_manifest,
)
from run.config_file import config_yaml
from run.losses import best_row
from run.run_dir import RunDir
from training.schedule import is_due
from training.state import TrainingState
from training.stopwatch import Stopwatch
from training.tensors import (
    full_tensor,
    list_shapes,
    load_values,
    read_weights,
    require_same_tensors,
    save_values,
    shard_like,
)

# A checkpoint that is being written.
PART_FOLDER = ".step.part"


class Checkpoints:
    """Saves a run's checkpoints and keeps the newest ones and the best. All ranks call it together.

    `last_step` is that of the newest checkpoint, or None; `best_row` has the metrics of the
    checkpoint with the lowest validation loss, or None.
    """

    def __init__(
        self, run_dir: Path, state: TrainingState, text: Tokens, log: Callable[[str], None]
    ) -> None:
        self.run_dir = run_dir
        self.run = RunDir(run_dir)
        self.state = state
        self.text = text
        self.log = log
        self.world = state.world
        self.last_step: int | None = None
        self.best_row: dict[str, float] | None = None

    def restore(self, manifest: Manifest) -> None:
        """Load the checkpoint of a manifest into the training state and set later ones aside."""
        folder = self.run.checkpoint_folder(manifest.step)
        load_weights(self.state.model, folder / MODEL_FILE)  # each rank reads its own rows
        load_optimizer_state(self.state.optimizers, self.state.model, folder / OPTIMIZER_FILE)
        self.world.wait()
        self.state.mean_loss.restore(manifest.losses)
        self.state.scaler.restore(manifest.loss_scale)
        self.last_step = manifest.step
        best = None
        if self.world.rank == 0:
            for step in self.run.steps():
                if step > manifest.step:  # unreadable here, but maybe not damaged
                    kept_as = self.run.set_aside(step)
                    self.log(f"the unreadable checkpoint of step {step:,} is kept as {kept_as}")
            best = self.run.best_row()
        self.best_row = self.world.broadcast(best)
        self.prune()
        self.log(f"resuming at step {manifest.step:,}")

    def save_if_due(self, step: int, row: dict[str, float], clock: Stopwatch) -> None:
        """Save a step if `checkpoint.every` says so, at the last step, or at a new best loss."""
        config = self.state.config
        lowest = self.best_row["val/loss"] if self.best_row else inf
        is_best = row.get("val/loss", inf) < lowest
        if step and (is_best or is_due(config.checkpoint.every, step, config)):
            self.save(step, row, clock, must_succeed=step == config.max_steps)

    def save(
        self, step: int, row: dict[str, float], clock: Stopwatch, must_succeed: bool = False
    ) -> None:
        """Save a step, unless that was done before.

        A checkpoint that cannot be written costs a note, or raises `UserError` if it must succeed.
        """
        if self.last_step == step:
            return
        self.state.guard.flush()
        clock.switch("save")
        values = self._gather()
        problem = None
        if self.world.rank == 0:
            manifest = Manifest(
                step,
                clock.seconds,
                row,
                self.text.fingerprint,
                self.state.mean_loss.state(),
                self.state.scaler.state(),
            )
            problem = self._write(manifest, values)
        problem = self.world.broadcast(problem)
        if problem is None:
            self.last_step = step
            earlier = [self.best_row] if self.best_row else []
            self.best_row = best_row([*earlier, {**row, "step": step}])
            self.prune()
        elif must_succeed:
            raise SharedError(problem)
        else:
            self.log(f"{problem}; training continues")

    def _gather(self) -> dict[str, dict[str, Any]]:
        """Return the values of each file, complete and on the CPU; none on ranks other than 0."""
        model = self.state.model
        weights = sorted(model.tensors().items())  # in one order, because all ranks gather together
        complete = {
            MODEL_FILE: ((name, full_tensor(tensor.detach())) for name, tensor in weights),
            OPTIMIZER_FILE: optimizer_state(self.state.optimizers, model),
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
        folder = self.run.checkpoint_folder(manifest.step)
        part = folder.with_name(PART_FOLDER)
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a save that was interrupted
            part.mkdir(parents=True)
            for file_name, named_values in values.items():
                save_values(named_values, part / file_name)
            save_tokenizer(self.text.tokenizer, part / TOKENIZER_FILE)
            (part / CONFIG_FILE).write_text(config_yaml(self.state.config), encoding="utf-8")
            write_manifest(part, manifest)
            for path in [*list_folder(part), part]:
                sync(path)
            run = self.run
            for path in (run.metrics_file, run.samples_file, run.snapshots, run.path):
                with tolerate_errors(f"syncing {path}", self.log):
                    if exists(path):
                        sync(path)
            part.rename(folder)
            sync(folder.parent)
            return None
        except (OSError, SafetensorError) as e:
            return (
                f"the checkpoint of step {manifest.step} could not be written in "
                f"{self.run_dir} ({e}); earlier checkpoints are unchanged"
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
        with tolerate_errors("removing old checkpoints", self.log):
            for name, named in (("last", self.last_step), ("best", best_step)):
                if named is not None:
                    self.run.write_pointer(name, named)
            for step in self.run.steps()[: -self.state.config.checkpoint.keep]:
                if step != best_step:
                    folder = self.run.checkpoint_folder(step)
                    folder.rename(folder.with_name(f".{folder.name}.part"))  # at once for readers
            for removed in list_folder(self.run.checkpoints, ".step_*.part"):
                shutil.rmtree(removed, ignore_errors=True)


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
    stored: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in load_values(path).items():
        name, _, field = key.partition("/")
        stored[name][field] = value
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        params = _parameters(optimizer)
        states = [stored[names[p]] for p in params]
        for p, state in zip(params, states):
            for field, value in state.items():
                if isinstance(value, Tensor):  # this rank's part, in memory of its own
                    state[field] = shard_like(p, value).clone()
        numbered = {number: state for number, state in enumerate(states) if state}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        for p, state in zip(params, states):
            for field, value in state.items():
                if isinstance(value, Tensor):  # torch has moved it, and may have changed its type
                    value = value.to(optimizer.state[p][field].device)
                optimizer.state[p][field] = value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# --- loading --------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(model: GPT, path: Path) -> None:
    """Copy weights from a file into a model, or each rank its rows."""
    tensors = model.tensors()
    stored = read_weights(path)
    require_same_tensors(str(path), list_shapes(stored), list_shapes(tensors))
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(tensor, stored[name]))
