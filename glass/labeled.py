"""Arrays with labeled axes that print as tables."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Limits of a printed table
MAX_WIDTH = 100  # characters
MAX_ROWS = 40
MAX_ROW_LABEL = 40  # characters
MAX_COLUMN_LABEL = 12


@dataclass(frozen=True, eq=False, repr=False)
class Labeled:
    """An array with a label for each index, which prints as a table.

    NumPy's functions take it as an array. `result[2, 0]` and slices select as in NumPy, and the
    name of a head does so in layers × heads: `result["L2H0"]`. For pandas, two axes are
    `pandas.DataFrame(result.values, *result.axes.values())`.
    """

    name: str  # of the numbers, with their unit
    values: np.ndarray
    axes: dict[str, list[str]]  # name of each axis → its labels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            index = self._find(index)
        chosen = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(which, int | np.integer | slice) for which in chosen):
            raise TypeError("index with integers, slices or a name; `values` takes any of NumPy's")
        values = self.values[index]
        axes = {}
        for k, (axis, labels) in enumerate(self.axes.items()):
            which = chosen[k] if k < len(chosen) else slice(None)
            if isinstance(which, slice):
                axes[axis] = labels[which]
        return Labeled(self.name, values, axes) if axes else values.item()

    def _find(self, name: str) -> tuple[int, int]:
        """Return the layer and the column of a name such as L2H0 or L1MLP."""
        layers, columns, *_ = [*self.axes.values(), [""]]
        for layer, column in np.ndindex(len(layers), len(columns)):
            if layers[layer] + columns[column] == name:
                return layer, column
        raise KeyError(f"there is no {name} in {' × '.join(self.axes)}")

    def __sub__(self, other: Any) -> "Labeled":
        return Labeled(f"difference of {self.name}", self.values - np.asarray(other), self.axes)

    def top(self, n: int = 5) -> "Labeled":
        """Return the n largest numbers, the largest first."""
        largest = np.argsort(-self.values, axis=None)[:n]
        places = zip(*np.unravel_index(largest, self.values.shape))
        names = []
        for place in places:
            name = " ".join(labels[k] for labels, k in zip(self.axes.values(), place))
            names.append(re.sub(r"^(L\d+) (H\d+|MLP)\b", r"\1\2", name))  # L2 and H0 are L2H0
        return Labeled(self.name, self.values.flat[largest], {" ".join(self.axes): names})

    def __repr__(self) -> str:
        title = f"{self.name} ({' × '.join(self.axes)})"
        if len(self.axes) > 2:
            return f'{title} of shape {self.values.shape}: print a part, such as ["L0H0"]'
        rows, columns = [*self.axes.values(), [""]][:2]
        rows = [label[:MAX_ROW_LABEL] for label in rows]
        columns = [label[:MAX_COLUMN_LABEL] for label in columns]
        table = self.values.reshape(len(rows), len(columns)).round(2) + 0.0  # -0.0 becomes 0.0
        left = max(map(len, rows), default=0)
        bounds = np.nanmin(table, initial=0), np.nanmax(table, initial=0)
        width = 1 + max(len(f"{bound:.2f}") for bound in bounds)
        width = max([width, *(1 + len(label) for label in columns)])
        shown = _ends(len(columns), (MAX_WIDTH - left) // width)

        def line(label: str, cells: Iterable[str]) -> str:
            return label.ljust(left) + "".join(cell.rjust(width) for cell in cells)

        lines = [title]
        if any(columns):
            lines.append(line("", ("…" if k is None else columns[k] for k in shown)))
        for row in _ends(len(rows), MAX_ROWS):
            if row is None:
                lines.append("…")
            else:
                numbers = ("…" if k is None else f"{table[row, k]:.2f}" for k in shown)
                lines.append(line(rows[row], numbers))
        return "\n".join(lines)


def _ends(count: int, most: int) -> list[int | None]:
    """Return the indices to print of `count`: some from each end, with one None for the others."""
    if count <= most:
        return [*range(count)]
    half = (most - 1) // 2
    return [*range(half), None, *range(count - half, count)]
