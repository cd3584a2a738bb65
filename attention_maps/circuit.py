"""Select the heads that form a circuit, by statistically significant measurements."""

from statistics import NormalDist
from typing import NamedTuple

from attention_maps.results import Estimate, Head, Measurements, parse_head

READINGS = 16  # windows or rows over which standard errors are estimated
MAX_NAMED_HEADS = 2  # heads of one kind that are named and form the circuit
# A smaller share of a head's score does not make an upstream head part of a circuit.
MIN_UPSTREAM_SHARE = 0.2
# A copying gain is reported if it exceeds both.
MIN_REPORTED_GAIN_NATS = 0.1
MIN_REPORTED_GAIN_ERRORS = 3


class UpstreamHead(NamedTuple):
    """A head that another head reads from.

    Attributes:
        head: The upstream head.
        input: Which input of the reading head depends on it: "queries" or "keys".
        share: Share of the reading head's score that is lost without it.
        is_previous_token_head: Whether it passes the threshold of the previous-token score.
    """

    head: Head
    input: str
    share: Estimate
    is_previous_token_head: bool


def max_errors_by_chance(count: int, probability: float = 0.05) -> float:
    """Return the bound, in standard errors, for the largest of several means without effect.

    The largest of `count` means of `READINGS` readings each exceeds the bound with at most the
    given probability if all true means are 0 (Bonferroni correction of Student's t, by the first
    terms of its series in the normal quantile).
    """
    z = NormalDist().inv_cdf(1 - probability / max(1, count))
    freedom = READINGS - 1
    first_order = (z**3 + z) / (4 * freedom)
    second_order = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first_order + second_order


def reported_copying_gain(measurements: Measurements) -> Estimate | None:
    """Return the copying gain if it is large and significant enough to be reported."""
    gain = measurements.copying_gain
    if gain is None or not gain.exceeds(MIN_REPORTED_GAIN_NATS, MIN_REPORTED_GAIN_ERRORS):
        return None
    return gain


def find_active_heads(
    measurements: Measurements, score: str, most: int | None = MAX_NAMED_HEADS
) -> list[Head]:
    """Return the heads that currently pass the threshold of a score, strongest first.

    A head counts only if it also passed at the previous snapshot, and if its score exceeds two
    standard errors. At most `most` heads are returned; None returns all.
    """
    emerged = measurements.emergence.emerged.get(score, {})
    lost = measurements.emergence.lost.get(score, {})
    active = [
        head
        for head in emerged
        if head not in lost and measurements.score(score, head).exceeds(errors=2)
    ]
    active.sort(key=lambda head: -measurements.score(score, head).value)
    return active[:most]


def find_upstream_head(measurements: Measurements, score: str, head: Head) -> UpstreamHead | None:
    """Return the head whose output this head's queries or keys depend on most.

    For an induction head, previous-token heads are preferred: it finds a token by the one before
    it. The share must exceed what the same number of heads without any effect would give; None if
    no head's share does.
    """
    previous_token_heads = find_active_heads(measurements, "previous_token")
    candidates = []
    for entry in measurements.composition:
        upstream = parse_head(entry.upstream)
        if (
            upstream is not None
            and (entry.score, entry.head) == (score, head)
            and entry.input != "values"  # values do not decide where a head attends
            and entry.share.exceeds(MIN_UPSTREAM_SHARE, errors=0)
        ):
            is_previous_token_head = upstream in previous_token_heads
            candidates.append(
                UpstreamHead(upstream, entry.input, entry.share, is_previous_token_head)
            )
    if score == "induction":
        preferred = [one for one in candidates if one.is_previous_token_head]
        candidates = preferred or candidates
    if not candidates:
        return None
    strongest = max(candidates, key=lambda one: one.share.value)
    comparisons = 2 * len(measurements.scored_heads(score))  # queries and keys of every head
    if strongest.share.value < strongest.share.error * max_errors_by_chance(comparisons):
        return None
    return strongest


def find_induction_circuit(measurements: Measurements) -> list[Head]:
    """Return the strongest induction heads and the head that the strongest one reads from."""
    heads = set(find_active_heads(measurements, "induction"))
    for strongest in find_active_heads(measurements, "induction", most=1):
        upstream = find_upstream_head(measurements, "induction", strongest)
        if upstream is not None:
            heads.add(upstream.head)
    return sorted(heads)
