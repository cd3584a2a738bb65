"""Device, precision, compiler and memory of this machine; the random state of a micro-step."""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.launcher import process_rank
from common.limits import count_processors, memory_limit
from common.terminal import error_sentence
from common.text import pluralize
from config import ResolvedConfig
from kernels import DTYPES
from model import GPT

# cuBLAS reads this before its first product; deterministic=true needs it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Narrower models decode faster in fp32, even on a CPU with bf16 instructions.
MIN_BF16_DECODING_WIDTH = 384
# Options of glibc's malloc, as (number of the option, bytes): the size from which a tensor gets
# memory of its own from the system, and the free memory from which some is returned to it.
M_MMAP_THRESHOLD = (-3, 32 << 20)
M_TRIM_THRESHOLD = (-1, 1 << 30)


def pick_device(device: str, processes: int = 1) -> str:
    """Return a usable device, for `auto` the fastest; several processes get a GPU each."""
    if device == "auto":
        device = "cpu"
        if torch.cuda.is_available():
            device = "cuda"
        elif processes == 1 and torch.backends.mps.is_available():
            device = "mps"
    if processes > 1 and device not in ("cpu", "cuda"):
        raise UserError(
            f"device={device} serves one process, but there are {processes}: use device=cuda, "
            "which gives each process a GPU, or device=cpu"
        )
    is_own_gpu = processes > 1 and device == "cuda"
    rank_here = process_rank() % max(1, torch.cuda.device_count())
    here = f"cuda:{os.environ.get('LOCAL_RANK', rank_here)}" if is_own_gpu else device
    try:
        torch.zeros(1, device=here).item()  # "meta" has no values
        if is_own_gpu:
            torch.cuda.set_device(here)  # from here on "cuda" means this process's GPU
    except (RuntimeError, AssertionError, ImportError) as e:
        several = " or fewer processes" if processes > 1 else ""
        reason = error_sentence(e).partition(". ")[0]  # torch lists all its backends after it
        raise UserError(
            f"device={device} is not available here ({reason}): use device=auto{several}"
        ) from None
    return device


def pick_precision(precision: str, device: str) -> str:
    """Return "fp32", "bf16" or "fp16"; "auto" becomes what the hardware multiplies fastest."""
    if precision != "auto":
        return precision
    if is_bf16_fast(device):
        return "bf16"
    # Compute capability 7, as V100 and T4, multiplies bf16 more slowly than float32.
    is_cuda = device.startswith("cuda")
    return "fp16" if is_cuda and torch.cuda.get_device_capability(device)[0] == 7 else "fp32"


def is_bf16_fast(device: str) -> bool:
    """Return whether the hardware multiplies bf16 faster than float32."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device != "cpu":
        return False
    with suppress(OSError):  # only Linux lists the processor's features in a file
        features = Path("/proc/cpuinfo").read_text()
        # Intel's AVX512-BF16 without AMX is slower than float32 (LOG.md).
        has_fast_avx512 = "AuthenticAMD" in features and "avx512_bf16" in features
        return "amx_bf16" in features or has_fast_avx512
    return False


def pick_threads(threads: int | str, processes: int) -> int:
    """Return the number of threads of each process. For several, their launcher has set it.

    "auto" is torch's number, or what a container may use if that is less and OMP_NUM_THREADS is
    not set.
    """
    if processes == 1 and not isinstance(threads, str):
        return threads
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return min(torch.get_num_threads(), count_processors())


def has_tf32(device: str) -> bool:
    """Return whether a device multiplies float32 in TF32: NVIDIA's from compute capability 8."""
    is_nvidia = device.startswith("cuda") and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= 8


def configure_process(config: ResolvedConfig) -> None:
    """Set what a run's arithmetic and memory depend on in this process; forget its peak memory.

    On a GPU, deterministic=true makes torch add in a fixed order, or refuse operations that cannot,
    and a run in float32 multiplies matrices in TF32: factors are rounded to 10 bits after the
    leading one, and products are summed in float32. On a CPU, compiled code is made deterministic,
    because its threads would add up an embedding's gradient in any order. glibc is kept from
    returning large tensors to the system, which took a seventh of a small model's step (LOG.md).
    """
    is_compiled_for_cpu = config.compile and config.device == "cpu"
    torch.use_deterministic_algorithms(
        config.deterministic or is_compiled_for_cpu, warn_only=not config.deterministic
    )
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(config.threads)
    uses_tf32 = config.precision == "fp32" and has_tf32(config.device)
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
    if config.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()  # of earlier jobs of a sweep
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(*option)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # of Linux: the resident memory's peak


@contextmanager
def default_settings() -> Iterator[None]:
    """Compute as torch does in a new process, whatever the program around it has set.

    Gradients are recorded, tensors are float32 on the CPU unless stated, and autocast is off.
    """
    with ExitStack() as settings:
        settings.enter_context(torch.inference_mode(False))
        settings.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda", "mps"):
            settings.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, False)
        settings.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)  # only an outer context would empty it
        if torch.get_default_device().type != "cpu":  # entering one slows down every call of torch
            settings.enter_context(torch.device("cpu"))
        settings.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def exact_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32, also where training multiplies them in TF32.

    TF32 has 10 bits after the leading one instead of 23.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def restored_process() -> Iterator[None]:
    """Compute in `default_settings`, and restore what `configure_process` and seeds change."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = torch.utils.deterministic.fill_uninitialized_memory
    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        # exact_float32 restores the precision, which configure_process may lower to TF32
        with torch.random.fork_rng(gpus), default_settings(), exact_float32():
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills_memory
        torch.set_num_threads(threads)


def move_for_sampling(model: GPT, device: str, precision: str = "auto") -> GPT:
    """Move a model to a device, with weights in the precision that decodes fastest there.

    Reading the weights limits decoding, and bf16 and fp16 halve it. On a CPU each bf16 product
    costs some ten microseconds more, so narrow models are faster in float32 (LOG.md).
    """
    is_narrow = device.startswith("cpu") and model.config.n_embd < MIN_BF16_DECODING_WIDTH
    threads = pick_threads("auto", processes=1)
    if precision == "auto":
        precision = "fp32" if is_narrow else pick_precision(precision, device)
        if is_narrow:  # several threads take up to 40 times as long on a busy machine (LOG.md)
            threads = 1
    torch.set_num_threads(threads)
    return model.to(device, DTYPES[precision])


def device_memory(device: str, processes: int) -> float | None:
    """Return the bytes that each process may use; a CPU's memory is shared. None if unknown."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return None
    memory = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit())
    return memory / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if processes > 1 else memory


def peak_memory(device: str) -> int | None:
    """Return the most bytes that this process has used since `configure_process`; None if unknown.

    On a GPU these are the bytes of tensors there, otherwise the memory resident in the machine,
    outside of Linux since the process began.
    """
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def synchronize(device: str) -> None:
    """Wait until the device has finished its work, so that a timer read next counts it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int = 0) -> None:
    """Seed torch's generators, which dropout draws from, by the position in the run.

    A checkpoint therefore needs no random state, and observing a run cannot change it.
    """
    state = np.random.SeedSequence((seed, step, micro_step, rank)).generate_state(1, np.uint64)[0]
    if torch.accelerator.is_available():
        torch.manual_seed(int(state >> 1))
    else:  # a fraction of the time of seeding all devices
        torch.default_generator.manual_seed(int(state >> 1))


def describe(device: str) -> str:
    """Return the device's name for the user."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {pluralize(torch.get_num_threads(), 'thread')})"
