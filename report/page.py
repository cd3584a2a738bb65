"""A run's folder → report.html, one file that opens offline: how the run went, its attention step
by step, what its heads do."""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from attention_maps.metrics import is_snapshot_metric, read_emergence
from attention_maps.rendering import RenderedFinding, describe_run
from common.files import atomic_write, ordinary_file, read_json_object
from common.metrics import METRICS, SAMPLES, is_scored, read_rows
from config import GPTConfig
from report import pack
from report.bundle import bundle
from report.pack import PROBES, Blobs, Packed, Shot, clipped, maps_that_fit, thin
from report.run import flatten_settings, load_config

BUDGET = 24_500_000  # bytes of the whole file, at most
NEEDS_BUDGET = 6_000_000  # of it, for what predictions needed
WEIGHTS_BUDGET = 12_000_000  # of it, for weights
DESCRIBED = 100_000  # of it, for what is told of the maps
MOST_POINTS = 1500  # of a curve
MOST_SCORED = 200  # steps for which every head's scores are kept
# Characters shown of a setting, of a title, of a sample; samples.
LONGEST_VALUE, LONGEST_TITLE, LONGEST_SAMPLE, MOST_SAMPLES = 2000, 200, 4000, 60
CURVES = (
    "train/loss",
    "val/loss",
    "val/bits_per_byte",
    "train/lr",
    "train/muon_lr",
    "train/grad_norm",
    "train/tokens_per_second",
)
SPENT = {
    "train": "train_seconds",
    "evaluate": "seconds/evaluate",
    "attention": "seconds/attention",
    "save": "seconds/save",
}
PARTS = Path(__file__).parent / "web"


class Model(NamedTuple):
    """A model that a page can run: its shape, its tokenizer, the bytes of its weights in float16,
    and what packs them at each step, the steps that matter most first."""

    config: GPTConfig
    tokenizer: dict
    size: int
    weights: dict[int, Callable[[], tuple[list, str] | None]]


def write_page(run_dir: Path) -> Path:
    """Write run_dir/report.html from what the folder holds so far, and return its path."""
    run_dir = Path(run_dir)
    rows, config = read_rows(run_dir / METRICS), load_config(run_dir)
    latest = {key: value for row in rows for key, value in row.items()}
    samples = [
        {"step": row["step"], "text": clipped(row["text"], LONGEST_SAMPLE)}
        for row in read_rows(run_dir / SAMPLES)
        if isinstance(row.get("text"), str)
    ]
    content = {
        "kind": "run",
        "title": run_dir.resolve().name,
        **of_shape(config and config.model),
        "step": latest.get("step"),
        "maxSteps": config and config.max_steps,
        "tokens": number(latest.get("tokens")),
        "maxCurvePoints": MOST_POINTS,
        "curves": {key: curve(rows, key) for key in CURVES},
        "seconds": {kind: number(latest.get(key)) for kind, key in SPENT.items()},
        "samples": thin(samples, MOST_SAMPLES),
        "omittedSamples": max(0, len(samples) - MOST_SAMPLES),
        "config": [
            [key, clipped(value, LONGEST_VALUE)] for key, value in flatten_settings(config).items()
        ],
        "snapshotSteps": [row["step"] for row in filter(is_scored, rows)],
        "scored": scored(rows),
        "findings": [finding._asdict() for finding in describe_run(rows)],
    }
    return fill(
        run_dir / "report.html",
        content,
        shots_in(run_dir, run_dir),
        model=config and kept_model(run_dir, config.model, latest),
    )


