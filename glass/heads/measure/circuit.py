"""Select the heads of a circuit from statistically significant measurements."""

from typing import NamedTuple

from common.statistics import two_sided_p
from glass.heads.measure.probes import MAX_ROWS
from run.row import Estimate, Head, Row, parse_head

MAX_NAMED_HEADS = 2  # heads of one kind that findings name and circuits include
SUFFICIENT_SHARE = 0.9  # of the copying gain, which a sufficient set of heads keeps
MIN_UPSTREAM_SHARE = 0.2  # of a head's score, for an upstream head to join the circuit
# A copying gain must exceed both limits to be reported.
MIN_REPORTED_GAIN_NATS = 0.1
MIN_REPORTED_GAIN_ERRORS = 3


class UpstreamHead(NamedTuple):
    """A head on whose output another head's score depends."""

    head: Head
    input: str  # of the other head, in which this one was ablated: "queries" or "keys"
    share: Estimate  # of the score, which was lost


def is_significant(largest: Estimate, count: int) -> bool:
    """Return whether the largest of `count` means is above 0, at the 5% level.

    It is Student's t-test with Bonferroni correction.
    """
    freedom = MAX_ROWS - 1  # degrees of freedom of a standard error over as many windows or rows
    return two_sided_p(largest.value / largest.error, freedom) / 2 <= 0.05 / count


def reported_copying_gain(row: Row) -> Estimate | None:
    """Return the copying gain, or None if it is unknown, small or not significant."""
    gain = row.estimate("probe/copying_gain")
    is_reported = gain.exceeds(MIN_REPORTED_GAIN_NATS, MIN_REPORTED_GAIN_ERRORS)
    return gain if is_reported else None


def find_active_heads(row: Row, score: str, most: int | None = MAX_NAMED_HEADS) -> list[Head]:
    """Return the heads with a significant score that emerged and are not lost, strongest first."""
    lost = row.heads(f"lost/{score}")
    active = [
        head
        for head in row.heads(f"emerged/{score}")
        if head not in lost and row.score(score, head).exceeds(errors=2)
    ]
    active.sort(key=lambda head: -row.score(score, head).value)
    return active[:most]


def find_upstream_head(row: Row, score: str, head: Head) -> UpstreamHead | None:
    """Return the upstream head on which a head's score depends most.

    For an induction head, previous-token heads come first: they mark each key with its predecessor.
    None if no share is significant.
    """
    candidates = _list_upstream_heads(row, score, head)
    if score == "induction":
        previous_token_heads = find_active_heads(row, "previous_token")
        preferred = [one for one in candidates if one.head in previous_token_heads]
        candidates = preferred or candidates
    if not candidates:
        return None
    strongest = max(candidates, key=lambda one: one.share.value)
    comparisons = 2 * len(row.heads(f"heads/{score}"))  # queries and keys of every head
    return strongest if is_significant(strongest.share, comparisons) else None


def _list_upstream_heads(row: Row, score: str, head: Head) -> list[UpstreamHead]:
    """Return the upstream heads on which a large share of where a head attends depends."""
    upstream_heads = []
    for place in row.places(f"composition/{score}/{head}"):
        name, _, component = place.partition("/")
        upstream = parse_head(component)
        share = row.estimate(f"composition/{score}", f"{head}/{place}")
        # Values do not decide where a head attends.
        if upstream and name != "values" and share.exceeds(MIN_UPSTREAM_SHARE, errors=0):
            upstream_heads.append(UpstreamHead(upstream, name, share))
    return upstream_heads


def find_induction_circuit(row: Row) -> list[Head]:
    """Return the strongest induction heads, and the upstream head of the strongest one."""
    heads = find_active_heads(row, "induction")
    upstream = find_upstream_head(row, "induction", heads[0]) if heads else None
    return sorted({*heads, upstream.head} if upstream else heads)
