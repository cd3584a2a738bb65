"""How a command runs and ends: its exit status, its one sentence, what it prints."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from config import Config, UserError, did_you_mean, knobs, not_one_of

WORDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
# How Python, the loader of libraries, and torch on a CPU and on a GPU put it.
TOO_LITTLE_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|failed to map segment|bad_alloc|[Cc]annot allocate memory"
    r"|can't allocate memory|not enough memory|[Ss]ize calculation overflow"
    r"|multiplication overflow")


def start(main: Callable[[], object], help: Callable[[], str],
          check: Callable[[list[str]], list[str]] = list) -> None:
    """Run an entry point on the checked arguments.

    A user's mistake becomes one sentence and status 1, Ctrl-C status 130. An output that cannot
    show a character gets a question mark for it.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  where it was closed
    sys.stdout.reconfigure(errors="replace")
    # For the processes that this one starts, such as a sweep's jobs.
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:replace"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, for `sentence`
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help(), flush=True)
            return
        sys.argv[1:] = check(sys.argv[1:])
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        output_closed()
    except Exception as e:
        if getattr(e, "already_printed", False):
            sys.exit(1)
        why = explained(e)
        if why is None:
            raise
        fail(why)


def explained(error: Exception) -> str | None:
    """What a user can do something about, in a sentence; None for a fault of the program."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals["__name__"].partition(".")[0]
    if isinstance(error, UserError) or package in ("hydra", "omegaconf", "yaml", "submitit"):
        return sentence(error)
    if isinstance(error, OSError) and error.errno is not None:
        if error.filename is None:  # of a stream: the disk under stdout is full
            discard_output()
        return f"{error.filename or 'the output'} cannot be read or written: {error.strerror}"
    if is_memory_error(error):
        return (f"there is too little memory ({first_line(error)}): free some, or ask for less, "
                "such as a smaller model, batch or text")
    return None


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
        return not_one_of(missing[1], missing[2], error.options)
    key = getattr(error, "full_key", None)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        if key in ("experiment", "sweep"):
            return "its first line has to be # @package _global_"
        return f"{key} is not a setting{did_you_mean(key, [name for name, *_ in knobs(Config())])}"
    wrong = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", first)
    if key and wrong:
        return f"{key}={wrong[1]} is not {WORDS.get(wrong[2], wrong[2])}"
    return f"{key}: {first}" if key else first


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_memory_error(error: Exception) -> bool:
    """Whether something was refused for want of memory."""
    return bool(TOO_LITTLE_MEMORY.search(f"{type(error).__name__}: {error}"))


def fail(why: str) -> None:
    if rank() == 0:  # of all the processes that meet with the same mistake
        print(f"error: {why}", file=sys.stderr)
    give_up()


def give_up() -> None:
    """End with status 1.

    One of several processes ends at once: the threads of a group that is left as it is can crash
    Python as it ends.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def output_closed() -> None:
    """Whoever read our output has seen enough."""
    discard_output()
    sys.exit(141)


def discard_output() -> None:
    """What stdout still holds is not tried again as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def rank() -> int:
    """This process's number among those that torchrun started; 0 where it did not."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


class Terminal(Console):
    """A console that falls silent where its output is gone: under `| head` a run goes on."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def printer(console: Console, wrap: bool = False) -> Callable[[str], None]:
    """What prints a line as it is: without markup, and unbroken, so that it can be copied; with
    `wrap`, for sentences, broken at spaces where it is wider than a terminal."""
    def say(line: str) -> None:
        whole = not (wrap and console.is_terminal)
        try:
            console.print(line, markup=False, highlight=False, soft_wrap=whole)
        except OSError:  # the disk of the log is full, or the terminal is gone
            console.on_broken_pipe()

    return say


@contextmanager
def waiting(console: Console, what: str) -> Iterator[Callable[[], None]]:
    """Name what is waited for: on a terminal with its seconds while it goes on, else in a line.

    Gives what ends that before the context does.
    """
    if not console.is_terminal:
        printer(console)(f"{what} …")
    with Progress(SpinnerColumn(), TextColumn(what), TimeElapsedColumn(), console=console,
                  transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield partial(bar.update, task, visible=False)
