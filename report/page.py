"""A run's folder → report.html, one file that opens offline: how the run went, its attention step
by step, what its heads do."""

import base64
import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import yaml

from files import (
    ASIDE,
    METRICS,
    SAMPLES,
    atomic_write,
    born_when,
    is_scored,
    read_rows,
    snapshot_steps,
)
from report.conclusion import conclude
from report.encode import PROBES, Embedded, Packed, Probe, Shot, embed
from report.explained import newest_that_fit

BUDGET = 24_500_000  # bytes of the whole file, at most
SAMPLES_BUDGET = 3_000_000  # of it, for samples
MOST_POINTS = 1500  # of a curve
MOST_SCORED = 200  # steps for which every head's scores are kept
# Characters shown of a setting, of a token and of a title.
LONGEST_VALUE, LONGEST_TOKEN, LONGEST_TITLE = 2000, 100, 200
CURVES = ("train/loss", "val/loss", "val/bits_per_byte", "train/lr", "train/grad_norm",
          "train/tokens_per_second", "probe/repeat_gain")
OF_REPEATS = ("repeat", "control")  # what begins the names of a snapshot that are not of the text
SPENT = ("evaluate", "attention", "save")
WIRE = re.compile(r"wiring/(\w+)/L(\d+)H(\d+)/(queries|keys|values)/L(\d+)H(\d+)")
HEAD_METRIC = re.compile(rf"(heads|births)/(\w+?)({'|'.join(ASIDE)})?/L(\d+)H(\d+)")
PARTS = Path(__file__).parent


def write_page(run_dir: Path) -> Path:
    """Write run_dir/report.html from what the folder holds so far, and return its path."""
    run_dir = Path(run_dir)
    rows = read_rows(run_dir / METRICS)
    settings = read_settings(run_dir / "config.yaml")
    model = settings.get("model") if isinstance(settings.get("model"), dict) else {}
    samples, left_out = thin_samples(read_samples(run_dir / SAMPLES))
    last = rows[-1] if rows else {}
    content = {
        "kind": "run", "title": run_dir.resolve().name, "groups": number(model.get("n_kv_head")),
        "step": last.get("step"), "maxSteps": number(settings.get("max_steps")),
        "tokens": number(last.get("tokens")), "points": MOST_POINTS,
        "curves": {key: curve(rows, key) for key in CURVES},
        "seconds": seconds_spent(rows), "samples": samples, "samplesLeftOut": left_out,
        "config": [[key, clipped(value, LONGEST_VALUE)] for key, value in flat(settings)],
        "scores": head_scores(rows), "births": births(rows), "wiring": wires(rows),
        "conclusion": conclude(rows), "tied": bool(model.get("tie_embeddings")),
    }
    shots = [open_shot(run_dir, path) for path in snapshots(run_dir)]
    return write(run_dir / "report.html", content, shots)


def attention_page(snapshot: dict, title: str, path: Path, groups: int | None = None,
                   tied: bool = False, scores: dict[str, float] | None = None,
                   prompted: int | None = None) -> Path:
    """Write a page of one prompt's attention: `snapshot` holds text, text_tokens, text_value_norms
    and perhaps step and what `attention_maps.card.explain` gives, as an .npz does.

    `groups`: how many key/value heads the query heads share; None: each has its own. `tied`:
    whether the output layer is the token embedding. `scores`: of the heads, as in metrics.jsonl.
    `prompted`: of how many tokens the prompt is; the model made the others.
    """
    shot = Shot(int(snapshot.get("step", 0)), lambda: nullcontext(text_probe(snapshot)))
    rows = [{"step": shot.step, **scores}] if scores else []
    content = {"kind": "prompt", "title": clipped(title, LONGEST_TITLE), "groups": groups,
               "tied": tied, "prompted": prompted, "births": [], "wiring": wires(rows),
               "scores": head_scores(rows)}
    return write(Path(path), content, [shot])


