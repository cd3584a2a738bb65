"""Arrays with labeled axes, and their means over several texts, that print as short tables."""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from reprlib import Repr
from typing import Any

import numpy as np

from common.errors import UserError
from common.text import format_fixed, pluralize
from glass.heads.measure.scores import mean_and_error

# Limits of a printed table
MAX_PRINTED_ROWS = 40
MAX_PRINTED_COLUMNS = 12
MAX_PRINTED_MEANS = 8  # columns of numbers with their standard errors
MAX_COLUMN_LABEL = 16  # characters: the names of scores fit
DECIMALS = 2
TEXT_LABELS = Repr()
TEXT_LABELS.maxstring = 80  # characters; the middle of a longer text is left out
TEXT_AXES = ("text", "pair")
TOKEN_AXES = ("token", "after", "query", "key", "hidden")


@dataclass(frozen=True, eq=False, repr=False)
class Labeled:
    """An array with a label for each index, which prints as a short table.

    Integers select from the first axes, as in `result[-1]`; so do a label of any axis and the name
    of a head in layers × heads: `result["L2H0"]`. NumPy's functions take it as an array.

    The answer about several texts is their mean, which prints with its standard error. What is
    selected of it, and the difference of two means, taken text by text, are such means again.
    """

    name: str  # of the numbers, with their unit
    values: np.ndarray
    axes: dict[str, list[str]]  # name of each axis → its labels
    each: "Labeled | None" = None  # of a mean: the values of each text, which are the first axis

    @property
    def errors(self) -> np.ndarray | None:
        """Standard errors of a mean over texts; nan if there is one text."""
        return _mean_and_error(self.each)[1] if self.each is not None else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._select_label(index)
        place = index if isinstance(index, tuple) else (index,)
        return self._select(tuple(operator.index(which) for which in place))  # no slices

    def _select_label(self, label: str) -> Any:
        for axis, labels in enumerate(self.axes.values()):
            if label in labels:
                return self._select((*[slice(None)] * axis, labels.index(label)))
        if component := re.fullmatch(r"(L\d+)(H\d+|MLP)", label):
            return self[component[1]][component[2]]
        raise UserError(f"{label!r} is not a label of {self.name!r}: see .axes")

    def _select(self, place: tuple[int | slice, ...]) -> Any:
        if self.each is not None:
            return _mean(self.each._select((slice(None), *place)))
        values = self.values[place]
        indices = [*place, *[slice(None)] * (self.values.ndim - len(place))]
        remaining = {
            axis: labels
            for (axis, labels), index in zip(self.axes.items(), indices)
            if isinstance(index, slice)
        }
        return Labeled(self.name, values, remaining) if remaining else values.item()

    def __sub__(self, other: "Labeled") -> "Labeled":
        operands = minuend, subtrahend = self.each or self, other.each or other
        sizes = [{name: len(labels) for name, labels in each.axes.items()} for each in operands]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"results of sizes {sizes[0]} and {sizes[1]} have no difference: ask both about "
                "the same texts"
            )
        values = minuend.values - subtrahend.values
        difference = Labeled(f"difference of {self.name}", values, minuend.axes)
        return difference if self.each is None else _mean(difference)

    def top(self, n: int = 5) -> "Labeled":
        """Return the n largest numbers, the largest first."""
        largest = np.argsort(-self.values, axis=None)[:n]
        names = []
        places = np.unravel_index(largest, self.values.shape)
        for place in zip(*places):
            name = " ".join(labels[k] for labels, k in zip(self.axes.values(), place))
            names.append(re.sub(r"^(L\d+) (?=H\d|MLP)", r"\1", name))  # L2 and H0 are L2H0
        axes = {" ".join(self.axes): names}
        if self.each is None:
            return Labeled(self.name, self.values[places], axes)
        first, texts = next(iter(self.each.axes.items()))
        values = self.each.values[(slice(None), *places)]
        return _mean(Labeled(self.name, values, {first: texts, **axes}))

    def frame(self) -> Any:
        """Return a pandas table with a row for each number and a column for each axis.

        The number is in the column `value`, or in `mean` beside its `standard_error`; those of
        each text are in `.each.frame()`.
        """
        try:
            import pandas
        except ImportError:
            raise UserError(
                "pandas is not installed: pip install pandas, or read .values and .axes"
            ) from None
        table = pandas.DataFrame(list(product(*self.axes.values())), columns=list(self.axes))
        if self.each is None:
            return table.assign(value=np.ravel(self.values))
        return table.assign(mean=np.ravel(self.values), standard_error=np.ravel(self.errors))

    def __repr__(self) -> str:
        title = f"{self.name} ({' × '.join(self.axes)})" if self.axes else self.name
        limit = MAX_PRINTED_COLUMNS
        if self.each is not None:
            is_known = ~np.isnan(self.each.values.reshape(len(self.each.values), -1))
            count = int(is_known.any(axis=1).sum())
            title += f", mean ± standard error of {pluralize(count, next(iter(self.each.axes)))}"
            limit = MAX_PRINTED_MEANS
        if len(self.axes) > 2:
            labels = [labels[0] for axis, labels in self.axes.items() if axis not in TEXT_AXES]
            part = "".join(labels[: len(self.axes) - 2])
            return f'{title} of shape {self.values.shape}: print a part, such as [0] or ["{part}"]'
        rows, columns = [*self.axes.values(), [""], [""]][:2]
        shape = (len(rows), len(columns))
        limits = {"rows": MAX_PRINTED_ROWS, "columns": limit}
        parts = []
        for axis, count, noun in zip([*self.axes, "", ""], shape, limits):
            is_end = axis in TOKEN_AXES and len(self.axes) == 2  # predictions are at the end
            parts.append(slice(-limits[noun], None) if is_end else slice(limits[noun]))
            if count > limits[noun]:
                title += f", the {'last' if is_end else 'first'} {limits[noun]} of {count} {noun}"

        def cut(values: np.ndarray) -> np.ndarray:
            return values.reshape(shape)[tuple(parts)]

        printed = cut(self.values)
        errors = [None] * printed.size if self.errors is None else cut(self.errors).flat
        values = printed.round(DECIMALS) + 0.0  # -0.0 becomes 0.0
        cells = [format_fixed(*cell, DECIMALS) for cell in zip(values.flat, errors)]
        if not self.axes:
            return f"{title}: {cells[0]}"
        heading = [label[:MAX_COLUMN_LABEL] for label in columns[parts[1]]]
        table = [["", *heading]] if any(heading) else []
        is_text = next(iter(self.axes)).startswith(TEXT_AXES)
        for label, row in zip(rows[parts[0]], np.reshape(cells, printed.shape).tolist()):
            table.append([quote_text(label) if is_text else label, *row])
        return "\n".join([title, *align_columns(table)])


