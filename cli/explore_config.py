"""The settings of explore.py. Does not import torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from common.checkpoints import check_checkpoint
from common.errors import UserError
from common.settings import check_settings, setting

MIN_PORT = 1024  # lower ones are for system services, and browsers leave 80 out of an address


@dataclass
class ExploreConfig:
    """Settings of `explore.py`."""

    run_dir: str | None = setting(None, "folder of the run; null: the newest run in runs/")
    init_from: str | None = setting(
        None,
        "instead of a run: a Hugging Face folder or model name, a .gguf file or nanoGPT's "
        "ckpt.pt; the setting's name may be left out",
    )
    checkpoint: str = setting(
        "last",
        "checkpoint to load: last, best, or a step number; with last, newer checkpoints are "
        "shown while the run trains",
    )
    prompt: str | None = setting(
        None, "text that the page shows first; null: an example", literal=True
    )
    port: int = setting(
        0, "port of the page's address, from 1024 on; 0: any free one", ge=0, le=65535
    )
    browser: bool = setting(True, "open the page in a browser if this machine has a display")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting(
        "auto",
        "floating-point format of the weights; auto: fp32; bf16 and fp16 take half the memory and "
        "round",
        choices=("auto", "fp32", "bf16", "fp16"),
    )

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        check_settings(self)
        if self.run_dir is not None and self.init_from is not None:
            raise UserError("run_dir= and init_from= exclude each other: leave one out")
        if 0 < self.port < MIN_PORT:
            raise UserError(f"port={self.port} must be at least {MIN_PORT}, or 0 for any free port")
        check_checkpoint(self.checkpoint)


def translate_model(argv: Sequence[str]) -> list[str]:
    """Translate a model that is given without a setting's name to init_from=MODEL.

    Raises:
        UserError: If there are several.
    """
    names = {field.name for field in fields(ExploreConfig)}
    arguments, models = [], []
    for argument in argv:
        key, equals, _ = argument.partition("=")
        is_model = key not in names and (not equals or os.path.exists(argument))
        if is_model and argument and not argument.startswith("-"):
            models.append(argument)
        else:
            arguments.append(argument)
    if len(models) > 1:
        raise UserError(
            f"{' '.join(models)} are several models: give only one, and quote a path "
            "that contains spaces"
        )
    return [*(f"init_from={model}" for model in models), *arguments]
