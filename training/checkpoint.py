"""Checkpoints: written whole or not at all, verified by hash before use, never pickled."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cli.config_file import config_yaml, read_config
from common.errors import UserError
from common.files import atomic_write, ordinary_file, sha256_of_file, sync
from common.metrics import METRICS, SAMPLES, best_row, read_rows
from config import Config, GPTConfig
from data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from data.tokens import Tokens
from model import GPT
from training.nonfinite import NonFiniteGuard
from training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from training.processes import World
from training.record import Stopwatch
from training.state import MeanLoss
from training.tensors import copy_rows, full_tensor, open_safetensors

FORMAT = 1
MODEL, OPTIMIZER, TOKENIZER, CONFIG, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "tokenizer.json",
    "config.yaml",
    "manifest.json",
)
FILES = (MODEL, OPTIMIZER, TOKENIZER, CONFIG)
SEAL = ',\n "sha256": "'  # begins the manifest's last entry: the hash of all before it
LARGEST = 1 << 24  # bytes of a manifest that is read
# What a manifest has of the run, and of what type: see `Checkpoints.save`.
TYPES = {"step": int, "seconds": dict, "metrics": dict, "fingerprint": str, "losses": list}


class NotSaved(UserError):
    """A checkpoint could not be written; earlier ones are as they were."""


class Checkpoints:
    """Saves a run's steps, each once; keeps the newest and the best."""

    def __init__(self, config: Config, run_dir: Path, world: World, log: Callable[[str], None]):
        self.config, self.run_dir, self.world, self.log = config, run_dir, world, log
        self.saved: int | None = None  # the step that was saved last
        self.best: dict | None = None  # the row of the lowest validation loss that has a checkpoint

    def begin(self, model: GPT, optimizers: list, text: Tokens) -> tuple[NonFiniteGuard, MeanLoss]:
        """Set what is saved; return the guard and the mean loss, which is saved too."""
        self.model, self.optimizers, self.text = model, optimizers, text
        self.guard = NonFiniteGuard(model)
        self.mean_loss = MeanLoss(self.config.device)
        return self.guard, self.mean_loss

    def restore(self, manifest: dict, rows: list[dict]) -> None:
        """Load the checkpoint of the manifest, {} for none; set later ones aside."""
        if not manifest:
            return
        step = self.saved = manifest["step"]
        folder = step_folder(self.run_dir, step)
        load_weights(self.model, folder / MODEL)
        load_optimizer_tensors(self.optimizers, self.model, folder / OPTIMIZER)
        self.mean_loss.restore(manifest["losses"])
        if self.world.rank == 0:
            for later in saved_steps(self.run_dir):
                if later > step:  # could not be read, which may be no fault of its own
                    self.log(f"kept as {set_aside(step_folder(self.run_dir, later))}")
            self.best = best_saved(self.run_dir, rows)
        self.best = self.world.broadcast(self.best)
        self.tidy()
        self.log(f"resuming at step {step:,}")

    def keep(self, step: int, row: dict[str, float], clock: Stopwatch) -> None:
        """Save a step that is due, or better than all before; remove what is not kept any more."""
        every, last = self.config.checkpoint.every, step == self.config.max_steps
        lowest = self.best["val/loss"] if self.best else inf
        better = step > 0 and row.get("val/loss", inf) < lowest
        due = step > 0 and (last or (every > 0 and step % every == 0))
        if not (due or better) or not self.save(step, row, clock, last_chance=last):
            return
        if better:
            self.best = {**row, "step": step}
            self.tidy()

    def save(
        self, step: int, row: dict[str, float], clock: Stopwatch, last_chance: bool = False
    ) -> bool:
        """Save a step with its metrics, unless it is saved; return whether it is now. One that
        cannot be written costs a note, and at the last chance raises `NotSaved`."""
        if self.saved == step:
            return True
        self.guard.flush()
        clock.switch("save")
        tensors = {
            MODEL: self.model.tensors(),
            OPTIMIZER: optimizer_tensors(self.optimizers, self.model),
        }
        for found in tensors.values():
            for name in sorted(found):
                value = full_tensor(found[name].detach())  # by all ranks together
                found[name] = value.cpu().contiguous() if self.world.rank == 0 else None
        problem = ""
        if self.world.rank == 0:
            manifest = {
                "format": FORMAT,
                "step": step,
                "seconds": clock.seconds,
                "metrics": row,
                "fingerprint": self.text.fingerprint,
                "losses": self.mean_loss.state(),
            }
            problem = self._write(manifest, tensors)
        problem = self.world.broadcast(problem)
        if not problem:
            self.saved = step
            self.tidy()
        elif last_chance:
            raise NotSaved(problem)
        else:
            self.log(f"{problem}; training goes on")
        return self.saved == step

    def _write(self, manifest: dict, tensors: dict[str, dict[str, Tensor]]) -> str:
        """Write checkpoints/step_XXXXXXXX; return what went wrong, or "".
        It gets its name when every byte of it, and of the record up to it, is on the disk."""
        folder = step_folder(self.run_dir, manifest["step"])
        part = folder.with_name(f".{folder.name}.part")
        try:
            _remove(part)
            part.mkdir(parents=True)
            for name, found in tensors.items():
                save_file(found, part / name)
            save_tokenizer(self.text.tokenizer, part / TOKENIZER)
            (part / CONFIG).write_text(config_yaml(self.config), encoding="utf-8")
            files = {
                name: {"bytes": (part / name).stat().st_size, "sha256": sha256_of_file(part / name)}
                for name in FILES
            }
            (part / MANIFEST).write_text(_sealed(json.dumps(manifest | {"files": files}, indent=1)))
            record = (self.run_dir / name for name in (METRICS, SAMPLES, "attention", ""))
            for path in (*part.iterdir(), part, *filter(Path.exists, record)):
                sync(path)
            part.rename(folder)
            sync(folder.parent)
            return ""
        except (OSError, SafetensorError) as e:
            needed = sum(t.nbytes for found in tensors.values() for t in found.values())
            return (
                f"the checkpoint of step {manifest['step']} could not be written in "
                f"{self.run_dir} ({getattr(e, 'strerror', None) or e}; it needs {needed:,} "
                "bytes): earlier checkpoints are as they were"
            )
        finally:
            _remove(part)

    def tidy(self) -> None:
        """Have `last` and `best` name theirs. Remove checkpoints except the newest and the best,
        and the rests of interrupted saves. What fails is tried again the next time."""
        if self.world.rank > 0:
            return
        best = self.best["step"] if self.best else None
        for name, step in (("last", self.saved), ("best", best)):
            with suppress(OSError):
                if step is not None and read_pointer(self.run_dir, name) != step:
                    write_pointer(self.run_dir, name, step)
        with suppress(OSError):
            for step in saved_steps(self.run_dir)[: -self.config.checkpoint.keep]:
                if step != best:
                    _remove(step_folder(self.run_dir, step))
            for part in (self.run_dir / "checkpoints").glob(".step_*.part"):
                _remove(part)


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def saved_steps(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint folder, oldest first."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d{8,})", name)))


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint that could not be read to a new name that is no step's; return it."""
    names = (folder.with_name(f"aside_{n}_{folder.name}") for n in count(1))
    aside = next(path for path in names if not os.path.lexists(path))
    return folder.rename(aside)


