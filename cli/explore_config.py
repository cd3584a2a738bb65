"""The settings of explore.py. Does not import torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from common.errors import UserError
from common.settings import setting
from config import Hardware, LoadConfig

MIN_PORT = 1024  # lower ones are for system services, and browsers leave 80 out of an address


@dataclass
class ExploreConfig(Hardware, LoadConfig):
    """Settings of `explore.py`."""

    checkpoint: str = setting(
        "best",
        "checkpoint to load: best, last, or a step number; reloading the page loads the one that "
        "is then the best or the last",
    )
    prompt: str | None = setting(
        None, "text that the page shows first; null: an example", literal=True
    )
    port: int = setting(
        0, "port of the page's address, from 1024 on; 0: any free one", ge=0, le=65535
    )
    browser: bool = setting(True, "open the page in a browser if this machine has a display")

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        super().check()
        if 0 < self.port < MIN_PORT:
            raise UserError(f"port={self.port} must be at least {MIN_PORT}, or 0 for any free port")


def translate_model(argv: Sequence[str]) -> list[str]:
    """Translate a model that is given without a setting's name to init_from=MODEL."""
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
