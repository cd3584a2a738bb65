"""A sweep's folder, read: its runs, their measures, the settings ranked. Does not import torch.

All of it is read from the folder, so it is the same whatever started the jobs.
"""

import re
import shlex
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import isfinite, nan, prod, sqrt
from pathlib import Path
from statistics import fmean, stdev

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from config import Config, UserError, read_config
from files import METRICS, best_row, read_object, read_rows
from report.page import flat, head_metrics

PLAN = "sweep.json"  # in the sweep's folder: the jobs of its last command
CSV, PAGE = "sweep.csv", "sweep.html"
JOB = "job.json"  # in a job's folder: what it was given, and why its last attempt failed
ALONE = {"overrides": {}, "swept": [], "failed": "", "until": []}  # as of a run of no sweep
INCIDENTAL = ("run_dir", "resume", "wandb.")  # settings that do not change a run's results


@dataclass(frozen=True)
class Run:
    """A job of a sweep as its folder has it.

    status: finished (all its steps are recorded), failed (its last attempt was), unfinished
    (stopped, or still running), not begun (its command was stopped before its turn).
    """

    path: Path
    settings: dict[str, str]  # what the sweep varied, as typed: model.n_kv_head → 2; `seed` too
    overrides: dict[str, str]  # all that was typed when it first trained
    config: Config | None  # as resolved; None before it trained
    rows: list[dict]  # metrics.jsonl
    status: str
    reason: str  # why its last attempt failed, in one line; of a finished run, why it did not go on
    changes: tuple[tuple[int, dict[str, str]], ...] = ()  # (step, settings that changed after it)

    @cached_property
    def measures(self) -> dict[str, float]:
        """What it came to, as far as it was measured; the names are those of metrics.jsonl.

        Losses at the best step, `best_step`, size, speed (`tokens_per_second` in training), bytes
        of the KV cache of one sequence; for each kind of head the first birth (`births/induction`)
        and the greatest last score (`heads/induction`).
        """
        best, last = best_row(self.rows) or {}, self.rows[-1] if self.rows else {}
        found = {key: best[key] for key in ("val/loss", "val/bits_per_byte") if key in best}
        found |= {"best_step": best["step"]} if best else {}
        found |= {key: last[key] for key in ("step", "tokens", "train_seconds") if key in last}
        if found.get("train_seconds") and "tokens" in found:
            found["tokens_per_second"] = found["tokens"] / found["train_seconds"]
        sizes = {"parameters": parameters(self.path), "kv_cache_bytes": kv_cache_bytes(self.config)}
        found |= {name: size for name, size in sizes.items() if size}
        of_heads = defaultdict(list)
        for kind, score, _, _, value in head_metrics(last):
            of_heads[kind, score].append(value)
        return found | {f"{kind}/{score}": min(values) if kind == "births" else max(values)
                        for (kind, score), values in of_heads.items()}


# --- the folder, read -----------------------------------------------------------------------------


def is_sweep(folder: Path) -> bool:
    """Whether a sweep has begun in this folder."""
    return (folder / PLAN).exists() or any(folder.glob(f"*/{JOB}"))


def require_sweep(folder: Path) -> None:
    """Raise `UserError` where no sweep has begun in this folder."""
    if not is_sweep(folder):
        raise UserError(f"{folder} is not the folder of a sweep: "
                        "python train.py -m … names it when it ends")


def read_sweep(folder: Path) -> list[Run]:
    """The jobs of a sweep by the names of their folders, those that never began too.

    Raises:
        UserError: there is no sweep, or a file in it does not fit this version.
    """
    require_sweep(folder)
    runs = {job.parent.name: read_run(job.parent) for job in folder.glob(f"*/{JOB}")}
    for name, settings in read_plan(folder).items():
        runs.setdefault(name, Run(folder / name, settings, settings, None, [], "not begun", ""))
    return [runs[name] for name in sorted(runs)]


def read_run(path: Path) -> Run:
    """A run as its folder has it, with what a sweep noted of it.

    Raises:
        UserError: a file in it does not fit this version.
    """
    job = read_job(path) if (path / JOB).exists() else ALONE
    config = config_of(path)
    try:
        rows = read_rows(path / METRICS)
    except OSError as e:
        raise UserError(f"{path / METRICS} cannot be read: {e.strerror}") from None
    done = config is not None and bool(rows) and rows[-1]["step"] >= config.max_steps
    status = "finished" if done else "failed" if job["failed"] else "unfinished"
    settings = {key: job["overrides"][key] for key in job["swept"]}
    return Run(path, settings, job["overrides"], config, rows, status, job["failed"],
               changes(job["until"], settings_of(config)))


def read_job(path: Path) -> dict:
    """The note in a job's folder: `overrides`, `swept` (keys of those), `failed` (a reason, or
    empty), `until`: [{step, config}], the settings that it had until then.
    """
    kept = read_json(path / JOB)
    job = {**kept, "failed": kept.get("failed", ""), "until": kept.get("until", [])}
    overrides, swept, until = job.get("overrides"), job.get("swept"), job["until"]
    fits = (are_texts(overrides) and isinstance(job["failed"], str)
            and isinstance(swept, list) and all(key in [*overrides] for key in swept)
            and isinstance(until, list) and all(isinstance(entry, dict) for entry in until)
            and all(type(entry.get("step")) is int for entry in until)
            and all(are_texts(entry.get("config")) for entry in until))
    if not fits:
        raise damaged(path / JOB, "it is not what a sweep writes there")
    return job


