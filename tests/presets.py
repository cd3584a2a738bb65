"""Model configurations of the presets in configs/model/."""

from pathlib import Path

from omegaconf import OmegaConf

from config import GPTConfig

PRESETS = sorted((Path(__file__).parents[1] / "configs" / "model").glob("*.yaml"))


def model_preset(name, **changes):
    """The configuration of a preset, with those it is based on."""
    folder = PRESETS[0].parent
    settings = dict(OmegaConf.load(folder / f"{name}.yaml"))
    for base in settings.pop("defaults", ()):
        settings = {**OmegaConf.load(folder / f"{base}.yaml"), **settings}
    return GPTConfig(**{**settings, **changes})
