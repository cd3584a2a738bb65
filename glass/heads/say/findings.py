"""State what a run's measurements show about its attention heads, with their evidence.

Each function looks for one kind of finding at the latest snapshot and states it in sentences.
Findings exceed two standard errors; the most important heads are corrected for multiple
comparisons.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from common.text import format_with_error, join_words, pluralize
from glass.heads.measure.circuit import (
    MAX_NAMED_HEADS,
    SUFFICIENT_SHARE,
    find_active_heads,
    find_upstream_head,
    is_significant,
    reported_copying_gain,
)
from run.row import Estimate, Head, Row, scored_rows

MAX_FINDINGS = 6
FULL_ATTENTION = 0.5  # a head whose score is not surely above this attends "in part"
MIN_REPORTED_IMPORTANCE_NATS = 0.01
MAX_MOST_IMPORTANT_HEADS = 3  # if more are not distinguishable from the first, none is reported
MIN_FAITHFULNESS_ALONE = 0.8  # below this share, layer 0 is added to the circuit
MIN_REPORTED_FAITHFULNESS = 0.5  # a share that is not surely above this is not reported
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
LEARNED_ACCURACY = 0.5  # of repeated random tokens, from which copying counts as learned

# Scores whose heads are reported, in order of interest → the kind of head, what it attends to.
PHENOMENA = {
    "induction": ("Induction head", "whatever followed the current token last time"),
    "previous_token": ("Previous-token head", "the previous token"),
    "duplicate_token": ("Duplicate-token head", "earlier copies of the current token"),
    "current_token": ("Current-token head", "the current token itself"),
}
# Whose first heads are announced during training: those of the induction circuit.
ANNOUNCED_SCORES = ("previous_token", "induction")
# Those and sinks, which are reported together.
KINDS = PHENOMENA | {"sink": ("Attention sink", "the first token")}


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
            line += f": {_name_heads(self.heads)}"
        if self.total > len(self.heads):
            line += f" ({len(self.heads)} of {self.total})"
        return f"{line}, emerged {self.emerged}" if self.emerged else line

    def __str__(self) -> str:
        line = f"{self.title}: {self.text}"
        return f"{line} [{'; '.join(self.details)}]" if self.details else line


def summarize(*rows: Row) -> list[Finding]:
    """Return the significant findings at the last snapshot, the most important first.

    `rows` are those of a run's metrics.jsonl, or the only one that `measure_heads` returns.
    """
    snapshots = scored_rows(rows)
    if not snapshots:
        return []
    latest = snapshots[-1]
    steps = [row["step"] for row in snapshots]
    induction, *others = (_find_attention(latest, score, steps) for score in PHENOMENA)
    attention = [induction or _find_copying(latest), *others]
    attention = [finding for finding in attention if finding is not None]
    candidates = [
        *attention[:1],
        _find_sufficient_heads(latest),
        _find_most_important_heads(latest),
        *attention[1:],
        _find_sinks(latest),
        *(_find_lost_head(latest, score) for score in PHENOMENA),
    ]
    return [finding for finding in candidates if finding is not None][:MAX_FINDINGS]


def announce_emergence(*rows: Row) -> list[Finding]:
    """State which heads became the first of their kind, if the last snapshot of a run dates them.

    A kind that had heads before the first step of training is not announced.
    """
    *earlier, latest = scored_rows(rows)
    steps = [row["step"] for row in earlier]
    announced = []
    for score in ANNOUNCED_SCORES:
        emerged = latest.heads(f"emerged/{score}")
        if not emerged or earlier[-1].heads(f"emerged/{score}") or 0 in emerged.values():
            continue
        heads = sorted(emerged, key=lambda head: -latest.score(score, head).value)
        kind = _name_kind(score)
        article = "an" if kind[0] in "aeiou" else "a"
        kinds = f"{article} {kind}" if len(heads) == 1 else f"{kind}s"
        date = format_emergence(emerged[heads[0]], steps)
        text = f"{_name_heads(heads)} became {kinds} {date}"
        announced.append(Finding(_title(score, heads), text, [], _names(heads)))
    return announced


# --- heads that attend to something ---------------------------------------------------------------


def _find_attention(latest: Row, score: str, steps: Sequence[int]) -> Finding | None:
    """State which heads attend to something, since when, and the circuit of induction heads.

    The text says when all of them had emerged, the details which one emerged at another time.
    """
    active = find_active_heads(latest, score, most=None)
    if not active:
        return None
    heads = active[:MAX_NAMED_HEADS]
    emerged = _date_heads(latest, score, heads, steps)
    sentences = [_state_target(latest, score, active)]
    details = []
    if score == "induction":
        sentences += _state_circuit(latest, heads)
        details = _list_copying(latest)
    if emerged:
        sentences.append(f"Emerged {emerged}.")
    for head in heads:
        date = _date_heads(latest, score, [head], steps)
        details.append(_describe_head(latest, score, head, "" if date == emerged else date))
    title = _title(score, heads)
    return Finding(title, " ".join(sentences), details, _names(heads), emerged, len(active))


def _title(score: str, heads: Sequence[Head]) -> str:
    name, _ = PHENOMENA[score]
    return name if len(heads) == 1 else f"{name}s"


def _name_kind(score: str) -> str:
    """Return what a head is called within a sentence, such as "induction head"."""
    name, _ = KINDS[score]
    return name[0].lower() + name[1:]


def _date_heads(latest: Row, score: str, heads: Sequence[Head], steps: Sequence[int]) -> str:
    """Return the interval in which all of the heads emerged; "" if one passed before training."""
    emerged = latest.heads(f"emerged/{score}")
    dates = [emerged[head] for head in heads]
    if len(steps) == 1 or 0 in dates:
        return ""
    before = [step for step in steps if step < min(dates)] or [min(dates)]
    return format_emergence(max(dates), before)


def _describe_head(latest: Row, score: str, head: Head, emerged: str) -> str:
    facts = [f"score {format_with_error(*latest.score(score, head))}"]
    copying = latest.score("copying", head)
    if score == "induction" and copying.is_known:
        facts.append(f"copying score {format_with_error(*copying)}")
    if emerged:
        facts.append(f"emerged {emerged}")
    if upstream := find_upstream_head(latest, score, head):
        lost = f"{_format_share(upstream.share)} of the score is lost"
        facts.append(f"{lost} when {upstream.head} is ablated in its {upstream.input}")
    return f"{head}: {', '.join(facts)}"


def _state_target(latest: Row, score: str, active: Sequence[Head]) -> str:
    """State what the strongest of the active heads attend to, and how many there are."""
    _, target = KINDS[score]
    heads = active[:MAX_NAMED_HEADS]
    full = [head for head in heads if _attends_fully(latest, score, head)]
    partial = [head for head in heads if head not in full]

    def subject(named: list[Head]) -> str:
        if len(active) == len(heads) or heads[0] not in named:
            return join_words(named)
        return f"{join_words(named)}, the strongest of {len(active)} {_name_kind(score)}s,"

    verb = "attends" if len(full or partial) == 1 else "attend"
    if not full:
        return f"{subject(partial)} {verb} in part to {target}."
    sentence = f"{subject(full)} {verb} to {target}"
    if partial:
        verb = "does" if len(partial) == 1 else "do"
        sentence += f"; {subject(partial)} {verb} so in part"
    return f"{sentence}."


def _attends_fully(latest: Row, score: str, head: Head) -> bool:
    return _surely_reaches(latest.score(score, head), FULL_ATTENTION)


def _surely_reaches(estimate: Estimate, minimum: float) -> bool:
    return estimate.value - 2 * estimate.error >= minimum


def _state_circuit(latest: Row, heads: Sequence[Head]) -> list[str]:
    """State where the strongest induction head reads from, and the circuit's share of the gain."""
    clauses = []
    if upstream := find_upstream_head(latest, "induction", heads[0]):
        previous_token_heads = find_active_heads(latest, "previous_token")
        kind = "the previous-token head " if upstream.head in previous_token_heads else ""
        reader = "It" if len(heads) == 1 else str(heads[0])
        clauses.append(f"{reader} reads from {kind}{upstream.head}")
    clauses += _state_circuit_share(latest)
    return [f"{'; '.join(clauses)}."] if clauses else []


