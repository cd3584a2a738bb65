"""Device, precision, compilation and memory; the random state of a micro-step; stop signals."""

import ctypes
import os
import platform
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cli import first_line, is_memory_error
from config import Config, UserError
from model import GPT
from training.int8 import quantize

# Floating-point operations of a whole run from which compiling pays, and what it costs and saves.
# Measured on CPUs (LOG.md), a guess for GPUs.
COMPILE_PAYS = {"cpu": (1e14, "a minute or two once, then 1.1 to 1.3 times the speed"),
                "cuda": (1e16, "perhaps a minute once, then faster steps")}
# Operations of the steps that a CPU takes uncompiled meanwhile. More would show more of a run that
# is compiled for the first time, and slow down all later ones.
MEANWHILE = 1e12
# How cuBLAS adds up in one order, read before its first product: needed for the same bits on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Options of glibc's malloc, by their numbers there: bytes from which memory is asked of the system
# for each tensor, and free bytes from which it is given back.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = (-3, 32 << 20), (-1, 1 << 30)
# Width of a model from which a CPU that multiplies bf16 fast decodes faster in it.
BF16_DECODES_FROM = 384


def pick_device(device: str) -> str:
    """The device named, or for `auto` the best one here.

    Raises:
        UserError: it is not to be had here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device={device} is not available here ({first_line(e)}): "
                        "use device=auto") from None
    return device


def resolve_device(config: Config, processes: int = 1) -> Config:
    """The configuration with what `device=auto` and `precision=auto` become on this machine; each
    of several processes gets a GPU of its own.

    By capability and never by a timing, so that the same machine gives the same bits.

    Raises:
        UserError: the device asked for is not to be had here, or not by several processes.
    """
    device, precision = config.device, config.precision
    if processes > 1 and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if processes > 1 and device not in ("cpu", "cuda"):
        raise UserError(f"device={device} is for one process, and there are {processes}: "
                        "use device=cuda, which gives each a GPU, or device=cpu")
    device = pick_device(device)
    if processes > 1 and device == "cuda":
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise UserError("torchrun started more processes than this machine has GPUs "
                            f"({torch.cuda.device_count()}): lower --nproc-per-node")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # which "cuda" then means
    if precision == "auto":
        precision = "bf16" if bf16_is_fast(device) else "fp32"
    return replace(config, device=device, precision=precision)


def resolve_size(config: Config, processes: int, steps_done: int) -> tuple[Config, int, str]:
    """The configuration with what `shard`, `compile` and `eager_steps` become for a model of this
    size where they are "auto"; its parameters; why it is compiled or not.

    Raises:
        UserError: the weights, and in training their gradients, exceed the memory here. A system
            that promises more memory than it has would end the process without a word.
    """
    parameters, flops = model_size(config)
    here = local_processes(processes)
    there = memory_here(config.device)
    if there and config.device == "cpu":
        there /= here
    if config.shard == "auto":
        config = replace(config, shard=smallest_shard(config, parameters, there, processes, here))
    needed = (4 if config.eval_only else 8) * parameters / config.shard
    if there and needed > there:
        raise too_little_memory(config, f"{there / 1e9:,.1f} GB, and the weights and their "
                                        f"gradients alone need {needed / 1e9:,.1f}")
    why, eagerly = "", config.eager_steps
    if config.compile == "auto":
        step_flops = flops * config.batch_size * config.model.block_size / processes
        pays, why = compile_pays(config.device, step_flops * (config.max_steps - steps_done))
        config = replace(config, compile=pays)
        if eagerly == "auto" and pays:
            eagerly = eager_steps(step_flops)
    compiled = config.compile and not config.eval_only
    beside = compiled and config.device == "cpu" and processes == 1  # where Builder compiles for
    eagerly = eagerly if beside and eagerly != "auto" else 0
    return replace(config, compile=compiled, eager_steps=eagerly), parameters, why


def model_size(config: Config) -> tuple[int, int]:
    """Parameters, and operations a token, of a model that is not made: counted for one layer and
    for two, as a deep model takes long even without memory."""
    with torch.device("meta"), enough_memory(config):
        one, two = (GPT(replace(config.model, n_layer=n)) for n in (1, 2))
    more = config.model.n_layer - 1
    return tuple(a + more * (b - a) for a, b in
                 ((one.num_parameters(), two.num_parameters()),
                  (one.flops_per_token(), two.flops_per_token())))


def local_processes(processes: int) -> int:
    """How many of the run's processes are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if processes > 1 else 1


def smallest_shard(config: Config, parameters: int, memory: float | None, processes: int,
                   of_a_machine: int) -> int:
    """Over how few processes the model must be sharded to fit `memory` bytes of each, with its
    gradients and the optimizer's state, beside the activations: those of a machine first."""
    c = config.model
    tokens = config.micro_batch(processes) * c.block_size
    # Bytes that a step keeps of each token and layer, and of its logits: docs/scaling.md.
    kept = tokens * (42 * c.n_layer * c.n_embd + 14 * c.vocab_size)
    whole = 8 * c.vocab_size * c.n_embd  # the embedding and its gradient, not resharded in a step
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    for shard in sorted(divisors, key=lambda n: (n > of_a_machine, n)):
        if memory is None or 16 * parameters / shard + kept + whole * (shard > 1) < 0.9 * memory:
            return shard
    return processes


