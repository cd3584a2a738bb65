"""Read what torchrun, or another launcher, has set for torch.distributed. Does not import torch."""

import os


def count_processes(alone: bool) -> int:
    """Return the number of processes that were started for a run, unless it is to have one."""
    return int(os.environ["WORLD_SIZE"]) if _has_rank() and not alone else 1


def process_rank() -> int:
    """Return the number of this process among those of a run; 0 if it was started alone."""
    return int(os.environ["RANK"]) if _has_rank() else 0


def _has_rank() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()
