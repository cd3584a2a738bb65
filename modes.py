"""What train.py does instead of training: prepare the text, or evaluate a model."""

from dataclasses import replace
from math import nan
from pathlib import Path

import cli
import interop
from common.text import pluralize
from config import Config
from inputs import prepare_data, prepare_same_text, starting_point
from model import GPT
from training import device
from training.evaluate import Splits, Windows, evaluate
from training.nonfinite import check_finite_weights
from training.plan import resolve
from training.processes import World
from training.progress import Progress


def prepare_only(config: Config) -> float:
    """Prepare the text of a run without training; return nan, because there is no loss."""
    console, progress = cli.Terminal(), Progress()
    initial = starting_point(config, Path(), progress, cli.printer(console))
    prepare_data(config, World(), initial.tokenizer, progress, console)
    return nan


def evaluate_only(config: Config) -> float:
    """Print the validation loss of a run's best model, or of the model in init_from; return it.

    The run is only read: nothing in its folder changes, and it may still be training.
    """
    console = cli.Terminal()
    log = cli.printer(console)
    source = str(config.run_dir or config.init_from)
    device.pick_device(config.device)
    initial = interop.open_starting_weights(source, log)
    text = prepare_same_text(config, initial.tokenizer, Progress(), console)
    for line in text.summary():
        log(line)

    # Windows of a text that is shorter than the context would be padded to it
    length = min(config.model.block_size, len(text.train) - 1, len(text.val) - 1)
    model_settings = replace(config.model, block_size=max(1, length))
    resolved = resolve(replace(config, model=model_settings, compile=False), World(), text)
    device.configure_process(resolved)
    model = GPT(resolved.model)
    initial.copy_to(model)
    check_finite_weights(model, source)
    model.to(resolved.device)

    validation = Windows(text.val, text.tokenizer, resolved)
    metrics = evaluate(model, Splits(validation, validation))
    manifest = initial.manifest
    step = f"step {manifest.step:,}, " if manifest else ""
    log(f"model    {source}, {step}{pluralize(model.num_parameters(), 'parameter')}")
    log(
        f"loss     {metrics['val/loss']:.4f} nats per token, "
        f"{metrics['val/bits_per_byte']:.4f} bits per byte"
    )
    log(f"         over {pluralize(validation.num_targets, 'validation token')}")
    if manifest and manifest.fingerprint != text.fingerprint:
        log(
            "note     the run was trained on another text, or this one has changed since: it may "
            "have been trained on parts of the validation split"
        )
    return metrics["val/loss"]
