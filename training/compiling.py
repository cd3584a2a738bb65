"""The model compiled, by a process beside the first steps.

    python -m training.compiling RUN_DIR ROWS     what that process runs
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from config import read_config
from model import GPT, autocast
from training.runtime import same_bits

ROOT = Path(__file__).parents[1]


class Builder:
    """A process that compiles the model of a run for micro-batches of so many sequences, and leaves
    the result in torch's cache on disk, from where `compile_model` has it in seconds.

    Used as a context manager, at whose end it is ended too. Up to then, or until it is waited for,
    this process leaves it a processor: threads that wait for each other would wait for it as well.
    """

    def __init__(self, run_dir: Path, rows: int):
        command = [sys.executable, "-m", "training.compiling", str(run_dir.resolve()), str(rows)]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=nothing, stdout=nothing,
                                         stderr=nothing)

    def __enter__(self):
        self._threads = torch.get_num_threads()
        torch.set_num_threads(max(1, self._threads - 1))
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        torch.set_num_threads(self._threads)

    def wait(self, between: Callable[[], None]) -> None:
        """Return when it is done; `between` is called meanwhile, and may raise."""
        torch.set_num_threads(self._threads)
        while self._process.poll() is None:
            between()
            time.sleep(0.1)


def main(run_dir: str, rows: str) -> None:
    config = read_config(Path(run_dir, "config.yaml"))
    # As `Batches` gives them: what is compiled is for their strides.
    tokens = torch.zeros(int(rows), config.model.block_size + 1, dtype=torch.long)
    compile_model(GPT(config.model), tokens[:, :-1], tokens[:, 1:], config.precision, print)


def compile_model(model: GPT, x: Tensor, y: Tensor, precision: str, say: Callable[[str], None],
                  graphs: bool = False) -> tuple[Callable, bool]:
    """The model compiled, tried on a micro-batch x, y (sequences, T) on its device, and True.

    Where that fails: a note, the model itself and False. `graphs`: a GPU's kernels are recorded as
    CUDA graphs and launched together.
    """
    device, ways = x.device.type, [{}]
    compile_to_same_bits(device)
    if graphs:
        ways.insert(0, {"mode": "reduce-overhead"})
    elif device == "cpu":  # kernels in two files, not in fifty: their headers take the time
        ways.insert(0, {"options": {"cpp_wrapper": True}})
    for way in ways:
        try:
            forward = torch.compile(model, **way)
            with same_bits(device), autocast(device, precision):
                for _ in range(3 if "mode" in way else 1):  # warm up, record, replay
                    forward(x, y)[1].backward()
            return forward, True
        except Exception as e:  # the compilers' errors have no common base; the run can go on
            torch.compiler.reset()
            problem = type(e).__name__
            if "mode" in way:
                say(f"CUDA graphs failed here ({problem}), so the run is compiled without")
        finally:
            model.zero_grad(set_to_none=True)
    say(f"torch.compile failed here ({problem}), so the run is eager")
    return model, False


def compile_to_same_bits(device: str) -> None:
    """On a CPU threads of compiled code would add up an embedding's gradient in any order."""
    if device == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


if __name__ == "__main__":
    main(*sys.argv[1:])
