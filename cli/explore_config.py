"""The settings of explore.py. Does not import torch."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cli.command_line import LoadConfig
from common.paths import GPT2_NAMES
from common.settings import setting
from config import Hardware

MODEL_NAME = r"\S*[/\\]\S+|\S+\.\w+"  # of a model on the hub, or of a file that may be missing


@dataclass
class ExploreConfig(Hardware, LoadConfig):
    """Settings of `explore.py`."""

    steps: str | None = setting(
        None,
        "steps of the model's training that the page shows: all, a number of steps such as 12, or "
        "a list such as 0,512,1000; null: one model",
        only_with={"checkpoint": ("best",)},
    )
    prompt: str | None = setting(
        None, "text that the page shows first; null: an example", literal=True
    )
    port: int = setting(
        0, "port of the page's address, 1024 or higher; 0: any free one", ge=0, le=65535
    )
    browser: bool = setting(True, "open the page in a browser if this machine has a display")


def translate_model(argv: Sequence[str]) -> list[str]:
    """Translate a path, or a name on the hub, in the first place to init_from=MODEL."""
    for model in argv[:1]:
        key, equals, _ = model.partition("=")
        is_named = key in ExploreConfig.__dataclass_fields__ or model.startswith("-")
        is_typed_name = model in GPT2_NAMES or (not equals and re.fullmatch(MODEL_NAME, model))
        if not is_named and (is_typed_name or os.path.exists(model)):
            return [f"init_from={model}", *argv[1:]]
    return [*argv]
