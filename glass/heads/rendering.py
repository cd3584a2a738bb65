"""Render findings as text: the same sentences in the terminal, on the page and in W&B."""

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

from common.text import format_with_error, pluralize
from glass.heads.circuit import MAX_NAMED_HEADS, MIN_REPORTED_GAIN_NATS
from glass.heads.findings import (
    AttentionFinding,
    CircuitShare,
    Copying,
    CopyingGainFinding,
    Finding,
    HeadEvidence,
    ImportanceFinding,
    Interval,
    LostFinding,
    SinkFinding,
    SufficientHeadsFinding,
    is_all,
    is_more_than_all,
    summarize_rows,
)
from glass.heads.results import Estimate, Head

FULL_ATTENTION = 0.5  # with a smaller score, a head attends "in part"


class Phenomenon(NamedTuple):
    """The name of a kind of head, and the token that it attends to."""

    name: str
    target: str


PHENOMENA = {
    "induction": Phenomenon("Induction head", "whatever followed the current token last time"),
    "previous_token": Phenomenon("Previous-token head", "the previous token"),
    "duplicate_token": Phenomenon("Duplicate-token head", "earlier copies of the current token"),
    "current_token": Phenomenon("Current-token head", "the current token itself"),
}


class RenderedFinding(NamedTuple):
    """A finding as text."""

    title: str  # name of the phenomenon, such as "Induction head"
    text: str  # sentences that state the finding
    details: list[str]  # measurements with standard errors, one phrase per head or measurement
    heads: list[str]  # their names, strongest first

    def __str__(self) -> str:
        line = f"{self.title}: {self.text}"
        return f"{line} [{'; '.join(self.details)}]" if self.details else line


def describe_run(rows: list[dict]) -> list[RenderedFinding]:
    """Return the findings of a run as text, from the rows of its metrics.jsonl."""
    return [render(finding) for finding in summarize_rows(rows)]


def render(finding: Finding) -> RenderedFinding:
    """Render a finding as text."""
    title, text, details = _render(finding)
    return RenderedFinding(title, text, details, [str(head) for head in finding.heads])


@singledispatch
def _render(finding: Finding) -> tuple[str, str, list[str]]:
    """Return the title, the text and the details of a finding."""
    raise TypeError(f"cannot render a {type(finding).__name__}")


@_render.register
def _render_attention(finding: AttentionFinding) -> tuple[str, str, list[str]]:
    phenomenon = PHENOMENA[finding.kind]
    title = phenomenon.name if len(finding.heads) == 1 else f"{phenomenon.name}s"
    scores = [(one.head, one.score) for one in finding.evidence]
    sentences = [_attention_sentence(scores, phenomenon.target)]
    if finding.kind == "induction":
        sentences += _upstream_sentences(finding.evidence)
        if finding.circuit_share is not None:
            sentences.append(_circuit_sentence(finding, finding.circuit_share))
        sentences += _emergence_sentences(finding.evidence)
    details = [_head_details(one) for one in finding.evidence]
    if finding.copying is not None:
        details = [*_copying_details(finding.copying), *details]
        if finding.copying.accuracy is not None and not finding.copying.is_learned:
            sentences.append(f"So far {_accuracy_clause(finding.copying)}.")
    return title, " ".join(sentences), details


def _attention_sentence(scores: Sequence[tuple[Head, Estimate]], target: str) -> str:
    """State which token the heads attend to, fully or in part."""
    full = [head for head, score in scores if score.value >= FULL_ATTENTION]
    partial = [head for head, score in scores if score.value < FULL_ATTENTION]
    verb = "attends" if len(full or partial) == 1 else "attend"
    if not full:
        return f"{_join(partial)} {verb} in part to {target}."
    sentence = f"{_join(full)} {verb} to {target}"
    if partial:
        verb = "does" if len(partial) == 1 else "do"
        sentence += f"; {_join(partial)} {verb} so in part"
    return f"{sentence}."


def _upstream_sentences(evidence: Sequence[HeadEvidence]) -> list[str]:
    sentences = []
    for one in evidence:
        if one.upstream is not None:
            subject = "It" if len(evidence) == 1 else one.head
            kind = "the previous-token head " if one.upstream.is_previous_token_head else ""
            lost = f"{100 * one.upstream.share.value:.0f}% of its score is lost without it"
            sentences.append(f"{subject} reads from {kind}{one.upstream.head} ({lost}).")
    return sentences


def _circuit_sentence(finding: AttentionFinding, circuit: CircuitShare) -> str:
    """State the share of the copying gain that remains with only the circuit active."""
    is_one_head = len(finding.heads) == 1 and finding.evidence[0].upstream is None
    account = "it accounts" if is_one_head else "they account"
    active = "Together with layer 0" if circuit.includes_layer_0 else "Without other heads"
    subject = f"{active} {account}"
    share = _format_percent(circuit.share)
    if is_all(circuit.share):
        return f"{subject} for all of the in-context copying gain ({share})."
    lowered = ": the other heads lower it" if is_more_than_all(circuit.share) else ""
    return f"{subject} for {share} of the in-context copying gain{lowered}."


