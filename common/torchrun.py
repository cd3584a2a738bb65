"""Read what torchrun told this process when it started it. Does not import torch."""

import os


def count_processes(alone: bool) -> int:
    """Return the number of processes that torchrun started for a run, unless it is to have one."""
    is_alone = alone or "TORCHELASTIC_RUN_ID" not in os.environ
    return 1 if is_alone else int(os.environ["WORLD_SIZE"])
