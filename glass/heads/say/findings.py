"""State what a run's measurements show about its attention heads, with their evidence.

Each function looks for one kind of finding at the latest snapshot and states it in sentences.
Findings exceed two standard errors; the most important heads are corrected for multiple
comparisons.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from common.text import format_with_error, pluralize
from glass.heads.measure.circuit import (
    MAX_NAMED_HEADS,
    MIN_REPORTED_GAIN_NATS,
    SUFFICIENT_SHARE,
    find_active_heads,
    find_upstream_head,
    is_previous_token_head,
    is_reported_gain,
    max_errors_by_chance,
    reported_copying_gain,
)
from glass.heads.measure.results import CompositionShare, Estimate, Head, Measurements
from glass.heads.say.metrics import read_gain_history, read_latest

MAX_FINDINGS = 6
FULL_ATTENTION = 0.5  # a head whose score is not surely above this attends "in part"
MIN_REPORTED_IMPORTANCE_NATS = 0.01
MAX_MOST_IMPORTANT_HEADS = 3  # if more are not distinguishable from the first, none is reported
MIN_FAITHFULNESS_ALONE = 0.8  # below this share, layer 0 is added to the circuit
MIN_REPORTED_FAITHFULNESS = 0.5  # a share that is not surely above this is not reported
LEARNED_ACCURACY = 0.5  # of repeated random tokens, from which copying counts as learned

# Scores whose heads are reported, in order of interest → the kind of head, what it attends to.
PHENOMENA = {
    "induction": ("Induction head", "whatever followed the current token last time"),
    "previous_token": ("Previous-token head", "the previous token"),
    "duplicate_token": ("Duplicate-token head", "earlier copies of the current token"),
    "current_token": ("Current-token head", "the current token itself"),
}


class Finding(NamedTuple):
    """A statistically significant observation, as text."""

    title: str  # name of the phenomenon, such as "Induction head"
    text: str  # sentences that state the finding
    details: list[str]  # measurements with standard errors, one phrase per head or measurement
    heads: list[str]  # their names, strongest first
    emerged: str = ""  # when they did, such as "between steps 100 and 200"
    total: int = 0  # number of such heads, if not all of them are named

    @property
    def headline(self) -> str:
        """The kind of head, the heads and when they emerged, for a short line."""
        line = self.title
        if self.heads:
            is_short = len(self.heads) <= MAX_NAMED_HEADS
            line += f": {_join(self.heads) if is_short else pluralize(len(self.heads), 'head')}"
        if self.total > len(self.heads):
            line += f" ({len(self.heads)} of {self.total})"
        return f"{line}, emerged {self.emerged}" if self.emerged else line

    def __str__(self) -> str:
        line = f"{self.title}: {self.text}"
        return f"{line} [{'; '.join(self.details)}]" if self.details else line


def summarize_run(rows: list[dict]) -> list[Finding]:
    """Return the findings of a run from the rows of its metrics.jsonl."""
    latest = read_latest(rows)
    return [] if latest is None else summarize(latest, read_gain_history(rows))


def summarize(
    latest: Measurements, gain_history: Mapping[int, Estimate] | None = None
) -> list[Finding]:
    """Return the significant findings of the latest snapshot, the most important first.

    `gain_history` has the copying gain at the step of every snapshot, the latest one included.
    """
    history = gain_history or {}
    snapshots = list(history)
    induction, *others = (_find_attention(latest, score, snapshots) for score in PHENOMENA)
    headline = induction or _find_copying(latest, history)
    attention = [finding for finding in (headline, *others) if finding is not None]
    candidates = [
        *attention[:1],
        _find_sufficient_heads(latest),
        _find_most_important_heads(latest),
        *attention[1:],
        _find_sinks(latest),
        *(_find_lost_head(latest, score) for score in PHENOMENA),
    ]
    return [finding for finding in candidates if finding is not None][:MAX_FINDINGS]


def _find_attention(latest: Measurements, score: str, snapshots: Sequence[int]) -> Finding | None:
    active = find_active_heads(latest, score, most=None)
    heads = active[:MAX_NAMED_HEADS]
    if not heads:
        return None
    name, target = PHENOMENA[score]
    title = name if len(heads) == 1 else f"{name}s"
    sentences = [_state_target(latest, score, active, target)]
    upstream = {head: find_upstream_head(latest, score, head) for head in heads}
    emerged: dict[Head, str] = {}
    interval = ""
    if len(snapshots) > 1:
        steps = latest.emergence.emerged[score]
        trained = [head for head in heads if steps[head]]  # the others passed before the first step
        emerged = {head: format_emergence(steps[head], snapshots) for head in trained}
        if len(trained) == len(heads):
            first, last = min(steps[head] for head in heads), max(steps[head] for head in heads)
            interval = format_emergence(last, [s for s in snapshots if s < first] or [first])
    details = []
    if score == "induction":
        sentences += _state_circuit(latest, heads, upstream[heads[0]])
        if gain := reported_copying_gain(latest):
            details = _list_copying(latest, gain)
        if emerged:
            strongest, when = next(iter(emerged.items()))
            is_common = when == interval
            sentences.append(f"{'Emerged' if is_common else f'{strongest} emerged'} {when}.")
            emerged = {} if is_common else {head: emerged[head] for head in trained[1:]}
    details += [
        _describe_head(latest, score, head, upstream[head], emerged.get(head)) for head in heads
    ]
    return Finding(title, " ".join(sentences), details, _names(heads), interval, len(active))


def _describe_head(
    latest: Measurements,
    score: str,
    head: Head,
    source: CompositionShare | None,
    emerged: str | None,
) -> str:
    facts = [f"score {format_with_error(*latest.score(score, head))}"]
    copying = latest.score("copying", head)
    if score == "induction" and copying.is_known:
        facts.append(f"copying score {format_with_error(*copying)}")
    if emerged is not None:
        facts.append(f"emerged {emerged}")
    if source is not None:
        lost = f"{_format_share(source.share)} of the score is lost"
        facts.append(f"{lost} when {source.upstream} is ablated in its {source.input}")
    return f"{head}: {', '.join(facts)}"


def _state_target(latest: Measurements, score: str, active: Sequence[Head], target: str) -> str:
    """State what the strongest of the active heads attend to, and how many there are."""
    heads = active[:MAX_NAMED_HEADS]
    full = [head for head in heads if _attends_fully(latest, score, head)]
    partial = [head for head in heads if head not in full]

    def subject(named: list[Head]) -> str:
        if len(active) == len(heads) or heads[0] not in named:
            return _join(named)
        return f"{_join(named)}, the strongest of {len(active)} {PHENOMENA[score][0].lower()}s,"

    verb = "attends" if len(full or partial) == 1 else "attend"
    if not full:
        return f"{subject(partial)} {verb} in part to {target}."
    sentence = f"{subject(full)} {verb} to {target}"
    if partial:
        verb = "does" if len(partial) == 1 else "do"
        sentence += f"; {subject(partial)} {verb} so in part"
    return f"{sentence}."


def _attends_fully(latest: Measurements, score: str, head: Head) -> bool:
    return _surely_reaches(latest.score(score, head), FULL_ATTENTION)


def _surely_reaches(estimate: Estimate, minimum: float) -> bool:
    return estimate.value - 2 * estimate.error >= minimum


def _state_circuit(
    latest: Measurements, heads: Sequence[Head], source: CompositionShare | None
) -> list[str]:
    """State where the strongest induction head reads from, and the circuit's share of the gain."""
    clauses = []
    if source is not None:
        kind = "the previous-token head " if is_previous_token_head(latest, source) else ""
        reader = "It" if len(heads) == 1 else str(heads[0])
        clauses.append(f"{reader} reads from {kind}{source.upstream}")
    clauses += _state_circuit_share(latest)
    return [f"{'; '.join(clauses)}."] if clauses else []


