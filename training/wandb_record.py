"""A run's record in Weights & Biases, online or offline."""

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path

import wandb
from requests.utils import get_netrc_auth

from attention_maps.metrics import aggregate_heads, emergence_metrics
from attention_maps.rendering import RenderedFinding
from cli import first_line
from common.files import atomic_write, ordinary_file
from config import Config
from training.plan import model_size

START, FINISH = 20, 30  # seconds that W&B is waited for, at most
PROJECT = "glassgpt"  # where neither the setting nor WANDB_PROJECT names one


class WandbRecord:
    """The record of a run. Whatever W&B raises is printed once; training goes on without it."""

    def __init__(self, config: Config, run_dir: Path, log: Callable[[str], None]):
        self.log_line = log
        self._run = start(config, run_dir, log)
        self._samples: list[list] = []  # step and text
        if self._run is not None:
            parameters, _ = model_size(config.model)
            self._do(lambda run: run.summary.update({"parameters": parameters}))

    def log(self, row: dict, picture: Path | None) -> None:
        """Record a step's metrics, and the picture of all maps, if there is one."""
        found = aggregate_heads(row)
        if picture:
            caption = f"every head's attention weights after {row['step']} steps"
            found["attention/map"] = wandb.Image(str(picture), caption=caption)
        self._do(lambda run: run.log(found, step=row["step"]))

    def sample(self, step: int, text: str) -> None:
        """Record a text that the model wrote, in a table with those before it."""
        self._samples.append([step, text])
        self._do(
            lambda run: run.log(
                {
                    "step": step,
                    "samples": wandb.Table(columns=["step", "text"], data=self._samples),
                },
                step=step,
            )
        )

    def page(self, path: Path, row: dict, findings: list[RenderedFinding], last: bool) -> None:
        """Record the run's page, the first and the last, which holds all before; what was found
        out, as sentences and their figures; and births."""
        lines, found = [str(finding) for finding in findings], {}
        if last or row["step"] == 0:
            found["attention/explorer"] = wandb.Html(path.read_text(encoding="utf-8"), inject=False)
        if lines:
            found["findings"] = wandb.Html(
                "".join(f"<p>{escape(line)}</p>" for line in lines), inject=False
            )
        if found:
            self._do(lambda run: run.log({"step": row["step"]} | found, step=row["step"]))
        if last:
            births = emergence_metrics(row)
            self._do(lambda run: run.summary.update(births | {"findings": "\n".join(lines)}))

    def finish(self, failed: bool) -> None:
        self._do(lambda run: run.finish(exit_code=int(failed)))

    def _do(self, call: Callable) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as e:  # whatever W&B raises, training goes on: metrics.jsonl is the record
            self.log_line(f"W&B stopped recording ({_brief(e)}); metrics.jsonl goes on")
            self._run = None


def _brief(error: Exception) -> str:
    name, reason = type(error).__name__, first_line(error)
    return name if reason == name else f"{name}: {reason}"


def wandb_mode(mode: str) -> str:
    """online, offline or disabled: `mode`, or for auto WANDB_MODE, else whether a key is set."""
    if mode != "auto":
        return mode
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("online", "offline", "disabled"):
        return mode
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    """Whether a W&B key is set, in the environment or by `wandb login`."""
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(url))


def start(config: Config, run_dir: Path, log: Callable[[str], None]):
    """A W&B run, or None; offline where online does not start in time. Never raises or asks."""
    mode = wandb_mode(config.wandb.mode)
    if mode == "disabled":
        return None
    if mode == "online" and not has_wandb_key():
        log("W&B: no key is set (wandb login), so the record is kept offline")
        mode = "offline"
    id_file = run_dir / "wandb" / "glassgpt-run-id"
    try:
        (run_dir / "wandb").mkdir(exist_ok=True)
        id = ordinary_file(id_file, 100).read_text().strip() if id_file.exists() else None
        try:
            run = init(config, run_dir, mode, id)
        except Exception as e:
            if mode == "offline":
                raise
            log(f"W&B did not start online ({_brief(e)}), so the record is kept offline")
            mode = "offline"
            run = init(config, run_dir, mode, id)
        with atomic_write(id_file) as part:
            part.write_text(run.id)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for key in ("tokens", "train_seconds", "seconds/*"):  # no panels: what is told comes first
            run.define_metric(key, step_metric="step", hidden=True)
        run.define_metric("val/loss", step_metric="step", summary="min")
    except Exception as e:
        log(f"W&B could not start ({_brief(e)}): metrics.jsonl is the record")
        return None
    if mode == "offline":
        records = shlex.quote(str(run_dir / "wandb")) + "/offline-run-*"
        log(f"W&B      recorded offline; to upload it: wandb sync {records}")
    return run


def init(config: Config, run_dir: Path, mode: str, id: str | None):
    """Start a W&B run, or continue the one of this id."""
    return wandb.init(
        project=config.wandb.project or os.environ.get("WANDB_PROJECT") or PROJECT,
        name=os.environ.get("WANDB_NAME") or run_dir.name,
        config=asdict(config),
        dir=str(run_dir),
        mode=mode,
        id=id,
        resume="allow" if id and mode == "online" else None,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=START,
            login_timeout=START,
            finish_timeout=FINISH,
        ),
    )
