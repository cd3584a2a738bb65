"""Read what torchrun told this process when it started it. Does not import torch."""

import os


def count_processes(alone: bool) -> int:
    """Return the number of processes that torchrun started for a run, unless it is to have one."""
    return 1 if alone or not is_under_torchrun() else int(os.environ["WORLD_SIZE"])


def process_rank() -> int:
    """Return this process's rank under torchrun, or 0 without torchrun."""
    return int(os.environ["RANK"]) if is_under_torchrun() else 0


def is_under_torchrun() -> bool:
    """True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