def save_look(found: dict, scores: dict[str, float], groups: int, path: Path) -> None:
    """Write what a page of a prompt shows as numbers, for `read_look`."""
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **found, groups=groups, scores=np.array([*scores.values()]),
                            score_names=np.array([*scores]))


def read_look(path: Path) -> tuple[dict, dict[str, float], int]:
    """What `save_look` wrote."""
    with np.load(path) as held:
        scores = dict(zip(held["score_names"].tolist(), held["scores"].tolist()))
        return dict(held), scores, int(held["groups"])


def text_probe(snapshot) -> dict:
    """Of a snapshot the maps of the text alone."""
    return {key: snapshot[key] for key in snapshot if not key.startswith(OF_REPEATS)}


def write(path: Path, content: dict, shots: list[Shot]) -> Path:
    """Write a page to `path`: the content, and as much of the snapshots as the budget leaves."""
    room = room_for_maps("run.html", content)
    blobs: list[str] = []
    explained = newest_that_fit({shot.step: shot.explained() for shot in shots})
    room -= sum(one.size for of in explained.values() for one in of.values())
    maps = attention(embed(shots, room), blobs)
    for probe in maps["probes"]:
        found = [explained[step].get(probe["name"]) for step in maps["steps"]]
        # One scale of colours for all steps.
        probe["needed"] = number(max((one.needed for one in found if one), default=0.0))
        probe["explained"] = [one and add((one.floats, one.ids), blobs) for one in found]
    words = {id: word for of in explained.values() for one in of.values()
             for id, word in one.words.items()}
    return put_together(path, "run.html", {**content, **maps, "words": words}, blobs)


def room_for_maps(name: str, content: dict) -> int:
    """Bytes that the budget leaves to the maps, in base64."""
    described = 100_000  # how the maps are kept, and their tokens
    return BUDGET - len(template(name)) - len(safe_json(content)) - described


def put_together(path: Path, name: str, content: dict, blobs: list[str]) -> Path:
    """Write the page called `name` with its data to `path`, whole or not at all."""
    head, foot = template(name).split("<!-- data -->")
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="\n") as f:
        f.write(f'{head}<script type="application/json" id="data">{safe_json(content)}</script>\n')
        f.writelines(f'<script type="text/plain" class="blob">{blob}</script>\n' for blob in blobs)
        f.write(foot)
    return path


def template(name: str) -> str:
    """A page without its data, with the parts that it names in comments."""
    return re.sub(r"(?:/\*|<!--) (\w+\.(?:html|css|js)) (?:\*/|-->)\n",
                  lambda part: template(part[1]), (PARTS / name).read_text(encoding="utf-8"))


def safe_json(value) -> str:
    """JSON in ASCII that cannot end or open an element: < > & are escaped, and so is all that is
    not ASCII, U+2028 too."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda c: f"\\u{ord(c[0]):04x}", text)


# Attention

def snapshots(run_dir: Path) -> list[Path]:
    """The snapshots' files in the order of their steps."""
    found = [path for path in (run_dir / "attention").glob("step_*.npz")
             if re.fullmatch(r"step_\d+", path.stem)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.partition("_")[2])


@lru_cache(maxsize=2)  # the run that is training, and the sweep that it belongs to
def shots_of(folder: Path) -> dict[tuple, Shot]:
    """The snapshots that pages of this folder have shown, with what they packed."""
    return {}


def open_shot(folder: Path, path: Path, load: Callable = np.load) -> Shot:
    """The snapshot of a file, for a page of `folder`; the same while the file stays as it is."""
    stat, shot = path.stat(), Shot(step_of(path), partial(load, path))
    return shots_of(folder).setdefault((path, stat.st_mtime_ns, stat.st_size), shot)


def attention(maps: Embedded | None, blobs: list[str]) -> dict:
    """What the page needs to know of the maps; the maps themselves are added to `blobs`, which it
    numbers."""
    if maps is None:
        return {"steps": [], "probes": [], "shape": None}

    probes = [describe(maps, name, blobs) for name in PROBES if name in maps.probes]
    thinned = "" if len(maps.steps) == maps.of else (
        f"{len(maps.steps)} of {maps.of} snapshots are in this page, so that it stays small.")
    return {"steps": maps.steps, "probes": probes, "thinned": thinned,
            "shape": next(iter(maps.probes.values())).shape[:2]}


