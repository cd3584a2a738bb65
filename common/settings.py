"""Declare settings as dataclass fields with help and bounds, and check their values."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import ge, gt, le, lt
from typing import Any

from common.errors import UserError, not_one_of

LARGEST_SEED = 2**63 - 1  # of torch's generators
# The largest value of a number by its type; a float has to fit into float32.
LARGEST_NUMBERS = {bool: 1, int: LARGEST_SEED, float: 1e30}
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SHOWN_VALUE_CHARS = 80  # of a value that a file contains
# Bounds of a number: the comparison that violates the bound, and its words.
BOUNDS = {"ge": (lt, "at least"), "gt": (le, "above"), "le": (gt, "at most"), "lt": (ge, "below")}


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Declare a setting.

    Args:
        default: Its default value, or a function that makes it.
        help: One line for --help.
        **limits: `choices` lists all allowed values; `ge`, `gt`, `le` and `lt` bound a number
            (at least, above, at most, below). None is always allowed if the type is optional.

    Returns:
        A dataclass field.
    """
    metadata = {"help": help, **limits}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(node: Any, prefix: str = "") -> None:
    """Check every setting of a dataclass and its sections against its choices and bounds.

    Args:
        node: The dataclass instance.
        prefix: What precedes the settings' names in messages, such as `model.`.

    Raises:
        UserError: If a value is not allowed.
    """
    for name, field, value in iterate_settings(node, prefix):
        if value is not None:
            check_value(name, value, field.metadata)


def check_value(name: str, value: Any, limits: Any) -> None:
    """Raise `UserError` if the value of a setting violates the limits that its field declares."""
    choices = limits.get("choices")
    if choices and value not in choices:
        raise UserError(not_one_of(name, value, map(format_value, choices)))
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}={value} is not a finite number")
    for key, (is_violated_by, words) in BOUNDS.items():
        limit = limits.get(key)
        if limit is not None and not isinstance(value, str) and is_violated_by(value, limit):
            raise UserError(f"{name}={value} must be {words} {limit}")
    if isinstance(value, (int, float)) and value > LARGEST_NUMBERS[type(value)]:
        raise UserError(f"{name}={value} must be at most {LARGEST_NUMBERS[type(value)]}")


def format_value(value: Any) -> str:
    """Format a value as a user types it: null, true, 0.1."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def show_value(value: Any) -> str:
    """Format a value of any size for a message."""
    text = format_value(value)
    return text if len(text) <= SHOWN_VALUE_CHARS else f"{text[:SHOWN_VALUE_CHARS]}…"


def iterate_settings(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted name, field, value) of every setting of a dataclass and its sections."""
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from iterate_settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value
