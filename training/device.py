"""Device, precision, compiler and memory of this machine; the random state of a micro-step."""

import ctypes
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from cli import first_line
from common.errors import UserError
from config import MIN_BF16_DECODING_WIDTH, Config
from model import GPT

# Read by cuBLAS before its first product; without it deterministic=true has none to offer.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Options of glibc's malloc, by their numbers there: bytes from which memory is asked of the system
# for each tensor, and free bytes from which it is given back.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = (-3, 32 << 20), (-1, 1 << 30)


def pick_device(device: str, processes: int = 1) -> str:
    """The device named, or for `auto` the best here; each process gets a GPU of its own."""
    if device == "auto":
        mps = processes == 1 and torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if processes > 1 and device not in ("cpu", "cuda"):
        raise UserError(
            f"device={device} is for one process, and there are {processes}: "
            "use device=cuda, which gives each a GPU, or device=cpu"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(
            f"device={device} is not available here ({first_line(e)}): use device=auto"
        ) from None
    if processes > 1 and device == "cuda":
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise UserError(
                "torchrun started more processes than this machine has GPUs "
                f"({torch.cuda.device_count()}): lower --nproc-per-node"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # which "cuda" then means
    return device


def pick_precision(precision: str, device: str) -> str:
    """The precision named, or for `auto` bf16 where the hardware multiplies it faster."""
    if precision != "auto":
        return precision
    return "bf16" if bf16_is_fast(device) else "fp32"


def bf16_is_fast(device: str) -> bool:
    """Whether the hardware multiplies bf16 faster than fp32: newer GPUs, AMX, AMD's AVX512-BF16."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    with suppress(OSError):  # Linux lists the processor's flags
        told = Path("/proc/cpuinfo").read_text()
        amd = "AuthenticAMD" in told  # Intel's AVX512-BF16 alone is slower than float32 (LOG.md)
        return device == "cpu" and ("amx_bf16" in told or (amd and "avx512_bf16" in told))
    return False


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler, which it needs for GPUs too."""
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")  # that torch looks for
    return any(shutil.which(name) for name in names if name)


def set_up(config: Config) -> None:
    """Set what a run's arithmetic and memory depend on in this process.

    On a GPU `deterministic` takes sums in one order, and torch refuses what it has no such kernel
    for. On a CPU threads of compiled code would add up an embedding's gradient in any order.

    glibc gives larger tensors back to the system, which clears each page before it comes again: a
    seventh of the time of a small model's step (LOG.md). Other C libraries have no such setting."""
    compiled_here = config.compile and config.device == "cpu"
    torch.use_deterministic_algorithms(
        config.deterministic or compiled_here, warn_only=not config.deterministic
    )
    torch.utils.deterministic.fill_uninitialized_memory = False
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(*option)


def for_sampling(model: GPT, device: str, precision: str = "auto") -> GPT:
    """The model moved to the device, its weights in the precision that decodes fastest there.
    Decoding is bound by reading the weights, and bf16 halves them; on a CPU each product in bf16
    costs some ten microseconds more, so that narrow models are faster in float32 (LOG.md)."""
    if precision == "auto":
        wide = not device.startswith("cpu") or model.config.n_embd >= MIN_BF16_DECODING_WIDTH
        precision = "bf16" if wide and bf16_is_fast(device) else "fp32"
        if not wide:  # threads that wait for a core among others' take 40 times as long (LOG.md)
            torch.set_num_threads(1)
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def memory_here(device: str) -> float | None:
    """Bytes of memory of the device, None where nobody says."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read next counts what it has done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int = 0) -> None:
    """Set torch's random state, which dropout draws from, by where the run stands: no state has to
    be saved, and what observes the run cannot shift it."""
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
