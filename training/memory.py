"""Estimate the memory of a run.

A step is traced on tensors without data, eagerly and in one process. What compiling and several
processes change is stated coarsely. docs/scaling.md says how far real runs were from the estimate.
"""

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache, partial
from math import ceil
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from config import GPTConfig, OptimConfig, ResolvedConfig
from kernels import MAX_FLOAT32_LOGITS, autocast
from model import GPT
from training.flops import extrapolate, model_size
from training.optimizers import build_optimizers
from variants import build_model

FLOAT32_BYTES = 4
KEY_BYTES = 8  # of an n-gram
# Share of a device's memory that the estimate may reach before the model is sharded.
MAX_MEMORY_SHARE = 0.9
PYTORCH_BYTES = 0.4e9  # resident beside tensors in a process that computes on the CPU
# Blocks of a sharded model that a process has gathered at the same time: the one that computes, the
# next one, and the message in which that one arrived.
GATHERED_BLOCKS = 3
# Chunks of logits in the smaller of two traced batches, from which others are extrapolated.
TRACED_CHUNKS = 8
# Generous numbers of float32 that a step keeps: for a parameter, for a channel of a layer and of
# its MLP, for a pair of tokens in a head, and for a logit.
NUMBERS_PER_PARAMETER = 8
NUMBERS_PER_CHANNEL = 10
NUMBERS_PER_ATTENTION_WEIGHT = 3
NUMBERS_PER_LOGIT = 8


class _StepMemory(NamedTuple):
    weights: int
    state: int  # of the optimizers
    fixed: int  # what else exists when the backward pass begins, whatever the batch
    per_sequence: int  # and for each sequence of the batch
    update: int  # gradients, and what the optimizers compute from them


def memory_needed(config: ResolvedConfig, processes: int) -> float:
    """Estimate the largest number of bytes of the tensors of each process in a training step.

    Tracing the step takes a few seconds.
    """
    model, table = config.model, 0
    if processes == 1 and model.ngrams > 1:
        rows = model.ngram_rows or 0
        table = rows * (KEY_BYTES + FLOAT32_BYTES * (model.ngram_dim + 1))
        # The sparse gradient keeps the rows of each micro-batch, and is copied to add them up
        num_used = min(
            rows, config.micro_batch_size(processes) * model.block_size * (model.ngrams - 1)
        )
        table += 2 * config.accumulate * num_used * (KEY_BYTES + FLOAT32_BYTES * model.ngram_dim)
        model = replace(model, ngram_rows=1)
    one_layer, two_layers = (
        _trace_step(
            astuple(replace(model, n_layer=n)),
            config.optim.name,
            config.precision,
            config.device,
            config.checkpoint_activations,
        )
        for n in (1, 2)
    )
    layers, shard = config.model.n_layer, config.shard
    step = _StepMemory(*(extrapolate(*sizes, layers) for sizes in zip(one_layer, two_layers)))

    gradients = step.weights / shard
    backward: float = step.fixed + config.micro_batch_size(processes) * step.per_sequence
    if config.accumulate > 1:
        backward += gradients
    average = gradients
    if processes > 1 and shard == 1:
        average += gradients  # they are copied into messages
    # Complete models divide Muon's matrices, and with them its state and its work.
    owners = processes if config.optim.name == "muon" and shard == 1 else 1
    update = gradients + (step.update - step.weights) / owners
    needed = table + (step.weights + step.state / owners) / shard
    needed += max(backward, average, update)
    if shard > 1:
        block = two_layers.weights - one_layer.weights
        outside = one_layer.weights - block
        needed += GATHERED_BLOCKS * block + 2 * outside  # also the gradients outside of the blocks
        if config.precision != "fp32":  # the traced step has copies of all blocks in 16 bits
            needed -= layers * block / 2
    return needed


def memory_bound(config: ResolvedConfig, processes: int) -> float:
    """Return more bytes than `memory_needed` for usual models, without tracing a step."""
    c = config.model
    parameters, _ = model_size(c)
    tokens = config.micro_batch_size(processes) * c.block_size
    layer = NUMBERS_PER_CHANNEL * (c.n_embd + c.hidden_dim)
    layer += NUMBERS_PER_ATTENTION_WEIGHT * c.n_head * c.block_size
    token = c.n_layer * layer + NUMBERS_PER_LOGIT * c.vocab_size
    return FLOAT32_BYTES * (NUMBERS_PER_PARAMETER * parameters + tokens * token)


@cache
def _trace_step(
    model_settings: tuple,
    optimizer_name: str,
    precision: str,
    device: str,
    checkpoint_activations: bool,
) -> _StepMemory:
    """Take a training step on tensors without data, and return the bytes of those tensors.

    `model_settings` are the fields of a `GPTConfig`. Only tensors of a GPU that torch can use are
    traced as such, others as on a CPU.
    """
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        device = "cpu"
    config = GPTConfig(*model_settings)
    with FakeTensorMode(), torch.device(device):
        model = build_model(config)
        model.checkpoint_activations = checkpoint_activations
        optimizers = build_optimizers(model, OptimConfig(name=optimizer_name), precision)

        def fill_gradients() -> None:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)

        def run_model(rows: int) -> None:
            tokens = torch.zeros(rows, config.block_size, dtype=torch.int64)
            with autocast(device, precision):
                loss = model(tokens, tokens)[1]
            loss.backward()

        def update() -> None:
            for optimizer in optimizers:
                optimizer.step()

        fill_gradients()
        update()  # now the optimizers have their state
        weights = sum(p.nbytes for p in model.parameters())
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        state = sum(tensor.nbytes for tensors in states for tensor in tensors.values())

        fill_gradients()
        logits = TRACED_CHUNKS * MAX_FLOAT32_LOGITS[torch.device(device).type]
        rows = ceil(logits / (config.block_size * config.vocab_size))
        once, twice = (_track_peak(model, optimizers, partial(run_model, n * rows)) for n in (1, 2))
        peak_of_update = _track_peak(model, optimizers, update)
    return _StepMemory(
        weights=weights,
        state=state,
        fixed=2 * once - twice - 2 * weights - state,
        per_sequence=(twice - once) // rows,
        update=peak_of_update - weights - state,
    )


def _track_peak(model: GPT, optimizers: list[Optimizer], work: Callable[[], None]) -> int:
    """Return the largest number of bytes that all tensors need at once during some work."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, *optimizers)
    with tracker:
        work()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]
