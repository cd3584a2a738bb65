"""Shared by all benchmarks: options, separate processes and timing."""

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from common.errors import UserError, did_you_mean, not_one_of
from common.terminal import command
from common.wait_policy import choose_wait_policy
from config import GPTConfig

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 2
MIN_TIMED_STEPS = 3
BYTES_PER_MB = 2**20
# Sizes of the square matrices that are multiplied to measure a device's rate; the fastest product
# counts. On a CPU the small ones are rarely interrupted, and the large one occupies many cores.
CPU_MATRIX_SIZES = (256, 512, 1024)
GPU_MATRIX_SIZES = (8192,)
SECONDS_PER_SIZE = 0.05


@dataclass
class PassThroughOptions:
    """Options of a benchmark that passes other arguments on to the runs that it starts."""

    settings: list[str] = field(default_factory=list)


class TrainingShape(NamedTuple):
    """Shape of a model that is trained, and of its batches."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int  # sequences per step, over all processes
    vocab_size: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch."""
        return self.batch_size * self.block_size

    def model_config(self, bias: bool = False) -> GPTConfig:
        """Return the settings of the model."""
        return GPTConfig(
            self.vocab_size,
            block_size=self.block_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            bias=bias,
        )


AnyOptions = TypeVar("AnyOptions")
Value = TypeVar("Value")
Result = TypeVar("Result")


class ProcessResult(NamedTuple):
    """The result of a function that ran in a separate process, and that process's peak memory."""

    value: Any
    peak_memory: int  # bytes


def read_options(argv: list[str], kind: type[AnyOptions]) -> AnyOptions:
    """Read KEY=VALUE arguments into a dataclass, whose defaults are texts or numbers.

    Arguments that are none of its fields become `settings` of a `PassThroughOptions`. Raises
    `UserError` if an argument is unknown, or not a number.
    """
    fields = [f for f in dataclasses.fields(cast(Any, kind)) if f.name != "settings"]
    types: dict[str, Callable[[str], Any]] = {f.name: type(f.default) for f in fields}
    values: dict[str, Any] = {}
    settings: list[str] = []
    for argument in argv:
        key, _, text = argument.partition("=")
        if key not in types:
            settings.append(argument)
            continue
        try:
            values[key] = types[key](text)
        except ValueError:
            number = "a whole number" if types[key] is int else "a number"
            raise UserError(f"{argument} is not {number}; give {key}=NUMBER") from None
    if issubclass(kind, PassThroughOptions):
        return kind(settings=settings, **values)
    if settings:
        argument = settings[0]
        hint = did_you_mean(argument.partition("=")[0], types)
        raise UserError(f"{argument} is not an option; use one of {', '.join(types)}{hint}")
    return kind(**values)


def select(key: str, names: str, choices: Mapping[str, Value]) -> dict[str, Value]:
    """Return the choices that comma-separated names pick; raise `UserError` for another name."""
    for name in names.split(","):
        if name not in choices:
            raise UserError(not_one_of(key, name, choices))
    return {name: choices[name] for name in names.split(",")}


def run_in_process(function: Callable[..., Any], *args: Any) -> ProcessResult:
    """Call a function of a module in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call_and_measure_memory, function, *args).result()


def _call_and_measure_memory(function: Callable[..., Any], *args: Any) -> ProcessResult:
    import torch

    from training.device import peak_memory

    value = function(*args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ProcessResult(value, peak_memory(device) or 0)


def median_step_seconds(
    step: Callable[[], object],
    seconds: float,
    synchronize: Callable[[], object] = lambda: None,
    steps_per_timing: int = 1,
) -> float:
    """Return the median time of a step in seconds, of timings that take at least `seconds`.

    `synchronize` waits until the device has finished; a device that should never wait for the host
    needs more than one step between two of its calls.
    """
    for _ in range(WARM_UP_STEPS):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < MIN_TIMED_STEPS or time.perf_counter() < end:
        synchronize()
        start = time.perf_counter()
        for _ in range(steps_per_timing):
            step()
        synchronize()
        times.append((time.perf_counter() - start) / steps_per_timing)
    return sorted(times)[len(times) // 2]


def measure_matmul_rate(device: str, precision: str) -> float:
    """Measure the operations per second of the fastest matrix product on a device."""
    import torch

    from kernels import DTYPES
    from training.device import synchronize

    rate = 0.0
    for size in GPU_MATRIX_SIZES if device.startswith("cuda") else CPU_MATRIX_SIZES:
        a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
        now = time.perf_counter()
        end = now + SECONDS_PER_SIZE
        while now < end:
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, a)
            synchronize(device)
            now = time.perf_counter()
            rate = max(rate, 2 * size**3 / (now - start))
    return rate


def run_command(main: Callable[[list[str]], object], doc: str | None) -> None:
    """Run a benchmark's `main` with the command line, or print its module's docstring as help."""
    argv = sys.argv[1:]
    if any(argument.partition("=")[0] in ("help", "--help", "-h") for argument in argv):
        print(doc)
    else:
        choose_wait_policy(print)  # of all processes that are started
        with command(lambda: doc or ""):
            main(argv)