def describe(maps: Embedded, name: str, blobs: list[str]) -> dict:
    """What the page needs to know of a probe's maps, which are added to `blobs`."""
    probe, (kind, b), rows = maps.probes[name], maps.kinds[name], maps.rows.get(name)
    return {
        "name": name, "period": probe.period,
        "label": "text" if name == "text" else f"random tokens, repeated after {probe.period}",
        "tokens": None if probe.tokens is None else [clipped(t, LONGEST_TOKEN)
                                                     for t in probe.tokens],
        "T": probe.shape[2], "kind": kind, "block": b,
        "maps": [add(packed, blobs) for packed in maps.packed[name]],
        "largest": number(maps.largest.get((name, b))),  # one scale of colours for all steps
        "rows": {"kind": rows[0], "maps": add(rows[1], blobs),
                 "largest": number(maps.largest.get((name, 1)))} if rows else None,
        "says": in_words(probe, kind, b, rows[0] if rows else None, maps.steps[-1]),
    }


def add(packed: Packed, blobs: list[str]) -> list[int | None]:
    """Add maps and norms to `blobs`; their places there, None for what is not known."""
    places = []
    for part in packed:
        places.append(None if part is None else len(blobs))
        blobs.extend([] if part is None else [base64.b64encode(part).decode()])
    return places


def in_words(probe: Probe, kind: str, b: int, rows: str | None, newest: int) -> str:
    """How the weights are kept, for the reader."""
    if kind == "float16":
        return "The weights are exactly the captured float16 numbers."
    kept = ("in one byte a weight: each is right within ±0.4% of the largest weight in its row, "
            "and a row sums to 1 within 1%")
    if kind == "bytes":
        return f"The weights are kept {kept}."
    text = (f"These {probe.shape[2]:,} tokens are shown in blocks of {b} × {b}: a cell is the "
            f"weight on the {b} tokens of a block together, the mean over the {b} tokens that "
            f"look, kept {kept}.")
    if not rows:
        return (f"{text} Rows of single tokens would make the page too large; they are in the "
                "run's attention folder.")
    how = {"float16": "exactly, as the captured float16 numbers",
           "bytes": "in one byte a weight (±0.4% of the row's largest)"}[rows]
    return (f"{text} At step {newest:,} every row is kept too, {how}: click a row of blocks to "
            "open the rows of its tokens.")


# What the run's other files say

def read_settings(path: Path) -> dict:
    """The configuration, or {} where there is none that can be read."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def flat(settings, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value as YAML would put it)."""
    if isinstance(settings, dict):
        return [pair for key, value in settings.items()
                for pair in flat(value, f"{prefix}.{key}" if prefix else str(key))]
    if settings is None or isinstance(settings, bool):
        settings = {None: "null", True: "true", False: "false"}[settings]
    return [(prefix, str(settings))]


def read_samples(path: Path) -> list[dict]:
    """The samples, {"step", "text"} each; lines that are none are left out."""
    return [{"step": row["step"], "text": row["text"]} for row in read_rows(path)
            if isinstance(row.get("text"), str)]


