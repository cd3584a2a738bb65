"""A sweep's folder → sweep.html, one file that opens offline: its settings compared, and the
attention of any two of its runs side by side.
"""

from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from urllib.parse import quote

import numpy as np

from report import page
from report.encode import Shot, embed, estimate
from report.page import curve, head_metrics, number, snapshots, thin
from report.sweep import (
    PAGE,
    Run,
    Setting,
    best_run,
    command,
    compared_by,
    in_words,
    no_better,
    ranked,
)

MOST_SNAPSHOTS = 12  # of a run
MOST_POINTS, ALL_POINTS = 300, 300_000  # of a curve, and of all curves
LONGEST_TEXT = 500  # characters shown of a value and of a reason
# Of these scores the strongest head is shown, of others the mean over the heads.
STRONGEST = ("previous_token", "duplicate_token", "induction", "sink")
SHOWN = ("parameters", "kv_cache_bytes", "tokens_per_second", "train_seconds", "val/loss",
         "val/bits_per_byte", "step")
# How the maps of a run are kept (report.encode), the most exact first.
PLANS = (("float16", {}), ("bytes", {}), ("blocks", {}), ("wide blocks", {}))

clip = partial(page.clipped, most=LONGEST_TEXT)


def write_sweep_page(folder: Path, runs: list[Run]) -> Path:
    """Write folder/sweep.html from what the runs' folders hold so far, and return its path."""
    folder, settings = Path(folder), ranked(runs)
    shown = [run for setting in settings for run in setting.runs]
    content = compared(folder, runs, settings) | {"maps": [None] * len(shown)}
    shots = [[page.open_shot(folder, path, load_text) for path in snapshots(run.path)]
             for run in shown]
    # One run of each setting, then the others.
    turns = [n for setting in settings for n in range(len(setting.runs))]
    order = sorted(range(len(shown)), key=turns.__getitem__)
    content["maps"], blobs = side_by_side(shots, page.room_for_maps("sweep.html", content), order)
    return page.put_together(folder / PAGE, "sweep.html", content, blobs)


def side_by_side(shots: list[list[Shot]], room: int,
                 order: list[int]) -> tuple[list[dict | None], list[str]]:
    """What the page keeps of the text's maps of each run, None where they do not fit; the runs are
    taken in this order, all of them in one way. And the maps themselves, in base64."""
    held: list[dict | None] = [None] * len(shots)
    blobs: list[str] = []
    most, plan = fitting(shots, room)
    for k in order:
        before = len(blobs)
        maps = page.attention(embed(thin(shots[k], most), room, [plan]), blobs)
        if maps["steps"]:
            held[k] = {"steps": maps["steps"], "of": len(shots[k]), "shape": maps["shape"],
                       **maps["probes"][0]}
        tokens = sum(probe["T"] for probe in maps["probes"])
        room -= sum(len(blob) + 80 for blob in blobs[before:]) + 20 * tokens
    return held, blobs


