"""A run on paper: parameters, memory by kind, operations and time of a configuration. Reads no data, and holds none of the memory.

A whole step, the one that trains, is run on tensors that have a shape and no contents, and what each operation would allocate
is counted. What a kernel takes within itself is not seen; docs/scaling.md has how far real steps were from the count.
"""

import os
import re
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as architecture
from attention_maps.probe import PERIODS
from config import Config, UserError
from data.tokenizer import DEFAULT_VOCAB_SIZE
from model import GPT
from training.optim import build_optimizers, shares
from training.runtime import COMPILE_PAYS, autocast, compile_pays, describe, host_memory, settle, synchronize

# Dense bf16 operations per second with float32 sums, and bytes of memory, as NVIDIA's data sheets give them.
GPUS = {"B200": (2250e12, 180e9), "H200": (989e12, 141e9), "H100": (989e12, 80e9), "A100": (312e12, 80e9), "A10G": (70e12, 24e9),
        "L4": (121e12, 24e9), "RTX 4090": (165e12, 24e9), "RTX 3090": (71e12, 24e9)}
UTILISATION = 0.4  # of that rate, assumed; large models were trained at 0.21 to 0.46 (Chowdhery et al. 2022, table 3)
ALPHABET = 256  # characters, assumed
# What a compiled model keeps for its backward pass is read or written by these operations; the rest is computed again.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot")


@dataclass
class Machine:
    """What a run is planned for: so many processes, each with a rate (operations per second) and a memory (bytes), None where unknown."""

    name: str
    processes: int
    rate: float | None
    source: str  # of the rate, in words
    memory: float | None


@dataclass
class Memory:
    """Bytes by kind that a process holds, and the most at once: gradients come as activations go. Of several processes, the one with the most."""

    weights: int
    gradients: int
    optimizer: int  # of the parameters that the process updates
    activations: int
    logits: int  # with their loss and gradients
    update: int  # while the optimizers work
    at_once: int
    checkpoint: int  # on disk: weights, and the optimizer's state of all processes


def print_plan(config: Config, experiment: str) -> None:
    """Print what the run would be: see the module.

    Raises:
        UserError: `config.dry_run` names no machine known here, or the batch cannot be split over its processes.
    """
    if int(os.environ.get("RANK", 0)) > 0:
        return  # torchrun starts many; one speaks
    machine = find_machine(config)
    c, T = config.model, config.model.block_size
    c.vocab_size, source = vocabulary(config)
    rows, rest = divmod(config.batch_size, config.accumulate * machine.processes)
    if rest:
        raise UserError(f"batch_size={config.batch_size} cannot be split over {machine.processes} processes and accumulate={config.accumulate} "
                        f"micro-steps: make it a multiple of {config.accumulate * machine.processes}")
    with FakeTensorMode():
        model = GPT(c)
        parameters, cache = model.num_parameters(), model.make_cache(1).nbytes
    tokens = config.max_steps * config.batch_size * T
    operations = model.flops_per_token() * tokens
    if config.compile == "auto":
        planned = config.dry_run is not True  # for a machine that is not this one
        config.compile = operations >= COMPILE_PAYS["cuda"][0] if planned else compile_pays(config.device, operations)[0]
    memory = measure(config, rows, machine.processes)
    probe = min(config.attention.tokens, T)
    lines = [
        ("plan", f"{experiment} on {machine.name}, {config.precision}, {'compiled' if config.compile else 'eager'}"),
        ("model", f"{parameters:,} parameters: {c.n_layer} layers of {c.n_embd}, {c.n_head} heads"),
        ("", f"context {T:,}, vocabulary {c.vocab_size:,} ({source})"),
        ("step", f"{config.batch_size:,} sequences: {count(machine.processes, 'process', 'es')} × {count(config.accumulate, 'micro-step')} "
                 f"× {rows:,}; {config.batch_size * T:,} tokens"),
        ("run", f"{config.max_steps:,} steps, {tokens:,} tokens: {tokens / parameters:,.3g} for each parameter"),
        ("operations", f"{model.flops_per_token():,} a token, forward and backward; {operations:.3g} in all"),
        ("memory", "of each process:" if machine.processes > 1 else ""),
        ("  weights", size(memory.weights)),
        ("  gradients", size(memory.gradients)),
        ("  optimizer", f"{size(memory.optimizer)}  {config.optim.name}'s state"),
        ("  activations", f"{size(memory.activations)}  kept for the backward pass"),
        ("  logits", f"{size(memory.logits)}  with loss and gradients"),
        ("  update", f"{size(memory.update)}  while {'gradients are summed' if machine.processes > 1 else 'the optimizer works'}"),
        ("  at once", f"{size(memory.at_once)}  at most{f', of {size(machine.memory).strip()}' if machine.memory else ''}; torch's own not counted"),
        ("beside it", "in the host's memory, and on disk:"),
        ("  snapshot", f"{size(4 * c.n_layer * c.n_head * probe ** 2 * (1 + 2 * PERIODS))}  of attention maps"),
        ("  cache", f"{size(cache)}  of keys and values, for a sampled text"),
        ("  checkpoint", f"{size(memory.checkpoint)}  each; {config.checkpoint.keep + 1} are kept"),
    ]
    if machine.memory and memory.at_once > machine.memory:
        fixed = memory.weights + memory.gradients + memory.optimizer
        lines.append(("note", "that is more than there is: raise accumulate, which splits a step" if fixed + memory.update < machine.memory else
                      "that is more than there is, however a step is split: take a smaller model"))
    if machine.rate:
        seconds = operations / (machine.rate * machine.processes * UTILISATION)
        many = f"{machine.processes} × " if machine.processes > 1 else ""
        lines.append(("time", f"{duration(seconds)} at {UTILISATION:.0%} of {many}{machine.rate / 1e12:,.3g} TFLOP/s ({machine.source})"))
    else:
        lines.append(("time", "not known: the data sheets' rates are of bf16"))
    print("\n".join(f"{name:<15}{value}".rstrip() for name, value in lines))


