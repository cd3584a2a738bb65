"""Checkpoints: written whole or not at all, verified by hash before use, never pickled."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from config import Config, GPTConfig, UserError, config_yaml, knobs, read_config
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from data.tokens import Tokens, prepare
from files import CHANGES, METRICS, atomic_write, best_row, ordinary, read_rows, sha256_of, sync
from model import GPT, parameter_shapes
from training.distributed import World
from training.optim import optimizer_tensors
from training.runtime import numerics_id
from training.tensors import copy_rows, opened, whole, write_tensors

FORMAT = 2  # 1 had no hash of the manifest in the manifest
MODEL, OPTIMIZER, TOKENIZER, CONFIG, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.yaml", "manifest.json")
FILES = (MODEL, OPTIMIZER, TOKENIZER, CONFIG)
SEAL = ',\n "sha256": "'  # begins the manifest's last entry: the hash of all before it
LARGEST = 1 << 24  # bytes of a manifest that is read
# What a manifest has of the run, and of what type; and what those of earlier versions lack.
TYPES = {"step": int, "seconds": dict, "fingerprint": str, "metrics": dict, "skipped": list,
         "machine": str, "changes": int, "best": dict, "kept": list}
EARLIER = {"skipped": [0, 0], "machine": "", "changes": 0, "best": None, "kept": []}


class NotSaved(UserError):
    """A checkpoint could not be written; earlier ones are as they were."""


@dataclass
class TrainState:
    """Where a run stands, beside its weights and the optimizers' state; a manifest holds it."""

    fingerprint: str  # of the text
    step: int = 0  # optimizer steps done
    seconds: dict[str, float] = field(default_factory=dict)  # by kind of work
    metrics: dict[str, float] = field(default_factory=dict)  # logged after this step
    skipped: list[int] = field(default_factory=lambda: [0, 0])  # steps left out: all, just now
    changes: int = 0  # of the text since the run began: losses on different texts do not compare
    # The row of the lowest loss on this text; in a manifest {} where there is none, and null where
    # an earlier version did not keep it.
    best: dict | None = None
    kept: list[int] = field(default_factory=list)  # checkpoints, one of which may be the best

    @classmethod
    def after(cls, manifest: dict, fingerprint: str) -> "TrainState":
        """The state that a manifest holds, on the text of this fingerprint; {}: of a new run."""
        if not manifest:
            return cls(fingerprint)
        state = cls(**{f.name: manifest[f.name] for f in fields(cls)})
        state.changes += manifest["fingerprint"] != fingerprint
        state.fingerprint = fingerprint
        return state

    def restore_best(self, run_dir: Path, rows: list[dict], damaged: bool) -> None:
        """Take the best row on this text that has a checkpoint, and make checkpoints/best name it.

        Where that names a checkpoint of which there is no row, it was better than all rows: it
        stays, and the best row is what a later one has to beat. Where the best is not known, as the
        rows are damaged or there are none, every checkpoint is kept.
        """
        known, steps = self.best is not None, saved_steps(run_dir)
        named = read_pointer(run_dir, "best")
        if named in steps and named not in [row["step"] for row in rows]:
            self.best = best_row(rows, self.changes)
        else:
            self.best = best_row([row for row in rows if row["step"] in steps], self.changes)
            if self.best and self.best["step"] != named:
                write_pointer(run_dir, "best", self.best["step"])
        if self.step and not known and (damaged or self.best is None):
            self.kept = steps

    def text_mark(self) -> dict[str, int]:
        """What marks rows whose losses are on a changed text."""
        return {CHANGES: self.changes} if self.changes else {}


