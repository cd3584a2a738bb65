"""Checkpoints: written beside and renamed, verified by hash before a byte of them is used, never pickled."""

import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from config import Config, UserError, read_config
from data.corpus import sha256_of
from data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from model import GPT

FORMAT = 1
MODEL, OPTIMIZER, TOKENIZER, CONFIG, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.yaml", "manifest.json")


def save_checkpoint(run_dir: Path, step: int, model: GPT, optimizer: dict[str, Tensor], tokenizer: Tokenizer,
                    config_yaml: str, state: dict) -> None:
    """Write checkpoints/step_XXXXXXXX and make `last` name it. `state` is JSON kept in the manifest.

    A checkpoint gets its name only when every byte of it is on disk, the manifest last, so whatever has the name
    is whole.

    Raises:
        OSError: it could not be written; earlier checkpoints are as they were.
    """
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        # named_parameters lists tied weights once, as safetensors wants them.
        save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, part / MODEL)
        save_file({name: t.contiguous() for name, t in optimizer.items()}, part / OPTIMIZER)
        save_tokenizer(tokenizer, part / TOKENIZER)
        (part / CONFIG).write_text(config_yaml, encoding="utf-8")
        files = {name: {"bytes": (part / name).stat().st_size, "sha256": sha256_of(part / name)}
                 for name in (MODEL, OPTIMIZER, TOKENIZER, CONFIG)}
        (part / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files, **state}, indent=1))
        for name in (*files, MANIFEST):
            _sync(part / name)
        _sync(part)
        shutil.rmtree(folder, ignore_errors=True)  # only ever a damaged one: a whole one is not saved again
        part.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    point(run_dir, "last", step)


def point(run_dir: Path, name: str, step: int) -> None:
    """Make checkpoints/`name` hold the name of a step's folder, at once and for good."""
    part = run_dir / "checkpoints" / f".{name}.part"
    part.write_text(f"step_{step:08d}\n")
    _sync(part)
    part.replace(run_dir / "checkpoints" / name)
    _sync(run_dir / "checkpoints")


def pointed(run_dir: Path, name: str) -> int | None:
    """The step that checkpoints/`name` names, or None."""
    try:
        found = re.fullmatch(r"step_(\d{8,})", (run_dir / "checkpoints" / name).read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def saved_steps(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint folder, oldest first."""
    found = (re.fullmatch(r"step_(\d{8,})", p.name) for p in (run_dir / "checkpoints").glob("step_*"))
    return sorted(int(m[1]) for m in found if m)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints and the best, and what an interrupted save left behind."""
    best = pointed(run_dir, "best")
    for step in saved_steps(run_dir)[:-keep]:
        if step != best:
            shutil.rmtree(run_dir / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
    for part in (run_dir / "checkpoints").glob(".step_*.part"):
        shutil.rmtree(part, ignore_errors=True)


def discard_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints later than `step`, from which the run goes on: damaged ones, that it will save again."""
    for later in saved_steps(run_dir):
        if later > step:
            shutil.rmtree(run_dir / "checkpoints" / f"step_{later:08d}")
    if (pointed(run_dir, "best") or 0) > step:
        (run_dir / "checkpoints" / "best").unlink()


def verify(folder: Path) -> dict:
    """The manifest of a checkpoint whose every file has the size and the hash it was written with.

    Raises:
        ValueError: something is missing or differs; it is named.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, not {FORMAT}")
        for name in (MODEL, OPTIMIZER, TOKENIZER, CONFIG):  # fixed names: a manifest cannot point elsewhere
            written, path = manifest["files"][name], folder / name
            if path.stat().st_size != written["bytes"]:
                raise ValueError(f"{name} has {path.stat().st_size} bytes where {written['bytes']} were written")
            if sha256_of(path) != written["sha256"]:
                raise ValueError(f"{name} is not what was written: its sha256 differs")
        return manifest
    except OSError as e:
        raise ValueError(f"{Path(e.filename or folder).name}: {e.strerror}") from e
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{MANIFEST} is damaged") from e


def find_checkpoint(run_dir: Path, which: str | int = "last", say=print) -> tuple[Path, dict]:
    """The folder and manifest of `last`, `best` or a step; a damaged one is said, and the one before it taken.

    Raises:
        UserError: there is none, or none that is whole.
    """
    steps = saved_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} {'has no checkpoint' if run_dir.is_dir() else 'does not exist'}")
    wanted = int(which) if str(which).isdigit() else pointed(run_dir, which)
    if wanted not in steps:
        if str(which).isdigit():
            raise UserError(f"{run_dir} has no checkpoint of step {which}: there are {', '.join(map(str, steps))}")
        wanted = steps[-1]  # a run without an evaluation has no best, and the newest is as good a `last`
    for step in [wanted] + [s for s in reversed(steps) if s < wanted]:
        folder = run_dir / "checkpoints" / f"step_{step:08d}"
        try:
            return folder, verify(folder)
        except ValueError as e:
            say(f"checkpoint {folder} is damaged ({e}): taking the one before it")
    raise UserError(f"no checkpoint of {run_dir} up to step {wanted} is whole: it cannot be loaded")


def load_weights(model: GPT, path: Path) -> None:
    """Copy the weights at path into the model.

    Raises:
        UserError: they are another model's: the names or shapes that differ are said.
    """
    tensors = load_tensors(path)
    params = dict(model.named_parameters())
    wrong = [f"{name}: {list(tensors[name].shape) if name in tensors else 'missing'} in the file, "
             f"{list(params[name].shape) if name in params else 'absent'} in the model"
             for name in sorted(tensors.keys() | params.keys())
             if name not in tensors or name not in params or tensors[name].shape != params[name].shape]
    if wrong:
        raise UserError(f"{path} holds another model: {'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}")
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(tensors[name])


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} cannot be read as safetensors: {e}") from None


def load_run(run_dir: str | os.PathLike, which: str | int = "last", say=print) -> tuple[GPT, Tokenizer, Config]:
    """The model (on the CPU, in evaluation mode), the tokenizer and the configuration of a run.

    Args:
        run_dir: a run's folder.
        which: `last`, `best` (by validation loss) or a step.
        say: takes the line that says a damaged checkpoint was passed over.

    Raises:
        UserError: there is no such checkpoint, or it is damaged and so are those before it.
    """
    folder, _ = find_checkpoint(Path(run_dir), which, say)
    config = read_config(folder / CONFIG)
    model = GPT(config.model)
    load_weights(model, folder / MODEL)
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except ValueError as e:
        raise UserError(str(e)) from None
    return model.eval(), tokenizer, config


def _sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk. Windows cannot sync a folder and needs not."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