def _state_circuit_share(latest: Measurements) -> list[str]:
    """State the circuit's share of the gain, with layer 0 if its share alone is too small."""
    faithfulness = latest.faithfulness
    if faithfulness is None or reported_copying_gain(latest) is None:
        return []
    share, components = faithfulness.circuit, _names(faithfulness.circuit_heads)
    if not share.value >= MIN_FAITHFULNESS_ALONE:
        share = faithfulness.circuit_and_layer_0
        components.append("layer 0")
    return [_state_kept_gain(components, share, "other heads")] if _is_reported(share) else []


def _is_reported(share: Estimate) -> bool:
    return share.is_known and _surely_reaches(share, MIN_REPORTED_FAITHFULNESS)


def _state_kept_gain(components: Sequence[str], share: Estimate, others: str) -> str:
    keep = "keeps" if len(components) == 1 else "keep"
    kept = f"{_format_share(share)} of the in-context copying gain"
    return f"{_join(components)} {keep} {kept} without {others}"


def _find_copying(latest: Measurements, history: Mapping[int, Estimate]) -> Finding | None:
    """State that the model copies in context without a detected induction head."""
    gain, accuracy = reported_copying_gain(latest), latest.repeated_accuracy
    if gain is None:
        return None
    text = (
        "Repeating a sequence of random tokens, instead of reshuffling it, lowers its loss by "
        f"{format_with_error(*gain)} nats/token"
    )
    emerged = ""
    # The first report at two successive snapshots counts: later ones never change it.
    for (step, first), (_, second) in pairwise(history.items()):
        if is_reported_gain(first) and is_reported_gain(second):
            if step:  # otherwise before training
                interval = format_emergence(step, list(history))
                emerged = f" The gain passed {MIN_REPORTED_GAIN_NATS} nats {interval}."
            break
    is_learned = accuracy is not None and _surely_reaches(accuracy, LEARNED_ACCURACY)
    title = "In-context copying" if is_learned else "Beginning of in-context copying"
    if accuracy is not None:
        text += f"; {_format_percent(accuracy)} of the repeated tokens are predicted"
    return Finding(title, f"{text}.{emerged}", _describe_repeated_loss(latest), [])