def find_machine(config: Config) -> Machine:
    """The machine that `config.dry_run` names, or this one; settles device and precision for it.

    Raises:
        UserError: it names none that is known.
    """
    if config.dry_run is True:
        settle(config)
        name, processes = describe(config.device), int(os.environ.get("WORLD_SIZE", 1)) if config.distributed == "auto" else 1
        known = next((GPUS[gpu] for gpu in GPUS if gpu in name), None) if config.precision == "bf16" else None
        rate, source = (known[0], "data sheet") if known else (matmul_rate(config.device, config.precision), "measured just now")
        return Machine(f"{processes} × {name}" if processes > 1 else name, processes, rate, source, memory_here(config.device))
    asked = re.fullmatch(r"(?:([1-9]\d*) ?[x×] ?)?(.+)", str(config.dry_run))
    gpu = next((gpu for gpu in GPUS if asked and gpu.replace(" ", "").lower() == asked[2].replace(" ", "").lower()), None)
    if gpu is None:
        raise UserError(f"dry_run={config.dry_run} is not true, for this machine, or a GPU known here, as in 8xH100: {', '.join(GPUS)}")
    config.device = "cuda"
    if config.precision == "auto":
        config.precision = "bf16"
    rate, memory = GPUS[gpu]
    return Machine(f"{asked[1] or 1} × {gpu}", int(asked[1] or 1), rate if config.precision == "bf16" else None, "data sheet", memory)


def vocabulary(config: Config) -> tuple[int, str]:
    """The size of the vocabulary as far as it is known without the text, and where it comes from, in words."""
    if config.model.vocab_size:
        return config.model.vocab_size, "model.vocab_size"
    if config.tokenizer.name == "gpt2":
        return 50257, "GPT-2's"
    if config.tokenizer.name == "bpe":
        return config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE, "fewer where the text is small"
    return ALPHABET, "assumed: the text is not read"