def thin_samples(samples: list[dict]) -> tuple[list[dict], int]:
    """As many samples as their budget takes, evenly, with the last; how many are left out."""
    kept = samples
    while len(kept) > 1 and len(safe_json(kept)) > SAMPLES_BUDGET:
        kept = thin(kept, -(-len(kept) // 2))
    if kept and len(safe_json(kept)) > SAMPLES_BUDGET:
        most = SAMPLES_BUDGET // 12  # a character takes 12 bytes at the most
        kept = [{**kept[-1], "text": kept[-1]["text"][:most] + "…"}]
    return kept, len(samples) - len(kept)


def thin(items: list, most: int) -> list:
    """At most `most` of the items, evenly, with the last, and the first where two have room."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[-1:]
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most - 1] + "…"


def number(value, digits: int = 6) -> float | None:
    """A figure as JSON can have it: None for what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def curve(rows: list[dict], key: str, most: int = MOST_POINTS) -> dict:
    """A metric over the steps, thinned evenly to at most so many points."""
    points = [(row["step"], number(row[key])) for row in rows if number(row.get(key)) is not None]
    shown = thin(points, most)
    errors = {row["step"]: number(row.get(f"{key}_se"), 2) for row in rows if f"{key}_se" in row}
    return {"steps": [x for x, _ in shown], "values": [y for _, y in shown], "of": len(points),
            **({"errors": [errors.get(x) for x, _ in shown]} if errors else {})}


def seconds_spent(rows: list[dict]) -> dict[str, float]:
    """Seconds of the run by kind of work, as far as they were recorded."""
    keys = {"train": "train_seconds", **{kind: f"seconds/{kind}" for kind in SPENT}}
    known = {kind: [value for row in rows if (value := number(row.get(key))) is not None]
             for kind, key in keys.items()}
    return {kind: values[-1] for kind, values in known.items() if values and values[-1]}


def head_scores(rows: list[dict]) -> dict[str, dict]:
    """Score → the steps that have it, and for each a list of (layer, head, value, standard error,
    value with attention to the first token left out), as far as these are known."""
    found: dict[str, dict] = {}
    for row in thin(list(filter(is_scored, rows)), MOST_SCORED):
        for kind, score, layer, head, value in head_metrics(row):
            if kind == "heads":
                of = found.setdefault(score, {"steps": [], "values": []})
                if not of["steps"] or of["steps"][-1] != row["step"]:
                    of["steps"].append(row["step"])
                    of["values"].append([])
                keys = (f"heads/{score}{end}/L{layer}H{head}" for end in ASIDE)
                beside = [number(row.get(key), 3) for key in keys]
                known = max((n for n, x in enumerate(beside, 1) if x is not None), default=0)
                of["values"][-1].append([layer, head, number(value, 4), *beside[:known]])
    return found


def wires(rows: list[dict]) -> dict[str, list]:
    """The steps that have scores, and for each who feeds whom: a list of (score, head, part, from,
    share, standard error), heads as (layer, head)."""
    found = {"steps": [], "values": []}
    for row in thin(list(filter(is_scored, rows)), MOST_SCORED):
        known = [(m, number(value, 3)) for key, value in row.items() if (m := WIRE.fullmatch(key))]
        errors = [number(row.get(m[0].replace(m[1], f"{m[1]}_se", 1)), 2) for m, _ in known]
        found["steps"].append(row["step"])
        found["values"].append([
            [m[1], [int(m[2]), int(m[3])], m[4], [int(m[5]), int(m[6])], share, error]
            for (m, share), error in zip(known, errors)
            if None not in (share, error) and not m[1].endswith("_se")])
    return found


def births(rows: list[dict]) -> list[dict]:
    """Who was born when, as the last row that says so has it."""
    last = next((row for row in reversed(rows)
                 if any(key.startswith("births/") for key in row)), {})
    looked = snapshot_steps(rows)
    found = [{"score": score, "layer": layer, "head": head, "step": number(value),
              "when": born_when(value, looked)}
             for kind, score, layer, head, value in head_metrics(last)
             if kind == "births" and number(value) is not None]
    return sorted(found, key=lambda b: (b["step"], b["score"], b["layer"], b["head"]))


def head_metrics(row: dict) -> list[tuple[str, str, int, int, float]]:
    """Scores and births of heads in a row: (heads or births, score, layer, head, value) each."""
    matches = ((HEAD_METRIC.fullmatch(key), value) for key, value in row.items())
    return [(m[1], m[2], int(m[4]), int(m[5]), value) for m, value in matches if m and not m[3]]
