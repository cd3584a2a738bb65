"""The folder of a checkpoint: the names in it, and its manifest, which has the files' hashes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import UserError
from common.files import damage_as_value_error, read_json_object, seal, sha256_of_file
from run.row import Row

CHECKPOINT_FORMAT = 2
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"
# The files of a checkpoint besides its manifest: those of its model, and the optimizers' state.
MODEL_FILES = (MODEL_FILE, TOKENIZER_FILE, CONFIG_FILE)
CHECKPOINT_FILES = (*MODEL_FILES, OPTIMIZER_FILE)


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint besides its tensors and settings."""

    step: int  # optimizer steps taken
    seconds: dict[str, float]  # spent so far, by activity
    metrics: dict[str, float]  # of this step; after a stop, also those of its heads
    fingerprint: str  # hash of the text; of a generated one, of its settings, and its seed
    losses: tuple[float, int]  # sum and number of the losses that no metrics row contains yet
    loss_scale: tuple[float, int] | None = None  # in fp16: the factor, and the steps since a change
    files: dict[str, dict] = field(default_factory=dict, compare=False)  # written: size and hash

    @property
    def row(self) -> Row:
        """The metrics, as the row of the step."""
        return Row({**self.metrics, "step": self.step})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, some or all of whose files were verified."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self.manifest.step


# What a new run begins with, on any text.
NEW = Manifest(step=0, seconds={}, metrics={}, fingerprint="", losses=(0.0, 0))


@dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint, or by default step 0 of a new run."""

    checkpoint: Checkpoint | None = None  # has the weights; None: the run makes its own
    recorded: int = -1  # the last step whose row of metrics.jsonl is kept

    @property
    def manifest(self) -> Manifest:
        """The facts of the start besides its tensors and settings."""
        return self.checkpoint.manifest if self.checkpoint else NEW

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self.manifest.step


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose other files are in the folder already."""
    files = {}
    for name in CHECKPOINT_FILES:
        path = folder / name
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
    content = {"format": CHECKPOINT_FORMAT, **asdict(manifest), "files": files}
    (folder / MANIFEST_FILE).write_text(seal(json.dumps(content, indent=1)))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify its hash, but not the other files.

    Raises:
        ValueError: If the manifest is damaged; the message says how.
        OSError: If it cannot be read for another reason, such as a missing permission.
        UserError: If it is of another format.
    """
    try:
        content = read_json_object(folder / MANIFEST_FILE, must_be_sealed=True)
    except ValueError as e:
        raise ValueError(f"{MANIFEST_FILE}: {e}") from None
    found_format = content.pop("format")
    if found_format != CHECKPOINT_FORMAT:
        raise UserError(
            f"the checkpoint {folder} has the format {found_format}, but this version of GlassGPT "
            f"reads format {CHECKPOINT_FORMAT}: use the version that wrote it, or start a new run"
        )
    del content["sha256"]
    for name in ("losses", "loss_scale"):
        if content.get(name):
            content[name] = tuple(content[name])
    return Manifest(**content)


def verify_checkpoint(folder: Path, names: Sequence[str] = CHECKPOINT_FILES) -> Checkpoint:
    """Verify the hashes of the manifest and of the files `names`; see `read_manifest`."""
    manifest = read_manifest(folder)
    for name in names:
        with damage_as_value_error():
            digest = sha256_of_file(folder / name)
        if digest != manifest.files[name]["sha256"]:
            raise ValueError(f"{name} was changed: its sha256 differs")
    return Checkpoint(folder, manifest)
