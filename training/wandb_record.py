"""Log a run to Weights & Biases, online or offline."""

import os
import shlex
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb
from pydantic import ValidationError
from requests.utils import get_netrc_auth
from wandb.sdk import wandb_setup

from common.errors import UserError
from common.files import atomic_write, ordinary_file
from common.terminal import error_reason, first_line, is_out_of_processes
from config import ResolvedConfig, WandbConfig
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
    """A run's record in W&B. After an error it is closed with one note; training continues.

    What is logged at a step is sent by `commit`, all at once, so that a snapshot that a signal
    interrupts leaves nothing when it is taken again.
    """

    def __init__(self, config: ResolvedConfig, run_dir: Path, log: Callable[[str], None]) -> None:
        self._print = log
        self._run = start(config, run_dir, log)
        self._values: dict[str, Any] = {}  # logged since the last `commit`
        if self._run is not None:
            parameters, flops = model_size(config.model)
            self.summarize({"parameters": parameters, "flops_per_token": flops})

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics."""
        self._values |= metrics

    def log_image(self, key: str, path: Path | None, caption: str) -> None:
        """Log an image from its file, if there is one."""
        if path is not None:
            self._log_media(key, lambda: wandb.Image(str(path), caption=caption))

    def log_table(self, key: str, columns: list[str], rows: list[list]) -> None:
        """Log a table, unless it is empty."""
        if rows:
            self._log_media(key, lambda: wandb.Table(columns=columns, data=rows))

    def log_html(self, key: str, content: str) -> None:
        """Log a page."""
        # W&B would inject a remote stylesheet.
        self._log_media(key, lambda: wandb.Html(content, inject=False))

    def commit(self, step: int) -> None:
        """Send what was logged since the last call as values of a step."""
        values, self._values = self._values, {}
        # W&B names the files of a call after the step of the call before.
        self._call(lambda run: run.log({"step": step}, step=step))
        self._call(lambda run: run.log(values, step=step))

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Update the summary of the W&B run."""
        self._call(lambda run: run.summary.update(values))

    def finish(self, failed: bool) -> None:
        """Upload the rest and close the W&B run."""
        self._call(lambda run: run.finish(exit_code=int(failed)))

    def _log_media(self, key: str, make: Callable[[], Any]) -> None:
        """Log an image, a table or a page, with a note instead if it cannot be made."""
        if self._run is None:
            return
        try:
            self._values[key] = make()
        except Exception as e:  # a damaged image raises errors of many types
            self._print(f"warning: {key} is not logged to W&B ({_error_reason(e)})")

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
