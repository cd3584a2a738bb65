"""Read and write the resolved configuration of a run (config.yaml)."""

import glob
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from common.errors import UserError
from common.files import ordinary_file
from common.settings import check_settings, iterate_settings
from common.terminal import error_sentence
from config import Config

MAX_CONFIG_BYTES = 1 << 20
# A model of the Hugging Face hub with its commit: owner/name@commit.
HUB_MODEL = re.compile(r"(\w[\w.-]*/[\w.-]+)@([0-9a-f]{40})")
CONFIG_FORMAT = 1
# Settings that a config.yaml of this format may lack → the value with which a run does what it did
# before. A new setting needs an entry: no file is filled up with defaults, which may change.
ADDED_SETTINGS: dict[str, Any] = {
    "model.parallel_mlp": False,
    "model.rope_share": 1.0,
    **dict.fromkeys(("wandb.name", "wandb.group", "wandb.tags", "wandb.notes")),
    "wandb.log_model": False,
}
# Settings that belong to one command, not to the run that it continues.
PER_COMMAND = (
    "run_dir",
    "resume",
    "prepare_only",
    "eval_only",
    "dry_run",
    "distributed",
    "shard",
)


def read_config(path: Path) -> Config:
    """Read and check the configuration of a run."""
    try:
        config = parse_config(ordinary_file(path, MAX_CONFIG_BYTES).read_text(encoding="utf-8"))
        check_settings(config)
        config.model.check()
        return config
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except Exception as e:  # a damaged file raises errors of many types
        raise UserError(
            f"{path} does not fit this version of GlassGPT: {error_sentence(e)}"
        ) from None


def parse_config(text: str) -> Config:
    """Return the configuration that `config_yaml` has written, which has every setting.

    Raises:
        Exception: Of many classes, if the text is damaged or of a later version.
    """
    # Anchors can expand without bound.
    if "&" in text and any(isinstance(token, yaml.AnchorToken) for token in yaml.scan(text)):
        raise ValueError("it contains YAML anchors, which runs do not write")
    saved = yaml.safe_load(text)
    if not isinstance(saved, dict) or saved.pop("format", None) != CONFIG_FORMAT:
        raise UserError(f"it lacks format: {CONFIG_FORMAT}, so the commit that wrote it reads it")
    for key, _, _ in iterate_settings(Config()):
        section, name = _find_section(saved, key)
        if name not in section and key not in ADDED_SETTINGS:
            raise UserError(f"it lacks {key}: restore the file, or use the version that wrote it")
        section.setdefault(name, ADDED_SETTINGS.get(key))
    schema = OmegaConf.structured(Config)
    return OmegaConf.to_object(OmegaConf.merge(schema, _escape_texts(saved)))


def _find_section(saved: dict, key: str) -> tuple[dict, str]:
    """Return the section of a setting in a file's content, and its name there."""
    section, _, name = key.rpartition(".")
    node = saved.get(section) if section else saved
    if not isinstance(node, dict):
        raise UserError(f"it lacks {key}: restore the file")
    return node, name


def absolute_paths(config: Config) -> Config:
    """Make paths absolute, so that the run can be resumed from another folder."""
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
    tokenizer = config.tokenizer
    if tokenizer.is_file:
        tokenizer = replace(tokenizer, name=str(Path(tokenizer.name).absolute()))
    return replace(config, data=data, init_from=init_from, tokenizer=tokenizer)


def config_yaml(config: Config) -> str:
    """Return the text of config.yaml, which `read_config` reads from any folder."""
    content = {"format": CONFIG_FORMAT, **asdict(absolute_paths(config))}
    return yaml.safe_dump(content, sort_keys=False)


def _escape_texts(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _escape_texts(value) for key, value in node.items()}
    return escape_interpolation(node) if isinstance(node, str) else node


def escape_interpolation(text: str) -> str:
    """Escape `${…}` so that OmegaConf returns the text unchanged."""
    return re.sub(r"(\\*)(\$\{)", lambda match: match[1] * 2 + r"\${", text)
