"""Prepare the inputs of a run: its text, tokenizer and initial weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import UserError
from common.terminal import Terminal, printer
from common.text import pluralize
from config import Config
from data.synthetic import generate_tokens
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokens import Tokens, open_tokens, prepare
from model import GPT
from run.checkpoints import TOKENIZER_FILE, Manifest
from run.run_dir import RunDir
from training.nonfinite import check_finite_weights
from training.run_folder import Progress
from training.world import World
from variants import count_ngrams


class StartingWeights(NamedTuple):
    """The tokenizer and the weights of the model that a run starts from."""

    tokenizer: Tokenizer | None = None  # None: the configured tokenizer
    copy_to: Callable[[GPT], object] | None = None  # None: the run has its own weights
    manifest: Manifest | None = None  # of a run's checkpoint; None if the model is not of a run


# `interop.open_starting_weights`: opens the model that init_from names, and prints notes
OpenWeights = Callable[[str, Callable[[str], None]], StartingWeights]


def prepare_inputs(
    config: Config,
    world: World,
    run_dir: Path,
    progress: Progress,
    open_weights: OpenWeights,
) -> tuple[StartingWeights, Tokens]:
    """Open the weights that a run starts from, prepare its text and count its n-grams.

    All ranks call this together.
    """
    console = Terminal(quiet=world.rank > 0)
    log = printer(console)
    if progress.manifest:
        folder = RunDir(run_dir).checkpoint_folder(progress.step)
        initial = StartingWeights(load_tokenizer(folder / TOKENIZER_FILE))
    elif config.init_from:
        initial = open_weights(config.init_from, log)
    else:
        initial = StartingWeights()
    text = _open_same_text(config, world, initial.tokenizer, progress, console)
    for line in text.summary():
        log(line)
    if text.tokenizer.vocab_size < (config.tokenizer.vocab_size or 0):
        log(
            f"note: the text is too short for tokenizer.vocab_size={config.tokenizer.vocab_size}, "
            f"so the vocabulary has {pluralize(text.tokenizer.vocab_size, 'token')}"
        )

    model = config.model
    weights_have_ngrams = config.init_from or (progress.manifest and model.ngram_rows)
    if model.ngrams < 2 or weights_have_ngrams:
        return initial, text
    keys = None
    if world.rank == 0:
        keys = count_ngrams(text.train, text.tokenizer.vocab_size, model)
    return initial, replace(text, ngrams=world.broadcast(keys))


def _open_same_text(
    config: Config,
    world: World,
    tokenizer: Tokenizer | None,
    progress: Progress,
    console: Terminal,
) -> Tokens:
    text = None
    if world.rank == 0:
        text = prepare_same_text(config, tokenizer, progress, console)
    location = world.broadcast(text and (text.folder.name, text.name, text.fingerprint))
    if text is None:  # on another machine the cache may lack it
        text = open_tokens(*location)
        text = text or prepare_same_text(config, tokenizer, progress, console)
    if text.fingerprint != location[-1]:
        raise UserError(
            f"{text.name} differs from that of the first process; copy the same text, and the "
            "same version of this program, to all machines."
        )
    world.wait()
    return text


def prepare_same_text(
    config: Config, tokenizer: Tokenizer | None, progress: Progress, console: Terminal
) -> Tokens:
    """Prepare the text and check that it is the one that a resumed run was trained on."""
    log = printer(console)
    given_tokenizer = tokenizer if config.init_from else None
    with console.status("preparing the text …"):
        if config.data.source == "synthetic":
            text = generate_tokens(config, tokenizer)
        else:
            text = prepare(config.data, config.tokenizer, log, given_tokenizer)
        if progress.manifest and progress.manifest.fingerprint != text.fingerprint:
            raise UserError(
                "the text, or how it is prepared, has changed since the run began (fingerprint "
                f"{progress.manifest.fingerprint[:16]} then, {text.fingerprint[:16]} now); "
                "restore it, or start a new run."
            )
        # A resumed run keeps its tokenizer, even if another version would learn another one.
        if tokenizer and tokenizer.to_json() != text.tokenizer.to_json():
            text = prepare(config.data, config.tokenizer, log, tokenizer)
    return text


def init_weights(
    model: GPT, initial: StartingWeights, text: Tokens, source: str = "init_from"
) -> None:
    """Copy weights from `source` into a model, and enter the text's n-grams."""
    if initial.copy_to:
        initial.copy_to(model)
        check_finite_weights(model, source)
    if model.ngrams is not None and text.ngrams is not None:
        model.ngrams.keys.copy_(torch.from_numpy(text.ngrams))