def read_plan(folder: Path) -> dict[str, dict[str, str]]:
    """The jobs of the sweep's last command: folder's name → what the sweep varies in it."""
    if not (folder / PLAN).exists():
        return {}  # of an earlier version
    jobs = read_json(folder / PLAN).get("jobs")
    if not isinstance(jobs, dict) or not all(map(are_texts, jobs.values())):
        raise damaged(folder / PLAN, "it is not what a sweep writes there")
    return jobs


def read_json(path: Path) -> dict:
    """A JSON object in a file of its own.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        return read_object(path)
    except ValueError as e:
        raise damaged(path, e) from None


def damaged(path: Path, why: Exception | str) -> UserError:
    return UserError(f"{path} cannot be read ({why}): mend it, or remove it")


def are_texts(value) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def config_of(path: Path) -> Config | None:
    """A run's configuration, or None before it trained."""
    try:
        stat = (path / "config.yaml").stat()
    except OSError:
        return None
    return _config(path / "config.yaml", stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=1000)
def _config(path: Path, *version: int) -> Config:
    """Parsed once for each version of the file: it takes longest of all that is read of a run."""
    return read_config(path)


def settings_of(config: Config | None) -> dict[str, str]:
    return dict(flat(asdict(config))) if config else {}


def step_saved(folder: Path) -> int | None:
    """The step of a checkpoint's folder; None where it is none."""
    found = re.fullmatch(r"checkpoints/step_(\d{1,18})", "/".join(folder.resolve().parts[-2:]))
    return int(found[1]) if found else None


def steps_saved(path: Path) -> list[int]:
    """The steps of a run's checkpoints, in their order."""
    found = map(step_saved, path.glob("checkpoints/step_*"))
    return sorted(step for step in found if step is not None)


def is_held(lock: Path) -> bool:
    """Whether a process has this lock, as one that trains has that of its folder."""
    if lock.is_symlink() or not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of someone else's
        return False


def changed(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Those of the settings `after` that were others `before`, and change what a run comes to."""
    return {key: value for key, value in after.items()
            if before.get(key, value) != value and not key.startswith(INCIDENTAL)}


def changes(until: list[dict], now: dict[str, str]) -> tuple[tuple[int, dict[str, str]], ...]:
    """(step, what changed after it) for each time that a run went on with other settings."""
    later = [*(entry["config"] for entry in until[1:]), now]
    pairs = ((entry["step"], changed(entry["config"], after)) for entry, after in zip(until, later))
    return tuple((step, settings) for step, settings in pairs if settings)


def until_now(path: Path, until: list[dict]) -> list[dict]:
    """The settings that a run had until each step, as its note has them, with those of now."""
    now, step = settings_of(config_of(path)), max(steps_saved(path), default=0)
    if until and not changed(until[-1]["config"], now):
        until = until[:-1]
    # What was trained under other settings from the same step on was discarded.
    later = now and (not until or until[-1]["step"] < step)
    return [*until, {"step": step, "config": now}] if later else until


def parameters(run_dir: Path) -> int | None:
    """Numbers that are trained, counted in the newest checkpoint."""
    for weights in sorted(run_dir.glob("checkpoints/step_*/model.safetensors"))[-1:]:
        with suppress(SafetensorError, OSError), safe_open(weights, "np") as tensors:
            names = tensors.keys()
            return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
    return None


def kv_cache_bytes(config: Config | None) -> int | None:
    """Bytes of the keys and values of one sequence of block_size tokens, in the run's precision."""
    if config is None:
        return None
    model = config.model
    numbers = model.n_layer * model.kv_heads * model.block_size * (model.key_dim + model.value_dim)
    return numbers * (2 if config.precision == "bf16" else 4)


# --- the runs, compared ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The runs that differ by their seed alone."""

    settings: dict[str, str]  # without the seed
    runs: list[Run]

    @property
    def name(self) -> str:
        """What was swept but for the seed: n_kv_head=2 lr=0.01."""
        pairs = (f"{key.rpartition('.')[2]}={value}" for key, value in self.settings.items())
        return " ".join(pairs)

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


def compared_by(runs: list[Run]) -> str:
    """The metric that ranks the runs: the loss, or bits per byte where vocabularies differ."""
    configs = [run.config for run in runs if run.config and run.rows]
    vocabularies = {(c.tokenizer.name, c.model.vocab_size, c.data.source, c.data.path, c.data.name)
                    for c in configs}
    return "val/loss" if len(vocabularies) < 2 else "val/bits_per_byte"


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
    """The command that started this run, for a shell; it gives it again where nothing `changes`."""
    settings = (f"{key}={value}" for key, value in run.overrides.items()
                if key not in ("sweep", "resume"))
    return " ".join(["python", "train.py", *map(shell_quoted, settings)])


def shell_quoted(text: str) -> str:
    """One word of a shell; control characters by their numbers, as bash and zsh read them."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}"
                          for c in text) + "'"


def in_words(changes: tuple[tuple[int, dict[str, str]], ...]) -> list[str]:
    """A line for each time that a run went on with other settings."""
    typed = [(step, [shell_quoted(f"{key}={value}") for key, value in settings.items()])
             for step, settings in changes]
    return [f"after {step:,} steps it went on with {' '.join(words)}" for step, words in typed]
