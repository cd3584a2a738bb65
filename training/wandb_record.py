"""Log a run to Weights & Biases, online or offline."""

import os
import shlex
from collections.abc import Callable
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import wandb
from pydantic import ValidationError
from requests.utils import get_netrc_auth
from wandb.sdk import wandb_setup

from cli import error_reason, first_line, is_out_of_processes
from common.errors import UserError
from common.files import atomic_write, ordinary_file
from common.text import pluralize
from config import ResolvedConfig, WandbConfig
from glass.heads.metrics import (
    StrongestHeads,
    aggregate_heads,
    composition_table,
    emergence_metrics,
    head_table,
)
from training.memory import model_size

# Seconds to wait for the server, unless W&B's own settings set them. W&B's defaults would
# delay a run without a network by minutes.
DEFAULT_INIT_TIMEOUT = 20
DEFAULT_FINISH_TIMEOUT = 30
DEFAULT_PROJECT = "glassgpt"
MAX_RUN_ID_BYTES = 100
MAX_RUN_NAME = 128  # characters that the server accepts
FALSE_WORDS = ("", "0", "f", "false", "n", "no", "off")  # values of WANDB_DISABLED
# Metrics without a panel of their own, so that the losses and scores come first.
HIDDEN_METRICS = ("tokens", "train_seconds", "seconds/*")


class WandbRecord:
    """A run's record in W&B. After an error it is closed with one note; training continues."""

    def __init__(
        self, config: ResolvedConfig, run_dir: Path, log: Callable[[str], None], rows: list[dict]
    ) -> None:
        """Start a W&B run; `rows` are the metrics that a resumed run has recorded before."""
        self._print = log
        self._strongest_heads = StrongestHeads(rows)
        self._run = start(config, run_dir, log)
        self._samples: list[list] = []  # [step, text]
        if self._run is not None:
            parameters, flops = model_size(config.model)
            summary = {"parameters": parameters, "flops_per_token": flops}
            self._call(lambda run: run.summary.update(summary))

    def log(self, row: dict, grid: Path | None) -> None:
        """Log a step's metrics, the tables of its snapshot, and the attention grid if there is one.

        The tables contain all heads; only the strongest ones also have metrics of their own.
        """
        step = row["step"]
        metrics = aggregate_heads(row) | self._strongest_heads.select(row)
        self._call(lambda run: run.log(metrics, step=step))
        for key, table in (
            ("attention/head_scores", head_table(row)),
            ("attention/composition", composition_table(row)),
        ):
            if table.rows:
                self._log_media(
                    step, key, partial(wandb.Table, columns=table.columns, data=table.rows)
                )
        if grid:
            caption = f"attention patterns of all heads after {pluralize(step, 'step')}"
            self._log_media(step, "attention/map", lambda: wandb.Image(str(grid), caption=caption))

    def log_sample(self, step: int, text: str) -> None:
        """Log a generated text in a table with the earlier ones."""
        self._samples.append([step, text])
        columns = ["step", "text"]
        self._log_media(step, "samples", lambda: wandb.Table(columns=columns, data=self._samples))

    def log_page(self, path: Path, row: dict, findings: list[str], is_last: bool) -> None:
        """Log the findings of a snapshot, and the run's page at the first and last step.

        The page of the last step contains all earlier snapshots, and the summary of the W&B run
        then gets the findings and the emergence steps of all heads.
        """
        step = row["step"]
        if is_last or step == 0:
            self._log_media(step, "attention/explorer", lambda: _html(path.read_text("utf-8")))
        if findings:
            html = "".join(f"<p>{escape(finding)}</p>" for finding in findings)
            self._log_media(step, "findings", lambda: _html(html))
        if is_last:
            summary = {**emergence_metrics(row), "findings": "\n".join(findings)}
            self._call(lambda run: run.summary.update(summary))

    def finish(self, failed: bool) -> None:
        """Upload the rest and close the W&B run."""
        self._call(lambda run: run.finish(exit_code=int(failed)))

    def _log_media(self, step: int, key: str, make: Callable[[], Any]) -> None:
        """Log an image, a table or a page, with a note instead if it cannot be made."""
        if self._run is None:
            return
        try:
            values = {"step": step, key: make()}
        except Exception as e:  # a damaged image raises errors of many types
            self._print(f"warning: {key} is not logged to W&B ({_error_reason(e)})")
            return
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


def _html(content: str) -> wandb.Html:
    return wandb.Html(content, inject=False)  # without W&B's remote stylesheet


def _error_reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{first['loc'][0]}={first['input']}: {first['msg']}"
    return error_reason(error)


def load_settings() -> wandb.Settings:
    """Return W&B's own settings, from its settings files and environment variables.

    Raises:
        UserError: If W&B rejects one of them. It would ignore a file that it cannot read, even one
            that says offline.
    """
    for name, value in list(os.environ.items()):
        if name.startswith("WANDB_") and not value:
            del os.environ[name]  # empty means unset, but W&B rejects many empty values
    try:
        own = wandb_setup.singleton().settings
        for path in filter(None, (own.settings_system, own.settings_workspace)):
            with suppress(FileNotFoundError):
                ConfigParser().read_string(ordinary_file(Path(path)).read_text(encoding="utf-8"))
        from_files = own.read_system_settings().all()
        if from_files.keys() - own.model_fields_set:  # W&B ignores files with an invalid value
            wandb.Settings(**from_files)
    except Exception as e:
        wandb.teardown()  # forget the settings that were read before the error
        if is_out_of_processes(e):
            raise
        raise UserError(
            f"W&B rejects its settings ({_error_reason(e)}): correct the environment variable "
            "(WANDB_…) or the settings file of W&B, or set wandb.mode=disabled"
        ) from None
    return own


