"""A checkpoint's manifest: how far the run was, and the size and hash of each file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import SEAL, is_sealed, ordinary_file, seal, sha256_of_file, step_name
from common.metrics import is_valid_number
from common.text import pluralize

CHECKPOINT_FORMAT = 2
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"
# The files of a checkpoint besides its manifest.
CHECKPOINT_FILES = (MODEL_FILE, OPTIMIZER_FILE, TOKENIZER_FILE, CONFIG_FILE)
# A manifest has about 2 kB; a larger file is not one.
MAX_MANIFEST_BYTES = 1 << 24


class OtherFormatError(UserError):
    """A checkpoint is intact, but another version of GlassGPT wrote it in another format."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step, times, metrics and other facts, besides its tensors and settings.

    Attributes:
        step: Optimizer steps taken.
        seconds: Seconds spent so far, by activity.
        metrics: Metrics of this step.
        fingerprint: Hash of the text and of how it was prepared.
        losses: Sum and number of the training losses that no metrics row contains yet.
        loss_scale: In fp16, the factor of the loss and the number of steps since it changed.
    """

    step: int
    seconds: dict[str, float]
    metrics: dict[str, float]
    fingerprint: str
    losses: tuple[float, int]
    loss_scale: tuple[float, int] | None = None


def _are_seconds(value: Any) -> bool:
    return type(value) is dict and all(is_valid_number(x) and x >= 0 for x in value.values())


def _are_metrics(value: Any) -> bool:
    return type(value) is dict and "step" not in value and all(map(is_valid_number, value.values()))


def _are_losses(value: Any) -> bool:
    if type(value) is not list or [type(x) for x in value] != [float, int]:
        return False
    total, count = value
    return isfinite(total) and count >= 0


def _is_loss_scale(value: Any) -> bool:
    if value is None:  # another precision
        return True
    if type(value) is not list or [type(x) for x in value] != [float, int]:
        return False
    factor, steps = value
    return 0 < factor < inf and steps >= 0


# Whether a manifest's value is valid, by its name.
VALUE_CHECKS = {
    "step": lambda value: type(value) is int and value >= 0,
    "seconds": _are_seconds,
    "metrics": _are_metrics,
    "fingerprint": lambda value: type(value) is str,
    "losses": _are_losses,
    "loss_scale": _is_loss_scale,
}


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
        OtherFormatError: If it is of another format.
    """
    return _parse(_read_sealed(folder), folder)


def verify_checkpoint(folder: Path, names: Sequence[str] = CHECKPOINT_FILES) -> Manifest:
    """Verify size and hash of these files of a checkpoint, and return its manifest.

    Raises:
        ValueError: If a file is damaged or missing; the message says how.
        OtherFormatError: If the checkpoint is of another format.
    """
    content = _read_sealed(folder)
    manifest = _parse(content, folder)
    try:
        for name in names:  # fixed names, so that a manifest cannot refer to other files
            written = content["files"][name]
            size = (folder / name).stat().st_size
            if size != written["bytes"]:
                raise ValueError(
                    f"{name} has {pluralize(size, 'byte')} instead of {written['bytes']:,}"
                )
            if sha256_of_file(folder / name) != written["sha256"]:
                raise ValueError(f"{name} was changed: its sha256 differs")
    except OSError as e:
        raise ValueError(f"{Path(e.filename or folder).name}: {e.strerror}") from e
    except (KeyError, TypeError) as e:
        raise ValueError(f"{MANIFEST_FILE} is damaged") from e
    return manifest


def _read_sealed(folder: Path) -> dict:
    """Return the JSON object in a checkpoint's manifest, of the right format and hash."""
    try:
        text = ordinary_file(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES).read_text(encoding="utf-8")
        content = json.loads(text)
        found_format = content["format"]
    except OSError as e:
        raise ValueError(f"{MANIFEST_FILE}: {e.strerror}") from e
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"{MANIFEST_FILE} is damaged") from e
    has_seal = SEAL in text
    if has_seal and not is_sealed(text):
        raise ValueError(f"{MANIFEST_FILE} was changed: its sha256 differs")
    if found_format != CHECKPOINT_FORMAT:  # others may have no seal
        raise OtherFormatError(
            f"the checkpoint {folder} has the format {found_format!a:.20}, but this version of "
            f"GlassGPT reads format {CHECKPOINT_FORMAT}: use the version that wrote it, or start a "
            "new run"
        )
    if not has_seal:
        raise ValueError(f"{MANIFEST_FILE} has no sha256")
    return content


def _parse(content: dict, folder: Path) -> Manifest:
    """Return the manifest in a JSON object, whose values must have the right types and ranges."""
    for name, is_valid in VALUE_CHECKS.items():
        if not is_valid(content.get(name)):
            raise ValueError(f"{MANIFEST_FILE} has no valid {name}")
    is_of_a_step = folder.name.startswith("step_")  # a copy may have any other name
    if is_of_a_step and folder.name != step_name(content["step"]):
        raise ValueError(f"{MANIFEST_FILE} belongs to step {content['step']}")
    total, count = content["losses"]
    loss_scale = content.get("loss_scale")
    return Manifest(
        step=content["step"],
        seconds=content["seconds"],
        metrics=content["metrics"],
        fingerprint=content["fingerprint"],
        losses=(total, count),
        loss_scale=None if loss_scale is None else tuple(loss_scale),
    )
