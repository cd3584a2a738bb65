"""The checkpoint of a run, as a model on disk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import Tokenizer, load_tokenizer
from run.checkpoints import (
    CONFIG_FILE,
    MODEL_FILE,
    MODEL_FILES,
    TOKENIZER_FILE,
    Checkpoint,
    Manifest,
    verify_checkpoint,
)
from run.config_file import read_config
from run.run_dir import RunDir
from training.safetensors_files import read_weights
from training.stored_model import StoredModel, require_layers, require_same_tensors, tensor_shapes


class StoredRun(StoredModel):
    """A checkpoint of a run, whose hashes are verified, or float16 weights kept with a snapshot.

    `which` is what was asked for: "last", "best" or a step. `run` is None if the checkpoint was
    copied out of its run. `settings` are those of the run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        which: str = "last",
        run_dir: RunDir | None = None,
        snapshot: Path | None = None,
    ) -> None:
        """Read everything now, because a running job may remove the folder at any time.

        The tensors are memory-mapped, which keeps their file readable.
        """
        self.path = folder = checkpoint.folder
        self.manifest: Manifest = checkpoint.manifest
        self.which = which
        self.run_dir = run_dir
        self.step = checkpoint.step if snapshot is None else int(which)
        weights = snapshot or folder / MODEL_FILE
        self._tensors = read_weights(weights)
        self._tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        self.settings = read_config(folder / CONFIG_FILE)
        self.config = GPTConfig.from_settings(self.settings.model)
        found = {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        require_layers(str(weights), found, self.config)
        require_same_tensors(str(weights), found, tensor_shapes(self.config))

    def __str__(self) -> str:
        return f"{self.run_dir.path if self.run_dir else self.path} at step {self.step:,}"

    def read_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `GPT.tensors` returns, with weights in float32."""
        for name, tensor in self._tensors.items():
            yield name, tensor.long() if name == "ngrams.keys" else tensor.float()

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the run was trained with."""
        return self._tokenizer


def open_run(run_dir: RunDir, which: str | int, log: Callable[[str], Any]) -> StoredRun:
    """Open a run at "last", "best" (lowest validation loss) or a step.

    The step may be that of a snapshot whose float16 weights were kept. `log` prints a line if a
    damaged checkpoint is replaced by another one.
    """
    snapshot = None
    if str(which).isdecimal() and int(which) not in run_dir.steps():
        snapshot = run_dir.snapshot_files(".safetensors").get(int(which))

    def read(checkpoint: Checkpoint) -> StoredRun:
        return StoredRun(checkpoint, str(which), run_dir, snapshot)

    return run_dir.open_checkpoint("last" if snapshot else which, read, log)


def open_copied_checkpoint(folder: Path) -> StoredRun:
    """Open a checkpoint that was copied out of its run; the optimizers' state may be missing."""
    try:
        return StoredRun(verify_checkpoint(folder, MODEL_FILES), "last")
    except ValueError as e:
        raise UserError(f"{folder} is a damaged checkpoint ({e}): copy it again") from None
