"""A row of metrics.jsonl: what was measured at one step, by the names that users see."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

if TYPE_CHECKING:  # importing it would take a fifth of the time of --help
    import numpy as np

# Of the values that accompany a head's score under a name of their own.
COMPANION_SUFFIXES = ("_se", "_without_first")


class Head(NamedTuple):
    """An attention head: layer index and index within the layer, written L2H3."""

    layer: int
    number: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.number}"


def parse_head(name: str) -> Head | None:
    """Parse a name such as L2H3, with numbers below 1000; None if it does not name a head."""
    match = re.fullmatch(r"L(\d{1,3})H(\d{1,3})", name, re.ASCII)
    return Head(int(match[1]), int(match[2])) if match else None


class Estimate(NamedTuple):
    """An estimated value and its standard error; nan if unknown."""

    value: float
    error: float = math.nan

    @property
    def is_measured(self) -> bool:
        """True if the value is finite."""
        return math.isfinite(self.value)

    @property
    def is_known(self) -> bool:
        """True if the value is finite and its standard error positive and finite."""
        return self.is_measured and 0 < self.error < math.inf

    def exceeds(self, minimum: float = -math.inf, errors: float = 2) -> bool:
        """Return whether the value reaches both `minimum` and `errors` standard errors."""
        return self.is_known and self.value >= max(minimum, errors * self.error)


class Row(dict[str, Any]):
    """Values by their keys.

    A key is a name, which a place may follow, such as a head: `heads/sink/L0H1`. The standard error
    of a value has `_se` after the name: `heads/sink_se/L0H1`. docs/definitions.md lists the names.
    """

    @property
    def is_scored(self) -> bool:
        """True for a row of a snapshot, which has scores of heads."""
        return any(key.startswith("heads/") for key in self)

    def put(
        self, name: str, estimate: tuple[SupportsFloat, SupportsFloat], place: str | Head = ""
    ) -> None:
        """Write a value and its standard error, each only if it is finite: JSON has no NaN."""
        value, error = estimate
        for key, number in ((_key(name, place), value), (_key(f"{name}_se", place), error)):
            if math.isfinite(number):
                self[key] = float(number)

    def put_heads(self, name: str, mean: "np.ndarray", error: "np.ndarray | None" = None) -> None:
        """Write the finite values of all heads (L, H), and their standard errors if given."""
        for layer, values in enumerate(mean.tolist()):
            for number, value in enumerate(values):
                if math.isfinite(value):
                    self[_key(name, Head(layer, number))] = float(value)
        if error is not None:
            self.put_heads(f"{name}_se", error)

    def estimate(self, name: str, place: str | Head = "") -> Estimate:
        """Return a value and its standard error; nan if unknown."""
        value = self.get(_key(name, place), math.nan)
        return Estimate(value, self.get(_key(f"{name}_se", place), math.nan))

    def score(self, name: str, head: Head) -> Estimate:
        """Return one head's score and its standard error; nan if unknown."""
        return self.estimate(f"heads/{name}", head)

    def places(self, name: str) -> list[str]:
        """Return the places at which a name has a value, such as L1H2/keys/L0H0."""
        start = f"{name}/"
        return [key.removeprefix(start) for key in self if key.startswith(start)]

    def heads(self, name: str) -> dict[Head, Any]:
        """Return the value of each head: its score (`heads/sink`), or a step (`emerged/sink`)."""
        heads = ((parse_head(place), place) for place in self.places(name))
        return {head: self[f"{name}/{place}"] for head, place in heads if head}

    def columns(self, group: str) -> dict[str, dict[Head, Any]]:
        """Return the values of each head by the names in a group.

        Of the group `heads`, these are the scores, their errors and the scores without the first
        token; of `emerged` and `lost`, the steps at which that happened.
        """
        columns: dict[str, dict[Head, Any]] = {}
        for place in self.places(group):
            name, _, head_name = place.partition("/")
            if head := parse_head(head_name):
                columns.setdefault(name, {})[head] = self[f"{group}/{place}"]
        return columns

    def scores(self, group: str = "heads") -> dict[str, dict[Head, Any]]:
        """Return the columns of a group that are neither errors nor without the first token."""
        columns = self.columns(group).items()
        return {name: heads for name, heads in columns if not name.endswith(COMPANION_SUFFIXES)}


def scored_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the snapshots."""
    return [row for row in rows if row.is_scored]


def last_scored_row(rows: Sequence[Row]) -> Row:
    """Return the row of the last snapshot; an empty one if there is none."""
    return next((row for row in reversed(rows) if row.is_scored), Row())


def _key(name: str, place: str | Head) -> str:
    return f"{name}/{place}" if place else name