def bf16_is_fast(device: str) -> bool:
    """Whether the hardware multiplies bf16 faster than fp32: newer GPUs, AVX512-BF16, AMX."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    return device == "cpu" and bool({"avx512_bf16", "amx_bf16"} & processor_flags())


def for_sampling(model: GPT, device: str, precision: str = "auto",
                 quantized: str = "none") -> GPT:
    """The model moved to the device, its weights in the precision that decodes fastest there.

    Decoding is bound by reading the weights, and bf16 halves them; on a CPU each product in bf16
    costs some ten microseconds more, so that narrow models are faster in float32 (LOG.md).
    `quantized` "int8" halves the matrices once more, and all else is bf16.

    Raises:
        UserError: the device has no product with int8 weights.
    """
    if quantized == "int8":
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise UserError(f"quantize=int8 is for device=cpu and cuda, and this is {device}: "
                            "leave quantize out, or use device=cpu")
        quantize(model)  # from the finest weights
        precision = "bf16"
    if precision == "auto":
        wide = not device.startswith("cpu") or model.config.n_embd >= BF16_DECODES_FROM
        precision = "bf16" if wide and bf16_is_fast(device) else "fp32"
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def processor_flags() -> set[str]:
    """The processor's feature flags, where Linux lists them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    return set()


def compile_pays(device: str, flops: float) -> tuple[bool, str]:
    """Whether `compile=auto` compiles a run of so many floating-point operations, and why."""
    kind = device.partition(":")[0]
    if kind not in COMPILE_PAYS:
        return False, f" (torch.compile is not used on {kind})"
    enough, costs = COMPILE_PAYS[kind]
    if flops < enough:
        return False, " (the run is too short to compile)"
    if not has_compiler():
        return False, " (no C++ compiler here)"
    return True, f" (compiling costs {costs})"


def eager_steps(step_flops: float) -> int:
    """Steps that are taken while the model is compiled, of so many operations each: a number that
    does not depend on how long that takes, so that a run has the same bits each time."""
    return round(MEANWHILE / step_flops)


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler, which it needs for GPUs too."""
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")  # that torch looks for
    return any(shutil.which(name) for name in names if name)


def graphs_are_safe(config: Config) -> bool:
    """Whether a compiled step may be replayed as CUDA graphs. A second micro-step would overwrite
    the first one's gradients, which graphs keep in memory of their own."""
    return config.device.startswith("cuda") and config.accumulate == 1


@contextmanager
def same_bits(device: str) -> Iterator[None]:
    """On a GPU, sums in one order for a while: else flash attention's gradients and an embedding's
    differ from run to run. torch refuses what it has no such kernel for."""
    strict = device.startswith("cuda")
    before = torch.are_deterministic_algorithms_enabled()
    if strict:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(before)


def memory_here(device: str) -> float | None:
    """Bytes of memory of the device, None where nobody says."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def enough_memory(config: Config) -> Iterator[None]:
    """Turn what torch and Python raise for want of memory into a `UserError` on what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as e:
        if is_memory_error(e):
            raise too_little_memory(config, first_line(e)[:200]) from None
        raise


def too_little_memory(config: Config, why: str) -> UserError:
    model = config.model
    return UserError(
        f"there is too little memory on {config.device} ({why}): raise "
        f"accumulate={config.accumulate}, which splits batch_size={config.batch_size}, or lower "
        f"model.n_layer={model.n_layer}, model.n_embd={model.n_embd} "
        f"or model.block_size={model.block_size}")


def keep_freed_memory() -> None:
    """Have steps on a CPU use the memory that the ones before freed.

    glibc gives larger tensors back to the system, which clears each page before it comes again:
    a seventh of the time of a small model's step (LOG.md). Other C libraries have no such setting.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(*option)


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read next counts what it has done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int = 0) -> None:
    """Set torch's random state, which dropout draws from, by where the run stands.

    So no state has to be saved, and what observes the run between two micro-steps cannot shift it.
    """
    state = np.random.SeedSequence((seed, step, micro_step, rank)).generate_state(1, np.uint64)[0]
    if torch.accelerator.is_available():
        torch.manual_seed(int(state >> 1))
    else:  # which takes a fraction of the time
        torch.default_generator.manual_seed(int(state >> 1))


def describe(device: str) -> str:
    """The device in words, for the user."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def numerics_id(config: Config, processes: int = 1) -> str:
    """What the last bits of a result depend on besides the configuration, in words."""
    machine = describe(config.device)
    if processes > 1:
        machine = f"{processes} of {machine}"
    return (f"{machine}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
            f"{config.precision}")


class Stopped(Exception):
    """A signal asked the run to end, with `exit_status` 130 or 143."""

    def __init__(self, exit_status: int):
        super().__init__(exit_status)
        self.exit_status = exit_status


class StopSignal:
    """Notes Ctrl-C and SIGTERM, for which the run looks with `check`; twice Ctrl-C ends at once.

    Used as a context manager. `exit_status` is None until a signal came, then 130 or 143.
    `save_asked` becomes true with SIGUSR1, by which Slurm and others warn: save, and continue.
    """

    def __init__(self):
        self.exit_status, self.save_asked = None, False

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            numbers.append(signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_):
        if self.exit_status is not None:
            # Python drops its own handlers as it ends, and torchrun signals who is still ending.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Stopped` where a signal came."""
        if self.exit_status is not None:
            raise Stopped(self.exit_status)

    def _note(self, number, frame):
        if number == getattr(signal, "SIGUSR1", None):
            self.save_asked = True
        elif number == signal.SIGINT and self.exit_status is not None:
            os._exit(130)
        else:
            self.exit_status = 128 + number
