"""Side-by-side measurements, each a command that prints a table and can write JSON: `python -m
benchmarks.NAME help=true`.

Whatever is compared runs in turns on one machine, each time in a process of its own. The ratios are
the result.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]


def options(argv: list[str], doc: str, **defaults) -> dict:
    """The `key=value` arguments as the types of their defaults; the others under "rest".

    Ends the process after printing `doc` for help=true, or with a sentence for a wrong type.
    """
    given = {**defaults, "json": "", "rest": []}
    for arg in argv:
        key, _, value = arg.partition("=")
        if key == "help":
            print(doc)
            sys.exit(0)
        if key not in given or key == "rest":
            given["rest"].append(arg)
            continue
        try:
            given[key] = type(given[key])(value)
        except ValueError:
            sys.exit(f"error: {arg} is not a {'whole ' * isinstance(given[key], int)}number")
    return given


def chosen(names: str, known: dict) -> dict:
    """Those of the known that the comma-separated names pick."""
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        sys.exit(f"error: {unknown[0]} is not one of {', '.join(known)}")
    return {name: known[name] for name in names.split(",")}


def apart(function: Callable[..., dict], *args) -> dict:
    """What function(*args) returns in a fresh process, with the most memory that this process held,
    in bytes, as "memory"."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_memory, function, *args).result()


def _with_memory(function: Callable[..., dict], *args) -> dict:
    import torch

    result = function(*args)
    if torch.cuda.is_available():
        return {**result, "memory": torch.cuda.max_memory_allocated()}
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**result, "memory": peak * (1 if sys.platform == "darwin" else 1024)}


def seconds_per(
    step: Callable[[], None],
    seconds: float,
    wait: Callable[[], None] = lambda: None,
    together: int = 1,
) -> float:
    """The median time of a step, of at least 3 and of as many as fit into the seconds, after two
    that are not counted; of so many `together` where a device should never wait for the host."""
    for _ in range(2):
        step()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        wait()
        began = time.perf_counter()
        for _ in range(together):
            step()
        wait()
        times.append((time.perf_counter() - began) / together)
    return sorted(times)[len(times) // 2]


def write_json(path: str, result: dict) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