def _list_copying(latest: Measurements, gain: Estimate) -> list[str]:
    details = [f"in-context copying gain {format_with_error(*gain)} nats"]
    details += _describe_repeated_loss(latest)
    if latest.repeated_accuracy is not None:
        details.append(f"{_format_percent(latest.repeated_accuracy)} of repeated tokens predicted")
    return details


def _describe_repeated_loss(latest: Measurements) -> list[str]:
    if latest.repeated_loss is None:
        return []
    loss = format_with_error(*latest.repeated_loss)
    return [f"loss of repeated tokens {loss} nats/token"]


def _find_sufficient_heads(latest: Measurements) -> Finding | None:
    faithfulness = latest.faithfulness
    if faithfulness is None or reported_copying_gain(latest) is None:
        return None
    heads, share = faithfulness.sufficient_heads, faithfulness.sufficient
    other_heads = latest.head_count - len(heads)
    if not heads or other_heads < 1 or not _is_reported(share):
        return None
    if share.value + 2 * share.error < SUFFICIENT_SHARE:
        return None  # they were only on the rows on which they were found
    if heads == faithfulness.circuit_heads and faithfulness.circuit.value >= MIN_FAITHFULNESS_ALONE:
        return None  # the headline says so
    title = "Sufficient head" if len(heads) == 1 else "Sufficient heads"
    others = f"the other {pluralize(other_heads, 'head')}"
    return Finding(title, f"{_state_kept_gain(_names(heads), share, others)}.", [], _names(heads))