def _emergence_sentences(evidence: Sequence[HeadEvidence]) -> list[str]:
    intervals = {one.head: format_interval(one.emerged) for one in evidence if one.emerged}
    if len(set(intervals.values())) == 1:
        return [f"Emerged {next(iter(intervals.values()))}."]
    return [f"{head} emerged {interval}." for head, interval in intervals.items()]


def _head_details(evidence: HeadEvidence) -> str:
    """List the measurements of one head, separated by commas."""
    facts = [f"score {format_with_error(*evidence.score)}"]
    if evidence.copying is not None:
        facts.append(f"copying score {format_with_error(*evidence.copying)}")
    if evidence.emerged is not None:
        facts.append(f"emerged {format_interval(evidence.emerged)}")
    if evidence.upstream is not None:
        head, read, share, _ = evidence.upstream
        lost = f"{_format_percent(share)} of the score is lost"
        facts.append(f"{lost} when {head} is ablated in its {read}")
    return f"{evidence.head}: {', '.join(facts)}"


@_render.register
def _render_copying_gain(finding: CopyingGainFinding) -> tuple[str, str, list[str]]:
    copying, emerged = finding.copying, ""
    text = (
        "Repeating a sequence of random tokens, instead of reshuffling it, lowers its loss by "
        f"{format_with_error(*copying.gain)} nats/token"
    )
    if finding.emerged is not None:
        interval = format_interval(finding.emerged)
        emerged = f" The gain passed {MIN_REPORTED_GAIN_NATS} nats {interval}."
    if copying.accuracy is None:
        return "In-context copying", f"{text}.{emerged}", []
    title = "In-context copying" if copying.is_learned else "Beginning of in-context copying"
    return title, f"{text}; {_accuracy_clause(copying)}.{emerged}", _copying_details(copying)


def _accuracy_clause(copying: Copying) -> str:
    assert copying.accuracy is not None
    return f"{_format_percent(copying.accuracy)} of the repeated tokens are predicted"


def _copying_details(copying: Copying) -> list[str]:
    details = [f"in-context copying gain {format_with_error(*copying.gain)} nats"]
    if copying.loss is not None:
        details.append(f"loss of repeated tokens {format_with_error(*copying.loss)} nats/token")
    if copying.accuracy is not None:
        details.append(f"{_format_percent(copying.accuracy)} of them predicted")
    return details


@_render.register
def _render_sufficient_heads(finding: SufficientHeadsFinding) -> tuple[str, str, list[str]]:
    title = "Sufficient head" if len(finding.heads) == 1 else "Sufficient heads"
    keep = "keeps" if len(finding.heads) == 1 else "keep"
    lower = ", which lower it" if finding.other_heads > 1 else ", which lowers it"
    text = (
        f"{_join(finding.heads)} {keep} {_format_percent(finding.share)} of the in-context copying "
        f"gain without the other {pluralize(finding.other_heads, 'head')}"
        f"{lower if is_more_than_all(finding.share) else ''}."
    )
    return title, text, []


@_render.register
def _render_importance(finding: ImportanceFinding) -> tuple[str, str, list[str]]:
    heads = _join(finding.heads, "or")
    increases = _join([format_with_error(*one) for one in finding.increases], "or")
    title = "Most important head" if len(finding.heads) == 1 else "Most important heads"
    return title, f"Zeroing {heads} raises the validation loss by {increases} nats/token.", []


@_render.register
def _render_sinks(finding: SinkFinding) -> tuple[str, str, list[str]]:
    heads, scores, target = finding.heads, finding.scores, "the first token"
    shown = [0] if len(heads) == 1 else [0, -1]  # the strongest and the weakest
    details = [
        f"{heads[k]}: attention to the first token {format_with_error(*scores[k])}" for k in shown
    ]
    if len(heads) <= MAX_NAMED_HEADS:
        return "Attention sink", _attention_sentence(list(zip(heads, scores)), target), details
    partial = sum(score.value < FULL_ATTENTION for score in scores)
    extent = " in part" if partial == len(heads) else ""
    suffix = f", {partial} of them in part" if 0 < partial < len(heads) else ""
    text = f"{len(heads)} of {finding.scored_heads} heads attend{extent} to {target}{suffix}."
    return "Attention sink", text, details


@_render.register
def _render_lost_head(finding: LostFinding) -> tuple[str, str, list[str]]:
    phenomenon, head = PHENOMENA[finding.kind], finding.heads[0]
    text = (
        f"{head} attended to {phenomenon.target} from step {finding.emerged:,} to step "
        f"{finding.lost:,}. Then its score fell significantly below the threshold"
    )
    if math.isfinite(finding.score.value):
        text += f"; now it is {format_with_error(*finding.score)}"
    return f"Lost: {phenomenon.name[0].lower()}{phenomenon.name[1:]}", f"{text}.", []


def format_interval(interval: Interval) -> str:
    """Format an interval between two snapshots: "between steps 100 and 200"."""
    if interval.by - interval.after > 1:
        return f"between steps {interval.after:,} and {interval.by:,}"
    return f"at step {interval.by:,}"


def _format_percent(share: Estimate) -> str:
    return f"{format_with_error(100 * share.value, 100 * share.error)}%"


def _join(words: Sequence[Head | str], conjunction: str = "and") -> str:
    """Join words: a, b and c."""
    *first, last = map(str, words)
    return f"{', '.join(first)} {conjunction} {last}" if first else last
