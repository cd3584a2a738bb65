"""Write the folder of a run without training it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from models import lively
from safetensors.torch import save_file

from common.terminal import Terminal
from config import Config, GPTConfig, ModelConfig, TokenizerConfig
from data.tokenizer import CharTokenizer, Tokenizer, save_tokenizer
from interop import open_pinned
from interop.stored import StoredRun
from model import GPT
from run.checkpoints import (
    CHECKPOINT_FILES,
    CONFIG_FILE,
    MODEL_FILE,
    NEW,
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    Manifest,
    Start,
    write_manifest,
)
from run.config_file import config_yaml
from run.run_dir import RunDir
from training.activity_timer import ActivityTimer
from training.record import Record
from variants import build_model

SHAPE = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 16}
TEXT = "abc"


def write_configuration(run_dir: Path, config: Config) -> None:
    """Write a checkpoint of a run, of whose files only the configuration can be read."""
    folder = RunDir(run_dir).checkpoint_folder(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config_yaml(config))
    write_fingerprint(run_dir, 1)


def write_fingerprint(run_dir: Path, step: int, fingerprint: str = "0" * 64) -> None:
    """Write the manifest of a step's checkpoint, and its other files empty if they do not exist."""
    folder = RunDir(run_dir).checkpoint_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    for name in CHECKPOINT_FILES:
        (folder / name).touch()
    write_manifest(folder, Manifest(step, {}, {}, fingerprint, (0.0, 0)))


def write_run(folder: Path) -> None:
    """Write a run with checkpoints of steps 3 and 6, of which the first is the best."""
    tokenizer = CharTokenizer(TEXT)
    run_dir = RunDir(folder)
    run_dir.checkpoints.mkdir(parents=True)
    config = Config(
        run_dir=str(folder),
        model=ModelConfig(vocab_size=len(TEXT), **SHAPE),
        tokenizer=TokenizerConfig(name="char"),
    )
    run_dir.config_file.write_text(config_yaml(config))
    save_tokenizer(tokenizer, run_dir.tokenizer_file)
    run_dir.metrics_file.write_text("")
    for step in (3, 6):
        checkpoint = run_dir.checkpoint_folder(step)
        checkpoint.mkdir()
        model = lively(build_model(GPTConfig(len(TEXT), **SHAPE)), seed=step)
        tensors = {name: tensor.detach().clone() for name, tensor in model.tensors().items()}
        save_file(tensors, checkpoint / MODEL_FILE)
        save_file({"none": torch.zeros(1)}, checkpoint / OPTIMIZER_FILE)
        save_tokenizer(tokenizer, checkpoint / TOKENIZER_FILE)
        (checkpoint / CONFIG_FILE).write_text(config_yaml(config))
        metrics = {"val/loss": step / 3, "val/bits_per_byte": 1.0}
        write_manifest(checkpoint, Manifest(step, {}, metrics, "0" * 64, (0.0, 0)))
    run_dir.write_pointer("best", 3)
    run_dir.write_pointer("last", 6)


def load_run(
    run_dir: Path, which: str | int = "last", log: Callable[[str], object] = print
) -> tuple[GPT, Tokenizer, Config]:
    """Load the model, the tokenizer and the configuration of a run."""
    stored = open_pinned(str(run_dir), which, log)
    assert isinstance(stored, StoredRun)
    return *stored.load(), stored.settings


def open_record(config: Config, run_dir: Path, recorded: int = -1) -> Record:
    """Open the record of a run that goes on after the step `recorded`."""
    text = SimpleNamespace(tokenizer=CharTokenizer(TEXT), task=None)
    manifest = replace(NEW, step=max(0, recorded))
    start = Start(Checkpoint(run_dir, manifest), recorded)
    return Record(config, RunDir(run_dir), text, start, ActivityTimer("cpu", {}), Terminal())
