"""Declare settings as dataclass fields with help and bounds, and check their values."""

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from operator import ge, gt, le, lt
from types import NoneType
from typing import Any, get_args

from common.errors import UserError, not_one_of

LARGEST_SEED = 2**63 - 1  # of torch's generators
# The largest value of a number by its type; a float has to fit into float32.
LARGEST_NUMBERS = {bool: 1, int: LARGEST_SEED, float: 1e30}
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SHOWN_VALUE_CHARS = 80  # of a value that a file contains
# Bounds of a number: the comparison that violates the bound, and its words.
BOUNDS = {"ge": (lt, "at least"), "gt": (le, "above"), "le": (gt, "at most"), "lt": (ge, "below")}
TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9][0-9_]{0,4000}")  # longer ones are no limit of anything


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Declare a setting.

    Args:
        default: Its default value.
        help: One line for --help.
        **limits: `choices` lists all allowed values; `ge`, `gt`, `le` and `lt` bound a number
            (at least, above, at most, below). None is always allowed if the type is optional.
            `literal` accepts a text that is empty or "None", which is a mistake elsewhere.

    Returns:
        A dataclass field.
    """
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def check_settings(node: Any, prefix: str = "") -> None:
    """Raise `UserError` if a setting of a dataclass or its sections violates its declared limits.

    The prefix precedes the settings' names in messages, such as `model.`.
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


def convert_value(name: str, field: dataclasses.Field, value: Any) -> Any:
    """Convert a value that was typed, or read from a YAML file, to the type of its setting.

    Raises:
        UserError: If the value is not of the type.
    """
    types = get_args(field.type) or (field.type,)
    is_literal = "literal" in field.metadata
    if value in (None, "null"):
        if NoneType not in types:
            raise UserError(f"{name}=null is not possible: give it a value, or leave it out")
        return None
    if value == "" and not is_literal:
        raise UserError(f"{name}= has no value: write {name}=VALUE, or leave it out")
    is_unset = value == "None" and NoneType in types and not is_literal  # as Python writes null
    for kind in () if is_unset else TYPE_WORDS:
        with suppress(ValueError, OverflowError):
            if kind in types:
                return _convert(kind, value)
    if isinstance(value, (list, dict)):
        raise UserError(
            f"{name}={show_value(value)} must be one value, not several ({field.metadata['help']})"
        )
    if NoneType in types and str(value).strip().lower() in ("none", "~"):
        raise UserError(f"{name}={value} does not leave it unset: write {name}=null")
    expected = " or ".join(words for kind, words in TYPE_WORDS.items() if kind in types)
    raise UserError(f"{name}={show_value(value)} is not {expected}{_hint(value, types)}")


def _convert(kind: type, value: Any) -> Any:
    """Convert a value to one type, or raise `ValueError`."""
    text = str(value).strip().lower()
    if kind is bool and text in (*TRUE_WORDS, *FALSE_WORDS):
        return text in TRUE_WORDS
    is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    if kind is int and is_number and WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if kind is float and is_number and text.isascii():
        return float(text)
    if kind is str and is_number:
        return str(value)
    raise ValueError


def _hint(value: Any, types: tuple) -> str:
    """Return how to correct a value that is not of one of these types."""
    with suppress(ValueError, OverflowError):
        if int in types and not isinstance(value, bool) and float(value).is_integer():
            return f": write {float(value):.0f}"
    return ""


def format_value(value: Any) -> str:
    """Format a value as a user types it: null, true, 0.1."""
    if value in (None, ()):
        return "null"
    if isinstance(value, tuple):
        return ",".join(map(format_value, value))
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