def attention_page(
    snapshot: dict,
    title: str,
    path: Path,
    model: Model,
    metrics: dict[str, float] | None = None,
    findings: Sequence[RenderedFinding] = (),
    prompted: int | None = None,
) -> Path:
    """Write a page of one prompt's attention, of what a look gives (attention_maps/analysis.py):
    its arrays as the snapshot (perhaps with a step), its metrics and its findings.
    prompted: tokens of the prompt; the model made the rest."""
    shot = Shot(int(snapshot.get("step", 0)), lambda: nullcontext(snapshot))
    told = {key: value for key, value in (metrics or {}).items() if not key.startswith("emerged/")}
    rows = [told | {"step": shot.step}] if told else []
    content = {
        "kind": "prompt",
        "title": clipped(title, LONGEST_TITLE),
        "promptTokens": prompted,
        "snapshotSteps": [],
        "scored": scored(rows),
        "findings": [finding._asdict() for finding in findings],
    }
    return fill(Path(path), content | of_shape(model.config), [shot], PROBES[:1], model)


# --- what is in the page --------------------------------------------------------------------------


def fill(
    path: Path,
    content: dict,
    shots: list[Shot],
    names: tuple[str, ...] = PROBES,
    model: Model | None = None,
) -> Path:
    """Write a page to `path`: the content, and as much of the snapshots as the budget leaves."""
    read, blobs = [shot for shot in shots if shot.probes], Blobs()
    content, shots = content | {"unreadableSnapshots": len(shots) - len(read)}, read
    content["weights"] = put_weights(model, blobs)
    room = BUDGET - len(template("run.html")) - len(safe_json(content)) - DESCRIBED
    room, left = room - sum(map(len, blobs)), NEEDS_BUDGET
    needs: dict[tuple[str, int], Packed] = {}
    for shot in reversed(shots):
        for name in (name for name in names if name in shot.probes):
            packed = shot.packed(name, "needs")
            if packed and packed.size <= left:
                left -= packed.size
                needs[name, shot.step] = packed
    room -= NEEDS_BUDGET - left
    maps = maps_that_fit(shots, names, room, blobs) or maps_that_fit(shots, names[:1], room, blobs)
    maps = maps or {"steps": [], "snapshotCount": len(shots), "shape": None, "probes": []}
    for probe in maps["probes"]:
        found = [needs.get((probe["name"], step)) for step in maps["steps"]]
        probe["tokenEffects"] = [one and blobs.put(one) for one in found]
        if content["kind"] == "prompt":  # of others' models, whose heads often rest there
            packed = shots[-1].packed(probe["name"], "rest")
            probe["withoutFirst"] = [blobs.put(packed)] if 2 * packed.size < room else []
    words = {id: word for packed in needs.values() for id, word in packed.words.items()}
    return put_together(path, "run.html", {**content, **maps, "words": words}, blobs)


def of_shape(model: GPTConfig | None) -> dict:
    """What a page knows of the shape of its model."""
    return {
        "groups": model and model.kv_heads,
        "tiedEmbeddings": model and model.tie_embeddings,
        "modelConfig": model and asdict(model),
    }


def kept_model(run_dir: Path, config: GPTConfig, latest: dict) -> Model | None:
    """The model of a run, by what its pictures and its newest checkpoint kept."""
    found = (run_dir / "attention").glob("step_" + "[0-9]" * 8 + ".safetensors")
    paths = {int(path.stem[5:]): path for path in sorted(found)}
    emerged = [
        bisect_left([*paths], step)
        for steps in read_emergence(latest).values()
        for step in steps.values()
    ]
    order = [len(paths) - 1, 0, *emerged, *(k - 1 for k in emerged), *range(len(paths))]
    steps = dict.fromkeys([*paths][k] for k in order if 0 <= k < len(paths))
    for path in sorted(run_dir.glob("checkpoints/step_*/tokenizer.json"))[-1:]:
        with suppress(ValueError, OSError):  # it cannot be read
            stats = {step: ordinary_file(paths[step]).stat() for step in steps}
            whole = path.with_name("model.safetensors").stat().st_size // 2  # of float32
            size = max((stat.st_size for stat in stats.values()), default=whole)
            return Model(
                config,
                read_json_object(path),
                size,
                {
                    step: partial(packed_weights, paths[step], stats[step].st_mtime_ns)
                    for step in steps
                },
            )
    return None


@lru_cache(maxsize=16)  # of the run that is training
def packed_weights(path: Path, version: int) -> tuple[list, str] | None:
    """What a picture kept of the model, packed; None where it cannot be read."""
    with suppress(SafetensorError, OSError, ValueError):
        return pack.pack_weights(load_file(path))
    return None