def _find_most_important_heads(latest: Measurements) -> Finding | None:
    """State on which one to three heads the validation loss depends most, if they stand out."""
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
    value, error = max(importance[head] for head in significant)
    leaders = [
        head
        for head, increase in importance.items()
        if increase.is_known and value - increase.value <= 2 * math.hypot(error, increase.error)
    ]
    if len(leaders) > MAX_MOST_IMPORTANT_HEADS or not significant.issuperset(leaders):
        return None  # another head may be the most important one
    leaders.sort(key=lambda head: -importance[head].value)
    title = "Most important head" if len(leaders) == 1 else "Most important heads"
    increases = _join([format_with_error(*importance[head]) for head in leaders], "or")
    text = f"Zeroing {_join(leaders, 'or')} raises the validation loss by {increases} nats/token."
    return Finding(title, text, [], _names(leaders))


def _find_sinks(latest: Measurements) -> Finding | None:
    heads = find_active_heads(latest, "sink", most=None)
    if not heads:
        return None
    strongest_and_weakest = heads if len(heads) == 1 else [heads[0], heads[-1]]
    details = [
        f"{head}: attention to the first token {format_with_error(*latest.score('sink', head))}"
        for head in strongest_and_weakest
    ]
    if len(heads) <= MAX_NAMED_HEADS:
        text = _state_target(latest, "sink", heads, "the first token")
        return Finding("Attention sink", text, details, _names(heads))
    partial = sum(not _attends_fully(latest, "sink", head) for head in heads)
    extent = " in part" if partial == len(heads) else ""
    suffix = f", {partial} of them in part" if 0 < partial < len(heads) else ""
    scored_heads = len(latest.scored_heads("sink"))
    text = f"{len(heads)} of {scored_heads} heads attend{extent} to the first token{suffix}."
    return Finding("Attention sink", text, details, _names(heads))


def _find_lost_head(latest: Measurements, score: str) -> Finding | None:
    """State when the head of a score that had been one longest was lost, if none is active."""
    emerged = latest.emergence.emerged.get(score, {})
    lost = latest.emergence.lost.get(score, {})
    if not lost or find_active_heads(latest, score):
        return None
    head = max(lost, key=lambda head: lost[head] - emerged.get(head, lost[head]))
    if lost[head] == emerged.get(head, lost[head]):
        return None
    name, target = PHENOMENA[score]
    kind = f"{name[0].lower()}{name[1:]}"
    subject = str(head) if len(lost) == 1 else f"{head}, one of {len(lost)} lost {kind}s,"
    text = (
        f"{subject} attended to {target} from step {emerged[head]:,} to step {lost[head]:,}. Then "
        "its score fell significantly below the threshold"
    )
    present = latest.score(score, head)
    if math.isfinite(present.value):
        text += f"; now it is {format_with_error(*present)}"
    return Finding(f"Lost: {kind}", f"{text}.", [], _names([head]), total=len(lost))


def format_emergence(step: int, snapshots: Sequence[int]) -> str:
    """Format when a head that first passed at `step` emerged: "between steps 100 and 200"."""
    after = max((snapshot for snapshot in snapshots if snapshot < step), default=step)
    return f"between steps {after:,} and {step:,}" if step - after > 1 else f"at step {step:,}"


def _format_share(share: Estimate) -> str:
    """Format a share; above 100%, only its lower bound of two standard errors."""
    if share.value <= 1:
        return _format_percent(share)
    lowest = math.floor(100 * (share.value - 2 * share.error))
    return "all" if lowest >= 100 else f"at least {lowest}%"


def _format_percent(share: Estimate) -> str:
    return f"{format_with_error(100 * share.value, 100 * share.error)}%"


def _names(heads: Sequence[Head]) -> list[str]:
    return [str(head) for head in heads]


def _join(words: Sequence[Head | str], conjunction: str = "and") -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} {conjunction} {last}" if first else last
