"""Turn a run's measurements into findings: what its attention heads do, with the evidence.

Findings hold at the latest snapshot and exceed two standard errors; "most important head" is
corrected for multiple comparisons. `attention_maps.rendering` turns them into text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attention_maps.circuit import (
    UpstreamHead,
    find_active_heads,
    find_upstream_head,
    max_errors_by_chance,
    reported_copying_gain,
)
from attention_maps.metrics import GainAt, read_gain_history, read_latest
from attention_maps.results import Estimate, Head, Measurements

# Scores whose heads are reported, the most interesting first.
REPORTED_SCORES = ("induction", "previous_token", "duplicate_token", "current_token")
MAX_FINDINGS = 5
MIN_REPORTED_IMPORTANCE_NATS = 0.01
# More heads than this share first place only if none of them stands out.
MAX_MOST_IMPORTANT_HEADS = 3
MIN_FAITHFULNESS_ALONE = 0.8  # a circuit with a smaller share is reported together with layer 0
MIN_REPORTED_FAITHFULNESS = 0.5
# The copying gain counts as formed once it stays above this share of its current value.
FORMED_GAIN_SHARE = 0.5


class Interval(NamedTuple):
    """Between which snapshots something formed.

    Attributes:
        after: Step of the last snapshot before; equal to `by` if `by` is the first snapshot.
        by: Step of the first snapshot at which it was there.
    """

    after: int
    by: int


@dataclass(frozen=True)
class Finding:
    """A statistically significant observation about some heads.

    Attributes:
        kind: What was observed: the name of a score, "copying_gain" or "importance".
        heads: The heads that it is about, strongest first.
    """

    kind: str
    heads: tuple[Head, ...]


@dataclass(frozen=True)
class HeadEvidence:
    """What was measured of one head of an `AttentionFinding`.

    Attributes:
        head: The head.
        score: Its score.
        formed: When it emerged; None for a model outside of a run.
        copying: Copying score of an induction head, if it was measured.
        upstream: The head that it depends on, if there is one.
    """

    head: Head
    score: Estimate
    formed: Interval | None
    copying: Estimate | None
    upstream: UpstreamHead | None


class CircuitShare(NamedTuple):
    """The share of the copying gain that a circuit keeps on its own."""

    share: Estimate
    includes_layer_0: bool


@dataclass(frozen=True)
class AttentionFinding(Finding):
    """Heads that attend to what their score measures.

    Attributes:
        evidence: What was measured of each head.
        copying_gain: In-context copying gain that the heads explain, in nats.
        circuit_share: How much of the gain their circuit keeps on its own.
    """

    evidence: tuple[HeadEvidence, ...]
    copying_gain: Estimate | None = None
    circuit_share: CircuitShare | None = None


@dataclass(frozen=True)
class CopyingGainFinding(Finding):
    """The model copies in context, but no induction head passes its threshold."""

    copying_gain: Estimate
    formed: Interval | None


@dataclass(frozen=True)
class ImportanceFinding(Finding):
    """Heads without which the validation loss rises most; `increases` in nats, one per head."""

    increases: tuple[Estimate, ...]


@dataclass(frozen=True)
class SinkFinding(Finding):
    """Heads that attend to the first token; `score` is that of the first of them."""

    score: Estimate
    scored_heads: int


@dataclass(frozen=True)
class LostFinding(Finding):
    """A head that attended to what its score measures, and no longer does."""

    emerged: int
    lost: int
    score: Estimate


def summarize_rows(rows: list[dict]) -> list[Finding]:
    """Return the findings of a run from the rows of its metrics.jsonl."""
    latest = read_latest(rows)
    return [] if latest is None else summarize(latest, read_gain_history(rows))


def summarize(latest: Measurements, gain_history: Sequence[GainAt] = ()) -> list[Finding]:
    """Return the findings that measurements support, the most important first.

    Args:
        latest: Current measurements.
        gain_history: Copying gain at every snapshot of the run, the current one included; empty
            for a model outside of a run.
    """
    snapshots = [gain.step for gain in gain_history]
    attention = {score: _find_attention(latest, score, snapshots) for score in REPORTED_SCORES}
    headline = _explain_copying_gain(latest, attention.pop("induction"), gain_history)
    if headline is None:
        for score in list(attention):
            if attention[score] is not None:
                headline = attention.pop(score)
                break
    candidates = [headline, _find_most_important_heads(latest), *attention.values()]
    candidates.append(_find_sinks(latest))
    for score in REPORTED_SCORES:
        if not find_active_heads(latest, score):
            candidates.append(_find_lost_head(latest, score))
    return [finding for finding in candidates if finding is not None][:MAX_FINDINGS]


def emergence_interval(step: int, snapshots: Sequence[int]) -> Interval:
    """Return between which snapshots something formed that is first seen at `step`."""
    return Interval(max((s for s in snapshots if s < step), default=step), step)


def _find_attention(
    latest: Measurements, score: str, snapshots: Sequence[int]
) -> AttentionFinding | None:
    """Return what the strongest heads of a score do."""
    heads = find_active_heads(latest, score)
    if not heads:
        return None
    evidence = []
    for head in heads:
        formed, copying = None, None
        if len(snapshots) > 1:
            formed = emergence_interval(latest.emergence.emerged[score][head], snapshots)
        if score == "induction" and latest.score("copying", head).is_known:
            copying = latest.score("copying", head)
        upstream = find_upstream_head(latest, score, head)
        evidence.append(HeadEvidence(head, latest.score(score, head), formed, copying, upstream))
    return AttentionFinding(score, tuple(heads), tuple(evidence))


def _explain_copying_gain(
    latest: Measurements, induction: AttentionFinding | None, history: Sequence[GainAt]
) -> Finding | None:
    """Add the copying gain to the induction heads; without heads, report the gain alone."""
    gain = reported_copying_gain(latest)
    if gain is None:
        return induction
    if induction is not None:
        share = _reported_circuit_share(latest)
        return AttentionFinding(induction.kind, induction.heads, induction.evidence, gain, share)
    formed = None
    below = [n for n, entry in enumerate(history) if entry.nats < FORMED_GAIN_SHARE * gain.value]
    if below:
        formed = Interval(history[below[-1]].step, history[below[-1] + 1].step)
    return CopyingGainFinding("copying_gain", (), gain, formed)


def _reported_circuit_share(latest: Measurements) -> CircuitShare | None:
    """Return the circuit's share of the gain: alone if that suffices, else with layer 0."""
    faithfulness = latest.faithfulness
    if faithfulness is None:
        return None
    includes_layer_0 = not faithfulness.circuit.value >= MIN_FAITHFULNESS_ALONE
    share = faithfulness.circuit_and_layer_0 if includes_layer_0 else faithfulness.circuit
    if not share.exceeds(MIN_REPORTED_FAITHFULNESS, errors=2):
        return None
    return CircuitShare(share, includes_layer_0)


def _find_most_important_heads(latest: Measurements) -> ImportanceFinding | None:
    """Return the head, or the two or three, without which the validation loss rises most."""
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
    return SinkFinding("sink", tuple(heads), latest.score("sink", heads[0]), scored)


def _find_lost_head(latest: Measurements, score: str) -> LostFinding | None:
    """Return the head that passed a score's threshold longest, of those that no longer do."""
    emerged = latest.emergence.emerged.get(score, {})
    lost = latest.emergence.lost.get(score, {})
    if not lost:
        return None
    head = max(lost, key=lambda head: lost[head] - emerged.get(head, lost[head]))
    if lost[head] == emerged.get(head, lost[head]):
        return None
    return LostFinding(score, (head,), emerged[head], lost[head], latest.score(score, head))
