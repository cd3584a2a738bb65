"""The settings of explore.py. Does not import torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from cli.load_config import LoadConfig
from common.settings import setting
from config import Hardware


@dataclass
class ExploreConfig(Hardware, LoadConfig):
    """Settings of `explore.py`."""

    prompt: str | None = setting(
        None, "text that the page shows first; null: an example", literal=True
    )
    port: int = setting(
        0, "port of the page's address, 1024 or higher; 0: any free one", ge=0, le=65535
    )
    browser: bool = setting(True, "open the page in a browser if this machine has a display")


def translate_model(argv: Sequence[str]) -> list[str]:
    """Translate a model in the first place, without a setting's name, to init_from=MODEL."""
    for model in argv[:1]:
        key, equals, _ = model.partition("=")
        is_named = key in ExploreConfig.__dataclass_fields__ or model.startswith("-")
        if model and not is_named and (not equals or os.path.exists(model)):
            return [f"init_from={model}", *argv[1:]]
    return [*argv]
