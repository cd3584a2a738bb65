"""The error for a user's mistake, and hints about misspelled names."""

import difflib


class UserError(Exception):
    """A mistake that the user can mend: one sentence with what was wrong, its value, what to do."""


def not_one_of(name: str, value, known) -> str:
    known = list(known)
    return f"{name}={value} is not one of {', '.join(known)}{did_you_mean(str(value), known)}"


def did_you_mean(word: str, known) -> str:
    """'; did you mean …?' with the nearest of the known words, or nothing where none is near."""
    last = [name for name in known if name.rpartition(".")[2] == word]  # optim.lr for lr
    near = last or difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
