"""A run before it starts: what every `auto` becomes, its memory and its operations. The formulas
are those of docs/scaling.md, which has how far real runs were from them."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from common.errors import UserError
from config import Config, GPTConfig
from data.tokens import Tokens
from model import GPT
from training.device import describe, has_compiler, memory_here, pick_device, pick_precision
from training.processes import World

# Floating-point operations of a whole run from which compiling pays. Measured on CPUs (LOG.md), a
# guess for GPUs.
COMPILE_PAYS = {"cpu": 1e14, "cuda": 1e16}
# Bytes that a step keeps of each token, layer and channel, and of each of its logits. Compiled,
# what products do not read is computed again.
KEPT = {
    ("bf16", False): (42, 14),
    ("bf16", True): (34, 6),
    ("fp32", False): (64, 14),
    ("fp32", True): (64, 14),
}
MANY_EPOCHS = 20  # beyond these a run is out of proportion to its text


def resolve(config: Config, world: World, text: Tokens, steps_done: int = 0) -> Config:
    """The configuration with what every `auto` becomes on this text and machine: by capability and
    never by a timing, so that the same machine gives the same bits."""
    device = pick_device(config.device, world.size)
    model = replace(config.model, vocab_size=vocabulary_of(config, text))
    if text.ngrams is not None:
        rows = len(text.ngrams)
        if model.ngram_rows not in (None, rows):
            raise UserError(
                f"model.ngram_rows={model.ngram_rows} is not the {rows} n-grams that "
                "the text has: leave it out"
            )
        model = replace(model, ngram_rows=rows)
    config = replace(
        config, model=model, device=device, precision=pick_precision(config.precision, device)
    )
    memory = memory_here(device)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.size > 1 else 1
    if memory and device == "cpu":
        memory /= here
    config = divide(config, world.size, memory, here)
    parameters, flops = model_size(model)
    if memory and 8 * parameters / config.shard > memory:
        raise UserError(
            f"there is too little memory on {device}: {memory / 1e9:,.1f} GB, and the "
            "weights and their gradients alone need "
            f"{8 * parameters / config.shard / 1e9:,.1f}: lower model.n_layer="
            f"{model.n_layer} or model.n_embd={model.n_embd}"
        )
    steps = config.max_steps - steps_done
    run_flops = flops * steps * config.batch_size * model.block_size / world.size
    if config.compile == "auto":
        pays = run_flops >= COMPILE_PAYS.get(device.partition(":")[0], float("inf"))
        config = replace(config, compile=pays and has_compiler())
    return config


def vocabulary_of(config: Config, text: Tokens) -> int:
    """The vocabulary of the model, on a text that has to fit it."""
    model, vocab_size = config.model, text.tokenizer.vocab_size
    ids, split = min((len(text.train), "training"), (len(text.val), "validation"))
    if ids <= model.block_size:
        fitting = 1 << max(0, ids - 1).bit_length() - 1 if ids > 2 else 0  # a power of two below
        way = f" or model.block_size={fitting}" if fitting > 1 else ""
        raise UserError(
            f"the {split} split has {ids} tokens, too few for "
            f"model.block_size={model.block_size}: give more text{way}"
        )
    # A model of others may have more ids than its tokenizer.
    by_characters = config.tokenizer.name == "char"  # of another text, they would be others
    spare = config.init_from and not by_characters and (model.vocab_size or 0) > vocab_size
    if model.vocab_size not in (None, vocab_size) and not spare:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is not the tokenizer's {vocab_size}: leave it out"
        )
    return model.vocab_size or vocab_size


def divide(config: Config, processes: int, memory: float | None, of_a_machine: int) -> Config:
    """The configuration with its `shard`, checked against the number of processes: for `auto` as
    few as hold the model in `memory` bytes each, those of a machine first."""
    parts = config.accumulate * processes
    if config.batch_size % parts:
        raise UserError(
            f"batch_size={config.batch_size} cannot be divided among {processes} "
            f"processes with accumulate={config.accumulate}: make it a multiple of "
            f"{parts}"
        )
    if config.shard == "auto":
        divisors = [n for n in range(1, processes + 1) if processes % n == 0]
        divisors.sort(key=lambda n: (n > of_a_machine, n))
        fitting = [
            n
            for n in divisors
            if memory is None or memory_needed(replace(config, shard=n), processes) < 0.9 * memory
        ]
        return replace(config, shard=fitting[0] if fitting else processes)
    if processes % config.shard:
        raise UserError(
            f"shard={config.shard} does not divide the {processes} processes: "
            "take a divisor, or shard=auto"
        )
    return config


def model_size(config: GPTConfig) -> tuple[int, int]:
    """Parameters of a model, and floating-point operations of a training step per token. Forward 2
    per weight of a matrix and 2·H·(d_k + d_v) per pair of tokens, half of the pairs being masked;
    backward twice that (Kaplan et al. 2020, Chowdhery et al. 2022). Counted for one layer and for
    two: a deep model takes long to make even without memory."""
    with torch.device("meta"):
        models = [GPT(replace(config, n_layer=n)) for n in (1, 2)]
    parameters = [model.num_parameters() for model in models]
    matrices = sum(p.numel() for p in models[0].blocks.parameters() if p.dim() == 2)  # of a layer
    pairs = config.n_head * (config.key_dim + config.value_dim) * config.block_size // 2
    products = config.n_layer * (matrices + pairs) + config.vocab_size * config.n_embd
    return parameters[0] + (config.n_layer - 1) * (parameters[1] - parameters[0]), 6 * products


def memory_needed(config: Config, processes: int) -> float:
    """Bytes that each of so many processes holds at most in training, by the formulas of
    docs/scaling.md, with what it gathers of a sharded model."""
    c = config.model
    parameters, _ = model_size(c)
    tables = (c.ngram_rows or 0) * c.ngram_dim  # one number of state a row
    outside = c.vocab_size * c.n_embd * (1 if c.tie_embeddings else 2) + tables
    state = 4 if config.optim.name == "muon" else 8
    held = 4 * parameters / config.shard  # weights, and as much of gradients
    optimizer = (state * (parameters - outside) + 8 * (outside - tables)) / config.shard
    block, size = (parameters - outside) / c.n_layer, 2 if config.precision == "bf16" else 4
    gathered = 8 * outside + 3 * size * block if config.shard > 1 else 0
    tokens = config.micro_batch_size(processes) * c.block_size
    of_layers, of_logits = KEPT[config.precision, config.compile is True]
    kept = tokens * (of_layers * c.n_layer * c.n_embd + of_logits * c.vocab_size)
    # Gradients come as activations go, but where there are some already, or sharded ones. To be
    # averaged, whole ones are copied then.
    stay = config.accumulate > 1 or config.shard > 1
    message = held if processes > 1 and config.shard == 1 else 0
    return held + optimizer + gathered + max(kept + held * stay, held + message)


def print_run(
    log: Callable[[str], None], config: Config, model: GPT, tokens: Tokens, processes: int
) -> None:
    """Print what is going to be trained, for how long, where."""
    parameters = model.num_parameters()
    step_tokens = config.batch_size * config.model.block_size
    epochs = config.max_steps * step_tokens / len(tokens.train)
    many = f"{processes} processes, each " if processes > 1 else ""
    how = "compiled, which takes a minute or two once" if config.compile else "eager"
    log(f"model    {parameters:,} parameters")
    log(f"run      {config.max_steps:,} steps of {step_tokens:,} tokens, {epochs:,.2f} epochs")
    if epochs > MANY_EPOCHS:
        log(
            f"note     each token is seen {epochs:,.0f} times, so the model will learn the text by "
            "heart: give more text or fewer max_steps"
        )
    log(f"machine  {many}{describe(config.device)}, {config.precision}, {how}")
