"""Checkpoints: written completely or not at all, verified by hash before use, never pickled."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cli.config_file import config_yaml, read_config
from common.checkpoints import (
    best_saved_row,
    find_checkpoint,
    read_pointer,
    remove_path,
    saved_steps,
    set_aside,
    step_folder,
    write_pointer,
)
from common.errors import SharedError, UserError
from common.files import exists, list_folder, refuse_link, sync
from common.manifest import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    Manifest,
    write_manifest,
)
from common.metrics import METRICS, SAMPLES
from config import Config, GPTConfig
from data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from data.tokens import Tokens
from model import GPT
from training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from training.schedule import is_due
from training.state import TrainingState
from training.stopwatch import Stopwatch
from training.tensors import copy_rows, full_tensor, open_safetensors
from variants import build_model

NGRAM_KEYS = "ngrams.keys"  # the only tensor of integers


class SavedWeights(NamedTuple):
    """Weights of a run at one step."""

    step: int
    folder: Path  # of the checkpoint with the weights, or else only with the configuration
    snapshot: Path | None = None  # float16 weights that were kept with a snapshot


class Checkpoints:
    """Saves a run's checkpoints and keeps the newest ones and the best.

    All ranks call the methods together; rank 0 writes. The tokenizer and the fingerprint of the
    text are saved with the training state.

    Attributes:
        last_step: Step of the newest checkpoint, or None.
        best_row: Metrics of the checkpoint with the lowest validation loss, or None.
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
        self._has_reported_error = False

    def restore(self, manifest: Manifest) -> None:
        """Load the checkpoint of a manifest into the training state and set later ones aside."""
        folder = step_folder(self.run_dir, manifest.step)
        with self.world.share_errors():  # each rank reads its own rows
            load_weights(self.state.model, folder / MODEL_FILE)
            load_optimizer_tensors(
                self.state.optimizers, self.state.model, folder / OPTIMIZER_FILE, manifest.step
            )
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
        if step == 0:
            return
        config = self.state.config
        lowest = self.best_row["val/loss"] if self.best_row else inf
        is_best = row.get("val/loss", inf) < lowest
        if not (is_best or is_due(config.checkpoint.every, step, config)):
            return
        is_saved = self.save(step, row, clock, must_succeed=step == config.max_steps)
        if is_saved and is_best:
            self.best_row = {**row, "step": step}
            self.prune()

    def save(
        self, step: int, row: dict[str, float], clock: Stopwatch, must_succeed: bool = False
    ) -> bool:
        """Save a step, unless that was done before, and return whether it is saved now.

        A checkpoint that cannot be written costs a note, or raises `UserError` if it must succeed.
        """
        if self.last_step == step:
            return True
        self.state.guard.flush()
        clock.switch("save")
        tensors = self._gather()
        problem = None
        if self.world.rank == 0:
            losses = self.state.mean_loss.state()
            manifest = Manifest(
                step,
                clock.seconds,
                row,
                self.text.fingerprint,
                losses,
                self.state.scaler.state(),
            )
            problem = self._write(manifest, tensors)
        problem = self.world.broadcast(problem)
        if problem is None:
            self.last_step = step
            self.prune()
            return True
        if must_succeed:
            raise SharedError(problem)
        self.log(f"{problem}; training continues")
        return False

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
        part = folder.with_name(f".{folder.name}.part")
        try:
            refuse_link(part.parent)
            remove_path(part)
            part.mkdir(parents=True)
            for file_name, named_tensors in tensors.items():
                save_file(named_tensors, part / file_name)
            save_tokenizer(self.text.tokenizer, part / TOKENIZER_FILE)
            (part / CONFIG_FILE).write_text(config_yaml(self.state.config), encoding="utf-8")
            write_manifest(part, manifest)
            for path in [*list_folder(part), part]:
                sync(path)
            for name in (METRICS, SAMPLES, "attention", ""):
                with self._tolerate_errors():
                    if exists(self.run_dir / name):
                        sync(self.run_dir / name)
            part.rename(folder)
            sync(folder.parent)
            return None
        except (OSError, SafetensorError) as e:
            reason = re.sub(r".*I/O error: (.*) \(os error \d+\)", r"\1", str(e))  # of safetensors
            needed = sum(t.nbytes for named in tensors.values() for t in named.values())
            return (
                f"the checkpoint of step {manifest.step} could not be written in "
                f"{self.run_dir} ({getattr(e, 'strerror', None) or reason}; it needs {needed:,} "
                "bytes); earlier checkpoints are unchanged"
            )
        finally:
            remove_path(part)

    def prune(self) -> None:
        """Point `last` and `best` at their checkpoints and remove the ones that are not kept.

        Remains of interrupted saves are removed too. What fails is retried at the next call; the
        first failure is printed.
        """
        if self.world.rank > 0:
            return
        best_step = int(self.best_row["step"]) if self.best_row else None
        for name, step in (("last", self.last_step), ("best", best_step)):
            with self._tolerate_errors():
                refuse_link(self.run_dir / "checkpoints")
                if step is not None and read_pointer(self.run_dir, name) != step:
                    write_pointer(self.run_dir, name, step)
        with self._tolerate_errors():
            refuse_link(self.run_dir / "checkpoints")
            for step in saved_steps(self.run_dir)[: -self.state.config.checkpoint.keep]:
                if step != best_step:
                    remove_path(step_folder(self.run_dir, step))
            for part in list_folder(self.run_dir / "checkpoints", ".step_*.part"):
                remove_path(part)

    @contextmanager
    def _tolerate_errors(self) -> Iterator[None]:
        """Continue after an error of reading or writing, and print a note about the first."""
        try:
            yield
        except OSError as e:
            if not self._has_reported_error:
                path = e.filename or self.run_dir / "checkpoints"
                self.log(
                    f"note: {path} cannot be read or written ({e.strerror or e}); "
                    "training continues"
                )
            self._has_reported_error = True


