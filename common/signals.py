"""Handle the signals that stop a command: Ctrl-C (SIGINT), SIGTERM, a closed terminal, Slurm's."""

import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
    if hasattr(signal, name)  # Windows has the first two
)


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Install signal handlers, and return those that they replace.

    Python allows this in the main thread only. In other threads nothing is changed, and stop
    signals have the effect that the program around the command gives them. A signal that is
    ignored, as SIGHUP under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        # None stands for a handler that was not installed from Python and cannot be restored.
        if signal.getsignal(number) not in (None, signal.SIG_IGN)
    }


def exit_on_stop_signals() -> None:
    """Let a stop signal end the process without a traceback; a notebook keeps its handlers."""
    if not hasattr(sys, "ps1"):
        set_handlers(dict.fromkeys(STOP_SIGNALS, lambda number, frame: sys.exit(128 + number)))


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback, until `raise_on_stop_signals`."""
    set_handlers({signal.SIGINT: signal.SIG_DFL})


def raise_on_stop_signals() -> None:
    """Restore what stop signals do in Python: raise `KeyboardInterrupt`, or end the process."""
    set_handlers({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL})