def _state_circuit_share(latest: Row) -> list[str]:
    """State the circuit's share of the gain, with layer 0 if its share alone is too small."""
    if reported_copying_gain(latest) is None:
        return []
    components = _names([*latest.heads("circuit")])
    share = latest.estimate("faithfulness", "circuit")
    if not share.value >= MIN_FAITHFULNESS_ALONE:
        components.append("layer 0")
        share = latest.estimate("faithfulness", "circuit_and_layer_0")
    return [_state_kept_gain(components, share, "other heads")] if _is_reported(share) else []


def _is_reported(share: Estimate) -> bool:
    return share.is_known and _surely_reaches(share, MIN_REPORTED_FAITHFULNESS)


def _state_kept_gain(components: Sequence[str], share: Estimate, others: str) -> str:
    keep = "keeps" if len(components) == 1 else "keep"
    kept = f"{_format_share(share)} of the in-context copying gain"
    return f"{join_words(components)} {keep} {kept} without {others}"


# --- copying without such heads, and the heads that suffice for it --------------------------------


def _find_copying(latest: Row) -> Finding | None:
    """State that the model copies in context without a detected induction head."""
    details = _list_copying(latest)
    if not details:
        return None
    is_learned = _surely_reaches(latest.estimate("probe/repeated_accuracy"), LEARNED_ACCURACY)
    title = "In-context copying" if is_learned else "Beginning of in-context copying"
    text = "Repeating a sequence of random tokens, instead of reshuffling it, lowers its loss."
    return Finding(title, text, details, [])


