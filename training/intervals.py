"""The steps at which a run evaluates, saves, looks at its heads and generates a sample text."""

from config import Config


def is_due(every: int, step: int, config: Config, first: int = 0) -> bool:
    """Return whether an activity is due.

    It is at multiples of `every` (0: none), at the last step, and at `first`, 2 * `first`,
    4 * `first` and so on below `every` (0: none).
    """
    is_early = first > 0 and step < every and is_doubling(step, first)
    return is_early or step == config.max_steps or (every > 0 and step % every == 0)


def is_doubling(step: int, first: int) -> bool:
    """Return whether a step is `first`, 2 * `first`, 4 * `first` or a later doubling."""
    return step % first == 0 and (step // first).bit_count() == 1


def is_evaluation_due(step: int, config: Config) -> bool:
    """Return whether the validation loss is measured at a step."""
    return is_due(config.eval.every, step, config, config.eval.first)


def is_snapshot_due(step: int, config: Config) -> bool:
    """Return whether a snapshot of attention is due at a step, whatever the heads do."""
    return is_due(config.attention.every, step, config, config.attention.first)


def is_attention_due(step: int, config: Config) -> bool:
    """Return whether a snapshot of attention is due, or a check for an extra one."""
    every, check_every = config.attention.every, config.attention.check_every
    return is_snapshot_due(step, config) or (every > 0 and is_due(check_every, step, config))


def is_grid_due(step: int, config: Config) -> bool:
    """Return whether the snapshot at a step gets an attention grid and a sample text.

    Both ends of the run get them, and every `picture_every` steps between; if that is 0, the first,
    second, fourth, eighth, … multiple of `every`.
    """
    every, picture_every = config.attention.every, config.attention.picture_every
    if step in (0, config.max_steps):
        return True
    if picture_every:
        return step % picture_every == 0
    return is_doubling(step, every)