def parameter_shapes(config: GPTConfig) -> dict[str, list[int]]:
    """Return the shapes of a model's tensors by name, without allocating them."""
    with torch.device("meta"):
        return {name: list(t.shape) for name, t in build_model(config).tensors().items()}


def check_weights(path: Path, config: GPTConfig, dtype: str = "F32") -> None:
    """Raise `UserError` if a file's weights do not fit a model; more positions are accepted.

    All weights have the type `dtype`, as safetensors names it.
    """
    with open_safetensors(path) as file:
        names = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        shapes = {name: list(saved.get_shape()) for name, saved in slices.items()}
        for name, saved in slices.items():
            expected = "I64" if name == NGRAM_KEYS else dtype
            if saved.get_dtype() != expected:
                raise UserError(f"{path}: {name} is of type {saved.get_dtype()}, not {expected}")
    positions = shapes.get("position_embedding.weight")
    if positions:
        positions[0] = min(positions[0], config.block_size)
    check_shapes(path, shapes, parameter_shapes(config))


def check_shapes(path: Path, shapes: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    """Raise `UserError` if the tensors of a file, name → shape, are not the expected ones."""
    differences = [
        f"{name:.80}: {shapes.get(name, 'missing')} in the file, "
        f"{expected.get(name, 'absent')} in the model"
        for name in sorted(shapes.keys() | expected.keys())
        if shapes.get(name) != expected.get(name)
    ]
    if differences:
        more = " …" if len(differences) > 3 else ""
        raise UserError(f"{path} contains another model: {'; '.join(differences[:3])}{more}")


@torch.no_grad()
def load_weights(model: GPT, path: Path, dtype: str = "F32") -> None:
    """Copy weights from a file into a model; of more positions than it has, the first ones."""
    check_weights(path, model.config, dtype)
    with open_safetensors(path) as file:
        for name, tensor in model.tensors().items():
            copy_rows(file, name, tensor)


def load_run(
    run_dir: str | os.PathLike, which: str | int = "last", log: Callable[[str], None] = print
) -> tuple[GPT, Tokenizer, Config]:
    """Load a trained model.

    Args:
        run_dir: Folder of the run.
        which: "last", "best" (lowest validation loss) or a step: of a checkpoint, or else of a
            snapshot whose float16 weights were kept.
        log: Prints a line if a damaged checkpoint is replaced by another one.

    Returns:
        The model on the CPU in evaluation mode, the tokenizer, and the run's configuration.

    Raises:
        UserError: If there is no such checkpoint, or it and all earlier ones are damaged.
    """
    saved = find_weights(Path(run_dir), which, log)
    return load_checkpoint(saved.folder, saved.snapshot)


def find_weights(run_dir: Path, which: str | int, log: Callable[[str], None]) -> SavedWeights:
    """Find and verify the weights that `load_run` loads."""
    snapshot = run_dir / "attention" / f"step_{which:0>8}.safetensors"
    is_step = str(which).isdecimal()
    if is_step and int(which) not in saved_steps(run_dir) and exists(snapshot):
        return SavedWeights(int(which), find_checkpoint(run_dir, "last", log)[0], snapshot)
    folder, manifest = find_checkpoint(run_dir, which, log)
    return SavedWeights(manifest.step, folder)


def load_checkpoint(folder: Path, snapshot: Path | None = None) -> tuple[GPT, Tokenizer, Config]:
    """Load the model of a verified checkpoint, or a snapshot's float16 weights; see `load_run`."""
    weights, dtype = (snapshot, "F16") if snapshot else (folder / MODEL_FILE, "F32")
    config = read_config(folder / CONFIG_FILE)
    model_config = GPTConfig.from_settings(config.model)
    check_weights(weights, model_config, dtype)  # before a damaged size allocates all memory
    model = build_model(model_config)
    load_weights(model, weights, dtype)
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    model.token_count = tokenizer.vocab_size
    return model.eval(), tokenizer, config