def quote_text(text: Any) -> str:
    """Return a text, or its token ids, on one line; the middle of a long one is left out."""
    return TEXT_LABELS.repr(text)


def average(name: str, answers: list[Labeled], noun: str, texts: Iterable[str]) -> Labeled:
    """Return the mean of answers about several texts, or pairs.

    A value that is nan is left out. Where the answers have different labels, such as T3 ·of and
    T3 ·in, the mean has their first word.

    Raises:
        UserError: The answers differ in shape.
    """
    shapes = {np.shape(answer.values) for answer in answers}
    if len(shapes) > 1:
        lengths = " and ".join(str(shape[-1]) for shape in sorted(shapes))
        raise UserError(
            f"the {noun}s have {lengths} tokens, so they have no mean for each token: use {noun}s "
            "with equal numbers of tokens"
        )
    axes = {noun: list(texts)}
    for axis in answers[0].axes:
        places = zip(*(answer.axes[axis] for answer in answers))
        axes[axis] = [
            names[0] if len(set(names)) == 1 else names[0].partition(" ")[0] for names in places
        ]
    return _mean(Labeled(name, np.stack([answer.values for answer in answers]), axes))


def _mean(each: Labeled) -> Labeled:
    _, *axes = each.axes.items()
    return Labeled(each.name, _mean_and_error(each)[0], dict(axes), each)


def _mean_and_error(each: Labeled) -> tuple[np.ndarray, np.ndarray]:
    return mean_and_error(np.moveaxis(each.values, 0, -1))


def align_columns(table: list[list[str]]) -> list[str]:
    """Return the lines of a table, its first column aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for label, *cells in table:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        lines.append(" ".join([label.ljust(widths[0]), *aligned]))
    return lines
