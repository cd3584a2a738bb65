"""Log a run to Weights & Biases, online or offline."""

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import wandb
from requests.utils import get_netrc_auth

from attention_maps.metrics import aggregate_heads, emergence_metrics
from cli import first_line
from common.files import atomic_write, ordinary_file
from config import ResolvedConfig
from training.plan import model_size

# Seconds to wait for the server, unless W&B's own environment variables set them. W&B's defaults
# would delay a run without a network by minutes.
DEFAULT_INIT_TIMEOUT = 20
DEFAULT_FINISH_TIMEOUT = 30
DEFAULT_PROJECT = "glassgpt"
DEFAULT_URL = "https://api.wandb.ai"
MODES = ("online", "offline", "disabled")
MAX_RUN_ID_BYTES = 100
# Metrics without a panel of their own, so that the losses and scores come first.
HIDDEN_METRICS = ("tokens", "train_seconds", "seconds/*")


class WandbRecord:
    """A run's record in W&B. After an error it is closed with one note; training continues."""

    def __init__(self, config: ResolvedConfig, run_dir: Path, log: Callable[[str], None]) -> None:
        self._print = log
        self._run = start(config, run_dir, log)
        self._samples: list[list] = []  # [step, text]
        if self._run is not None:
            parameters, _ = model_size(config.model)
            self._call(lambda run: run.summary.update({"parameters": parameters}))

    def log(self, row: dict, grid: Path | None) -> None:
        """Log a step's metrics, and the attention grid if there is one."""
        values: dict[str, Any] = {**aggregate_heads(row)}
        if grid:
            caption = f"attention patterns of all heads after {row['step']} steps"
            values["attention/map"] = wandb.Image(str(grid), caption=caption)
        self._log(row["step"], values)

    def log_sample(self, step: int, text: str) -> None:
        """Log a generated text in a table with the earlier ones."""
        self._samples.append([step, text])
        table = wandb.Table(columns=["step", "text"], data=self._samples)
        self._log(step, {"step": step, "samples": table})

    def log_page(self, path: Path, row: dict, findings: list[str], is_last: bool) -> None:
        """Log the findings of a snapshot, and the run's page at the first and last step.

        Args:
            path: The page; the last one contains all earlier snapshots.
            row: Metrics of the snapshot's step.
            findings: The findings so far, as sentences.
            is_last: Whether the run is finished; its summary then gets the findings and the
                emergence steps of all heads.
        """
        values: dict[str, Any] = {}
        if is_last or row["step"] == 0:
            html = path.read_text(encoding="utf-8")
            values["attention/explorer"] = wandb.Html(html, inject=False)
        if findings:
            html = "".join(f"<p>{escape(finding)}</p>" for finding in findings)
            values["findings"] = wandb.Html(html, inject=False)
        if values:
            self._log(row["step"], {"step": row["step"], **values})
        if is_last:
            summary = {**emergence_metrics(row), "findings": "\n".join(findings)}
            self._call(lambda run: run.summary.update(summary))

    def finish(self, failed: bool) -> None:
        """Upload the rest and close the W&B run."""
        self._call(lambda run: run.finish(exit_code=int(failed)))

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._call(lambda run: run.log(values, step=step))

    def _call(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as e:  # W&B raises errors of many types; training continues in any case
            reason = _error_reason(e)
            self._print(
                f"warning: W&B logging failed ({reason}); metrics are still written to "
                "metrics.jsonl"
            )
            self._run = None


def _error_reason(error: Exception) -> str:
    name, reason = type(error).__name__, first_line(error)
    return name if reason == name else f"{name}: {reason}"


def resolve_mode(mode: str) -> str:
    """Return online, offline or disabled.

    Args:
        mode: The setting wandb.mode. `auto` uses the environment variable WANDB_MODE, or else
            online if an API key is set and offline if not.
    """
    if mode != "auto":
        return mode
    mode = os.environ.get("WANDB_MODE", "")
    if mode in MODES:
        return mode
    return "online" if has_api_key() else "offline"


def has_api_key() -> bool:
    """Return whether a W&B key is set, in the environment or by `wandb login`."""
    url = os.environ.get("WANDB_BASE_URL", DEFAULT_URL)
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(url))


def start(config: ResolvedConfig, run_dir: Path, log: Callable[[str], None]) -> Any:
    """Start a W&B run without ever raising or prompting.

    Returns:
        The run, which is offline if the server does not respond in time; None if W&B is disabled
        or cannot start.
    """
    mode = resolve_mode(config.wandb.mode)
    if mode == "disabled":
        return None
    if mode == "online" and not has_api_key():
        log("W&B      no API key is set (wandb login), so the run is recorded offline")
        mode = "offline"
    try:
        run, mode = _init_online_or_offline(config, run_dir, mode, log)
        define_metrics(run)
    except Exception as e:
        reason = _error_reason(e)
        log(f"warning: W&B cannot start ({reason}); metrics are written to metrics.jsonl only")
        return None
    if mode == "offline":
        records = shlex.quote(str(run_dir / "wandb")) + "/offline-run-*"
        log(f"W&B      recorded offline; upload it with: wandb sync {records}")
    return run


def _init_online_or_offline(
    config: ResolvedConfig, run_dir: Path, mode: str, log: Callable[[str], None]
) -> tuple[Any, str]:
    """Start a W&B run, offline if online fails, and return it with its mode.

    A resumed run continues under the id that its folder contains.
    """
    (run_dir / "wandb").mkdir(exist_ok=True)
    id_file = run_dir / "wandb" / "glassgpt-run-id"
    run_id = None
    if id_file.exists():
        run_id = ordinary_file(id_file, MAX_RUN_ID_BYTES).read_text().strip()
    try:
        run = _init(config, run_dir, mode, run_id)
    except Exception as e:
        if mode == "offline":
            raise
        log(f"W&B      did not start online ({_error_reason(e)}), so the run is recorded offline")
        mode = "offline"
        run = _init(config, run_dir, mode, run_id)
    with atomic_write(id_file) as part:
        part.write_text(run.id)
    return run, mode


def _init(config: ResolvedConfig, run_dir: Path, mode: str, run_id: str | None) -> Any:
    init_timeout = float(os.environ.get("WANDB_INIT_TIMEOUT", DEFAULT_INIT_TIMEOUT))
    finish_timeout = float(os.environ.get("WANDB_FINISH_TIMEOUT", DEFAULT_FINISH_TIMEOUT))
    return wandb.init(
        project=config.wandb.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
        name=os.environ.get("WANDB_NAME") or run_dir.name,
        config=asdict(config),
        dir=str(run_dir),
        mode=mode,
        id=run_id,
        resume="allow" if run_id and mode == "online" else None,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=init_timeout,
            login_timeout=init_timeout,
            finish_timeout=finish_timeout,
        ),
    )


def define_metrics(run: Any) -> None:
    """Plot every metric over the step, and give the best validation loss to the summary."""
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for key in HIDDEN_METRICS:
        run.define_metric(key, step_metric="step", hidden=True)
    run.define_metric("val/loss", step_metric="step", summary="min")
