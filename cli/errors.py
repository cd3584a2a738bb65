"""What went wrong, in one sentence."""

import re
import traceback

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from config import Config, did_you_mean, knobs

WORDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
# How Python, the loader of libraries, and torch on a CPU and on a GPU put it.
TOO_LITTLE_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|failed to map segment|bad_alloc|[Cc]annot allocate memory"
    r"|can't allocate memory|not enough memory|[Ss]ize calculation overflow"
    r"|multiplication overflow")


def sentence(error: Exception) -> str:
    """What Hydra, OmegaConf and YAML say over several lines, in one."""
    first = first_line(error)
    mark = getattr(error, "problem_mark", None)
    if mark:
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        preset = re.match(r"In '(.+?)': ", first)
        return (f"{preset[1]}.yaml: " if preset else "") + sentence(cause)
    missing = re.search(r"Could not find '(.+)/(.+?)'", first)
    if missing and getattr(error, "options", None):
        return no_preset(missing[1], missing[2], error.options)
    key = getattr(error, "full_key", None)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        if key in ("experiment", "sweep"):
            return "its first line has to be # @package _global_"
        known = [name for name, _, _ in knobs(Config())]
        return f"{key} is not a setting{did_you_mean(key, known)}"
    wrong = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", first)
    if key and wrong:
        return f"{key}={wrong[1]} is not {WORDS.get(wrong[2], wrong[2])}"
    return f"{key}: {first}" if key else first


def no_preset(group: str, name: str, known) -> str:
    return f"{group}={name} is not one of {', '.join(known)}{did_you_mean(name, known)}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_memory_error(error: Exception) -> bool:
    """Whether something was refused for want of memory."""
    return bool(TOO_LITTLE_MEMORY.search(f"{type(error).__name__}: {error}"))


def raised_by_hydra(error: Exception) -> bool:
    """Whether Hydra, or what it reads files with, refuses something; not what it runs."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].partition(".")[0] in ("hydra", "omegaconf", "yaml")
