"""What is found out of a model, in sentences: of what holds now, beyond its error, and none
without. Of a run, or of a look at one moment, which is a run of one row."""

import math
import re
from statistics import NormalDist
from typing import NamedTuple

from common.metrics import is_scored, snapshot_steps
from common.text import format_emergence, format_with_error

# What heads of a kind do, and did.
KINDS = {
    "induction": ("looks at", "looked at", "what followed last time"),
    "previous_token": ("looks at", "looked at", "the token just before"),
    "duplicate_token": ("looks back at", "looked back at", "the same token"),
    "current_token": ("stays on", "stayed on", "the token itself"),
}
TOLD, MOST = 2, 5  # heads of a kind, and sentences, at most
HALF = 0.5  # of a score, below which a head does it partly; of a gain, from which it is there
COPIES, FED = 0.5, 0.2  # a score of copying, a share of composition, that are told, at least
WORTH = 0.01  # nats of a head's importance that are told, at least
CLEAR, ERRORS = 0.1, 3  # a repeat gain that is told: nats, at least, and times its error
ENOUGH = 0.8  # a share of it from which the heads that are named make it alone
WINDOWS = 16  # of which errors are made

Head = tuple[int, int]  # layer, head


class Finding(NamedTuple):
    """A sentence, and its numbers, with their errors, in words."""

    text: str
    figures: str


def summarize_run(rows: list[dict]) -> list[Finding]:
    """What the metrics of a run tell, the most important first; [] where nothing is clear."""
    scored = [row for row in rows if is_scored(row)]
    if not scored:
        return []
    row, steps = scored[-1], snapshot_steps(rows)
    kinds = {kind: of_kind(row, kind, steps) for kind in KINDS}
    gain = repeating(scored, kinds["induction"])
    first = "induction" if gain else next(filter(kinds.get, KINDS), "")
    told = [
        gain or kinds.pop(first, None),
        most_important(row),
        *(kinds[kind] for kind in kinds if kind != first),
        resting(row),
        *(past(row, kind) for kind in kinds if not kinds[kind]),
    ]
    return [finding for finding in told if finding][:MOST]


def told_heads(row: dict) -> list[Head]:
    """The heads that `repeating` names: of induction, and who feeds the strongest."""
    names = {*doing(row, "induction")}
    names |= {
        feeder[0] for head in doing(row, "induction")[:1] if (feeder := fed(row, "induction", head))
    }
    return sorted(tuple(map(int, re.findall(r"\d+", name))) for name in names)


def doing(row: dict, kind: str, most: int | None = TOLD) -> list[str]:
    """The heads that are of a kind and were so at the snapshot before, the strongest first."""
    born = [key.rpartition("/")[2] for key in row if key.startswith(f"emerged/{kind}/")]
    now = [
        head
        for head in born
        if f"lost/{kind}/{head}" not in row and clear(row, f"heads/{kind}", head)
    ]
    return sorted(now, key=lambda head: -row[f"heads/{kind}/{head}"])[:most]


def repeating(scored: list[dict], induction: Finding | None) -> Finding | None:
    """Since when the model repeats what it has seen, and by which heads."""
    row, gains = scored[-1], [row.get("probe/copying_gain", 0.0) for row in scored]
    value, error = gains[-1], row.get("probe/copying_gain_se")
    if not is_known(value, error) or value < max(CLEAR, ERRORS * error):
        return None
    below = [k for k, gain in enumerate(gains) if gain < HALF * value]
    text = (
        f"By step {scored[below[-1] + 1]['step']:,} this model learned to repeat what it has seen"
        if below
        else "This model repeats what it has seen"
    )
    figures = [f"repeat gain {format_with_error(value, error)} nats"]
    if induction:
        feeder = fed(row, "induction", doing(row, "induction")[0])
        text += f": {induction.text[:-1]}{f', fed by {feeder[0]}' if feeder else ''}"
        figures.append(induction.figures)
    alone = row.get("faithfulness/circuit", 0) >= ENOUGH
    them, how = ("circuit", "alone") if alone else ("circuit_and_layer_0", "together with layer 0")
    share, off = (row.get(f"faithfulness{end}/{them}") for end in ("", "_se"))
    if induction and is_known(share, off) and share >= max(HALF, 2 * off):
        part = "all" if share + 2 * off >= 1 else f"{100 * share:.0f}%"
        many = "they make" if feeder or "(and " in induction.text else "it makes"
        text += f"; {how} {many} {part} of the gain"
        figures.append(f"{how} {format_with_error(100 * share, 100 * off)}% of the gain")
    return Finding(f"{text}.", "; ".join(figures))


def of_kind(row: dict, kind: str, steps: list[int]) -> Finding | None:
    """What the strongest heads of a kind do, since when, and who feeds them."""
    heads, figures = doing(row, kind), []
    for head in heads:
        facts = [f"score {known(row, f'heads/{kind}', head)}"]
        if len(steps) > 1:
            facts.append(f"born {format_emergence(row[f'emerged/{kind}/{head}'], steps)}")
        if kind == "induction" and (copying := known(row, "heads/copying", head)):
            facts.insert(1, f"copying {copying}")
        if feeder := fed(row, kind, head):
            facts.append(
                f"{feeder[1]}% of the score is lost when {feeder[0]} is cut from its {feeder[2]}"
            )
        figures.append(f"{head}: {', '.join(facts)}")
    if not heads:
        return None
    first, others = (
        does(row, kind, heads[0]),
        [  # of another that does otherwise, it is said how
            head
            if (also := does(row, kind, head)) == does(row, kind, heads[0])
            else f"{head} {'partly' if also.startswith('partly') else also}"
            for head in heads[1:]
        ],
    )
    more = f" (and {listed(others)})" if others else ""
    return Finding(f"{heads[0]}{more} {first} {KINDS[kind][2]}.", "; ".join(figures))


