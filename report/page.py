"""A run's folder → report.html, one file that opens offline: how the run went, its attention step by step, what its heads do."""

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

from files import ASIDE, atomic_write, born_when, read_rows, snapshot_steps
from report.encode import PROBES, Embedded, Probe, Shot, embed

BUDGET = 24_500_000  # bytes of the whole file, at most
SAMPLES_BUDGET = 3_000_000  # of it, for samples
MOST_POINTS = 1500  # of a curve
MOST_SCORED = 200  # steps for which every head's scores are kept
LONGEST_VALUE, LONGEST_TOKEN = 2000, 100  # characters shown of a setting and of a token
CURVES = ("train/loss", "val/loss", "val/bits_per_byte", "train/lr", "train/grad_norm", "train/tokens_per_second")
SPENT = ("evaluate", "attention", "save")
HEAD_METRIC = re.compile(rf"(heads|births)/(\w+?)({'|'.join(ASIDE)})?/L(\d+)H(\d+)")
PARTS = Path(__file__).parent


def write_page(run_dir: Path) -> Path:
    """Write run_dir/report.html from what the folder holds so far, and return its path."""
    run_dir = Path(run_dir)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if isinstance(row, dict) and "step" in row]
    settings = read_settings(run_dir / "config.yaml")
    model = settings.get("model") if isinstance(settings.get("model"), dict) else {}
    samples, left_out = thin_samples(read_samples(run_dir / "samples.jsonl"))
    last = rows[-1] if rows else {}
    content = {
        "kind": "run", "title": run_dir.resolve().name, "groups": number(model.get("n_kv_head")),
        "step": last.get("step"), "maxSteps": number(settings.get("max_steps")), "tokens": number(last.get("tokens")), "points": MOST_POINTS,
        "curves": {key: curve(rows, key) for key in CURVES},
        "seconds": seconds_spent(rows), "samples": samples, "samplesLeftOut": left_out,
        "config": [[key, value[:LONGEST_VALUE] + ("…" if len(value) > LONGEST_VALUE else "")] for key, value in flat(settings)],
        "scores": head_scores(rows), "births": births(rows),
    }
    return write(run_dir / "report.html", content, [open_shot(run_dir, path) for path in snapshots(run_dir)])


def attention_page(snapshot: dict, title: str, path: Path, groups: int | None = None) -> Path:
    """Write a page of one prompt's attention: `snapshot` holds text, text_tokens, text_value_norms and perhaps step, as an .npz does.

    `groups`: how many key/value heads the query heads share; None: each has its own.
    """
    only = {key: snapshot[key] for key in ("text", "text_tokens", "text_value_norms") if key in snapshot}
    shot = Shot(int(snapshot.get("step", 0)), lambda: nullcontext(only))
    return write(Path(path), {"kind": "prompt", "title": title, "groups": groups}, [shot])


def write(path: Path, content: dict, shots: list[Shot]) -> Path:
    """Put the content and as much of the snapshots as the budget leaves into a page, which appears at `path` whole."""
    room = room_for_maps("run.html", content)
    blobs: list[str] = []
    maps = attention(embed(shots, room), blobs)
    return put_together(path, "run.html", {**content, **maps}, blobs)


def room_for_maps(name: str, content: dict) -> int:
    """Bytes that the budget leaves to the maps, in base64."""
    return BUDGET - len(template(name)) - len(safe_json(content)) - 100_000  # what says how the maps are kept, and their tokens


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
    """JSON in ASCII that cannot end or open an element: < > & are escaped, and so is all that is not ASCII, U+2028 too."""
    return re.sub("[<>&]", lambda c: f"\\u{ord(c[0]):04x}", json.dumps(value, allow_nan=False, separators=(",", ":")))


# Attention

def snapshots(run_dir: Path) -> list[Path]:
    """The snapshots' files in the order of their steps."""
    found = {p: re.fullmatch(r"step_(\d+)\.npz", p.name) for p in (run_dir / "attention").glob("step_*.npz")}
    return sorted((p for p, match in found.items() if match), key=lambda p: int(found[p][1]))


@lru_cache(maxsize=2)  # the run that is training, and the sweep that it belongs to
def shots_of(folder: Path) -> dict[tuple, Shot]:
    """The snapshots that pages of this folder have shown, with what they packed."""
    return {}


def open_shot(folder: Path, path: Path, load: Callable = np.load) -> Shot:
    """The snapshot of a file, for a page of `folder`; the same one for as long as the file stays as it is."""
    stat = path.stat()
    return shots_of(folder).setdefault((path, stat.st_mtime_ns, stat.st_size), Shot(int(path.stem.partition("_")[2]), partial(load, path)))


