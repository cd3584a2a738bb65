"""A run on paper: parameters, memory by kind, operations and time of a configuration.

Reads no data and takes none of the memory: a whole training step is run on tensors that have a
shape and no contents, and what each operation would allocate is counted. What a kernel takes
within itself is not seen; docs/scaling.md has how far real steps were from the count.
"""

import os
import re
import statistics
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as architecture
from attention_maps.probe import PERIODS
from config import Config, UserError
from data.tokenizer import DEFAULT_VOCAB_SIZE
from model import GPT, autocast
from training.distributed import check
from training.optim import build_optimizers
from training.runtime import (
    COMPILE_PAYS,
    compile_pays,
    describe,
    memory_here,
    resolve_device,
    smallest_shard,
    synchronize,
)
from training.sharding import groups

# Dense bf16 operations per second with float32 sums, bytes of memory, and bytes per second each way
# to the other GPUs of a machine, by NVLink or PCIe (NVIDIA's data sheets).
GPUS = {"B200": (2250e12, 180e9, 900e9), "H200": (989e12, 141e9, 450e9),
        "H100": (989e12, 80e9, 450e9), "A100": (312e12, 80e9, 300e9), "A10G": (70e12, 24e9, 32e9),
        "L4": (121e12, 24e9, 32e9), "RTX 4090": (165e12, 24e9, 32e9),
        "RTX 3090": (71e12, 24e9, 32e9)}
OF_A_MACHINE = 8  # GPUs, beyond which they talk over a network, assumed 400 Gb/s for each
NETWORK = 50e9
# Share of that rate, assumed: large models were trained at 0.21 to 0.46 (Chowdhery et al. 2022).
UTILISATION = 0.4
ALPHABET = 256  # characters, assumed
# A compiled model keeps for its backward pass what these operations read or write; it computes
# the rest again.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot")


@dataclass
class Machine:
    """What a run is planned for: so many processes, each with a rate and a memory."""

    name: str
    processes: int
    rate: float | None  # operations per second; None where unknown
    source: str  # of the rate, in words
    memory: float | None  # bytes; None where unknown
    link: float | None = None  # bytes per second each way between them; None where unknown