def compared(folder: Path, runs: list[Run], settings: list[Setting]) -> dict:
    """What the page says beside the maps."""
    metric, keys, best = compared_by(runs), swept_keys(runs), best_run(runs)
    values = {key: in_order([run.settings.get(key, "") for run in runs]) for key in keys}
    most = max(10, min(MOST_POINTS, ALL_POINTS // max(1, 8 * len(runs))))
    return {
        "title": folder.resolve().name, "metric": metric, "points": most,
        "command": command(best) if best else None,
        "asGood": second.name if best and (second := no_better(settings, metric)) else None,
        "changes": in_words(best.changes) if best else [],
        "keys": [{"name": clip(key), "values": [clip(value) for value in values[key]],
                  **axis(values[key])} for key in keys],
        "settings": [{"figures": figures(setting, metric), "births": births(setting),
                      "scores": scores(setting)} for setting in settings],
        "runs": [{"setting": k, **about(folder, run, metric, most),
                  "values": [values[key].index(run.settings.get(key, "")) for key in keys]}
                 for k, setting in enumerate(settings) for run in setting.runs],
    }


def fitting(shots: list[list[Shot]], room: int) -> tuple[int, tuple[str, dict]]:
    """How many snapshots of a run, kept in which way, are estimated to fit for all runs: one way,
    so that any two can be compared.
    """
    for most in (MOST_SNAPSHOTS, MOST_SNAPSHOTS // 2, MOST_SNAPSHOTS // 4, 1):
        chosen = [[shot for shot in thin(of, most) if shot.probes()] for of in shots]
        for plan in PLANS:
            if sum(estimate(kept, *plan) for kept in chosen if kept) < 0.95 * room:
                return most, plan
    return 1, PLANS[-1]


@contextmanager
def load_text(path: Path):
    """Of a snapshot's file the maps of the text alone, closed again."""
    with np.load(path) as held:
        yield page.text_probe(held)


# What was swept

def swept_keys(runs: list[Run]) -> list[str]:
    """What was swept; the seed only where nothing else was."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    return [key for key in keys if key != "seed"] or keys


def in_order(typed: list[str]) -> list[str]:
    """The values of a key, each once: numbers by their size, others as they come."""
    values = list(dict.fromkeys(typed))
    return values if None in map(as_number, values) else sorted(values, key=as_number)


def as_number(value: str) -> float | None:
    try:
        return number(float(value), 12)
    except ValueError:
        return None


def axis(values: list[str]) -> dict:
    """How values in their order are spread: as names, or as numbers (`at`), evenly or by ratio."""
    at = [as_number(value) for value in values]
    if None in at:
        return {"axis": "names", "at": None}
    if min(at) <= 0 or len(at) < 2 or len(set(at)) < len(at):
        return {"axis": "linear", "at": at}
    if len(at) == 2:
        return {"axis": "log" if at[1] >= 4 * at[0] else "linear", "at": at}
    differences = [b - a for a, b in pairwise(at)]
    ratios = [np.log(b / a) for a, b in pairwise(at)]
    uneven, uneven_log = (pstdev(gaps) / fmean(gaps) for gaps in (differences, ratios))
    return {"axis": "log" if uneven_log < uneven else "linear", "at": at}


# What came of it

def figures(setting: Setting, metric: str) -> dict:
    """Means over the finished runs, the metric's standard error, and of how many runs it is."""
    return {"n": len(setting.values(metric)), "error": number(setting.error(metric)),
            "metric": number(setting.mean(metric)),
            **{name: number(setting.mean(name)) for name in SHOWN}}


def births(setting: Setting) -> dict[str, dict]:
    """For each kind of head: in how many finished runs one was born, and the mean first step."""
    steps = {kind: setting.values(f"births/{kind}") for kind in STRONGEST}
    return {kind: {"runs": len(of), "step": number(fmean(of))} for kind, of in steps.items() if of}


def scores(setting: Setting) -> dict[str, float]:
    """Of each score at the end the mean over the finished runs."""
    found: dict[str, list[float]] = {}
    for run in setting.finished:
        for score, value in of_heads(run.rows[-1]).items():
            found.setdefault(score, []).append(value)
    return {score: number(fmean(values), 4) for score, values in found.items()}


def of_heads(row: dict) -> dict[str, float]:
    """Score → that of the strongest head, or the mean over heads."""
    found: dict[str, list[float]] = {}
    for kind, score, _, _, value in head_metrics(row):
        if kind == "heads" and number(value) is not None:
            found.setdefault(score, []).append(value)
    return {score: max(values) if score in (*STRONGEST, "importance") else fmean(values)
            for score, values in found.items()}


def about(folder: Path, run: Run, metric: str, most: int) -> dict:
    """A run's name, how it ended, its curves."""
    found, config, name = run.measures, run.config, run.path.relative_to(folder).as_posix()
    heads = [{"step": row["step"], **of_heads(row)} for row in run.rows]
    curves = dict.fromkeys(score for row in heads for score in row if score != "step")
    link = quote(f"{name}/report.html") if (run.path / "report.html").exists() else None
    return {
        "name": clip(name), "page": link, "status": run.status, "reason": clip(run.reason),
        "seed": clip(run.settings.get("seed", str(config.seed) if config else "")),
        "maxSteps": config.max_steps if config else None,
        "groups": config.model.kv_heads if config else None,
        "head": first_head(run.rows[-1] if run.rows else {}),
        "figures": {key: number(found.get(key)) for key in SHOWN},
        "metric": number(found.get(metric)),
        "curves": {"val": curve(run.rows, metric, most),
                   "train": curve(run.rows, "train/loss", most)},
        "heads": {score: curve(heads, score, most) for score in curves},
        "births": {kind: number(found[f"births/{kind}"]) for kind in STRONGEST
                   if f"births/{kind}" in found},
    }


def first_head(row: dict) -> list[int]:
    """[layer, head] to look at first: in this row the strongest by induction."""
    inducing = [(value, [layer, head]) for kind, score, layer, head, value in head_metrics(row)
                if (kind, score) == ("heads", "induction") and number(value) is not None]
    return max(inducing)[1] if inducing else [0, 0]