def attention(maps: Embedded | None, blobs: list[str]) -> dict:
    """What the page needs to know of the maps; the maps themselves are added to `blobs`, which it numbers."""
    if maps is None:
        return {"steps": [], "probes": [], "shape": None}

    def add(parts: tuple[bytes, bytes | None]) -> list[int | None]:
        numbers = []
        for part in parts:
            numbers.append(None if part is None else len(blobs))
            blobs.extend([] if part is None else [base64.b64encode(part).decode()])
        return numbers

    probes = []
    for name in (name for name in PROBES if name in maps.probes):
        probe, (kind, b) = maps.probes[name], maps.kinds[name]
        rows = maps.rows.get(name)
        probes.append({
            "name": name, "label": "text" if name == "text" else f"repeats (period {probe.period})", "period": probe.period,
            "tokens": None if probe.tokens is None else [t if len(t) <= LONGEST_TOKEN else t[:LONGEST_TOKEN - 1] + "…" for t in probe.tokens],
            "T": probe.shape[2], "kind": kind, "block": b, "maps": [add(parts) for parts in maps.packed[name]],
            "largest": number(maps.largest.get((name, b))),  # one scale of colours for all steps
            "rows": {"kind": rows[0], "maps": add(rows[1]),
                     "largest": number(maps.largest.get((name, 1)))} if rows else None,
            "says": in_words(probe, kind, b, rows[0] if rows else None, maps.steps[-1]),
        })
    thinned = "" if len(maps.steps) == maps.of else f"{len(maps.steps)} of {maps.of} snapshots are in this page, so that it stays small."
    return {"steps": maps.steps, "probes": probes, "shape": next(iter(maps.probes.values())).shape[:2], "thinned": thinned}


def in_words(probe: Probe, kind: str, b: int, rows: str | None, newest: int) -> str:
    """How the weights are kept, for the reader."""
    bytes_ = "in one byte a weight: each is right within ±0.4% of the largest weight in its row, and a row sums to 1 within 1%"
    if kind == "float16":
        return "The weights are exactly the captured float16 numbers."
    if kind == "bytes":
        return f"The weights are kept {bytes_}."
    text = (f"These {probe.shape[2]:,} tokens are shown in blocks of {b} × {b}: a cell is the weight on the {b} tokens of a block together, "
            f"the mean over the {b} tokens that look, kept {bytes_}.")
    if rows:
        how = "exactly, as the captured float16 numbers" if rows == "float16" else "in one byte a weight (±0.4% of the row's largest)"
        return f"{text} At step {newest:,} every row is kept too, {how}: click a row of blocks to open the rows of its tokens."
    return f"{text} Rows of single tokens would make the page too large; they are in the run's attention folder."


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
        return [pair for key, value in settings.items() for pair in flat(value, f"{prefix}.{key}" if prefix else str(key))]
    plain = {None: "null", True: "true", False: "false"}
    return [(prefix, plain[settings] if settings is None or isinstance(settings, bool) else str(settings))]


def read_samples(path: Path) -> list[dict]:
    """The samples, {"step", "text"} each; lines that are none are left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            sample = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(sample, dict) and isinstance(sample.get("text"), str) and isinstance(sample.get("step"), int):
            found.append({"step": sample["step"], "text": sample["text"]})
    return found


def thin_samples(samples: list[dict]) -> tuple[list[dict], int]:
    """As many samples, the last among them, as their budget takes, evenly; and how many are left out."""
    kept = samples
    while len(kept) > 1 and len(safe_json(kept)) > SAMPLES_BUDGET:
        kept = thin(kept, -(-len(kept) // 2))
    if kept and len(safe_json(kept)) > SAMPLES_BUDGET:
        kept = [{**kept[-1], "text": kept[-1]["text"][:SAMPLES_BUDGET // 12] + "…"}]  # a character takes 12 bytes at the most
    return kept, len(samples) - len(kept)


def thin(items: list, most: int) -> list:
    """At most `most` of the items, evenly; with the first, where there is room for two, and the last."""
    if len(items) <= most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)] if most > 1 else items[-1:]


def number(value, digits: int = 6) -> float | None:
    """A figure as JSON can have it: None for what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def curve(rows: list[dict], key: str, most: int = MOST_POINTS) -> dict:
    """A metric over the steps, thinned evenly to at most so many points."""
    points = [(row["step"], number(row[key])) for row in rows if number(row.get(key)) is not None]
    return {"steps": [x for x, _ in thin(points, most)], "values": [y for _, y in thin(points, most)], "of": len(points)}


def seconds_spent(rows: list[dict]) -> dict[str, float]:
    """Seconds of the run by kind of work, as far as they were recorded."""
    keys = {"train": "train_seconds", **{kind: f"seconds/{kind}" for kind in SPENT}}
    latest = {kind: next((row[key] for row in reversed(rows) if number(row.get(key)) is not None), None) for kind, key in keys.items()}
    return {kind: number(value) for kind, value in latest.items() if value}


def head_scores(rows: list[dict]) -> dict[str, dict]:
    """Score → the steps that have it, and for each a list of (layer, head, value, standard error,
    value with attention to the first token left out), as far as these are known."""
    found: dict[str, dict] = {}
    for row in thin([row for row in rows if any(key.startswith("heads/") for key in row)], MOST_SCORED):
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


def births(rows: list[dict]) -> list[dict]:
    """Who was born when, as the last row that says so has it."""
    last = next((row for row in reversed(rows) if any(key.startswith("births/") for key in row)), {})
    looked = snapshot_steps(rows)
    found = [{"score": score, "layer": layer, "head": head, "step": number(value),
              "when": born_when(value, looked)}
             for kind, score, layer, head, value in head_metrics(last) if kind == "births" and number(value) is not None]
    return sorted(found, key=lambda b: (b["step"], b["score"], b["layer"], b["head"]))


def head_metrics(row: dict) -> list[tuple[str, str, int, int, float]]:
    """Scores and births of heads in a row: (heads or births, score, layer, head, value) each."""
    matches = ((HEAD_METRIC.fullmatch(key), value) for key, value in row.items())
    return [(m[1], m[2], int(m[4]), int(m[5]), value) for m, value in matches if m and not m[3]]
