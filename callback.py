"""Around the runs and sweeps that Hydra starts; configs/config.yaml names the class."""

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

import cli
from cli.job import prepare_to_import_torch, typed_arguments
from common.errors import UserError
from common.terminal import exit_on_error
from config import Config
from run.run_dir import RunDir


class JobCallback(Callback):
    """Checks runs and sweeps before Hydra writes anything, and summarizes sweeps."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a run that cannot work; keep it for `train.main` otherwise."""
        with exit_on_any_error():
            sweep = config.hydra.runtime.choices.get("sweep")
            if sweep and "hydra.mode=RUN" not in typed_arguments:
                raise UserError(
                    f"sweep={sweep} does not say that it is a sweep: add -m, or write hydra: and, "
                    "indented, mode: MULTIRUN into its file"
                )
            job = cli.configure(cli.make_job(config, config.hydra), read_starting_model)
            if job.config.run_dir and not cli.makes_no_run(job.config):
                from run.locking import check_run_dir  # slow to import, and seldom needed

                check_run_dir(job.config, RunDir(Path(job.config.run_dir)))
            cli.checked_runs.append(job)
            prepare_to_import_torch()
            # Before Hydra makes a folder, because that takes seconds
            if "train" in sys.modules:  # of a notebook, in which it may have been edited
                importlib.reload(sys.modules["train"])
            else:
                importlib.import_module("train")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a sweep none of whose jobs can work; print previews of jobs if asked for."""
        from sweeps.sweep import Sweep

        with exit_on_any_error():
            sweep = Sweep(config)
            if config.dry_run:
                prepare_to_import_torch()
                from train import run

                sweep.preview(read_starting_model, run)
            sweep.check(read_starting_model)
            sweep.start()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table of a sweep; exit with status 1 unless all of its jobs are finished."""
        from sweeps.sweep import end_sweep

        with exit_on_any_error():
            end_sweep(Path(config.hydra.sweep.dir), config.hydra.runtime.choices.get("sweep"))


@contextmanager
def exit_on_any_error() -> Iterator[None]:
    """Exit with status 1 after an error, which Hydra would turn into a warning and go on."""
    try:
        with exit_on_error():
            yield
    except Exception:  # a bug
        traceback.print_exc()
        sys.exit(1)


def read_starting_model(name: str) -> Config:
    """Return the shape and the tokenizer of the model that `init_from` names."""
    prepare_to_import_torch()
    from interop import read_starting_model

    return read_starting_model(name)
