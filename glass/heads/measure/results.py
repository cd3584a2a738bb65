"""Types of the attention measurements. Does not import torch."""

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Head(NamedTuple):
    """An attention head: layer index and index within the layer, written L2H3."""

    layer: int
    number: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.number}"


def parse_head(name: str) -> Head | None:
    """Parse a name such as L2H3; None if it does not name a head."""
    # Larger numbers, as in a damaged file, would need tables of any size.
    match = re.fullmatch(r"L(\d{1,3})H(\d{1,3})", name, re.ASCII)
    return Head(int(match[1]), int(match[2])) if match else None


class Estimate(NamedTuple):
    """An estimated value and its standard error; nan if unknown."""

    value: float
    error: float = math.nan

    @property
    def is_known(self) -> bool:
        """True if the value is finite and its standard error positive and finite."""
        return math.isfinite(self.value) and 0 < self.error < math.inf

    def exceeds(self, minimum: float = -math.inf, errors: float = 2) -> bool:
        """Return whether the value reaches both `minimum` and `errors` standard errors."""
        return self.is_known and self.value >= max(minimum, errors * self.error)


class Estimates(NamedTuple):
    """Estimated values and their standard errors, in two arrays of one shape; nan if unknown."""

    mean: np.ndarray
    error: np.ndarray

    def at(self, index: tuple[int, ...]) -> Estimate:
        """Return the value and standard error at one index."""
        return Estimate(float(self.mean[index]), float(self.error[index]))


Scores = dict[str, Estimates]  # name of a score → its estimates, (n_layer, n_head)


@dataclass(frozen=True)
class Emergence:
    """Steps at which heads emerged and were lost, as dicts: score → head → step."""

    # First step at which the head passed the threshold, as it did at the next snapshot.
    emerged: dict[str, dict[Head, int]] = field(default_factory=dict)
    # Last step before the score fell significantly below it; only of heads that did not pass since.
    lost: dict[str, dict[Head, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class CompositionShare:
    """The share of a head's score that is lost when an upstream component is mean-ablated."""

    score: str  # "previous_token" or "induction"
    head: Head  # the downstream head, whose score it is
    input: str  # of the head, in which the component is ablated: "queries", "keys" or "values"
    upstream: str  # the component: a head (L0H1), an MLP (L0MLP) or "embedding"
    share: Estimate  # if all layers between are recomputed (path patching)
    direct: Estimate  # if the layers between keep their outputs


@dataclass(frozen=True)
class Faithfulness:
    """The share of the copying gain that remains when all other heads are mean-ablated."""

    circuit_heads: tuple[Head, ...]
    sufficient_heads: tuple[Head, ...]  # a small set that keeps most of the copying gain
    # Shares with only these heads active:
    none: Estimate
    circuit: Estimate
    circuit_and_layer_0: Estimate  # all heads of layer 0
    sufficient: Estimate  # on rows that were not used to find them


@dataclass(frozen=True)
class Measurements:
    """All measurements of a model's heads at one snapshot."""

    step: int  # number of optimizer steps taken; 0 for a model outside of a run
    scores: Scores = field(default_factory=dict)
    emergence: Emergence = field(default_factory=Emergence)
    copying_gain: Estimate | None = None  # in nats/token; None if it was not measured
    repeated_loss: Estimate | None = None  # of repeated random tokens, in nats/token
    repeated_accuracy: Estimate | None = None  # share of them that the likeliest prediction is
    composition: tuple[CompositionShare, ...] = ()  # significant shares of the strongest heads
    faithfulness: Faithfulness | None = None  # of the induction circuit; None if not measured

    @property
    def head_count(self) -> int:
        """Number of heads of the model; 0 if no score was measured."""
        return max((estimates.mean.size for estimates in self.scores.values()), default=0)

    def score(self, name: str, head: Head) -> Estimate:
        """Return one head's score; nan if it was not measured."""
        try:
            return self.scores[name].at(head)
        except LookupError:
            return Estimate(math.nan)

    def scored_heads(self, name: str) -> list[Head]:
        """Return the heads for which a score was measured."""
        if name not in self.scores:
            return []
        indices = np.argwhere(~np.isnan(self.scores[name].mean))
        return [Head(*index) for index in indices.tolist()]
