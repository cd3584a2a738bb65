"""A sweep's folder, read: its runs, their measures, the settings ranked. Does not import torch. All
of it is read from the folder, so it is the same whatever started the jobs."""

import json
import re
import shlex
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite, nan, prod, sqrt
from pathlib import Path
from statistics import fmean, stdev
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, safe_open

from cli.config_file import read_config
from common.errors import UserError
from common.files import ordinary_file, read_json_object
from common.metrics import COMPANION_SUFFIXES, METRICS, best_row, read_rows
from common.settings import iterate_settings
from config import BF16_DECODES_FROM, Config

CSV, PAGE = "sweep.csv", "sweep.html"
JOB = "job.json"  # in a job's folder: what it was given, and why its last attempt failed
HEAD_METRIC = re.compile(rf"(heads|emerged)/(\w+?)({'|'.join(COMPANION_SUFFIXES)})?/L(\d+)H(\d+)")


@dataclass(frozen=True)
class Run:
    """A job of a sweep, or a run of no sweep, as its folder has it."""

    path: Path
    settings: dict[str, str]  # what the sweep varied, as typed: model.n_kv_head → 2; `seed` too
    overrides: dict[str, str]  # all that was typed when it first trained
    config: Config | None  # as resolved; None before it trained
    rows: list[dict]  # metrics.jsonl
    status: str  # finished; failed in its last attempt; unfinished: stopped, or still running
    reason: str  # why its last attempt failed, in one line; of a finished run, why it did not go on

    @cached_property
    def measures(self) -> dict[str, float]:
        """What it came to, as far as it was measured, by the names of metrics.jsonl: the losses of
        the best step, size, speed in training, bytes of the KV cache of one sequence, the last
        repeat gain; for each kind of head the first birth (`emerged/induction`), the tokens seen
        and the loss then, and the greatest last score; see `pairs_again`."""
        best, last = best_row(self.rows) or {}, self.rows[-1] if self.rows else {}
        found = {key: best[key] for key in ("val/loss", "val/bits_per_byte") if key in best}
        found |= {"best_step": best["step"]} if best else {}
        found |= {key: last[key] for key in ("step", "tokens", "train_seconds") if key in last}
        if found.get("train_seconds") and "tokens" in found:
            found["tokens_per_second"] = found["tokens"] / found["train_seconds"]
        sizes = {"parameters": parameters(self.path), "kv_cache_bytes": kv_cache_bytes(self.config)}
        found |= {name: size for name, size in sizes.items() if size}
        if "probe/copying_gain" in last:
            found["copying_gain"] = last["probe/copying_gain"]
        for kind, best_of in (("emerged", min), ("heads", max)):
            found |= {
                f"{kind}/{score}": best_of(values.values())
                for score, values in of_heads(last, kind).items()
            }
        for kind in ("previous_token", "induction"):
            if (born := found.get(f"emerged/{kind}")) and found.get("step"):
                found[f"tokens_at_emergence/{kind}"] = born * found["tokens"] / found["step"]
                after = (
                    row["val/loss"]
                    for row in self.rows
                    if row["step"] >= born and "val/loss" in row
                )
                found[f"loss_at_emergence/{kind}"] = next(after, nan)
        if repeated := pairs_again(self.path):
            found["pairs_again"] = repeated
        return found


def of_heads(row: dict, kind: str) -> dict[str, dict[tuple[int, int], float]]:
    """What a row has of heads, `kind` heads or emerged: score → {(layer, head): value}."""
    found = defaultdict(dict)
    for key, value in row.items():
        if (m := HEAD_METRIC.fullmatch(key)) and m[1] == kind and not m[3] and isfinite(value):
            found[m[2]][int(m[4]), int(m[5])] = value
    return found


def pairs_again(run_dir: Path) -> float | None:
    """The share of tokens of the validation windows that snapshots look at whose pair with the
    token before came earlier in the window: what a text has for induction to find."""
    for path in sorted(run_dir.glob("attention/step_*.npz"))[-1:]:
        with (
            suppress(OSError, ValueError, KeyError, BadZipFile),
            np.load(ordinary_file(path)) as held,
        ):
            ids = held["window_ids"].astype(np.int64)  # (W, T)
            pairs = (ids[:, :-1] * (ids.max() + 1) + ids[:, 1:]).tolist()
            return fmean(pair in row[:k] for row in pairs for k, pair in enumerate(row))
    return None


# --- the folder, read -----------------------------------------------------------------------------


def is_sweep(folder: Path) -> bool:
    """Whether a sweep has begun in this folder."""
    return any(folder.glob(f"*/{JOB}"))


def require_sweep(folder: Path) -> None:
    """Raise `UserError` where no sweep has begun in this folder."""
    if not is_sweep(folder):
        raise UserError(
            f"{folder} is not the folder of a sweep: python train.py -m … names it when it ends"
        )


def read_sweep(folder: Path) -> list[Run]:
    """The jobs of a sweep by the names of their folders."""
    require_sweep(folder)
    return [read_run(job.parent) for job in sorted(folder.glob(f"*/{JOB}"))]


def read_run(path: Path) -> Run:
    """A run as its folder has it, with what a sweep noted of it."""
    job = read_job(path) if (path / JOB).exists() else {"overrides": {}, "swept": [], "failed": ""}
    config, rows = config_of(path), read_rows(path / METRICS)
    done = config is not None and bool(rows) and rows[-1]["step"] >= config.max_steps
    status = "finished" if done else "failed" if job["failed"] else "unfinished"
    settings = {key: job["overrides"][key] for key in job["swept"]}
    return Run(path, settings, job["overrides"], config, rows, status, job["failed"])


