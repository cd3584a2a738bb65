"""What a run has found out, in sentences: of measurements with their errors, and none without."""

import math

from files import as_known, born_when, is_scored, snapshot_steps

KINDS = {"previous_token": "looks at the token just before",
         "duplicate_token": "looks back at the same token",
         "induction": "looks at what followed last time"}
COPIES = 0.5  # a score of copying beyond this, either way, is told
TOLD, FED = 2, 0.2  # heads of a kind that are told of, at most; shares of wiring, at least


def conclude(rows: list[dict]) -> list[str]:
    """The sentences of a run's metrics, [] where nothing is clear of its error."""
    scored = [row for row in rows if is_scored(row)]
    if not scored:
        return []
    found = [gain(scored[-1])]
    for kind in KINDS:
        heads = [key.rpartition("/")[2] for key in scored[-1] if key.startswith(f"births/{kind}/")]
        heads = [head for head in heads if known(scored[-1], f"heads/{kind}", head)]
        heads.sort(key=lambda head: -scored[-1][f"heads/{kind}/{head}"])
        found += [of_head(rows, scored[-1], kind, head) for head in heads[:TOLD]]
    return [sentence for sentence in [*found, most_important(scored[-1])] if sentence]


def gain(row: dict) -> str | None:
    """By how much the loss of what comes again is lower."""
    value, error = row.get("probe/repeat_gain"), row.get("probe/repeat_gain_se")
    if not is_known(value, error) or value < 2 * error:
        return None
    return (f"In random tokens that repeat, a token's loss is {as_known(value, error)} nats lower "
            "the second time.")


def of_head(rows: list[dict], row: dict, kind: str, head: str) -> str:
    """What a head does, since when, who feeds it, and what is lost without it."""
    does, copies = KINDS[kind], row.get(f"heads/copying/{head}", 0)
    facts = [f"score {known(row, f'heads/{kind}', head)}"]
    if kind == "induction" and known(row, "heads/copying", head) and abs(copies) >= COPIES:
        does = f"{'copies' if copies > 0 else 'pushes down'} what followed last time"
        facts += [f"copying {known(row, 'heads/copying', head)}"] if copies < 0 else []
    facts.append(f"born {born_when(row[f'births/{kind}/{head}'], snapshot_steps(rows))}")
    sentence = f"{head} {does} ({', '.join(facts)}{fed(row, kind, head)})."
    pair, new = (clear(row, f"heads/{cost}", head) for cost in ("pair_cost", "new_cost"))
    if pair and known(row, "heads/new_cost", head):
        sentence += (f" Without it the loss rises by {pair} nats at pairs that repeat, "
                     f"{f'by {new}' if new else 'not clearly'} at tokens not seen before.")
    return sentence


def fed(row: dict, kind: str, head: str) -> str:
    """What is lost without the head below that feeds this one most; empty where none does."""
    prefix, best = f"wiring/{kind}/{head}/", None
    for key, share in row.items():
        part, _, feeder = key.removeprefix(prefix).partition("/")
        if key.startswith(prefix) and share >= max(FED, best[0] if best else 0):
            best = share, part, feeder
    error = best and row.get(f"wiring/{kind}_se/{head}/{best[1]}/{best[2]}")
    if best is None or not is_known(best[0], error):
        return ""
    lost = "what it writes" if best[1] == "values" else "the score"
    return (f"; {as_known(100 * best[0], 100 * error)}% of {lost} is lost when {best[2]} is cut "
            f"from its {best[1]}")


def most_important(row: dict) -> str | None:
    """The head without which the validation loss rises most."""
    prefix = "heads/importance/"
    heads = {key.removeprefix(prefix): value for key, value in row.items()
             if key.startswith(prefix) and math.isfinite(value)}
    head = max(heads, key=heads.get, default="")
    error = row.get(f"heads/importance_se/{head}")
    if not head or not is_known(heads[head], error) or heads[head] < 2 * error:
        return None
    return (f"{head} matters most: without it the validation loss is "
            f"{known(row, prefix[:-1], head)} nats higher.")


def known(row: dict, score: str, head: str) -> str | None:
    """A head's score with its error, None where one of them is not known."""
    value, error = row.get(f"{score}/{head}"), row.get(f"{score}_se/{head}")
    return as_known(value, error) if is_known(value, error) else None


def clear(row: dict, score: str, head: str) -> str | None:
    """As `known`, where the score is above twice its error."""
    value, error = row.get(f"{score}/{head}"), row.get(f"{score}_se/{head}")
    return as_known(value, error) if is_known(value, error) and value >= 2 * error else None


def is_known(value: float | None, error: float | None) -> bool:
    """Whether they are finite, and the error is more than 0."""
    return None not in (value, error) and math.isfinite(value) and 0 < error < math.inf