class Checkpoints:
    """Saves a run's steps, each once."""

    def __init__(self, config: Config, run_dir: Path, model: GPT,
                 optimizers: list[torch.optim.Optimizer], tokenizer: Tokenizer, world: World,
                 say: Callable[[str], None]):
        self.config, self.run_dir, self.model, self.optimizers = config, run_dir, model, optimizers
        self.tokenizer, self.world, self.say = tokenizer, world, say
        self.saved: int | None = None  # the step that was saved last
        self._tried: int | None = None

    def save(self, state: TrainState, last_chance: bool) -> bool:
        """Save the step that the run is at, unless it is saved; whether it is now.

        Raises:
            NotSaved: it could not be written, at the last step or the `last_chance`; before, a note
                is printed and training goes on.
        """
        if self.saved == state.step or (self._tried == state.step and not last_chance):
            return self.saved == state.step
        self._tried = state.step
        # Tied weights once, as safetensors wants.
        files = {MODEL: dict(self.model.named_parameters()),
                 OPTIMIZER: optimizer_tensors(self.optimizers, self.model)}
        values = (whole(tensor.detach()) for tensors in files.values()
                  for _, tensor in sorted(tensors.items()))
        problem = ""
        if self.world.rank == 0:
            machine = numerics_id(self.config, self.world.size)
            kept = {**asdict(state), "best": state.best or {}, "machine": machine}
            try:
                save_checkpoint(self.run_dir, files, values, self.tokenizer,
                                config_yaml(self.config), kept)
            except NotSaved as e:
                problem = str(e)
        for _ in values:  # what is not written: all ranks put together all
            pass
        problem = self.world.tell(problem)
        if not problem:
            self.saved = state.step
        elif last_chance or state.step == self.config.max_steps:
            raise NotSaved(problem)
        else:
            self.say(f"{problem}; training goes on")
        return self.saved == state.step


def save_checkpoint(run_dir: Path, tensors: dict[str, dict[str, Tensor]], values: Iterator[Tensor],
                    tokenizer: Tokenizer, config_yaml: str, state: dict) -> None:
    """Write checkpoints/step_XXXXXXXX and make `last` name it.

    It gets its name when every byte of it is on disk, so what has the name is whole.

    Args:
        tensors: those of each file by name, which may be sharded.
        values: all of them whole, by file, then by name.
        state: JSON for the manifest.

    Raises:
        NotSaved: it could not be written, for want of space or otherwise.
    """
    step = state["step"]
    folder = step_folder(run_dir, step)
    part = folder.with_name(f".{folder.name}.part")
    try:
        _remove(part)
        part.mkdir(parents=True)
        for name, found in tensors.items():
            write_tensors(part / name, found, values)
        save_tokenizer(tokenizer, part / TOKENIZER)
        (part / CONFIG).write_text(config_yaml, encoding="utf-8")
        files = {name: {"bytes": (part / name).stat().st_size, "sha256": sha256_of(part / name)}
                 for name in FILES}
        manifest = json.dumps({"format": FORMAT, "step": step, "files": files, **state}, indent=1)
        (part / MANIFEST).write_text(_sealed(manifest))
        for name in (*files, MANIFEST):
            sync(part / name)
        sync(part)
        _remove(folder)  # only ever a damaged one: a whole one is not saved again
        part.rename(folder)
        sync(folder.parent)
        write_pointer(run_dir, "last", step)
    except OSError as e:
        shutil.rmtree(part, ignore_errors=True)  # what is free counts without it
        needed = sum(tensor.numel() * tensor.element_size() for found in tensors.values()
                     for tensor in found.values())
        why = e.strerror or e
        raise NotSaved(f"the checkpoint of step {step} could not be written ({why}): it needs "
                       f"{needed:,} bytes, and {_free(run_dir)} are free where {run_dir} is; "
                       "earlier checkpoints are as they were") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def to_resume(run_dir: Path, resume: bool | str, say=print) -> dict:
    """The manifest of the checkpoint that a run goes on from; {} where there is none yet and
    `resume` is "auto".

    Raises:
        UserError: there is none, or none that is whole.
    """
    if saved_steps(run_dir):
        return find_checkpoint(run_dir, "last", say)[1]
    if resume != "auto":
        raise UserError(f"run_dir={run_dir} was stopped before its first checkpoint: "
                        "start it again with resume=auto")
    return {}


def how_to_go_on(run_dir: Path) -> str:
    """What to do with a run that stopped for a number that is not finite."""
    if saved_steps(run_dir):
        return "the checkpoints are as they were: go on from the last one with resume=true"
    return "there is no checkpoint yet: start again with resume=auto"


def write_pointer(run_dir: Path, name: str, step: int) -> None:
    """Make checkpoints/`name` hold the name of a step's folder, at once and for good."""
    with atomic_write(run_dir / "checkpoints" / name) as part:
        part.write_text(f"step_{step:08d}\n")
        sync(part)
    sync(run_dir / "checkpoints")


def read_pointer(run_dir: Path, name: str) -> int | None:
    """The step that checkpoints/`name` names, or None."""
    try:
        text = ordinary(run_dir / "checkpoints" / name, 100).read_text()
        found = re.fullmatch(r"step_(\d{8,})", text.strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def saved_steps(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint folder, oldest first."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d{8,})", name)))


