"""Turn a run's measurements into findings: observations about heads, with their evidence.

Findings hold at the latest snapshot and exceed two standard errors. The most important heads are
corrected for multiple comparisons. `glass.heads.rendering` turns findings into text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from glass.heads.circuit import (
    UpstreamHead,
    find_active_heads,
    find_upstream_head,
    is_reported_gain,
    max_errors_by_chance,
    reported_copying_gain,
)
from glass.heads.metrics import GainAt, read_gain_history, read_latest
from glass.heads.results import Estimate, Head, Measurements

# Scores whose heads are reported, in order of interest.
REPORTED_SCORES = ("induction", "previous_token", "duplicate_token", "current_token")
MAX_FINDINGS = 6
MIN_REPORTED_IMPORTANCE_NATS = 0.01
# If more heads than this are not distinguishable from the most important one, none is reported.
MAX_MOST_IMPORTANT_HEADS = 3
MIN_FAITHFULNESS_ALONE = 0.8  # below this share, layer 0 is added to the circuit
MIN_REPORTED_FAITHFULNESS = 0.5  # below this share, nothing is reported
# A model has learned to copy if it predicts at least this share of repeated random tokens.
LEARNED_ACCURACY = 0.5
# A share is called "all" of something only if it is known to within this distance.
MAX_ERROR_OF_ALL = 0.1


class Interval(NamedTuple):
    """The interval between two snapshots in which a head or the copying gain emerged."""

    after: int  # step of the last snapshot before the emergence; the same as `by` if there is none
    by: int  # step of the first snapshot after the emergence


@dataclass(frozen=True)
class Finding:
    """A statistically significant observation about some heads."""

    kind: str  # name of the score that shows it, or "copying_gain"
    heads: tuple[Head, ...]  # the observed heads, strongest first


@dataclass(frozen=True)
class HeadEvidence:
    """The measurements of one head that support an `AttentionFinding`."""

    head: Head
    score: Estimate  # of the finding's kind
    emerged: Interval | None  # None for a model outside of a run
    copying: Estimate | None  # copying score of an induction head, if it was measured
    upstream: UpstreamHead | None  # on which its score depends most; None if none is significant


class CircuitShare(NamedTuple):
    """The share of the copying gain that remains with only a circuit active."""

    share: Estimate
    includes_layer_0: bool  # whether the heads of layer 0 are active too


def is_all(share: Estimate) -> bool:
    """Return whether a share is 100% within two standard errors, which are small."""
    return abs(share.value - 1) <= 2 * share.error <= MAX_ERROR_OF_ALL


def is_more_than_all(share: Estimate) -> bool:
    """Return whether a share exceeds 100% by more than two errors: the other heads lower it."""
    return share.value - 2 * share.error > 1


@dataclass(frozen=True)
class Copying:
    """Loss and accuracy of a model on the repetition of random tokens."""

    gain: Estimate  # in-context copying gain in nats/token
    loss: Estimate | None  # of repeated tokens in nats/token; None in records without it
    accuracy: Estimate | None  # share of them that the likeliest prediction is; None likewise

    @property
    def is_learned(self) -> bool:
        """True if at least half of the repeated tokens are predicted, beyond two errors."""
        accuracy = self.accuracy
        return accuracy is not None and accuracy.value - 2 * accuracy.error >= LEARNED_ACCURACY


@dataclass(frozen=True)
class AttentionFinding(Finding):
    """The finding that heads attend to the token that their score is about."""

    evidence: tuple[HeadEvidence, ...]  # measurements of each head, in the order of `heads`
    copying: Copying | None = None  # by induction heads, if its gain is reported
    circuit_share: CircuitShare | None = None  # of this gain, with only their circuit active


@dataclass(frozen=True)
class CopyingGainFinding(Finding):
    """The finding that the model copies in context without a detected induction head."""

    copying: Copying
    emerged: Interval | None  # when the gain became large enough to be reported; None if unknown


@dataclass(frozen=True)
class SufficientHeadsFinding(Finding):
    """The finding that some heads keep most of the copying gain without the others."""

    share: Estimate  # of the copying gain that they keep, on rows not used to find them
    other_heads: int  # number of the model's other heads


@dataclass(frozen=True)
class ImportanceFinding(Finding):
    """The finding that the validation loss depends most on one to three heads."""

    increases: tuple[Estimate, ...]  # of the loss in nats/token when each of `heads` is zeroed


@dataclass(frozen=True)
class SinkFinding(Finding):
    """The finding that heads attend to the first token (attention sink)."""

    scores: tuple[Estimate, ...]  # sink scores, in the order of `heads`
    scored_heads: int  # number of heads for which this score was measured


@dataclass(frozen=True)
class LostFinding(Finding):
    """The finding that the score of a head fell significantly below the threshold."""

    emerged: int  # first step at which it passed
    lost: int  # last step before the fall
    score: Estimate  # now


def summarize_rows(rows: list[dict]) -> list[Finding]:
    """Return the findings of a run from the rows of its metrics.jsonl."""
    latest = read_latest(rows)
    return [] if latest is None else summarize(latest, read_gain_history(rows))


def summarize(latest: Measurements, gain_history: Sequence[GainAt] = ()) -> list[Finding]:
    """Return the significant findings of the latest snapshot, the most important first.

    `gain_history` has the copying gain at every snapshot of the run, the latest one included. It is
    empty for a model outside of a run.
    """
    snapshots = [gain.step for gain in gain_history]
    induction, *others = (_find_attention(latest, score, snapshots) for score in REPORTED_SCORES)
    headline = _explain_copying_gain(latest, induction, gain_history)
    attention = [finding for finding in (headline, *others) if finding is not None]
    importance, sinks = _find_most_important_heads(latest), _find_sinks(latest)
    lost = [
        _find_lost_head(latest, score)
        for score in REPORTED_SCORES
        if not find_active_heads(latest, score)
    ]
    sufficient = _find_sufficient_heads(latest)
    candidates = [*attention[:1], sufficient, importance, *attention[1:], sinks, *lost]
    return [finding for finding in candidates if finding is not None][:MAX_FINDINGS]


def emergence_interval(step: int, snapshots: Sequence[int]) -> Interval:
    """Return the interval that ends at `step` and begins at the snapshot before it."""
    return Interval(max((s for s in snapshots if s < step), default=step), step)


def _find_attention(
    latest: Measurements, score: str, snapshots: Sequence[int]
) -> AttentionFinding | None:
    """Report the strongest heads that pass the threshold of a score."""
    heads = find_active_heads(latest, score)
    if not heads:
        return None
    evidence = []
    for head in heads:
        emerged, copying = None, None
        if len(snapshots) > 1:
            emerged = emergence_interval(latest.emergence.emerged[score][head], snapshots)
        if score == "induction" and latest.score("copying", head).is_known:
            copying = latest.score("copying", head)
        upstream = find_upstream_head(latest, score, head)
        evidence.append(HeadEvidence(head, latest.score(score, head), emerged, copying, upstream))
    return AttentionFinding(score, tuple(heads), tuple(evidence))


def _explain_copying_gain(
    latest: Measurements, induction: AttentionFinding | None, history: Sequence[GainAt]
) -> Finding | None:
    """Add the copying gain to the finding about induction heads, or report it without heads."""
    gain = reported_copying_gain(latest)
    if gain is None:
        return induction
    copying = Copying(gain, latest.repeated_loss, latest.repeated_accuracy)
    if induction is not None:
        return replace(induction, copying=copying, circuit_share=_reported_circuit_share(latest))
    return CopyingGainFinding("copying_gain", (), copying, _date_copying_gain(history))


def _date_copying_gain(history: Sequence[GainAt]) -> Interval | None:
    """Return when the gain was reported first, at two successive snapshots.

    Later snapshots never change the date. It is None if there are no two such snapshots.
    """
    for (step, gain), (_, next_gain) in pairwise(history):
        if is_reported_gain(gain) and is_reported_gain(next_gain):
            return emergence_interval(step, [snapshot.step for snapshot in history])
    return None


def _reported_circuit_share(latest: Measurements) -> CircuitShare | None:
    """Return the circuit's share of the gain, with layer 0 if its share alone is too small."""
    faithfulness = latest.faithfulness
    if faithfulness is None:
        return None
    includes_layer_0 = not faithfulness.circuit.value >= MIN_FAITHFULNESS_ALONE
    share = faithfulness.circuit_and_layer_0 if includes_layer_0 else faithfulness.circuit
    if not share.exceeds(MIN_REPORTED_FAITHFULNESS, errors=2):
        return None
    return CircuitShare(share, includes_layer_0)