def check_settings(config: WandbConfig) -> str:
    """Return the mode of W&B; raise `UserError` if it would refuse to start due to a setting."""
    own = load_settings()
    for source, name in (("wandb.project", config.project), ("WANDB_ENTITY", own.entity)):
        if not name:
            continue
        try:
            wandb.Settings(project=name)  # W&B has the same rules for both, but checks one only
        except Exception as e:
            reason = first_line(e).rpartition("': ")[2]
            raise UserError(f"{source}={name} is not a name that W&B accepts: {reason}") from None
        if not name.isprintable() or name != name.strip():
            raise UserError(
                f"{source}={name!r} has control characters or spaces at its ends: choose a name "
                "without them"
            )
    return resolve_mode(config.mode, own)


def resolve_mode(mode: str, own: wandb.Settings) -> str:
    """Return online, offline or disabled.

    Args:
        mode: The setting wandb.mode. Of it and W&B's own settings the more private one counts;
            if neither says, W&B is online with an API key and offline without one.
        own: W&B's own settings.
    """
    is_disabled = os.environ.get("WANDB_DISABLED", "").lower() not in FALSE_WORDS
    if "disabled" in (mode, own.mode) or is_disabled:
        return "disabled"
    if mode == "offline" or own.mode in ("offline", "dryrun"):
        return "offline"
    return "online" if mode == "online" or has_api_key(own) else "offline"


def has_api_key(own: wandb.Settings) -> bool:
    """Return whether W&B's settings have an API key, or `wandb login` has stored one."""
    return bool(own.api_key or own.identity_token_file or get_netrc_auth(own.base_url))


def start(config: ResolvedConfig, run_dir: Path, log: Callable[[str], None]) -> Any:
    """Start a W&B run without ever raising or prompting.

    The run is offline if the server does not respond in time. None is returned if W&B is disabled
    or cannot start.
    """
    if config.wandb.mode == "disabled":
        return None
    try:
        own = load_settings()
        mode = resolve_mode(config.wandb.mode, own)
        if config.wandb.mode not in ("auto", mode):
            log(
                f"W&B      {mode}, because W&B's own settings (WANDB_MODE, WANDB_DISABLED or a "
                f"settings file) say so; wandb.mode={config.wandb.mode} does not override them"
            )
        if mode == "disabled":
            return None
        if mode == "online" and not has_api_key(own):
            log("W&B      no API key is set (wandb login), so the run is recorded offline")
            mode = "offline"
        run, mode = _init_online_or_offline(config, run_dir, mode, own, log)
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
    config: ResolvedConfig,
    run_dir: Path,
    mode: str,
    own: wandb.Settings,
    log: Callable[[str], None],
) -> tuple[Any, str]:
    """Start a W&B run, offline if online fails, and return it with its mode.

    A resumed run continues under the id that its folder contains.
    """
    (run_dir / "wandb").mkdir(exist_ok=True)
    id_file = run_dir / "wandb" / "glassgpt-run-id"
    run_id = _read_run_id(id_file)
    try:
        run = _init(config, run_dir, mode, own, run_id)
    except Exception as e:
        if mode == "offline":
            raise
        log(f"W&B      did not start online ({_error_reason(e)}), so the run is recorded offline")
        mode = "offline"
        run = _init(config, run_dir, mode, own, run_id)
    with atomic_write(id_file) as part:
        part.write_text(run.id)
    return run, mode


def _read_run_id(path: Path) -> str | None:
    """Return the id in a file; None without the file or with content that is not an id."""
    try:
        return wandb.Settings(run_id=ordinary_file(path, MAX_RUN_ID_BYTES).read_text()).run_id
    except (OSError, ValueError, wandb.Error):
        return None


def _init(
    config: ResolvedConfig, run_dir: Path, mode: str, own: wandb.Settings, run_id: str | None
) -> Any:
    timeouts = {"init_timeout": DEFAULT_INIT_TIMEOUT, "finish_timeout": DEFAULT_FINISH_TIMEOUT}
    for name in timeouts.keys() & own.model_fields_set:
        timeouts[name] = getattr(own, name)
    run_name = run_dir.name.encode(errors="replace").decode()[:MAX_RUN_NAME]
    return wandb.init(
        project=config.wandb.project or own.project or DEFAULT_PROJECT,
        name=own.run_name or run_name,
        config=asdict(config),
        dir=str(run_dir),
        mode=mode,
        id=run_id,
        resume="allow" if run_id and mode == "online" else None,
        settings=wandb.Settings(
            silent=True, console="off", login_timeout=timeouts["init_timeout"], **timeouts
        ),
    )


def define_metrics(run: Any) -> None:
    """Plot every metric over the step, and give the best validation loss to the summary."""
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for key in HIDDEN_METRICS:
        run.define_metric(key, step_metric="step", hidden=True)
    run.define_metric("val/loss", step_metric="step", summary="min")