def prune(run_dir: Path, keep: int, also: list[int]) -> None:
    """Remove checkpoints except the `keep` newest, the best and those `also` kept; and the rests of
    interrupted saves."""
    also = [*also, read_pointer(run_dir, "best")]
    for step in saved_steps(run_dir)[:-keep]:
        if step not in also:
            _remove(step_folder(run_dir, step))
    for part in (run_dir / "checkpoints").glob(".*.part"):
        _remove(part)


def discard_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints after `step`: damaged ones, which the run that goes on saves again."""
    for later in saved_steps(run_dir):
        if later > step:
            _remove(step_folder(run_dir, later))
    if (read_pointer(run_dir, "best") or 0) > step:
        (run_dir / "checkpoints" / "best").unlink()


def verify(folder: Path) -> dict:
    """The manifest of a checkpoint whose every file has the size and the hash it was written with.

    Raises:
        ValueError: something is missing or differs; it is named.
    """
    try:
        text = ordinary(folder / MANIFEST, LARGEST).read_text(encoding="utf-8")
        manifest, at = json.loads(text), text.rfind(SEAL)
        if manifest["format"] not in (1, FORMAT):
            raise ValueError(f"its format is {manifest['format']}, "
                             f"and this version of GlassGPT reads 1 to {FORMAT}")
        if (at >= 0 or manifest["format"] > 1) and text != _sealed(text[:at] + "\n}"):
            raise ValueError(f"{MANIFEST} is not what was written: its sha256 differs")
        if f"step_{manifest['step']:08d}" != folder.name:
            raise ValueError(f"it is of step {manifest['step']}")
        for name in FILES:  # fixed names: a manifest cannot point elsewhere
            written, size = manifest["files"][name], (folder / name).stat().st_size
            if size != written["bytes"]:
                raise ValueError(f"{name} has {size} bytes where {written['bytes']} were written")
            if sha256_of(folder / name) != written["sha256"]:
                raise ValueError(f"{name} is not what was written: its sha256 differs")
        return _state(manifest)
    except OSError as e:
        raise ValueError(f"{Path(e.filename or folder).name}: {e.strerror}") from e
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"{MANIFEST} is damaged") from e


def _state(manifest: dict) -> dict:
    """The manifest with all that a `TrainState` needs.

    Raises:
        KeyError, TypeError: something is missing, or of another type.
    """
    manifest = EARLIER | manifest
    for name, kind in TYPES.items():
        value = manifest[name]
        if value is None and name == "best":
            continue
        numbers = (value.values() if isinstance(value, dict)
                   else value if isinstance(value, list) else ())
        if type(value) is not kind or any(type(n) not in (int, float) for n in numbers):
            raise TypeError(name)
    if len(manifest["skipped"]) != 2:
        raise TypeError("skipped")
    if manifest["best"] and type(manifest["best"]["step"]) is not int:
        raise TypeError("best")
    return manifest


def _sealed(manifest: str) -> str:
    """The text of a JSON object with one entry more: the hash of the text."""
    return f"{manifest[:-2]}{SEAL}{hashlib.sha256(manifest.encode()).hexdigest()}\"\n}}"


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path).free:,}"
    except OSError:
        return "an unknown number"


def find_checkpoint(run_dir: Path, which: str | int = "last", say=print) -> tuple[Path, dict]:
    """The folder and manifest of `last`, `best` or a step; for a damaged one, a note and the next.

    Raises:
        UserError: there is none, or none that is whole.
    """
    steps = saved_steps(run_dir)
    if not steps:
        problem = "has no checkpoint" if run_dir.is_dir() else "does not exist"
        raise UserError(f"{run_dir} {problem}")
    wanted = int(which) if str(which).isdigit() else steps[-1]
    if wanted not in steps:
        raise UserError(f"{run_dir} has no checkpoint of step {which}: "
                        f"there are {', '.join(map(str, steps))}")
    if which == "best":
        wanted = read_pointer(run_dir, "best")
        if wanted not in steps:  # damaged; or there was no evaluation
            best = best_row([row for row in read_rows(run_dir / METRICS) if row["step"] in steps])
            wanted = best["step"] if best else steps[-1]
    order = [step for step in reversed(steps) if step <= wanted]
    order += [step for step in steps if step > wanted] if which == "best" else []
    for step, after in zip(order, [*order[1:], None]):
        folder = step_folder(run_dir, step)
        try:
            return folder, verify(folder)
        except ValueError as e:
            instead = "" if after is None else f": taking that of step {after}"
            say(f"checkpoint {folder} is damaged ({e}){instead}")
    raise UserError(f"no checkpoint of {run_dir} up to step {max(order)} is whole: "
                    "it cannot be loaded")


def same_text(folder: Path, state: dict, tokens: Tokens, config: Config, say=print) -> Tokens:
    """The tokens that a run goes on with: of the text that it began with, by its own vocabulary.

    Raises:
        UserError: the text has changed, and config.accept_changed_data does not allow that.
    """
    if state["fingerprint"] != tokens.fingerprint:
        changed = ("the text, or how it is prepared, has changed since the run began "
                   f"(fingerprint {state['fingerprint'][:16]} then, {tokens.fingerprint[:16]} now)")
        if not config.accept_changed_data:
            raise UserError(f"{changed}: restore it, go on all the same with "
                            "accept_changed_data=true, or start a new run")
        say(f"note: {changed}; the best loss is that on the new text from here on")
    kept = saved_tokenizer(folder)
    if kept.to_json() == tokens.tokenizer.to_json():
        return tokens
    return prepare(config.data, config.tokenizer, say, kept, whole=True)


def check_model(folder: Path, model: GPTConfig) -> None:
    """Raise `UserError` where the checkpoint is of a model with other settings or weights."""
    saved = {name: value for name, _, value in knobs(read_config(folder / CONFIG).model, "model.")}
    other = [f"{name}: {saved[name]} in the checkpoint, {value} in the run"
             for name, _, value in knobs(model, "model.") if value != saved[name]]
    if other:
        raise UserError(f"{folder} is of another model ({'; '.join(other)}): "
                        "restore the run's config.yaml, or start a new run")
    check_weights(folder / MODEL, model)


def check_weights(path: Path, config: GPTConfig) -> None:
    """Raise `UserError` where the weights at path are not this model's; more positions are fine.

    Reads no weights and makes no model: sizes that lie cost no memory.
    """
    with opened(path) as file:
        names = file.keys()
        shapes = {name: list(file.get_slice(name).get_shape()) for name in names}
    if config.n_layer > len(shapes):
        raise UserError(f"{path} has {len(shapes)} tensors, too few for the {config.n_layer} "
                        "layers of its model")
    expected = parameter_shapes(config)
    positions = shapes.get("position_embedding.weight") or [0]
    positions[0] = min(positions[0], config.block_size)
    wrong = [f"{name}: {shapes.get(name, 'missing')} in the file, "
             f"{expected.get(name, 'absent')} in the model"
             for name in sorted(shapes.keys() | expected.keys())
             if shapes.get(name) != expected.get(name)]
    if wrong:
        more = " …" if len(wrong) > 3 else ""
        raise UserError(f"{path} holds another model: {'; '.join(wrong[:3])}{more}")


@torch.no_grad()
def load_weights(model: GPT, path: Path) -> None:
    """Copy the weights at path into the model; of more positions, the first.

    Raises:
        UserError: as `check_weights`.
    """
    check_weights(path, model.config)
    with opened(path) as file:
        for name, p in model.named_parameters():
            copy_rows(file, name, p)


def load_run(run_dir: str | os.PathLike, which: str | int = "last",
             say=print) -> tuple[GPT, Tokenizer, Config]:
    """The model (on the CPU, in evaluation mode), the tokenizer and the configuration of a run.

    Args:
        run_dir: a run's folder.
        which: `last`, `best` (by validation loss) or a step.
        say: takes a note that a damaged checkpoint was passed over.

    Raises:
        UserError: there is no such checkpoint, or it is damaged and so are those before it.
    """
    folder, _ = find_checkpoint(Path(run_dir), which, say)
    config = read_config(folder / CONFIG)
    tokenizer = saved_tokenizer(folder)
    check_weights(folder / MODEL, config.model)
    model = GPT(config.model)
    load_weights(model, folder / MODEL)
    return model.eval(), tokenizer, config


def saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        UserError: it is none, or of another size than the model; only a model of others may have
            ids to spare.
    """
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except ValueError as e:
        raise UserError(str(e)) from None
    vocab_size = read_config(folder / CONFIG).model.vocab_size or 0
    spare = vocab_size - tokenizer.vocab_size
    if spare < 0 or (spare > 0 and not isinstance(tokenizer, HFTokenizer)):
        raise UserError(f"{folder / TOKENIZER} has {tokenizer.vocab_size} tokens, and the model "
                        f"beside it {vocab_size}: they do not belong together, "
                        "take another checkpoint")
    return tokenizer


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