@dataclass
class Memory:
    """Bytes by kind that a process holds, and the most at once: gradients come as activations go.

    Of a sharded model the process has its part, and beside it what it gathers of the others'.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # of the other processes' weights and gradients, while they are used
    activations: int
    logits: int  # with their loss and gradients
    update: int  # while the optimizers work
    at_once: int
    checkpoint: int  # on disk: weights, and the optimizer's state


def print_plan(config: Config, experiment: str) -> None:
    """Print what the run would be: see the module.

    Raises:
        UserError: `config.dry_run` names no machine known here, or the batch cannot be split over
            its processes.
    """
    if int(os.environ.get("RANK", 0)) > 0:
        return  # torchrun starts many; one speaks
    machine, config = find_machine(config)
    vocab_size, source = vocabulary(config)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    check(config, machine.processes)
    with FakeTensorMode():
        model = GPT(config.model)
        parameters, cache = model.num_parameters(), model.make_cache(1).nbytes
    if config.shard == "auto":
        config = replace(config, shard=smallest_shard(config, parameters, machine.memory,
                                                      machine.processes, OF_A_MACHINE))
    tokens = config.max_steps * config.batch_size * config.model.block_size
    operations = model.flops_per_token() * tokens
    if config.compile == "auto":
        elsewhere = config.dry_run is not True
        pays = (operations >= COMPILE_PAYS["cuda"][0] if elsewhere
                else compile_pays(config.device, operations)[0])
        config = replace(config, compile=pays)
    rows = config.micro_batch(machine.processes)
    memory = measure(config, rows, machine.processes)
    lines = [
        *shape_lines(config, experiment, machine, parameters, source),
        ("operations", f"{model.flops_per_token():,} a token, forward and backward; "
                       f"{operations:.3g} in all"),
        *memory_lines(config, machine, memory, cache),
        *network_lines(config, machine, parameters, operations / config.max_steps),
        ("time", expected_time(machine, operations)),
    ]
    print("\n".join(f"{name:<15}{value}".rstrip() for name, value in lines))


def shape_lines(config: Config, experiment: str, machine: Machine, parameters: int,
                source: str) -> list[tuple[str, str]]:
    """What would be trained, on what, in which steps; `source` is that of the vocabulary."""
    c, T = config.model, config.model.block_size
    tokens = config.max_steps * config.batch_size * T
    rows = config.micro_batch(machine.processes)
    return [
        ("plan", f"{experiment} on {machine.name}, {config.precision}, "
                 f"{'compiled' if config.compile else 'eager'}"),
        ("model", f"{parameters:,} parameters: {c.n_layer} layers of {c.n_embd}, {c.n_head} heads"),
        ("", f"context {T:,}, vocabulary {c.vocab_size:,} ({source})"),
        ("step", f"{config.batch_size:,} sequences: {count(machine.processes, 'process', 'es')} × "
                 f"{count(config.accumulate, 'micro-step')} × {rows:,}; "
                 f"{config.batch_size * T:,} tokens"),
        ("run", f"{config.max_steps:,} steps, {tokens:,} tokens: "
                f"{tokens / parameters:,.3g} for each parameter"),
    ]


def memory_lines(config: Config, machine: Machine, memory: Memory,
                 cache: int) -> list[tuple[str, str]]:
    """Memory by kind, of a process and beside it, with a note where that is more than there is."""
    c, probe = config.model, min(config.attention.tokens, config.model.block_size)
    several = machine.processes > 1
    gathered = ("  gathered", f"{size(memory.gathered)}  of other processes' parts")
    there = f", of {size(machine.memory).strip()}" if machine.memory else ""
    lines = [
        ("memory", f"of each process (shard={config.shard}):" if several else ""),
        ("  weights", size(memory.weights)),
        ("  gradients", size(memory.gradients)),
        ("  optimizer", f"{size(memory.optimizer)}  {config.optim.name}'s state"),
        *([gathered] if several and config.shard > 1 else []),
        ("  activations", f"{size(memory.activations)}  kept for the backward pass"),
        ("  logits", f"{size(memory.logits)}  with loss and gradients"),
        *([("  update", f"{size(memory.update)}  while the optimizer works")]
          if memory.update else []),
        ("  at once", f"{size(memory.at_once)}  at most{there}; torch's own not counted"),
        ("beside it", "in the host's memory, and on disk:"),
        ("  snapshot", f"{size(4 * c.n_layer * c.n_head * probe ** 2 * (1 + 2 * PERIODS))}"
                       "  of attention maps"),
        ("  cache", f"{size(cache)}  of keys and values, for a sampled text"),
        ("  checkpoint", f"{size(memory.checkpoint)}  each; {config.checkpoint.keep + 1} are kept"),
    ]
    if machine.memory and memory.at_once > machine.memory:
        whole_step = memory.weights + memory.gradients + memory.optimizer + memory.update
        advice = ("raise accumulate, which splits a step" if whole_step < machine.memory
                  else "raise shard" if config.shard < machine.processes
                  else "however a step is split, take a smaller model or more processes")
        lines.append(("note", f"that is more than there is: {advice}"))
    return lines


def network_lines(config: Config, machine: Machine, parameters: int,
                  operations: float) -> list[tuple[str, str]]:
    """What processes send each other in a step, in what time, and whether that binds; `operations`
    are a step's."""
    if machine.processes == 1:
        return []
    received = communication(config, parameters, machine.processes)
    lines = [("network", f"{size(received).strip()} a step to each process")]
    if machine.link and machine.rate:
        sending = received / machine.link
        computing = operations / (machine.rate * machine.processes * UTILISATION)
        lines.append(("", f"{sending:.3g} s at {machine.link / 1e9:,.0f} GB/s, beside "
                          f"{computing:.3g} s of compute"))
        lines.append(("limit", "the network: more tokens a step" if sending > computing
                      else "compute"))
    return lines


def expected_time(machine: Machine, operations: float) -> str:
    if not machine.rate:
        return "not known: the data sheets' rates are of bf16"
    seconds = operations / (machine.rate * machine.processes * UTILISATION)
    many = f"{machine.processes} × " if machine.processes > 1 else ""
    return (f"{duration(seconds)} at {UTILISATION:.0%} of {many}{machine.rate / 1e12:,.3g} TFLOP/s "
            f"({machine.source})")


