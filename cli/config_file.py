"""Read and write the resolved configuration of a run (config.yaml)."""

import glob
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from common.settings import check_settings
from config import HUB_MODEL, Config

LARGEST = 1 << 20  # bytes of a config.yaml that is read
GONE = ("eval_only", "dry_run")  # of older versions: what a command did, no settings of its run


def read_config(path: Path) -> Config:
    """The configuration in a run's config.yaml, within the bounds of this version's settings."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST):
            raise ValueError(f"it is not an ordinary file of at most {LARGEST:,} bytes")
        text = path.read_text(encoding="utf-8")
        if "&" in text and any(isinstance(token, yaml.AnchorToken) for token in yaml.scan(text)):
            raise ValueError("it has YAML anchors, which no run's has")  # they can fill the memory
        saved = {**yaml.safe_load(text)}
        saved.get("data", {}).pop("encoding", None)  # as GONE
        config = config_from_dict({key: saved[key] for key in saved if key not in GONE})
        check_settings(config)
        config.model.check()
        return config
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        TypeError,
        ValueError,
        RecursionError,
        UserError,
    ) as e:
        reason = f"{e}".partition("\n")[0] or type(e).__name__
        raise UserError(f"{path} does not fit this version of GlassGPT: {reason}") from None


def config_from_dict(saved: dict) -> Config:
    """The configuration whose `asdict` was saved."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), _escaped_tree(saved)))


def absolute_paths(config: Config) -> Config:
    """The configuration with paths that still hold when the run is resumed from elsewhere."""
    data, init_from = config.data, config.init_from
    if data.path is not None:
        path, here = os.path.expanduser(data.path), os.getcwd()
        if glob.has_magic(path) and not os.path.exists(path):
            here = glob.escape(here)
        data = replace(data, path=str(Path(here, path)))
    if data.name is not None and os.path.isdir(folder := os.path.expanduser(data.name)):
        data = replace(data, name=str(Path(folder).absolute()))
    if init_from and not HUB_MODEL.fullmatch(init_from):
        init_from = str(Path(init_from).absolute())
    return replace(config, data=data, init_from=init_from)


def config_yaml(config: Config) -> str:
    """The configuration as `read_config` reads it, from any folder."""
    return yaml.safe_dump(asdict(absolute_paths(config)), sort_keys=False)


def _escaped_tree(node):
    """The same tree with its texts such that OmegaConf sees no interpolation in them."""
    if isinstance(node, dict):
        return {key: _escaped_tree(value) for key, value in node.items()}
    return escape_interpolation(node) if isinstance(node, str) else node


def escape_interpolation(text: str) -> str:
    """A text that OmegaConf, to which `${…}` means something, gives back as it is here."""
    return re.sub(r"(\\*)(\$\{)", lambda m: m[1] * 2 + r"\${", text)
