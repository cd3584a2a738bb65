"""Run a command: exit statuses, one-line errors, and printing to a terminal."""

import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import UserError, not_one_of
from common.launcher import count_processes, process_rank
from common.signals import raise_on_stop_signals
from common.text import printable

# Libraries whose errors are about what the user typed or wrote.
PARSER_PACKAGES = ("hydra", "omegaconf", "yaml", "submitit")
# Plugins of Hydra that are packages of their own, such as hydra-optuna-sweeper.
HYDRA_PLUGINS = {
    "hydra/sweeper": ("ax", "nevergrad", "optuna"),
    "hydra/launcher": ("joblib", "ray", "rq", "submitit"),
}
# How Python, the dynamic loader, and torch on a CPU and on a GPU say that memory ran out.
OUT_OF_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|failed to map segment|bad_alloc|[Cc]annot allocate memory"
    r"|can't allocate memory|not enough memory|[Ss]ize calculation overflow"
    r"|multiplication overflow"
)
WORD = r"(?:'[^']*'|[^\s'])+"  # of a shell's command line
# What users copy out of a message: a line after its label, or a command up to its last setting.
COMMAND = re.compile(
    r"(?:^|(?<=\s\s))python .*"
    rf"|python (?:-m \w+|\w+\.py)(?: (?:-\S+|[\w.]+={WORD}))*"
    rf"|(?:wandb sync|pip install) {WORD}"
)
STATUS_USER_ERROR = 1
STATUS_INTERRUPTED = 130
STATUS_BROKEN_PIPE = 141


@contextmanager
def command(help: Callable[[], str]) -> Iterator[None]:
    """Run a command in the `with` block as `exit_on_error` does, or print its help if asked for."""
    raise_on_stop_signals()
    replace_unprintable_characters()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, instead of printing them
    with exit_on_error():
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help(), flush=True)
            sys.exit()
        yield


def replace_unprintable_characters() -> None:
    """Print "?" for characters that the encoding of stdout lacks, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # otherwise of a notebook
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors into exit statuses: 1, after one sentence, for a mistake of the user.

    It is 130 for Ctrl-C, and 141 if the reader of stdout is gone.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as e:
        if isinstance(e, KeyboardInterrupt):
            status = STATUS_INTERRUPTED
        elif isinstance(e, BrokenPipeError):
            status = STATUS_BROKEN_PIPE
        elif explanation := explain_error(e):
            status = STATUS_USER_ERROR
            if process_rank() == 0:  # the others meet the same error
                print_stderr(f"error: {explanation}")
        else:
            raise
        if sys.stdout:  # otherwise it was closed from the beginning
            discard_output(sys.stdout)
        traceback.clear_frames(e.__traceback__)  # which in a notebook would keep the model
        sys.exit(status)


def explain_error(error: BaseException) -> str | None:
    """Return one sentence about an error that the user can fix, or None for a bug."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    modules = (type(error).__module__, frame.f_globals["__name__"])
    if isinstance(error, UserError) or any(m.startswith(PARSER_PACKAGES) for m in modules):
        return error_sentence(error)
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'the output'} cannot be read or written: {error.strerror}"
    if OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
        several = ", or a larger shard" if count_processes(alone=False) > 1 else ""
        return (
            f"not enough memory ({error_sentence(error)}): free some, or use a smaller model, "
            f"batch_size or text{several}"
        )
    return None


def error_sentence(error: BaseException) -> str:
    """Return what an error says in one line, with its type unless it is about the user's input."""
    if isinstance(error, UserError):
        return printable(str(error), one_line=True)
    if isinstance(error, MissingConfigException) and error.options:
        return _explain_missing_preset(error.missing_cfg_file or "", error.options)
    if isinstance(error, OverrideParseException):
        override = printable(error.override, one_line=True)
        return (
            f"the value in {override} cannot be read: correct it; in a sweep, separate values by "
            "commas, and put texts with other signs in quotes"
        )
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    if type(error).__module__.startswith(PARSER_PACKAGES):
        return _explain_parser_error(error)
    first_line = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line])


def _explain_missing_preset(path: str, presets: Sequence[str]) -> str:
    """Say that a group has no preset at this path, or which package has Hydra's plugin."""
    group, _, name = path.rpartition("/")
    plugin = name.partition("_")[0]
    if plugin in HYDRA_PLUGINS.get(group, ()):
        kind = group.rpartition("/")[2]
        return f"{group}={name} needs a package: pip install hydra-{plugin}-{kind}"
    hint = "" if group.startswith("hydra") else " (a preset of your own needs --config-dir)"
    return f"{not_one_of(group, name, presets)}{hint}"


def _explain_parser_error(error: BaseException) -> str:
    """Return what Hydra, OmegaConf or YAML says, after the key that it is about."""
    text, _, rest = str(error).partition("full_key:")
    message = " ".join(text.split()) or type(error).__name__
    message = re.sub(r"In '(.*?)': \w+ raised while composing config:", r"in \1.yaml:", message)
    key = rest.split()[:1]
    return ": ".join([*key, message])


@contextmanager
def tolerate_errors(activity: str, log: Callable[[str], None]) -> Iterator[None]:
    """Turn any error of an activity that may fail, such as "drawing a page", into a warning."""
    try:
        yield
    except Exception as e:  # drawing, W&B and damaged files raise errors of many types
        log(f"warning: {activity} failed ({error_sentence(e)})")


def discard_output(stream: IO[str]) -> None:
    """Drop what a stream buffers but cannot write, so that Python does not fail on it at the end.

    The disk under it is full, or its reader is gone.
    """
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):  # a stream that is not a file has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Terminal(Console):
    """A console that goes silent when nothing can be written: a run under `| head` continues."""

    def __init__(self, **options: Any) -> None:
        # In a notebook Rich would display HTML, even in place of writing to a file.
        super().__init__(force_jupyter=False, emoji=False, **options)

    @property
    def is_terminal(self) -> bool:
        """True only for a real terminal; notebooks set FORCE_COLOR, so Rich would say True."""
        return is_terminal(self.file) and super().is_terminal

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError:  # the disk of the log is full, or its reader or the terminal is gone
            self.quiet = True
            discard_output(self.file)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; None, a closed stream and a notebook's are not."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def print_stderr(line: str) -> None:
    """Print lines to stderr as `printer` does, and ignore a full disk under it."""
    printer(Terminal(stderr=True))(line)


def printer(console: Console) -> Callable[[str | Table | Text], None]:
    """Return a function that prints lines, wrapped in a terminal, a table, or a formatted text."""

    def log(content: str | Table | Text) -> None:
        shown: Any = content
        if isinstance(content, str):
            shown = printable(content)
            if console.is_terminal:
                shown = "\n".join(wrap(line, console.width) for line in shown.split("\n"))
        console.print(shown, markup=False, highlight=False, soft_wrap=True)

    return log


def wrap(line: str, width: int) -> str:
    """Break a line at spaces, but not in a path or a command, and indent what follows.

    The indentation is that of the text after a label, such as "loss     3.2". What is too wide for
    that begins at the left edge, where the terminal shows as much of it in one line as it can.
    """
    label = re.match(r".{,11}?\s{2,}", line)
    lines = textwrap.wrap(
        COMMAND.sub(lambda command: command[0].replace(" ", "\0"), line),
        width,
        subsequent_indent=" " * len(label[0] if label else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )
    wrapped = (each if len(each) <= width else each.lstrip() for each in lines)
    return "\n".join(wrapped).replace("\0", " ")