def put_weights(model: Model | None, blobs: Blobs) -> dict | None:
    """The weights of as many steps as fit, and the tokenizer; or only how large one would be."""
    if model is None or model.tokenizer.get("kind") not in ("char", "bpe"):
        return None
    found, left, large = {}, WEIGHTS_BUDGET, model.size > WEIGHTS_BUDGET
    for step, pack_it in () if large else model.weights.items():
        packed = pack_it()
        if packed is not None and len(packed[1]) <= left:
            left -= len(packed[1])
            blobs.append(packed[1])
            tensors, found[step] = packed[0], len(blobs) - 1
        elif packed is not None:
            large = True
    if not found:
        return {"bytes": model.size} if large else None
    blobs.append(pack.in_base64(json.dumps(model.tokenizer).encode()))
    return {"tensors": tensors, "blobs": dict(sorted(found.items())), "tokenizer": len(blobs) - 1}


@lru_cache(maxsize=2)  # the run that is training, and the sweep that it belongs to
def shots_of(folder: Path) -> dict[tuple, Shot]:
    """The snapshots that pages of this folder have shown: a cache, with what they packed."""
    return {}


def shots_in(folder: Path, run_dir: Path) -> list[Shot]:
    """A run's snapshots, in the order of their steps, for a page of `folder`."""
    found = []
    for path in (run_dir / "attention").glob("step_*.npz"):
        if step := re.fullmatch(r"step_(\d+)", path.stem):
            stat, shot = path.stat(), Shot(int(step[1]), partial(opened, path))
            version = path, stat.st_mtime_ns, stat.st_size
            found.append(shots_of(folder).setdefault(version, shot))
    return sorted(found, key=lambda shot: shot.step)


def opened(path: Path):
    """A snapshot's arrays, to read from while it is open."""
    return np.load(ordinary_file(path))


def scored(rows: list[dict]) -> dict:
    """The steps that have scores of heads, and each of those metrics in a column."""
    shown = thin(list(filter(is_scored, rows)), MOST_SCORED)
    keys = dict.fromkeys(key for row in shown for key in row if is_snapshot_metric(key))
    return {
        "steps": [row["step"] for row in shown],
        "columns": {key: [number(row.get(key), 4) for row in shown] for key in keys},
    }


def curve(rows: list[dict], key: str, most: int = MOST_POINTS) -> dict:
    """A metric over the steps, thinned evenly to at most so many points."""
    points = [(row["step"], number(row[key])) for row in rows if number(row.get(key)) is not None]
    shown = thin(points, most)
    return {"steps": [x for x, _ in shown], "values": [y for _, y in shown], "of": len(points)}


def number(value: float | None, digits: int = 6) -> float | None:
    """A figure as JSON can have it: None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


# --- the file -------------------------------------------------------------------------------------


def put_together(path: Path, name: str, content: dict, blobs: list[str]) -> Path:
    """Write the page called `name` with its data to `path`, whole or not at all."""
    head, foot = template(name).split("<!-- data -->")
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="\n") as f:
        f.write(f'{head}<script type="application/json" id="data">{safe_json(content)}</script>\n')
        f.writelines(f'<script type="text/plain" class="blob">{blob}</script>\n' for blob in blobs)
        f.write(foot)
    return path


def template(name: str) -> str:
    """Return a page without its data, with the parts that it names in comments.

    A named HTML or CSS file is inserted; a named JavaScript file is the entry of a bundle.
    """
    return re.sub(
        r"(?:/\*|<!--) (\w+\.(?:html|css|js)) (?:\*/|-->)\n",
        lambda part: bundle(PARTS / part[1]) if part[1].endswith(".js") else template(part[1]),
        (PARTS / name).read_text(encoding="utf-8"),
    )


def safe_json(value) -> str:
    """JSON in ASCII in which < > & are escaped, so that it cannot end or open an element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda c: f"\\u{ord(c[0]):04x}", text)
