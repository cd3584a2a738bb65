"""Handle the signals that stop a command: Ctrl-C (SIGINT) and SIGTERM."""

import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Install signal handlers, and return those that they replace.

    Python allows this in the main thread only. In other threads nothing is changed, and stop
    signals have the effect that the program around the command gives them.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    # None stands for a handler that was not installed from Python, which cannot be restored.
    return {number: signal.signal(number, h) for number, h in handlers.items() if h is not None}


def exit_on_stop_signals() -> None:
    """Let a stop signal end the process without a traceback."""
    set_handlers(dict.fromkeys(STOP_SIGNALS, _exit_now))


def _exit_now(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
