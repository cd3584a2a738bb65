"""Arrays with labeled axes that print as short tables."""

import operator
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

# Limits of a printed table
MAX_PRINTED_ROWS = 40
MAX_PRINTED_COLUMNS = 12
MAX_COLUMN_LABEL = 12  # characters


@dataclass(frozen=True, eq=False, repr=False)
class Labeled:
    """An array with a label for each index, which prints as a short table.

    Integers select from the first axes, as in `result[-1]`, and so does the name of a head in
    layers × heads: `result["L2H0"]`. NumPy's functions take it as an array.
    """

    name: str  # of the numbers, with their unit
    values: np.ndarray
    axes: dict[str, list[str]]  # name of each axis → its labels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            index = self._find_head(index)
        place = index if isinstance(index, tuple) else (index,)
        place = tuple(operator.index(which) for which in place)  # no slices
        values = self.values[place]
        remaining = dict(list(self.axes.items())[len(place) :])
        return Labeled(self.name, values, remaining) if remaining else values.item()

    def _find_head(self, name: str) -> tuple[np.intp, ...]:
        layers_and_heads = list(self.axes.values())[:2]
        names = ["".join(labels) for labels in product(*layers_and_heads)]
        return np.unravel_index(names.index(name), self.values.shape[:2])

    def __sub__(self, other: "Labeled") -> "Labeled":
        return Labeled(f"difference of {self.name}", self.values - other.values, self.axes)

    def top(self, n: int = 5) -> "Labeled":
        """Return the n largest numbers, the largest first."""
        largest = np.argsort(-self.values, axis=None)[:n]
        names = []
        for place in zip(*np.unravel_index(largest, self.values.shape)):
            name = " ".join(labels[k] for labels, k in zip(self.axes.values(), place))
            names.append(re.sub(r"^(L\d+) (?=H\d|MLP)", r"\1", name))  # L2 and H0 are L2H0
        return Labeled(self.name, self.values.flat[largest], {" ".join(self.axes): names})

    def __repr__(self) -> str:
        title = f"{self.name} ({' × '.join(self.axes)})"
        if len(self.axes) > 2:
            return f'{title} of shape {self.values.shape}: print a part, such as ["L0H0"]'
        rows, columns = [*self.axes.values(), [""]][:2]
        shape = (len(rows), len(columns))
        printed = self.values.reshape(shape)[:MAX_PRINTED_ROWS, :MAX_PRINTED_COLUMNS]
        if printed.size < self.values.size:
            title += ", the first {} × {} of {} × {}".format(*printed.shape, *shape)
        heading = [label[:MAX_COLUMN_LABEL] for label in columns[:MAX_PRINTED_COLUMNS]]
        table = [["", *heading]] if any(heading) else []
        for label, row in zip(rows, printed.round(2) + 0.0):  # -0.0 becomes 0.0
            table.append([label, *(f"{value:.2f}" for value in row)])
        return "\n".join([title, *align_columns(table)])


def align_columns(table: list[list[str]]) -> list[str]:
    """Return the lines of a table, its first column aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for label, *cells in table:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        lines.append(" ".join([label.ljust(widths[0]), *aligned]))
    return lines