def _find_sufficient_heads(latest: Measurements) -> SufficientHeadsFinding | None:
    faithfulness = latest.faithfulness
    if faithfulness is None or reported_copying_gain(latest) is None:
        return None
    heads, share = faithfulness.sufficient_heads, faithfulness.sufficient
    other_heads = latest.head_count - len(heads)
    if not heads or other_heads < 1 or not share.exceeds(MIN_REPORTED_FAITHFULNESS, errors=2):
        return None
    return SufficientHeadsFinding("sufficient", heads, share, other_heads)


def _find_most_important_heads(latest: Measurements) -> ImportanceFinding | None:
    """Report the one to three heads with the largest head importance, if they stand out."""
    importance = {
        head: latest.score("importance", head) for head in latest.scored_heads("importance")
    }
    errors_by_chance = max_errors_by_chance(len(importance))
    significant = {
        head
        for head, increase in importance.items()
        if increase.exceeds(MIN_REPORTED_IMPORTANCE_NATS, errors_by_chance)
    }
    if not significant:
        return None
    largest = max(importance[head] for head in significant)
    leaders = [
        head
        for head, increase in importance.items()
        if increase.is_known and not _is_clearly_smaller(increase, largest)
    ]
    if len(leaders) > MAX_MOST_IMPORTANT_HEADS or not significant.issuperset(leaders):
        return None  # another head may be the most important one
    leaders.sort(key=lambda head: -importance[head].value)
    increases = tuple(importance[head] for head in leaders)
    return ImportanceFinding("importance", tuple(leaders), increases)


def _is_clearly_smaller(estimate: Estimate, largest: Estimate) -> bool:
    """Return whether an estimate is below the largest by over two errors of the difference."""
    error = math.hypot(largest.error, estimate.error)
    return largest.value - estimate.value > 2 * error


def _find_sinks(latest: Measurements) -> SinkFinding | None:
    heads = find_active_heads(latest, "sink", most=None)
    if not heads:
        return None
    scored = len(latest.scored_heads("sink"))
    scores = tuple(latest.score("sink", head) for head in heads)
    return SinkFinding("sink", tuple(heads), scores, scored)


def _find_lost_head(latest: Measurements, score: str) -> LostFinding | None:
    """Report the lost head of a score that had been a head of this kind longest."""
    emerged = latest.emergence.emerged.get(score, {})
    lost = latest.emergence.lost.get(score, {})
    if not lost:
        return None
    head = max(lost, key=lambda head: lost[head] - emerged.get(head, lost[head]))
    if lost[head] == emerged.get(head, lost[head]):
        return None
    return LostFinding(score, (head,), emerged[head], lost[head], latest.score(score, head))