def measure(config: Config, rows: int, processes: int = 1) -> Memory:
    """The memory of a process that trains on `rows` sequences at once, by a step without contents; of a compiled model an estimate."""
    states, updates = [], []
    c, shape = config.model, (rows, config.model.block_size)
    counter = Counter(logits=rows * c.block_size * c.vocab_size)
    with FakeTensorMode(), attention_of(config.device):
        model = GPT(c)
        tokens = torch.zeros(shape, dtype=torch.int64)
        with counter:
            for micro_step in range(min(2, config.accumulate)):  # in the second the gradients of the first are there
                with autocast("cpu", config.precision):
                    logits, loss = model(tokens, tokens)
                if micro_step == 0:
                    activations, recomputed = counter.now[0], counter.recomputed()
                loss.backward()
            step = counter.most
            for part in shares(model, config, processes):
                optimizers, counter.most = build_optimizers(model, config, part), [0, 0]
                for optimizer in optimizers:
                    optimizer.step()
                states.append(sum(t.nbytes for optimizer in optimizers for tensors in optimizer.state.values() for t in tensors.values()))
                updates.append(max(0, sum(counter.most) - sum(counter.now)))
    gradients = sum(p.grad.nbytes for p in model.parameters())
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    update = max(updates) if processes == 1 else max(gradients, *updates)  # gradients are copied to be summed
    most = sum(step)
    if config.compile:  # the logits in the precision of the products, and their gradient in float32
        activations, logits_most = activations - recomputed, logits.nbytes + 4 * logits.numel()
        most = activations + logits_most + (gradients if config.accumulate > 1 else 0)
    else:
        logits_most = step[1]
    return Memory(weights, gradients, max(states), activations, logits_most, update, weights + max(states) + max(most, gradients + update),
                  sum(p.nbytes for p in model.parameters()) + sum(states))


class Counter(TorchDispatchMode):
    """Counts the bytes that the operations run within it allocate, until they are freed."""

    def __init__(self, logits: int):
        """`logits`: elements of a tensor that counts as logits."""
        super().__init__()
        self._logits, self._alive, self._in_products = logits, {}, set()  # storage → (bytes, whether logits)
        self.now = [0, 0]  # bytes of other things, of logits
        self.most = [0, 0]  # the same when their sum was largest

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in storages((args, kwargs))}
        if function.overloadpacket.__name__.startswith(PRODUCTS):
            self._in_products |= inputs | {storage._cdata for storage in storages(out)}
        for storage in storages(out):
            key = storage._cdata
            if key not in self._alive and key not in inputs:  # neither counted nor a view of what was there before
                self._alive[key] = storage.nbytes(), int(storage.nbytes() in (2 * self._logits, 4 * self._logits))
                self._count(key, 1)
                weakref.finalize(storage, self._freed, key)
        if sum(self.now) > sum(self.most):
            self.most = list(self.now)
        return out

    def recomputed(self) -> int:
        """Bytes alive, logits left out, that a compiled model would not keep."""
        return sum(size for key, (size, logits) in self._alive.items() if key not in self._in_products and not logits)

    def _count(self, key: int, sign: int) -> None:
        size, logits = self._alive[key]
        self.now[logits] += sign * size

    def _freed(self, key: int) -> None:
        self._count(key, -1)
        del self._alive[key]
        self._in_products.discard(key)


def storages(tree) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


@contextmanager
def attention_of(device: str) -> Iterator[None]:
    """Attention as the device computes it, though the step runs as on a CPU: others have no use for `short_attention`."""
    short = architecture.SHORT
    architecture.SHORT = short if device == "cpu" else 0
    try:
        yield
    finally:
        architecture.SHORT = short


def matmul_rate(device: str, precision: str, size: int = 2048, seconds: float = 0.5) -> float:
    """Floating-point operations per second of a size × size matrix product here: the median of so many seconds."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16 if precision == "bf16" else torch.float32) for _ in range(2))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        synchronize(device)
        began = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size ** 3 / sorted(times[2:])[len(times[2:]) // 2]  # the first ones warm up


def memory_here(device: str) -> float | None:
    """Bytes of memory of the device, None where nobody says."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number > 1 else ''}"


def size(number: float) -> str:
    """Bytes for people."""
    unit, scale = next((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B ", 1)) if number >= scale or scale == 1)
    return f"{number / scale:>7.3g} {unit}"


def duration(seconds: float) -> str:
    unit, scale = next((unit, scale) for unit, scale in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
                       if seconds >= 1.5 * scale or scale == 1)
    return f"{seconds / scale:,.2g} {unit}" if seconds < 100 * scale else f"{seconds / scale:,.0f} {unit}"
