"""Resolve a run's configuration before it starts, on its text and machine."""

import os
from dataclasses import replace

from common.errors import UserError
from common.text import pluralize
from config import GPU_VOCAB_MULTIPLE, Config, EvalConfig, GPTConfig, ResolvedConfig
from data.tokens import Tokens
from run.run_dir import Log
from training.compiler import has_compiler
from training.device import describe, device_memory, pick_device, pick_precision, pick_threads
from training.flops import model_size, peak_flops, tokens_per_step

# Floating-point operations of a whole run from which compiling saves time, by kind of device.
# Measured on CPUs (LOG.md); an estimate for GPUs.
MIN_FLOPS_TO_COMPILE = {"cpu": 1e14, "cuda": 1e16}
# From more epochs than this the validation loss rises again. Of the default model on tiny
# Shakespeare it falls until the end of 5.9 epochs, and rises from the middle of 11.8 (LOG.md).
MANY_EPOCHS = 10
# Of a parameter's weight, its gradient, and the one or two numbers that its optimizer keeps.
MIN_BYTES_PER_PARAMETER = 12


def resolve(config: Config, processes: int, text: Tokens, steps_done: int = 0) -> ResolvedConfig:
    """Replace every `auto` and every size that depends on the text by its value.

    The choices depend on capabilities and never on timing, so that the same machine always gives
    the same bits. A resumed run has already taken `steps_done` steps.
    """
    device = pick_device(config.device, processes)
    model = _resolve_model(config, text)
    if model.vocab_multiple is None:
        multiple = GPU_VOCAB_MULTIPLE if device.startswith("cuda") else 1
        model = replace(model, vocab_multiple=multiple)
    choices = {
        "model": model,
        "device": device,
        "precision": pick_precision(config.precision, device),
        "threads": pick_threads(config.threads, processes),
        "compile": config.compile is True,
    }
    resolved = ResolvedConfig(**vars(config) | choices)
    if not text.task:
        resolved = replace(resolved, eval=_follow_epochs(resolved, len(text.train)))

    check_batch_size(config, processes)
    check_shard(config.shard, processes)
    _check_memory(resolved, processes)

    if config.compile == "auto":
        _, flops_per_token = model_size(resolved.model)
        tokens = tokens_per_step(resolved) * (config.max_steps - steps_done)
        compile = should_compile(device, flops_per_token * tokens / processes)
        resolved = replace(resolved, compile=compile)
    return resolved


def _follow_epochs(config: ResolvedConfig, training_tokens: int) -> EvalConfig:
    """Return when to evaluate: first after one epoch if that is before the first evaluation.

    Otherwise the model could overfit a small text before any evaluation.
    """
    epoch = max(1, training_tokens // tokens_per_step(config))
    first = config.eval.first or config.eval.every
    return replace(config.eval, first=epoch) if epoch < first else config.eval


def _resolve_model(config: Config, text: Tokens) -> GPTConfig:
    vocab_size = _vocabulary_size(config, text)
    model = GPTConfig.from_settings(replace(config.model, vocab_size=vocab_size))
    if text.ngrams is None:
        return model
    rows = len(text.ngrams)
    if model.ngram_rows not in (None, rows):
        raise UserError(
            f"model.ngram_rows={model.ngram_rows} differs from the "
            f"{pluralize(rows, 'n-gram')} of the text: leave it out"
        )
    return replace(model, ngram_rows=rows)


def _vocabulary_size(config: Config, text: Tokens) -> int:
    """Return the model's vocabulary size for a text, after checking that they fit together."""
    model = config.model
    vocab_size = text.tokenizer.vocab_size
    length, split = min((len(text.train), "training"), (len(text.val), "validation"))
    if length <= model.block_size:
        raise UserError(
            f"the {split} split has only {pluralize(length, 'token')}, too few for "
            f"model.block_size={model.block_size}: give more text, or lower model.block_size"
        )
    if model.vocab_size is None or model.vocab_size == vocab_size:
        return vocab_size
    # A pretrained model may have more ids than its tokenizer, unless they stand for characters,
    # which would be others in another text.
    is_pretrained = config.init_from and config.tokenizer.name != "char"
    if not is_pretrained or model.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} differs from the tokenizer's {vocab_size}: "
            "leave it out"
        )
    return model.vocab_size


def check_batch_size(config: Config, processes: int) -> None:
    """Raise `UserError` if the batch cannot be divided among processes and micro-steps."""
    parts = config.accumulate * processes
    if config.batch_size % parts:
        raise UserError(
            f"batch_size={config.batch_size} cannot be divided among {processes} processes with "
            f"accumulate={config.accumulate}: make it a multiple of {parts}"
        )


def check_shard(shard: int, processes: int) -> None:
    """Raise `UserError` if the processes cannot be divided into groups of `shard`."""
    if processes % shard:
        raise UserError(
            f"shard={shard} does not divide the {pluralize(processes, 'process')}: choose a divisor"
        )


def _check_memory(config: ResolvedConfig, processes: int) -> None:
    """Raise `UserError` if what a process keeps of a model exceeds its memory."""
    tensors, bytes_each = ("weights, gradients and optimizer", MIN_BYTES_PER_PARAMETER)
    if config.eval_only:
        tensors, bytes_each = ("weights", 4)
    # A table of n-grams has gradients of a few rows only
    parameters, _ = model_size(replace(config.model, ngram_rows=1))
    needed = bytes_each * parameters / config.shard
    memory = device_memory(config.device, processes)
    larger = f" or raise shard={config.shard}" if config.shard < processes else ""
    if memory is not None and needed > memory:
        raise UserError(
            f"the {tensors} need at least {needed / 1e9:,.1f} GB, but {config.device} "
            f"has only {memory / 1e9:,.1f} GB of memory: lower "
            f"model.n_layer={config.model.n_layer} or model.n_embd={config.model.n_embd}{larger}"
        )


def should_compile(device: str, flops: float) -> bool:
    """Return whether a run of this many operations per process is worth compiling, and can be."""
    is_worth_it = flops >= MIN_FLOPS_TO_COMPILE.get(device.partition(":")[0], float("inf"))
    return is_worth_it and has_compiler()


def print_run(config: ResolvedConfig, text: Tokens, processes: int, log: Log) -> None:
    """Print what is going to be trained, for how long and where."""
    parameters, _ = model_size(config.model)
    step_tokens = tokens_per_step(config)
    epochs = config.max_steps * step_tokens / len(text.train)
    machines = ""
    if processes > 1:
        number = os.environ.get("GROUP_WORLD_SIZE")  # known to torchrun only
        on_machines = f" on {pluralize(int(number), 'machine')}" if number else ""
        machines = f"{processes} processes{on_machines}, each "
    mode = "compiled (takes a minute or two once)" if config.compile else "eager"
    known_epochs = "" if text.task else f", {epochs:,.2f} epochs"
    log(f"model    {pluralize(parameters, 'parameter')}")
    log(f"run      {pluralize(config.max_steps, 'step')} of {step_tokens:,} tokens{known_epochs}")
    if epochs > MANY_EPOCHS and not text.task:
        log(
            f"note     each token is seen {epochs:,.0f} times, so overfitting is likely; give more "
            "text or fewer max_steps"
        )
    log(f"machine  {machines}{describe(config.device)}, {config.precision}, {mode}")
    if peak := peak_flops(config.device, config.precision):
        log(f"peak     {peak / 1e9:,.0f} GFLOP/s in a matrix product (data sheet)")
