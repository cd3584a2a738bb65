"""Speed and memory of turning text into BPE tokens.

    python -m benchmarks.preparing [megabytes=10,100,1000] [vocab_size=2048]

The text is generated, the same at each call: lines of Python's standard library in random order.
Each size is prepared in a new process on all cores and then deleted. The largest one needs twice
its size on the disk.
"""

import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness import read_options, run_command, run_in_process
from config import DataConfig, TokenizerConfig
from data.sources import find_stdlib_files

LINES_PER_DRAW = 10_000
BYTES_PER_MEGABYTE = 1e6


@dataclass
class PreparingOptions:
    """Options of this benchmark."""

    megabytes: str = "10,100,1000"
    vocab_size: int = 2048


class PreparingResult(NamedTuple):
    """Time for preparing one text, and the most memory of the process."""

    seconds: float
    bytes: int
    memory: int = 0  # bytes


def generate_text(path: Path, size: int) -> None:
    """Write about `size` bytes of text."""
    lines = [
        line
        for file in find_stdlib_files()[::10]
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True)
    ]
    rng = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            written += file.write("".join(rng.choices(lines, k=LINES_PER_DRAW)))


def measure_preparing(path: str, cache: str, vocab_size: int) -> PreparingResult:
    """Prepare a text in an empty cache."""
    os.environ["GLASSGPT_CACHE"] = cache
    from data.tokens import prepare

    start = time.perf_counter()
    data, tokenizer = DataConfig(source="text", path=path), TokenizerConfig("bpe", vocab_size)
    tokens = prepare(data, tokenizer, lambda line: None)
    return PreparingResult(time.perf_counter() - start, tokens.size.bytes)


def main(argv: list[str]) -> list[PreparingResult]:
    """Measure every size, print a table and return its figures."""
    options = read_options(argv, PreparingOptions)
    results = []
    for megabytes in options.megabytes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            text, cache = Path(folder, "text.txt"), Path(folder, "cache")
            generate_text(text, int(float(megabytes) * BYTES_PER_MEGABYTE))
            result, memory = run_in_process(
                measure_preparing, str(text), str(cache), options.vocab_size
            )
            results.append(result._replace(memory=memory))
    Console().print(make_table(results, options.vocab_size))
    return results


def make_table(results: list[PreparingResult], vocab_size: int) -> Table:
    """Show what each size took."""
    cores = os.cpu_count() or 1
    table = Table(title=f"Text to BPE tokens, vocabulary {vocab_size:,}, {cores} cores")
    for column in ("MB", "seconds", "MB per minute", "per core", "peak memory, MB"):
        table.add_column(column, justify="right")
    for result in results:
        megabytes = result.bytes / BYTES_PER_MEGABYTE
        rate = megabytes / result.seconds * 60
        table.add_row(
            f"{megabytes:,.0f}",
            f"{result.seconds:.1f}",
            f"{rate:,.0f}",
            f"{rate / cores:,.0f}",
            f"{result.memory / BYTES_PER_MEGABYTE:,.0f}",
        )
    return table


if __name__ == "__main__":
    run_command(main, __doc__)
