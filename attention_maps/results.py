"""Types of the attention measurements: scores, emergence, composition, faithfulness.

Only NumPy is needed here, so that the HTML report can read measurements without importing torch.
"""

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Head(NamedTuple):
    """An attention head: its layer and its number in the layer, written L2H3."""

    layer: int
    number: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.number}"


def parse_head(name: str) -> Head | None:
    """Return the head called `name`, or None if it is the name of something else."""
    match = re.fullmatch(r"L(\d+)H(\d+)", name)
    return Head(int(match[1]), int(match[2])) if match else None


class Estimate(NamedTuple):
    """A value with its standard error; nan where unknown."""

    value: float
    error: float = math.nan

    @property
    def is_known(self) -> bool:
        """Whether the value is finite and has a positive, finite standard error."""
        return math.isfinite(self.value) and 0 < self.error < math.inf

    def exceeds(self, minimum: float = -math.inf, errors: float = 2) -> bool:
        """Return whether the value is at least `minimum` and at least `errors` standard errors."""
        return self.is_known and self.value >= max(minimum, errors * self.error)


class Estimates(NamedTuple):
    """Values with their standard errors, as two arrays of one shape; nan where unknown."""

    mean: np.ndarray
    error: np.ndarray

    def at(self, index: tuple[int, ...]) -> Estimate:
        """Return the estimate at an index of both arrays."""
        return Estimate(float(self.mean[index]), float(self.error[index]))


Scores = dict[str, Estimates]  # name of a score → its estimates, (n_layer, n_head)


@dataclass(frozen=True)
class Emergence:
    """When heads began and ceased to pass the threshold of a score, by score and head.

    Attributes:
        emerged: First step at which the head passed, and passed at the next snapshot too.
        lost: Last step at which the head passed; only of heads that no longer pass.
    """

    emerged: dict[str, dict[Head, int]] = field(default_factory=dict)
    lost: dict[str, dict[Head, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class CompositionShare:
    """The share of a head's score that is lost when an upstream component is mean-ablated.

    Attributes:
        score: The score of the head: "previous_token" or "induction".
        head: The downstream head.
        input: Which input of the head lacks the component: "queries", "keys" or "values".
        upstream: The component: a head (L0H1), an MLP (L0MLP) or "embedding".
        share: With all layers between recomputed (path patching).
        direct: Without recomputation.
    """

    score: str
    head: Head
    input: str
    upstream: str
    share: Estimate
    direct: Estimate


@dataclass(frozen=True)
class Faithfulness:
    """The share of the copying gain that remains when only some heads work.

    Attributes:
        heads: The heads of the circuit.
        none: Share without any head.
        circuit: Share with the heads of the circuit alone.
        circuit_and_layer_0: Share with the circuit and every head of layer 0.
    """

    heads: tuple[Head, ...]
    none: Estimate
    circuit: Estimate
    circuit_and_layer_0: Estimate


@dataclass(frozen=True)
class Measurements:
    """Everything measured of a model's heads at one moment.

    Attributes:
        step: Optimizer steps taken so far; 0 for a model outside of a run.
        scores: Scores of every head.
        emergence: Which heads pass a threshold, since when.
        copying_gain: In-context copying gain in nats; None if it was not measured.
        composition: Composition of the strongest heads; only significant upstream components.
        faithfulness: Faithfulness of the induction circuit; None if it was not measured.
    """

    step: int
    scores: Scores = field(default_factory=dict)
    emergence: Emergence = field(default_factory=Emergence)
    copying_gain: Estimate | None = None
    composition: tuple[CompositionShare, ...] = ()
    faithfulness: Faithfulness | None = None

    def score(self, name: str, head: Head) -> Estimate:
        """Return a score of a head, unknown (nan) if it was not measured."""
        table = self.scores.get(name)
        if table is None or head.layer >= len(table.mean) or head.number >= len(table.mean[0]):
            return Estimate(math.nan)
        return table.at(head)

    def scored_heads(self, name: str) -> list[Head]:
        """Return the heads for which a score was measured."""
        if name not in self.scores:
            return []
        indices = np.argwhere(~np.isnan(self.scores[name].mean))
        return [Head(int(layer), int(number)) for layer, number in indices]
