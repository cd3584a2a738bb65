"""Declare settings as dataclass fields with help and bounds, and check their values."""

import dataclasses
import math
from dataclasses import fields, is_dataclass
from operator import ge, gt, le, lt

from common.errors import UserError, not_one_of

LARGEST_SEED = 2**63 - 1  # of torch's generators
LARGEST_NUMBER = {bool: 1, int: LARGEST_SEED, float: 1e30}  # of a setting; float32 has to hold it
# Of a number: what breaks its bound, and the words for it.
BOUNDS = {"ge": (lt, "at least"), "gt": (le, "above"), "le": (gt, "at most"), "lt": (ge, "below")}


def setting(default, help, **limits):
    """A setting: its default (or what makes it), one line of help, and the values that it takes.
    `choices` are all of them; `ge`, `gt`, `le`, `lt` bound a number (at least, above, at most,
    below). None is always allowed where the type is optional."""
    kind = "default_factory" if callable(default) else "default"
    return dataclasses.field(**{kind: default}, metadata={"help": help, **limits})


def check_settings(node, prefix: str = "") -> None:
    """Refuse a setting of the dataclass `node`, or of its sections, that is out of bounds."""
    for name, f, value in iterate_settings(node, prefix):
        choices = f.metadata.get("choices")
        if value is None:
            continue
        if choices and value not in choices:
            raise UserError(not_one_of(name, value, map(format_value, choices)))
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} is not a finite number")
        for key, (breaks, words) in BOUNDS.items():
            limit = f.metadata.get(key)
            if limit is not None and not isinstance(value, str) and breaks(value, limit):
                raise UserError(f"{name}={value} must be {words} {limit}")
        if isinstance(value, (int, float)) and value > LARGEST_NUMBER[type(value)]:
            raise UserError(f"{name}={value} must be at most {LARGEST_NUMBER[type(value)]}")


def format_value(value) -> str:
    """A value as it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def iterate_settings(node, prefix: str = ""):
    """Yield (dotted name, field, value) of every setting of the dataclass instance `node`."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from iterate_settings(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value