def find_machine(config: Config) -> tuple[Machine, Config]:
    """The machine that `config.dry_run` names, or this one, and the configuration resolved for it.

    Raises:
        UserError: it names none that is known.
    """
    if config.dry_run is True:
        return this_machine(resolve_device(config))
    asked = re.fullmatch(r"(?:([1-9]\d*) ?[x×] ?)?(.+)", str(config.dry_run))
    names = {name.replace(" ", "").lower(): name for name in GPUS}
    gpu = names.get(asked[2].replace(" ", "").lower()) if asked else None
    if gpu is None:
        raise UserError(f"dry_run={config.dry_run} is not true, for this machine, or a GPU known "
                        f"here, as in 8xH100: {', '.join(GPUS)}")
    precision = "bf16" if config.precision == "auto" else config.precision
    processes, (rate, memory, link) = int(asked[1] or 1), GPUS[gpu]
    rate = rate if precision == "bf16" else None
    link = link if processes <= OF_A_MACHINE else NETWORK
    machine = Machine(f"{processes} × {gpu}", processes, rate, "data sheet", memory, link)
    return machine, replace(config, device="cuda", precision=precision)


def this_machine(config: Config) -> tuple[Machine, Config]:
    """The machine that this runs on, with its rate from a data sheet or else measured now."""
    processes = int(os.environ.get("WORLD_SIZE", 1)) if config.distributed == "auto" else 1
    name = describe(config.device)
    gpu = next((gpu for gpu in GPUS if gpu in name), None)
    if gpu and config.precision == "bf16":
        rate, source = GPUS[gpu][0], "data sheet"
    else:
        rate, source = matmul_rate(config.device, config.precision), "measured just now"
    if processes > 1:
        name = f"{processes} × {name}"
    return Machine(name, processes, rate, source, memory_here(config.device)), config


def vocabulary(config: Config) -> tuple[int, str]:
    """The size of the vocabulary as far as it is known without the text; its source in words."""
    if config.model.vocab_size:
        return config.model.vocab_size, "model.vocab_size"
    if config.tokenizer.name == "gpt2":
        return 50257, "GPT-2's"
    if config.tokenizer.name == "bpe":
        return config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE, "fewer where the text is small"
    return ALPHABET, "assumed: the text is not read"