def best_saved(run_dir: Path, rows: list[dict]) -> dict | None:
    """The row of the lowest validation loss that has a checkpoint, by rows and manifests."""
    known = {row["step"]: row for row in rows}
    found = []
    for step in saved_steps(run_dir):
        try:
            metrics = read_manifest(step_folder(run_dir, step))["metrics"]
        except ValueError:
            continue  # it will be told where it is to be loaded
        found.append({**metrics, **known.get(step, {}), "step": step})
    return best_row(found)


def write_pointer(run_dir: Path, name: str, step: int) -> None:
    """Make checkpoints/`name` hold the name of a step's folder, at once and for good."""
    with atomic_write(run_dir / "checkpoints" / name) as part:
        part.write_text(f"step_{step:08d}\n")
    sync(run_dir / "checkpoints")


def read_pointer(run_dir: Path, name: str) -> int | None:
    """The step that checkpoints/`name` names, or None."""
    try:
        text = ordinary_file(run_dir / "checkpoints" / name, 100).read_text()
        found = re.fullmatch(r"step_(\d{8,})", text.strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def find_checkpoint(
    run_dir: Path, which: str | int = "last", log: Callable[[str], None] = print
) -> tuple[Path, dict]:
    """The folder and manifest of `last`, `best` or a step; of a damaged one's neighbour, noted."""
    steps = saved_steps(run_dir)
    if not steps:
        problem = "has no checkpoint" if run_dir.is_dir() else "does not exist"
        raise UserError(f"{run_dir} {problem}")
    wanted = int(which) if str(which).isdigit() else steps[-1]
    if wanted not in steps:
        raise UserError(
            f"{run_dir} has no checkpoint of step {which}: there are {', '.join(map(str, steps))}"
        )
    if which == "best":
        wanted = read_pointer(run_dir, "best")
        if wanted not in steps:  # damaged; or there was no evaluation
            best = best_saved(run_dir, read_rows(run_dir / METRICS))
            wanted = best["step"] if best else steps[-1]
    order = [step for step in reversed(steps) if step <= wanted]
    order += [step for step in steps if step > wanted] if which == "best" else []
    for step, after in zip(order, [*order[1:], None]):
        folder = step_folder(run_dir, step)
        try:
            return folder, verify(folder)
        except ValueError as e:
            instead = "" if after is None else f": taking that of step {after}"
            log(f"checkpoint {folder} is damaged or cannot be read ({e}){instead}")
    raise UserError(
        f"no checkpoint of {run_dir} up to step {max(order)} is whole: it cannot be loaded"
    )


def verify(folder: Path) -> dict:
    """The manifest of a checkpoint whose files are what was written; a ValueError for another."""
    manifest = read_manifest(folder)
    try:
        for name in FILES:  # fixed names: a manifest cannot point elsewhere
            written, size = manifest["files"][name], (folder / name).stat().st_size
            if size != written["bytes"]:
                raise ValueError(f"{name} has {size} bytes where {written['bytes']} were written")
            if sha256_of_file(folder / name) != written["sha256"]:
                raise ValueError(f"{name} is not what was written: its sha256 differs")
    except OSError as e:
        raise ValueError(f"{Path(e.filename or folder).name}: {e.strerror}") from e
    except (KeyError, TypeError) as e:
        raise ValueError(f"{MANIFEST} is damaged") from e
    return manifest


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint; a ValueError, with what is wrong, for a damaged one."""
    try:
        text = ordinary_file(folder / MANIFEST, LARGEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        manifest = {"losses": [0.0, 0]} | manifest  # of older versions
        if manifest["format"] != FORMAT:
            raise ValueError(
                f"its format is {manifest['format']}, and this version of GlassGPT reads {FORMAT}"
            )
        if text != _sealed(text[: text.rfind(SEAL)] + "\n}"):
            raise ValueError(f"{MANIFEST} is not what was written: its sha256 differs")
        if (
            any(type(manifest[name]) is not kind for name, kind in TYPES.items())
            or list(map(type, manifest["losses"])) != [float, int]
            or folder.name != f"step_{manifest['step']:08d}"
        ):
            raise ValueError(f"{MANIFEST} is of something else")
        return manifest
    except OSError as e:
        raise ValueError(f"{MANIFEST}: {e.strerror}") from e
    except (
        KeyError,
        TypeError,
        AttributeError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        RecursionError,
    ) as e:
        raise ValueError(f"{MANIFEST} is damaged") from e


def _sealed(manifest: str) -> str:
    """The text of a JSON object with one entry more: the hash of the text."""
    return f'{manifest[:-2]}{SEAL}{hashlib.sha256(manifest.encode()).hexdigest()}"\n}}'


def parameter_shapes(config: GPTConfig) -> dict[str, list[int]]:
    """The shapes of a model's tensors, by name, without making one."""
    with torch.device("meta"):
        return {name: list(t.shape) for name, t in GPT(config).tensors().items()}


def check_weights(path: Path, config: GPTConfig) -> None:
    """Raise `UserError` where the weights at path are not this model's; more positions are fine."""
    with open_safetensors(path) as file:
        names = file.keys()
        shapes = {name: list(file.get_slice(name).get_shape()) for name in names}
    positions = shapes.get("position_embedding.weight") or [0]
    positions[0] = min(positions[0], config.block_size)
    check_shapes(path, shapes, parameter_shapes(config))


def check_shapes(path: Path, shapes: dict[str, list], expected: dict[str, list]) -> None:
    """Raise `UserError` where tensors at path, name → shape, are not those expected of them."""
    wrong = [
        f"{name}: {shapes.get(name, 'missing')} in the file, "
        f"{expected.get(name, 'absent')} in the model"
        for name in sorted(shapes.keys() | expected.keys())
        if shapes.get(name) != expected.get(name)
    ]
    if wrong:
        more = " …" if len(wrong) > 3 else ""
        raise UserError(f"{path} holds another model: {'; '.join(wrong[:3])}{more}")


@torch.no_grad()
def load_weights(model: GPT, path: Path) -> None:
    """Copy the weights at path into the model; of more positions, the first."""
    check_weights(path, model.config)
    with open_safetensors(path) as file:
        for name, tensor in model.tensors().items():
            copy_rows(file, name, tensor)


def load_run(
    run_dir: str | os.PathLike, which: str | int = "last", log: Callable[[str], None] = print
) -> tuple[GPT, Tokenizer, Config]:
    """The model (on the CPU, in evaluation mode), the tokenizer and the configuration of a run.

    which: `last`, `best` (by validation loss) or a step, of a checkpoint or else of a picture (in
    float16). Raises `UserError` where there is none, or it is damaged and so are those before."""
    picture = Path(run_dir, "attention", f"step_{which:0>8}.safetensors")
    pictured = picture.is_file() and int(which) not in saved_steps(Path(run_dir))
    folder, _ = find_checkpoint(Path(run_dir), "last" if pictured else which, log)
    config, weights = read_config(folder / CONFIG), picture if pictured else folder / MODEL
    check_weights(weights, config.model)
    model = GPT(config.model)
    load_weights(model, weights)
    return model.eval(), load_tokenizer(folder / TOKENIZER), config


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