def does(row: dict, kind: str, head: str) -> str:
    """What a head does, partly where it does it less than half of the time."""
    verb = KINDS[kind][0]
    copies, error = (row.get(f"heads/copying{end}/{head}") for end in ("", "_se"))
    if kind == "induction" and is_known(copies, error) and abs(copies) - 2 * error >= COPIES:
        verb = "copies" if copies > 0 else "pushes down"
    return verb if row[f"heads/{kind}/{head}"] >= HALF else f"partly {verb}"


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def fed(row: dict, kind: str, head: str) -> tuple[str, str, str] | None:
    """The head below that feeds this one's look most, of induction a head that looks at the token
    before where one does: its name, the share of the score that is lost without it, in words, and
    what it is cut from. None where none does so clearly."""
    prefix, found = f"composition/{kind}/{head}/", []
    for key, share in row.items():
        read, _, feeder = key.removeprefix(prefix).partition("/")
        error = row.get(f"composition/{kind}_se/{head}/{read}/{feeder}")
        if (
            key.startswith(prefix)
            and read != "values"
            and re.fullmatch(r"L\d+H\d+", feeder)
            and is_known(share, error)
            and share >= FED
        ):
            found.append((share, error, feeder, read))
    if kind == "induction":  # it searches for a token by the one before it
        found = [wire for wire in found if wire[2] in doing(row, "previous_token")] or found
    share, error, feeder, read = max(found, default=(0, 1, "", ""))
    if share < error * beyond(2 * len(scores_of(row, kind))):
        return None
    return feeder, format_with_error(100 * share, 100 * error), read


def most_important(row: dict) -> Finding | None:
    """The head, or the two or three, without which the validation loss rises most."""
    worth = {
        head: (value, row.get(f"heads/importance_se/{head}"))
        for head, value in scores_of(row, "importance").items()
    }
    least = beyond(len(worth))
    clear = {
        head: (value, error)
        for head, (value, error) in worth.items()
        if is_known(value, error) and value >= max(WORTH, least * error)
    }
    if not clear:
        return None
    top, off = max(clear.values())
    leaders = sorted(
        (
            head
            for head, (value, error) in worth.items()
            if is_known(value, error) and top - value <= 2 * math.hypot(off, error)
        ),
        key=lambda h: -worth[h][0],
    )
    if len(leaders) > 3 or not set(leaders) <= set(clear):
        return None  # it could be another one as well
    rise = listed([f"{format_with_error(*worth[head])}" for head in leaders])
    text = f"{leaders[0]} matters most" if len(leaders) == 1 else f"{listed(leaders)} matter most"
    return Finding(
        f"{text} to the validation loss.",
        f"without {' or '.join(leaders)} it is {rise} nats higher",
    )


def resting(row: dict) -> Finding | None:
    """How many heads rest on the first token, and the one that most does."""
    heads, many = doing(row, "sink", most=None), len(scores_of(row, "sink"))
    if not heads:
        return None
    names = listed(heads) if len(heads) <= TOLD else f"{len(heads)} of {many} heads"
    return Finding(
        f"{names} rest{'s' * (len(heads) == 1)} on the first token.",
        f"the weight on it: {heads[0]} {known(row, 'heads/sink', heads[0])}",
    )


def past(row: dict, kind: str) -> Finding | None:
    """What a head did, of a kind of which there is none now."""
    prefix, (_, did, where) = f"lost/{kind}/", KINDS[kind]
    ended = {key.removeprefix(prefix): step for key, step in row.items() if key.startswith(prefix)}
    lived = {head: step - row[f"emerged/{kind}/{head}"] for head, step in ended.items()}
    head = max(lived, key=lived.get, default=None)
    if not head or not lived[head]:
        return None
    return Finding(
        f"{head} {did} {where} from step {row[f'emerged/{kind}/{head}']:,} to "
        f"{ended[head]:,}, and does so no more.",
        f"score {known(row, f'heads/{kind}', head)} now",
    )


def scores_of(row: dict, score: str) -> dict[str, float]:
    """A score of every head."""
    prefix = f"heads/{score}/"
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def beyond(count: int, chance: float = 0.05) -> float:
    """How many standard errors the largest of so many means of WINDOWS readings exceeds by chance
    with this probability at most, where all are 0: Student's t for the chance of each (Bonferroni),
    by the first terms of its series in the normal quantile."""
    z, n = NormalDist().inv_cdf(1 - chance / max(1, count)), WINDOWS - 1
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def known(row: dict, score: str, head: str) -> str | None:
    """A head's score with its error, None where one of them is not known."""
    value, error = row.get(f"{score}/{head}"), row.get(f"{score}_se/{head}")
    return format_with_error(value, error) if is_known(value, error) else None


def clear(row: dict, score: str, head: str) -> bool:
    """Whether a head's score is known, and above twice its error."""
    value, error = row.get(f"{score}/{head}"), row.get(f"{score}_se/{head}")
    return is_known(value, error) and value >= 2 * error


def is_known(value: float | None, error: float | None) -> bool:
    """Whether they are finite, and the error is more than 0."""
    return None not in (value, error) and math.isfinite(value) and 0 < error < math.inf
