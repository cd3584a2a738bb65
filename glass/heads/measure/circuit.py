"""Select the heads of a circuit from statistically significant measurements."""

from statistics import NormalDist

from glass.heads.measure.results import CompositionShare, Estimate, Head, Measurements, parse_head

READINGS = 16  # windows or rows from which each standard error is estimated
MAX_NAMED_HEADS = 2  # heads of one kind that findings name and circuits include
SUFFICIENT_SHARE = 0.9  # of the copying gain, which a sufficient set of heads keeps
MIN_UPSTREAM_SHARE = 0.2  # of a head's score, for an upstream head to join the circuit
# A copying gain must exceed both limits to be reported.
MIN_REPORTED_GAIN_NATS = 0.1
MIN_REPORTED_GAIN_ERRORS = 3


def max_errors_by_chance(count: int) -> float:
    """Return the 5% significance bound, in standard errors, for the largest of `count` means.

    It is Student's t with Bonferroni correction, by its series in the normal quantile.
    """
    z = NormalDist().inv_cdf(1 - 0.05 / max(1, count))
    freedom = READINGS - 1
    first_order = (z**3 + z) / (4 * freedom)
    second_order = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first_order + second_order


def reported_copying_gain(measurements: Measurements) -> Estimate | None:
    """Return the copying gain, or None if it is small or not significant."""
    gain = measurements.copying_gain
    return gain if gain is not None and is_reported_gain(gain) else None


def is_reported_gain(gain: Estimate) -> bool:
    """Return whether a copying gain is large and significant enough to be reported."""
    return gain.exceeds(MIN_REPORTED_GAIN_NATS, MIN_REPORTED_GAIN_ERRORS)


def find_active_heads(
    measurements: Measurements, score: str, most: int | None = MAX_NAMED_HEADS
) -> list[Head]:
    """Return the heads with a significant score that emerged and are not lost, strongest first."""
    emerged = measurements.emergence.emerged.get(score, {})
    lost = measurements.emergence.lost.get(score, {})
    active = [
        head
        for head in emerged
        if head not in lost and measurements.score(score, head).exceeds(errors=2)
    ]
    active.sort(key=lambda head: -measurements.score(score, head).value)
    return active[:most]


def find_upstream_head(
    measurements: Measurements, score: str, head: Head
) -> CompositionShare | None:
    """Return the share of the upstream head on which a head's score depends most.

    For an induction head, previous-token heads come first: they mark each key with its predecessor.
    None if no share is significant.
    """
    shares = [
        entry
        for entry in measurements.composition
        if (entry.score, entry.head) == (score, head)
        and parse_head(entry.upstream)
        and entry.input != "values"  # values do not decide where a head attends
        and entry.share.exceeds(MIN_UPSTREAM_SHARE, errors=0)
    ]
    if score == "induction":
        shares = [one for one in shares if is_previous_token_head(measurements, one)] or shares
    strongest = max(shares, key=lambda one: one.share.value, default=None)
    comparisons = 2 * len(measurements.scored_heads(score))  # queries and keys of every head
    if strongest is None or not strongest.share.exceeds(errors=max_errors_by_chance(comparisons)):
        return None
    return strongest


def is_previous_token_head(measurements: Measurements, share: CompositionShare) -> bool:
    """Return whether the upstream component of a share is a strong previous-token head."""
    return parse_head(share.upstream) in find_active_heads(measurements, "previous_token")


def find_induction_circuit(measurements: Measurements) -> list[Head]:
    """Return the strongest induction heads, and the upstream head of the strongest one."""
    heads = set(find_active_heads(measurements, "induction"))
    for strongest in find_active_heads(measurements, "induction", most=1):
        upstream = find_upstream_head(measurements, "induction", strongest)
        if upstream and (head := parse_head(upstream.upstream)):
            heads.add(head)
    return sorted(heads)
