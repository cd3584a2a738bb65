"""Log a run to Weights & Biases, online or offline."""

import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb
from pydantic import ValidationError
from requests.utils import get_netrc_auth
from wandb.env import CACHE_DIR, DATA_DIR, get_cache_dir, get_data_dir
from wandb.sdk.wandb_setup import singleton

from common.errors import UserError
from common.files import atomic_write
from common.paths import writable_folder
from common.terminal import error_sentence, tolerate_errors
from config import ResolvedConfig, WandbConfig
from run.checkpoints import MANIFEST_FILE, MODEL_FILES
from run.run_dir import RunDir
from training.flops import model_size

# Seconds to wait for the server. W&B's defaults would delay a run without a network by minutes.
os.environ.setdefault("WANDB_LOGIN_TIMEOUT", "20")
os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")
FINISH_TIMEOUT = 30

DEFAULT_PROJECT = "glassgpt"
MAX_RUN_NAME = 128  # characters that the server accepts


def provide_folders() -> None:
    """Give W&B a home, and a temporary folder for its cache and data if it cannot write its own."""
    if not os.environ.get("HOME"):
        os.environ.pop("HOME", None)
        home = os.path.expanduser("~")  # "~" if the system does not know the user
        os.environ["HOME"] = os.devnull if home == "~" else home
    for variable, folder in ((CACHE_DIR, get_cache_dir()), (DATA_DIR, get_data_dir())):
        writable = writable_folder(Path(folder))
        if writable != Path(folder):
            os.environ[variable] = str(writable)


provide_folders()


class WandbRecord:
    """A run's record in W&B. After an error it is closed with a note; training continues.

    What is logged at a step is sent by `commit`, all at once, so that a snapshot that a signal
    interrupts leaves nothing when it is taken again.
    """

    def __init__(self, config: ResolvedConfig, run_dir: RunDir, log: Callable[[str], None]) -> None:
        self._print = log
        self._open_run = wandb.run  # of the program around `train_from`
        self._run = start(config, run_dir, log)
        self._values: dict[str, Any] = {}  # logged since the last `commit`
        if self._run is not None:
            parameters, flops = model_size(config.model)
            self.update_summary({"parameters": parameters, "flops_per_token": flops})

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics, each of which W&B draws as a chart."""
        self._values |= metrics

    def log_image(self, key: str, path: Path, caption: str) -> None:
        """Log an image from its file."""
        self._log_media(key, lambda: wandb.Image(str(path), caption=caption))

    def log_table(self, key: str, columns: list[str], rows: list[list]) -> None:
        """Log a table, unless it is empty."""
        if rows:
            self._log_media(key, lambda: wandb.Table(columns=columns, data=rows))

    def log_page(self, key: str, path: Path) -> None:
        """Log a page from its file."""
        # W&B would inject a remote stylesheet.
        self._log_media(key, lambda: wandb.Html(path, inject=False))

    def commit(self, step: int) -> None:
        """Send what was logged since the last call as values of a step."""
        values, self._values = self._values, {}
        # W&B names the files of a call after the step of the call before.
        self._call(lambda run: run.log({"step": step}, step=step))
        self._call(lambda run: run.log(values, step=step))

    def update_summary(self, values: Mapping[str, Any]) -> None:
        """Update the summary of the W&B run."""
        self._call(lambda run: run.summary.update(values))

    def log_best_checkpoint(self, run_dir: RunDir) -> None:
        """Log the best checkpoint, without the state of its optimizers, as an artifact."""

        def log_artifact(run: Any) -> None:
            checkpoint = run_dir.checkpoint("best", self._print)
            metadata = {"step": checkpoint.step}
            artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=metadata)
            for name in (MANIFEST_FILE, *MODEL_FILES):
                artifact.add_file(str(checkpoint.folder / name))
            run.log_artifact(artifact)

        self._call(log_artifact)

    def finish(self, failed: bool) -> None:
        """Upload the rest and close the W&B run, unless the program around it has opened it."""
        if self._run is not self._open_run:
            self._call(lambda run: run.finish(exit_code=int(failed)))

    def _log_media(self, key: str, make: Callable[[], Any]) -> None:
        if self._run is not None:
            with tolerate_errors(f"logging {key} to W&B", self._print):
                self._values[key] = make()

    def _call(self, action: Callable[[Any], None]) -> None:
        run, self._run = self._run, None
        if run is not None:
            with tolerate_errors("logging to W&B", self._print):
                action(run)
                self._run = run


def check_wandb(config: WandbConfig) -> str:
    """Return the mode of W&B: online, offline or disabled."""
    if config.mode == "disabled":
        return config.mode
    try:
        wandb.Settings(project=config.project, run_tags=_list_tags(config))
        return _resolve_mode(config.mode)
    except Exception as e:
        reason = error_sentence(e)
        if isinstance(e, ValidationError):
            first = e.errors()[0]
            reason = f"{first['loc'][0]}={first['input']}: {first['msg']}"
        raise UserError(
            f"W&B rejects wandb.project, wandb.tags or one of its own settings ({reason}): correct "
            "it, or set wandb.mode=disabled"
        ) from None


def _list_tags(config: WandbConfig) -> list[str] | None:
    if config.tags is None:
        return None
    return [tag.strip() for tag in config.tags.strip("[]").split(",")]


def _resolve_mode(mode: str) -> str:
    """Return the more private of wandb.mode and W&B's own mode; offline without an API key."""
    own = singleton().settings  # from environment variables and W&B's settings files
    if "disabled" in (mode, own.mode):
        return "disabled"
    is_offline = "offline" in (mode, own.mode) or own.mode == "dryrun"
    return "offline" if is_offline or not _has_api_key() else "online"