def _list_copying(latest: Row) -> list[str]:
    gain = reported_copying_gain(latest)
    if gain is None:
        return []
    details = [f"in-context copying gain {format_with_error(*gain)} nats/token"]
    loss = latest.estimate("probe/repeated_loss")
    if loss.is_measured:
        details.append(f"loss of repeated tokens {format_with_error(*loss)} nats/token")
    accuracy = latest.estimate("probe/repeated_accuracy")
    if accuracy.is_measured:
        details.append(f"{_format_percent(accuracy)} of repeated tokens predicted")
    return details


def _find_sufficient_heads(latest: Row) -> Finding | None:
    """State which few heads keep most of the copying gain."""
    heads = latest.heads("sufficient").keys()
    all_heads = {head for by_head in latest.scores().values() for head in by_head}
    others = len(all_heads) - len(heads)
    share = latest.estimate("faithfulness", "sufficient")
    if not heads or others < 1 or reported_copying_gain(latest) is None or not _is_reported(share):
        return None
    if share.value + 2 * share.error < SUFFICIENT_SHARE:
        return None  # they were only on the rows on which they were found
    circuit_share = latest.estimate("faithfulness", "circuit")
    if heads == latest.heads("circuit").keys() and circuit_share.value >= MIN_FAITHFULNESS_ALONE:
        return None  # the headline says so
    names = _names([*heads])
    title, statement = "Sufficient head", "This head alone suffices for copying"
    if len(names) > 1:
        count = NUMBER_WORDS.get(len(names), len(names))
        title, statement = "Sufficient heads", f"These {count} heads alone suffice for copying"
    kept = _state_kept_gain(names, share, f"the other {pluralize(others, 'head')}")
    return Finding(title, f"{statement}: {join_words(names)}.", [kept], names)


# --- other heads ----------------------------------------------------------------------------------


def _find_most_important_heads(latest: Row) -> Finding | None:
    """State on which one to three heads the validation loss depends most, if they stand out."""
    importance = {
        head: latest.score("importance", head) for head in latest.heads("heads/importance")
    }
    significant = {
        head
        for head, increase in importance.items()
        if increase.exceeds(MIN_REPORTED_IMPORTANCE_NATS, errors=0)
        and is_significant(increase, len(importance))
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
    zeroed = join_words(leaders, "or")
    increases = join_words([format_with_error(*importance[head]) for head in leaders], "or")
    text = f"Zeroing {zeroed} raises the validation loss by {increases} nats/token."
    return Finding(title, text, [], _names(leaders))


def _find_sinks(latest: Row) -> Finding | None:
    heads = find_active_heads(latest, "sink", most=None)
    if not heads:
        return None
    strongest_and_weakest = heads if len(heads) == 1 else [heads[0], heads[-1]]
    details = [
        f"{head}: attention to the first token {format_with_error(*latest.score('sink', head))}"
        for head in strongest_and_weakest
    ]
    if len(heads) <= MAX_NAMED_HEADS:
        text = _state_target(latest, "sink", heads)
        return Finding("Attention sink", text, details, _names(heads))
    partial = sum(not _attends_fully(latest, "sink", head) for head in heads)
    extent = " in part" if partial == len(heads) else ""
    suffix = f", {partial} of them in part" if 0 < partial < len(heads) else ""
    scored_heads = len(latest.heads("heads/sink"))
    text = f"{len(heads)} of {scored_heads} heads attend{extent} to the first token{suffix}."
    return Finding("Attention sink", text, details, _names(heads))


def _find_lost_head(latest: Row, score: str) -> Finding | None:
    """State when the head of a score that had been one longest was lost, if none is active."""
    emerged = latest.heads(f"emerged/{score}")
    lost = latest.heads(f"lost/{score}")
    if not lost or find_active_heads(latest, score):
        return None
    head = max(lost, key=lambda head: lost[head] - emerged[head])
    _, target = PHENOMENA[score]
    kind = _name_kind(score)
    subject = str(head) if len(lost) == 1 else f"{head}, one of {len(lost)} lost {kind}s,"
    text = (
        f"{subject} attended to {target} from step {emerged[head]:,} to step {lost[head]:,}. Then "
        "its score fell significantly below the threshold"
    )
    present = latest.score(score, head)
    if present.is_measured:
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


def _name_heads(heads: Sequence[Head | str]) -> str:
    return join_words(heads) if len(heads) <= MAX_NAMED_HEADS else pluralize(len(heads), "head")
