"""How fast text of any size becomes BPE tokens, and in how much memory.

    python -m benchmarks.preparing [megabytes=10,100,1000] [vocab_size=2048] [json=FILE]

The text is made up, the same each time: lines of Python's standard library in random order. Each
size is prepared in a process of its own, on all cores, and deleted afterwards; the largest needs
twice its size on the disk.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import cli
from benchmarks import apart, options, write_json
from config import DataConfig, TokenizerConfig
from data.sources import find_stdlib_files


def generate(path: Path, size: int) -> None:
    """Write about `size` bytes of text."""
    lines = [
        line
        for file in find_stdlib_files()[::10]
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True)
    ]
    choose, done = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while done < size:
            done += file.write("".join(choose.choices(lines, k=10_000)))


def measure(path: str, cache: str, vocab_size: int) -> dict:
    os.environ["GLASSGPT_CACHE"] = cache
    from data.tokens import prepare

    began = time.perf_counter()
    tokens = prepare(
        DataConfig(source="text", path=path), TokenizerConfig("bpe", vocab_size), lambda line: None
    )
    return {
        "seconds": time.perf_counter() - began,
        "bytes": tokens.bytes,
        "tokens": len(tokens.train) + len(tokens.val),
    }


def main(argv: list[str]) -> list[dict]:
    given = options(argv, __doc__, megabytes="10,100,1000", vocab_size=2048)
    result, cores = [], os.cpu_count() or 1
    for size in given["megabytes"].split(","):
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder, "text.txt"), int(float(size) * 1e6))
            result.append(
                apart(
                    measure,
                    str(Path(folder, "text.txt")),
                    str(Path(folder, "cache")),
                    given["vocab_size"],
                )
            )
    table = Table(title=f"text to BPE tokens, vocabulary {given['vocab_size']:,}, {cores} cores")
    for column in ("MB", "seconds", "MB a minute", "a core", "most memory, MB"):
        table.add_column(column, justify="right")
    for row in result:
        rate = row["bytes"] / 1e6 / row["seconds"] * 60
        table.add_row(
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['seconds']:.1f}",
            f"{rate:,.0f}",
            f"{rate / cores:,.0f}",
            f"{row['memory'] / 1e6:,.0f}",
        )
    Console().print(table)
    write_json(given["json"], result)
    return result


if __name__ == "__main__":
    cli.start(lambda: main(sys.argv[1:]), lambda: __doc__)
