"""Checkpoints: written completely or not at all, verified by hash before use, never pickled."""

import shutil
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from cli.config_file import config_yaml
from common.checkpoints import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    Manifest,
    best_saved_row,
    saved_steps,
    set_aside,
    step_folder,
    write_manifest,
    write_pointer,
)
from common.errors import SharedError
from common.files import exists, list_folder, sync
from common.metrics import METRICS, SAMPLES, best_row
from common.terminal import tolerate_errors
from data.tokenizer import save_tokenizer
from data.tokens import Tokens
from model import GPT
from training.optimizers import Muon
from training.schedule import is_due
from training.state import TrainingState
from training.stopwatch import Stopwatch
from training.tensors import copy_rows, full_tensor, open_safetensors

# A checkpoint that is being written.
PART_FOLDER = ".step.part"
# The fields that torch's AdamW stores per parameter; our optimizers name theirs.
ADAMW_FIELDS = ("step", "exp_avg", "exp_avg_sq")


class Checkpoints:
    """Saves a run's checkpoints and keeps the newest ones and the best. All ranks call it together.

    `last_step` is that of the newest checkpoint, or None; `best_row` has the metrics of the
    checkpoint with the lowest validation loss, or None.
    """

    def __init__(
        self, run_dir: Path, state: TrainingState, text: Tokens, log: Callable[[str], None]
    ) -> None:
        self.run_dir = run_dir
        self.state = state
        self.text = text
        self.log = log
        self.world = state.world
        self.last_step: int | None = None
        self.best_row: dict[str, float] | None = None

    def restore(self, manifest: Manifest) -> None:
        """Load the checkpoint of a manifest into the training state and set later ones aside."""
        folder = step_folder(self.run_dir, manifest.step)
        with self.world.share_errors():  # each rank reads its own rows
            load_weights(self.state.model, folder / MODEL_FILE)
            load_optimizer_tensors(self.state.optimizers, self.state.model, folder / OPTIMIZER_FILE)
        self.state.mean_loss.restore(manifest.losses)
        self.state.scaler.restore(manifest.loss_scale)
        self.last_step = manifest.step
        best = None
        if self.world.rank == 0:
            for step in saved_steps(self.run_dir):
                if step > manifest.step:  # unreadable here, but maybe not damaged
                    kept_as = set_aside(step_folder(self.run_dir, step))
                    self.log(f"the unreadable checkpoint of step {step:,} is kept as {kept_as}")
            best = best_saved_row(self.run_dir)
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
        tensors = self._gather()
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
            problem = self._write(manifest, tensors)
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

    def _gather(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each file, complete and on the CPU; none on ranks other than 0."""
        model = self.state.model
        weights = sorted(model.tensors().items())  # in one order, because all ranks gather together
        complete = {
            MODEL_FILE: ((name, full_tensor(tensor.detach())) for name, tensor in weights),
            OPTIMIZER_FILE: optimizer_tensors(self.state.optimizers, model),
        }
        gathered: dict[str, dict[str, Tensor]] = {}
        for file_name, tensors in complete.items():
            gathered[file_name] = {}
            for name, tensor in tensors:
                if self.world.rank == 0:
                    gathered[file_name][name] = tensor.cpu().contiguous()
        return gathered

    def _write(self, manifest: Manifest, tensors: dict[str, dict[str, Tensor]]) -> str | None:
        """Write checkpoints/step_XXXXXXXX, or leave nothing and return what went wrong.

        The folder gets its name only after each of its bytes, and of the run's record up to this
        step, is on the disk.
        """
        folder = step_folder(self.run_dir, manifest.step)
        part = folder.with_name(PART_FOLDER)
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a save that was interrupted
            part.mkdir(parents=True)
            for file_name, named_tensors in tensors.items():
                save_file(named_tensors, part / file_name)
            save_tokenizer(self.text.tokenizer, part / TOKENIZER_FILE)
            (part / CONFIG_FILE).write_text(config_yaml(self.state.config), encoding="utf-8")
            write_manifest(part, manifest)
            for path in [*list_folder(part), part]:
                sync(path)
            for path in [self.run_dir / name for name in (METRICS, SAMPLES, "attention", "")]:
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
                    write_pointer(self.run_dir, name, named)
            for step in saved_steps(self.run_dir)[: -self.state.config.checkpoint.keep]:
                if step != best_step:
                    folder = step_folder(self.run_dir, step)
                    folder.rename(folder.with_name(f".{folder.name}.part"))  # at once for readers
            for removed in list_folder(self.run_dir / "checkpoints", ".step_*.part"):
                shutil.rmtree(removed, ignore_errors=True)


# --- the optimizers' state ------------------------------------------------------------------------


@torch.no_grad()
def optimizer_tensors(
    optimizers: list[Optimizer], model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Yield the complete optimizer state by name, such as `head.weight/exp_avg`, in their order.

    All ranks take the tensors together.
    """
    names = {p: name for name, p in model.named_parameters()}
    if not any(optimizer.state for optimizer in optimizers):  # before the first step
        return
    states = [(f"{names[p]}/{field}", o, p, field) for o, p, field in _state_of(optimizers)]
    for name, optimizer, p, field in sorted(states, key=lambda state: state[0]):
        yield name, _gather_state(optimizer, p, field)


@torch.no_grad()
def load_optimizer_tensors(optimizers: list[Optimizer], model: nn.Module, path: Path) -> None:
    """Restore the state that `optimizer_tensors` returned, bit for bit."""
    names = {p: name for name, p in model.named_parameters()}
    with open_safetensors(path) as file:
        if not file.keys():  # it was saved before the first step
            return
        for optimizer, p, field in _state_of(optimizers):
            if isinstance(optimizer, Muon) and not optimizer.owns(p):
                continue
            key = f"{names[p]}/{field}"
            if field == "step":  # a scalar, which fused AdamW counts on the parameter's device
                state = file.get_tensor(key).to(p.device)
            else:
                state = _empty_state(p, field)
                copy_rows(file, key, state)
            optimizer.state[p][field] = state


def _state_of(optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, Tensor, str]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for field in getattr(optimizer, "state_fields", ADAMW_FIELDS):
                    yield optimizer, p, field


def _gather_state(optimizer: Optimizer, p: Tensor, field: str) -> Tensor:
    """Return the complete state of a parameter; all ranks call this together."""
    if not isinstance(optimizer, Muon):
        return full_tensor(optimizer.state[p][field])
    state = optimizer.state[p][field] if optimizer.owns(p) else _empty_state(p, field)
    return optimizer.share_state(p, full_tensor(state))


def _empty_state(p: Tensor, field: str) -> Tensor:
    return torch.empty_like(p[:, :1] if field == "row_squares" else p)


# --- loading --------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(model: GPT, path: Path) -> None:
    """Copy weights from a file into a model; of more positions than it has, the first ones."""
    with open_safetensors(path) as file:
        for name, tensor in model.tensors().items():
            copy_rows(file, name, tensor)
