"""The table of benchmarks.gpu, in Markdown."""

from typing import Any, NamedTuple

from benchmarks.harness import BYTES_PER_MB
from benchmarks.scaling import SINGLE_PROCESS_NAMES
from benchmarks.speedrun import format_times
from benchmarks.variants import describe_row
from common.text import pluralize

TARGET_LOSSES = ("1.4697", "1.44")  # nanoGPT's published loss, and a lower one


class TableRow(NamedTuple):
    """One line of the table."""

    label: str
    text: str


def markdown_table(result: dict[str, Any]) -> str:
    """Return the results of `benchmarks.gpu.main` as a title and a table."""
    cuda = f", CUDA {result['cuda']}" if result["cuda"] else ""
    lines = [
        f"{result['machine']}, torch {result['torch']}{cuda}",
        "",
        "| part | measurement | result |",
        "|---|---|---|",
    ]
    for name, outcome in result["parts"].items():
        for number, row in enumerate(describe_outcome(name, outcome, result["processes"])):
            label = f"{name} ({outcome['seconds']:.0f} s)" if number == 0 else ""
            cells = [escape_cell(cell) for cell in (label, row.label, row.text)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def escape_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table: on one line, without column separators."""
    return " ".join(text.split()).replace("|", "\\|")


def describe_outcome(part: str, outcome: dict[str, Any], processes: int) -> list[TableRow]:
    """Return what `run_part` returned as lines of the table.

    Args:
        part: Name of the part.
        outcome: Its result, error or reason for skipping.
        processes: Number of processes that torchrun can start on the machine.
    """
    rows = []
    if "skipped" in outcome:
        rows.append(TableRow("skipped", outcome["skipped"]))
    if "result" in outcome:
        rows += describe_result(part, outcome["result"])
        if part == "processes" and processes == 1:
            rows.append(TableRow("several processes", "skipped: the machine has one GPU"))
    if "error" in outcome:
        rows.append(TableRow("FAILED", outcome["error"]))
    return rows


def describe_result(part: str, result: Any) -> list[TableRow]:
    """Return a part's result as lines of the table."""
    describe = {
        "tests": _describe_tests,
        "variants": _describe_variants,
        "processes": _describe_processes,
        "quality": _describe_quality,
        "decoding": _describe_decoding,
    }
    return describe.get(part, _describe_training)(result)


def _describe_tests(result: dict[str, Any]) -> list[TableRow]:
    failed = result["failed"]
    counts = f"{result['passed']} passed, {len(failed)} failed, {result['skipped']} skipped"
    return [
        TableRow("marked gpu", counts),
        *(TableRow(name, message) for name, message in failed.items()),
    ]


def _describe_training(result: dict[str, Any]) -> list[TableRow]:
    peak = result["published_flops"]
    table_rows = []
    for name, row in next(iter(result["sizes"].values()), {}).items():
        mfu = ""
        if peak is not None and row["precision"] == "bf16":
            mfu = f"MFU {row['flops_per_second'] / peak:.0%}, "
        speed = (
            f"{row['tokens_per_second']:,.0f} tok/s ({row['ratio']:.2f}x), {mfu}"
            f"{row['share_of_matmul']:.0%} of the matrix rate"
        )
        table_rows.append(TableRow(name, speed))
    for name, row in result.get("memory", {}).items():
        measured, estimated = row["measured"] / BYTES_PER_MB, row["estimated"] / BYTES_PER_MB
        memory = f"{measured:,.0f} MB, estimated {estimated:,.0f} ({row['ratio']:.2f}x)"
        table_rows.append(TableRow(f"{name}, memory", memory))
    return table_rows


def _describe_variants(result: dict[str, Any]) -> list[TableRow]:
    return [TableRow(name, describe_row(row)) for name, row in result["rows"].items()]


def _describe_processes(result: dict[str, dict]) -> list[TableRow]:
    table_rows = []
    for name, row in result.items():
        size, optim, processes, method = name.split()
        if processes == "1":
            method = SINGLE_PROCESS_NAMES[method]
        label = f"{size}, {optim}, {pluralize(int(processes), 'process')}: {method}"
        speed = (
            f"{1000 * row['seconds']:,.1f} ms per step, {row['of_ddp']:.2f}x DDP, "
            f"{row['memory'] / BYTES_PER_MB:,.0f} MB"
        )
        table_rows.append(TableRow(label, speed))
    return table_rows


def _describe_quality(result: dict[str, list[dict]]) -> list[TableRow]:
    ((name, runs),) = result.items()
    table_rows = []
    for target in TARGET_LOSSES:
        times = format_times(run["seconds_to"][target] for run in runs)
        table_rows.append(TableRow(f"{name}, to {target}", times))
    losses = ", ".join(f"{run['loss']:.4f}" for run in runs)
    return [*table_rows, TableRow(f"{name}, final loss", losses)]


def _describe_decoding(result: dict[str, Any]) -> list[TableRow]:
    table_rows = []
    for row in result["decoding"]:
        speed = (
            f"{row['glassgpt']:,.0f} tok/s in {row['dtype']}, {row['ratio']:.1f}x transformers in "
            f"float32, {row['glassgpt'] / row['bound']:.0%} of the memory bound"
        )
        table_rows.append(TableRow(f"{row['size']}, batch {row['batch']}", speed))
    return table_rows