def measure(config: Config, rows: int, processes: int = 1) -> Memory:
    """The memory of a process that trains on `rows` sequences at once, by a step without contents.

    Of a compiled model it is an estimate. Of several processes `config.shard` hold a model.
    """
    c, shape = config.model, (rows, config.model.block_size)
    counter = Counter(logits=rows * c.block_size * c.vocab_size)
    with FakeTensorMode(), computed_as_on(config.device):
        model = GPT(c)
        tokens = torch.zeros(shape, dtype=torch.int64)
        with counter:
            # Two micro-steps, where there are so many: in the second, gradients are already there.
            for micro_step in range(min(2, config.accumulate)):
                with autocast("cpu", config.precision):
                    logits, loss = model(tokens, tokens)
                if micro_step == 0:
                    activations, recomputed = counter.now[0], counter.recomputed()
                loss.backward()
            step = counter.most
            state, update = updated(counter, model, config)
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    most, logits_most = sum(step), step[1]
    if config.compile:  # the logits in the precision of the products, their gradient in float32
        activations, logits_most = activations - recomputed, logits.nbytes + 4 * logits.numel()
        most = activations + logits_most + (parameters if config.accumulate > 1 else 0)
    shard, gathered = 1, 0
    if processes > 1:
        shard = config.shard
        gathered = gathered_bytes(model, config) if shard > 1 else 0
        # Gradients that are averaged whole have their memory all the time.
        there = shard == 1 or config.accumulate > 1
        most = activations + logits_most + (parameters // shard if there else 0)
    weights, gradients = parameters // shard + buffers, parameters // shard
    state, update = state // shard, update // shard
    return Memory(weights, gradients, state, gathered, activations, logits_most, update,
                  at_once=weights + state + max(gathered + most, gradients + update),
                  checkpoint=parameters + state * shard)


def gathered_bytes(model: GPT, config: Config) -> int:
    """Bytes that a process has whole at once of a sharded model: what is outside the blocks, all
    through a step, with its gradient; two groups of blocks, of which one is used and one is coming,
    and the gradient of one."""
    sizes = [sum(p.numel() for block in group for part in (block.attention, block.mlp)
                 for p in part.parameters()) for group in groups(model.blocks)]
    outside = model.num_parameters() - sum(sizes)
    whole = sum(sorted(sizes)[-2:]) + max(sizes)
    return 8 * outside + (2 if config.precision == "bf16" else 4) * whole


def communication(config: Config, parameters: int, processes: int) -> float:
    """Bytes that a process receives in a step: the weights, in the passes forward and backward
    of each micro-step where they are sharded, and gradients in float32."""
    shard, replicas = config.shard, processes // config.shard
    passes, reductions = (2 * config.accumulate, config.accumulate) if shard > 1 else (0, 1)
    size = 2 if config.precision == "bf16" else 4
    within = parameters * (shard - 1) / shard * (size * passes + 4 * reductions)
    return within + 2 * (replicas - 1) / replicas * 4 * parameters / shard * reductions


def updated(counter: "Counter", model: GPT, config: Config) -> tuple[int, int]:
    """Bytes of the optimizers' state, and what their step takes."""
    optimizers = build_optimizers(model, config.optim, config.precision)
    counter.most = [0, 0]
    for optimizer in optimizers:
        optimizer.step()
    state = sum(tensor.nbytes for optimizer in optimizers
                for tensors in optimizer.state.values() for tensor in tensors.values())
    return state, max(0, sum(counter.most) - sum(counter.now))


class Counter(TorchDispatchMode):
    """Counts the bytes that the operations run within it allocate, until they are freed."""

    def __init__(self, logits: int):
        """`logits`: elements of a tensor that counts as logits."""
        super().__init__()
        self._logits = logits
        self._alive, self._in_products = {}, set()  # storage → (bytes, whether it holds logits)
        self.now = [0, 0]  # bytes of other things, of logits
        self.most = [0, 0]  # the same when their sum was largest

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in storages((args, kwargs))}
        if function.overloadpacket.__name__.startswith(PRODUCTS):
            self._in_products |= inputs | {storage._cdata for storage in storages(out)}
        for storage in storages(out):
            key = storage._cdata
            # What was counted, or is a view of what was there before, is no allocation.
            if key not in self._alive and key not in inputs:
                is_logits = storage.nbytes() in (2 * self._logits, 4 * self._logits)
                self._alive[key] = storage.nbytes(), int(is_logits)
                self._count(key, 1)
                weakref.finalize(storage, self._freed, key)
        if sum(self.now) > sum(self.most):
            self.most = list(self.now)
        return out

    def recomputed(self) -> int:
        """Bytes alive, logits left out, that a compiled model would not keep."""
        return sum(size for key, (size, is_logits) in self._alive.items()
                   if key not in self._in_products and not is_logits)

    def _count(self, key: int, sign: int) -> None:
        size, is_logits = self._alive[key]
        self.now[is_logits] += sign * size

    def _freed(self, key: int) -> None:
        self._count(key, -1)
        del self._alive[key]
        self._in_products.discard(key)


def storages(tree) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


@contextmanager
def computed_as_on(device: str) -> Iterator[None]:
    """Attention and loss as the device computes them: only a CPU has ways of its own."""
    usual = architecture.SHORT, architecture.LOGITS_AT_ONCE
    if device != "cpu":
        architecture.SHORT, architecture.LOGITS_AT_ONCE = 0, sys.maxsize
    try:
        yield
    finally:
        architecture.SHORT, architecture.LOGITS_AT_ONCE = usual


def matmul_rate(device: str, precision: str, seconds: float = 0.5) -> float:
    """Operations per second of a matrix product here, of 2048³ or, as a GPU does that in less time
    than its launch takes, 8192³: the median over some seconds."""
    size = 8192 if device.startswith("cuda") else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        synchronize(device)
        began = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size ** 3 / statistics.median(times[2:])  # the first ones warm up


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number > 1 else ''}"


def size(number: float) -> str:
    """Bytes for people."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B ", 1))
    unit, scale = next((unit, scale) for unit, scale in units if number >= scale or scale == 1)
    return f"{number / scale:>7.3g} {unit}"


def duration(seconds: float) -> str:
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, scale = next((unit, scale) for unit, scale in units
                       if seconds >= 1.5 * scale or scale == 1)
    number = seconds / scale
    return f"{number:,.2g} {unit}" if number < 100 else f"{number:,.0f} {unit}"
