"""The settings of the commands that load a trained model. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import exists
from common.paths import expand_model_name
from common.settings import check_settings, setting
from config import ModelSource


@dataclass
class LoadConfig(ModelSource):
    """Settings of the commands that load a trained model."""

    checkpoint: str = setting("best", "checkpoint of the run: best, last, or a step number")

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        check_settings(self)
        is_step = self.checkpoint.isascii() and self.checkpoint.isdigit()
        if self.checkpoint not in ("best", "last") and not is_step:
            raise UserError(f"checkpoint={self.checkpoint} must be best, last or a step number")
        if self.run_dir is not None and self.init_from is not None:
            raise UserError("run_dir= and init_from= exclude each other: leave one out")
        if self.run_dir is not None and not exists(
            Path(expand_model_name("run_dir", self.run_dir))
        ):
            raise UserError(f"run_dir={self.run_dir} does not exist: name the folder of a run")