def read_job(path: Path) -> dict:
    """The note in a job's folder: `overrides`, `swept` (keys of those), `failed` (why, or "")."""
    try:
        job = read_json_object(path / JOB)
        texts = [*job["overrides"].values(), *job["swept"], job["failed"]]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a setting is no text")
        if not set(job["swept"]) <= job["overrides"].keys():
            raise ValueError("what was swept was not given")
        return job
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise UserError(f"{path / JOB} cannot be read ({e}): mend it, or remove it") from None


def config_of(path: Path) -> Config | None:
    """A run's configuration, or None before it trained."""
    file = path / "config.yaml"
    return cached_config(file, file.stat().st_mtime_ns) if file.exists() else None


@lru_cache(maxsize=1000)
def cached_config(path: Path, version: int) -> Config:
    """Parsed once for each version of the file: it takes longest of all that is read of a run."""
    return read_config(path)


def settings_of(config: Config | None) -> dict[str, str]:
    """Settings by their dotted names, as YAML would put them."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, _, value in (iterate_settings(config) if config else ())
    }


def parameters(run_dir: Path) -> int | None:
    """Numbers that are trained, counted in the newest checkpoint."""
    for weights in sorted(run_dir.glob("checkpoints/step_*/model.safetensors"))[-1:]:
        with suppress(SafetensorError, OSError), safe_open(ordinary_file(weights), "np") as tensors:
            names = set(tensors.keys()) - {"ngrams.keys"}
            return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
    return None


def kv_cache_bytes(config: Config | None) -> int | None:
    """Bytes of the keys and values of one sequence of block_size tokens, as sample.py keeps them
    where the run was trained."""
    if config is None:
        return None
    model = config.model
    numbers = model.n_layer * model.kv_heads * model.block_size * (model.key_dim + model.value_dim)
    wide = config.device != "cpu" or model.n_embd >= BF16_DECODES_FROM
    return numbers * (2 if config.precision == "bf16" and wide else 4)


# --- the runs, compared ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The runs that differ by their seed alone."""

    settings: dict[str, str]  # without the seed
    runs: list[Run]

    @property
    def name(self) -> str:
        """What was swept but for the seed: n_kv_head=2 lr=0.01."""
        return named(self.settings)

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    def values(self, measure: str) -> list[float]:
        """A measure of each finished run that has it."""
        return [run.measures[measure] for run in self.finished if measure in run.measures]

    def mean(self, measure: str) -> float:
        """The mean over the finished runs; nan where there is none."""
        values = self.values(measure)
        return fmean(values) if values else nan

    def error(self, measure: str) -> float:
        """The standard error of that mean: nan where fewer than two runs are finished."""
        values = self.values(measure)
        if len(values) < 2 or not all(map(isfinite, values)):
            return nan
        return stdev(values) / sqrt(len(values))


def named(settings: dict[str, str]) -> str:
    """Settings by their last names: n_kv_head=2 lr=0.01."""
    return " ".join(f"{key.rpartition('.')[2]}={brief(value)}" for key, value in settings.items())


def brief(value: str) -> str:
    """A value as it is shown: a number that a sweeper has drawn with four digits."""
    if re.fullmatch(r"-?\d*\.\d{5,}(e-?\d+)?", value):
        return f"{float(value):.4g}"
    return value


def one_seed(settings: list[Setting]) -> bool:
    """Whether several settings have one finished run each: by how much seeds differ is not known,
    and so none of them is the best."""
    return len(settings) > 1 and all(len(setting.finished) < 2 for setting in settings)


def compared_by(runs: list[Run]) -> str:
    """The metric that ranks the runs: the loss, or bits per byte where vocabularies differ."""
    vocabularies = {vocabulary(run.config) for run in runs if run.config and run.rows}
    return "val/loss" if len(vocabularies) < 2 else "val/bits_per_byte"


def vocabulary(config: Config | None) -> str:
    """What tells of a run whether its losses compare with another's: its vocabulary and text."""
    c = config or Config()
    return str((c.tokenizer.name, c.model.vocab_size, c.data.source, c.data.path, c.data.name))


def ranked(runs: list[Run]) -> list[Setting]:
    """The settings, best mean first; then means that are no number; then what has not finished."""
    metric, groups = compared_by(runs), {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        group = groups.setdefault(tuple(sorted(settings.items())), Setting(settings, []))
        group.runs.append(run)

    def order(setting: Setting) -> tuple:
        mean = setting.mean(metric)
        return not setting.finished, not isfinite(mean), mean if isfinite(mean) else 0

    return sorted(groups.values(), key=order)


def no_better(settings: list[Setting], metric: str) -> Setting | None:
    """The setting that comes second, where it is worse than the first by no more than the standard
    error of their difference; None where it is not, or where that is not known."""
    first, second = [*settings, None, None][:2]
    if not second:
        return None
    error = sqrt(first.error(metric) ** 2 + second.error(metric) ** 2)
    return second if second.mean(metric) - first.mean(metric) <= error else None


def best_run(runs: list[Run]) -> Run | None:
    """The best run of the best setting; None where no run has a result."""
    metric = compared_by(runs)
    candidates = ranked(runs)[0].finished if runs else []
    results = [run for run in candidates if isfinite(run.measures.get(metric, nan))]
    return min(results, key=lambda run: run.measures[metric], default=None)


def command(run: Run) -> str:
    """The command that gives this run again, for a shell."""
    settings = (f"{key}={value}" for key, value in run.overrides.items() if key != "sweep")
    return " ".join(["python", "train.py", *map(shlex.quote, settings)])
