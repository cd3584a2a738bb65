"""Declare settings as dataclass fields with help and bounds, and check their values."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from operator import ge, gt, le, lt
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args

from common.errors import UserError, not_one_of
from common.text import join_words

Node = TypeVar("Node", bound=Any)  # a dataclass of settings

LARGEST_SEED = 2**63 - 1  # of torch's generators
# The largest value of a number by its type; a float has to fit into float32.
LARGEST_NUMBERS = {bool: 1, int: LARGEST_SEED, float: 1e30}
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SHOWN_VALUE_CHARS = 80  # of a value that a file contains
# Bounds of a number: the comparison that violates the bound, and its words.
BOUNDS = {"ge": (lt, "at least"), "gt": (le, "above"), "le": (gt, "at most"), "lt": (ge, "below")}
BOOLEANS = {"true": True, "false": False}


class GreaterThan(NamedTuple):
    """All numbers above a limit."""

    limit: float

    def __contains__(self, value: Any) -> bool:
        """Return whether a number is above the limit."""
        return value > self.limit


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Declare a setting as a dataclass field; `help` is its line in --help.

    `choices` lists all allowed values; `ge`, `gt`, `le` and `lt` bound a number (at least, above,
    at most, below). None is always allowed if the type is optional. `only_with` names other
    settings and their values with which this one has an effect. `literal` accepts an empty text.
    """
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def check_settings(node: Any, prefix: str = "") -> None:
    """Raise `UserError` if a setting of a dataclass or its sections violates its limits."""
    for name, field, value in iterate_settings(node, prefix):
        if value is not None:
            _check_value(name, value, field.metadata)


def _check_value(name: str, value: Any, limits: Any) -> None:
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
    """Convert a value that was typed, or read from a file, to the type of its setting."""
    types = get_args(field.type) or (field.type,)
    if value in (None, "null") and NoneType in types:
        return None
    if value == "" and "literal" not in field.metadata:
        raise UserError(f"{name}= has no value: write {name}=VALUE, or leave it out")
    for kind in TYPE_WORDS:
        with suppress(KeyError, ValueError):
            if kind in types and not isinstance(value, (list, dict)):
                text = str(value)
                return BOOLEANS[text.lower()] if kind is bool else kind(text)
    expected = " or ".join(words for kind, words in TYPE_WORDS.items() if kind in types)
    raise UserError(f"{name}={show_value(value)} is not {expected}")


def check_setting(name: str, field: dataclasses.Field, value: Any) -> None:
    """Raise `UserError` unless a setting takes a value that is read from a file."""
    converted = convert_value(name, field, value)
    if converted is not None:
        _check_value(name, converted, field.metadata)


def explain_unused(node: Any, key: str, swept: Sequence[str] = ()) -> str | None:
    """Return why a setting has no effect, and what to do; None if it has.

    Settings that are swept have other values in other jobs of the sweep, so they do not count.
    """
    settings = {name: (field, value) for name, field, value in iterate_settings(node)}
    field, typed = settings[key]
    for other, allowed in field.metadata.get("only_with", {}).items():
        value = settings[other][1]
        is_swept = any(name == "experiment" or f"{other}.".startswith(f"{name}.") for name in swept)
        if is_swept or value in allowed or typed is None:
            continue
        return (
            f"{key}={format_value(typed)} has no effect with {describe_condition(other, [value])}: "
            f"leave it out, or use {describe_condition(other, allowed)}"
        )
    return None


def describe_condition(name: str, allowed: Any) -> str:
    """Return values of a setting as they are typed; a preset stands for its section's name."""
    if isinstance(allowed, GreaterThan):
        return f"{name} above {allowed.limit}"
    return f"{re.sub('[.](name|source)$', '', name)}={join_words(map(format_value, allowed), 'or')}"


def format_value(value: Any) -> str:
    """Format a value as a user types it: null, true, 0.1."""
    if value in (None, ()):
        return "null"
    if isinstance(value, tuple):
        return ",".join(map(format_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def replace_setting(node: Node, key: str, value: Any) -> Node:
    """Return a dataclass with one setting, named by its dotted key, or section replaced."""
    section, _, name = key.rpartition(".")
    if section:
        value = dataclasses.replace(getattr(node, section), **{name: value})
    return dataclasses.replace(node, **{section or name: value})


def format_settings(node: Any) -> dict[str, str]:
    """Return every setting of a dataclass and its sections by its key, as a user would type it."""
    return {key: format_value(value) for key, _, value in iterate_settings(node)}


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
