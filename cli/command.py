"""How a command runs and ends: its exit status, its one sentence, what it prints."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from common.errors import UserError, not_one_of
from common.text import printable

# How Python, the loader of libraries, and torch on a CPU and on a GPU put it.
TOO_LITTLE_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|failed to map segment|bad_alloc|[Cc]annot allocate memory"
    r"|can't allocate memory|not enough memory|[Ss]ize calculation overflow"
    r"|multiplication overflow"
)


def start(
    main: Callable[[], object],
    help: Callable[[], str],
    check: Callable[[list[str]], list[str]] = list,
) -> None:
    """Print the `help` that is asked for, or run `main` on the arguments as `check` leaves them."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  where it was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    sys.stdout.reconfigure(errors="replace")  # an output may lack a character
    # For the processes that this one starts, such as a sweep's jobs.
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:replace"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, for `sentence`

    def answer() -> None:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help(), flush=True)
            sys.exit()
        sys.argv[1:] = check(sys.argv[1:])
        main()

    run(answer)


def run(main: Callable[[], object]):
    """What `main` returns; a user's mistake is one sentence and exit status 1, Ctrl-C 130."""
    try:
        return main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has seen enough
        discard_output()
        sys.exit(141)
    except Exception as e:
        why = explained(e)
        if why is None:
            raise
        if rank() == 0:  # of all processes that meet with a mistake, the first says it
            tell(f"error: {why}")
        sys.exit(1)


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
    if TOO_LITTLE_MEMORY.search(f"{type(error).__name__}: {error}"):
        return (
            f"there is too little memory ({first_line(error)}): free some, or ask for less, "
            "such as a smaller model, batch or text"
        )
    return None


def sentence(error: Exception) -> str:
    """What an error says, in one line: Hydra, OmegaConf and YAML take several."""
    if mark := getattr(error, "problem_mark", None):
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return not_one_of(group, name, error.options)
    if isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    if isinstance(error, HydraException):
        said, cause = " ".join(str(error).split()), error.__cause__
        said = said.partition(" Set the environment variable HYDRA_FULL_ERROR")[0]
        return f"{said}: {first_line(cause)}" if cause and first_line(cause) not in said else said
    key = getattr(error, "full_key", None)
    return f"{key}: {first_line(error)}" if key else first_line(error)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def tell(line: str) -> None:
    """Print a line to stderr; a full disk under it costs nothing else."""
    with suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


def printer(console: Console, wrap: bool = False) -> Callable[[str | Table], None]:
    """What prints a table, or a line as it is: without markup, and unbroken, so that it can be
    copied; with `wrap`, for sentences, broken at spaces where it is wider than a terminal."""

    def log(line: str | Table) -> None:
        whole, shown = not (wrap and console.is_terminal), line
        if isinstance(line, str):
            shown = printable(line)
        try:
            console.print(shown, markup=False, highlight=False, soft_wrap=whole)
        except OSError:  # the disk of the log is full, or the terminal is gone
            console.on_broken_pipe()

    return log
