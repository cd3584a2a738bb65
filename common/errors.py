"""The error for a user's mistake, and hints about misspelled names."""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A mistake that the user can fix: one sentence with the problem, its value and the fix."""


class SharedError(UserError):
    """An error that every process of a run raises, so that only rank 0 prints it."""


def not_one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return the message for a value that is not among the choices, with the closest one."""
    choices = list(choices)
    suggestion = did_you_mean(str(value), choices)
    return f"{name}={value} is not one of {', '.join(choices)}{suggestion}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return '; did you mean …?' with the closest name, or '' if none is close.

    A dotted name whose last part is the word counts as closest: optim.lr for lr.
    """
    names = list(names)
    closest = [name for name in names if name.rpartition(".")[2] == word]
    closest = closest or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean {closest[0]}?" if closest else ""
