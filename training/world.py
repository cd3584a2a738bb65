"""The processes of a run, as training sees them: here one process.

`distributed.world` has the same methods for several processes. Every rank runs
the same train.py on its slice of each batch. Rank 0 writes and prints.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor, nn

from common.signals import STOP_SIGNALS, set_handlers
from common.terminal import Terminal, printer
from config import ResolvedConfig
from model import GPT

Result = TypeVar("Result")


class Stopped(BaseException):
    """A signal asked the run to stop; `exit_status` is 128 + its number: 130 after Ctrl-C."""

    def __init__(self, exit_status: int) -> None:
        self.exit_status = exit_status


class World:
    """The ranks of a run and the stop signals that they received; all ranks call a method together.

    `log` prints on rank 0, into `console`, so that nothing is printed across a progress bar there.
    As a context manager it notes `STOP_SIGNALS` for `check_stop`. A second Ctrl-C ends the process
    at once. After the last check, a signal ends the process when the block is left.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.console = Terminal(quiet=rank > 0)
        self.log = printer(self.console)
        self._exit_status = 0
        self._is_interruptible = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "World":
        self._handlers = set_handlers(dict.fromkeys(STOP_SIGNALS, self._note_signal))
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        set_handlers(self._handlers)
        if self._exit_status and exception_type is None:
            raise SystemExit(self._exit_status)  # so that a sweep starts no more jobs

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._exit_status = 128 + number
        set_handlers({n: old for n, old in self._handlers.items() if n == signal.SIGINT})
        if self._is_interruptible:
            raise Stopped(self._exit_status)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal end the block early; call `check_stop` after it.

        The block must contain nothing that other ranks wait for, and only work that can be redone.
        """
        self._is_interruptible = True
        try:
            yield
        except Stopped:
            pass  # `check_stop` raises it on all ranks together
        finally:
            self._is_interruptible = False

    def check_stop(self, at_once: bool = True) -> None:
        """Raise `Stopped` on all ranks if any of them got a signal.

        They wait here for rank 0, however long it has worked alone. `at_once=False` lets several
        ranks check about once a second only: pass it after steps in which rank 0 did no extra work.
        """
        if self._exit_status:
            raise Stopped(self._exit_status)

    # --- Messages ---------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value

    def on_rank_0(self, function: Callable[[], Result]) -> Result:
        """Call a function on rank 0 only, and return its result on every rank."""
        return self.broadcast(function() if self.rank == 0 else None)

    @contextmanager
    def opened_on_rank_0(self, opened: AbstractContextManager[Result]) -> Iterator[Result]:
        """Enter a context on rank 0 only, and yield its value on every rank."""
        with opened if self.rank == 0 else nullcontext() as value:
            yield self.broadcast(value)

    def wait(self) -> None:
        """Wait until all ranks are here, however long one has worked alone.

        If one of them has failed, the others end here too.
        """

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        return values

    # --- The model and its gradients --------------------------------------------------------------

    def place(self, model: GPT, config: ResolvedConfig) -> None:
        """Move a model to the device of each rank; of a sharded model, only its rows."""
        model.to(config.device)
        if self.size == 1 and model.ngrams is not None:
            model.ngrams.sparse = True  # several ranks average dense gradients instead

    def average_gradients(self, model: nn.Module) -> None:
        """Average the gradients over the ranks, as far as the backward pass has not done so."""

    def join_norms(self, norms: Tensor, params: list[Tensor]) -> Tensor:
        """Return the norms (parameters,) of whole gradients, given those of each rank's parts."""
        return norms

    def evaluating(self, model: GPT) -> AbstractContextManager:
        """Put a model into evaluation mode for forward passes, which all ranks run together."""
        return model.evaluating()

    def plain_copy(self, model: GPT) -> GPT | None:
        """Gather an unsharded, uncompiled copy of the model on rank 0; return None on other ranks.

        A single process gets the model itself.
        """
        return model