def _has_api_key() -> bool:
    own = singleton().settings
    return bool(own.api_key or own.identity_token_file or get_netrc_auth(own.base_url))


def start(config: ResolvedConfig, run_dir: RunDir, log: Callable[[str], None]) -> Any:
    """Start a W&B run, offline if the server is slow; None if W&B is disabled or fails.

    The function of a sweep agent has opened a run already, which is taken.
    """
    if config.wandb.mode == "disabled":
        return None
    with tolerate_errors("starting W&B", log):
        mode = _resolve_mode(config.wandb.mode)
        if mode == "disabled":
            return None
        if wandb.run is not None and "WANDB_SWEEP_ID" in os.environ:
            run = wandb.run
            run.config.update(asdict(config), allow_val_change=True)
            log(f"W&B      logged into the agent's run {run.id}")
        else:
            run = _start_own(config, run_dir, mode, log)
        run.define_metric("step", hidden=True)  # the axis, which has no chart of its own
        run.define_metric("*", step_metric="step")  # plots every metric over the step
        return run
    return None


def _start_own(
    config: ResolvedConfig, run_dir: RunDir, mode: str, log: Callable[[str], None]
) -> Any:
    run = None
    if mode == "online":
        with tolerate_errors("starting W&B online", log):
            run = _initialize(config, run_dir, "online")
    if run is None:
        run = _initialize(config, run_dir, "offline")
        records = f"{shlex.quote(str(run_dir.wandb))}/offline-run-*"
        reason = "" if _has_api_key() else " without an API key"
        log(f"W&B      recorded offline{reason}; upload it with: wandb sync {records}")
    if wandb.run is not None:
        log(f"W&B      a record of its own; your run {wandb.run.id} stays open as it is")
    with atomic_write(run_dir.wandb_id_file) as part:
        part.write_text(run.id)
    return run


def _initialize(config: ResolvedConfig, run_dir: RunDir, mode: str) -> Any:
    """Start a W&B run. A resumed one keeps its name, and the id that its folder contains."""
    own = singleton().settings
    id, name = None, own.run_name or run_dir.path.name[:MAX_RUN_NAME]
    if run_dir.wandb_id_file.exists():
        id, name = run_dir.wandb_id_file.read_text(), own.run_name
    elif wandb.run is not None:
        id = secrets.token_hex(4)  # WANDB_RUN_ID may be that of the open run
    # An upload of the model may take longer, and may be interrupted
    timeout = own.finish_timeout or (0 if config.wandb.log_model else FINISH_TIMEOUT)
    hooks = sys.exit, sys.excepthook
    run = wandb.init(
        project=config.wandb.project or own.project or DEFAULT_PROJECT,
        name=config.wandb.name or name,
        group=config.wandb.group,
        tags=_list_tags(config.wandb),
        notes=config.wandb.notes,
        config=asdict(config),
        dir=str(run_dir.path),
        mode=mode,
        id=id,
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off", finish_timeout=timeout),
    )
    sys.exit, sys.excepthook = hooks  # `finish` gets the exit code, and a sweep has many runs
    return run
