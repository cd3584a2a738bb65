"""Models of the Hugging Face hub by name, in the hub's own cache."""

import re
from pathlib import Path

from cli import print_stderr
from common.errors import UserError
from config import HUB_MODEL

# What is fetched: weights without pickle, settings, the tokenizer; nothing in folders.
WEIGHTS, SHARDS = "model.safetensors", "model-*-of-*.safetensors"
FILES = [WEIGHTS, SHARDS, "config.json", "tokenizer.json", "tokenizer_config.json"]


def fetched(init_from: str) -> str:
    """A folder as it is; a name on the hub with its commit, once its files are here."""
    name = re.fullmatch(r"(\w[\w.-]*/[\w.-]+?)(@[0-9a-f]{40})?", init_from)
    first = Path(init_from).parts[:1]
    if Path(init_from).exists():
        return init_from
    if not name or first == ("runs",) or Path(*first).is_dir():
        raise UserError(
            f"init_from={init_from} does not exist: give the folder of a run or of "
            "Hugging Face weights, or a name on their hub"
        )
    print_stderr(f"fetching {init_from} from the hub")
    try:
        folder = snapshot(name[1], name[2] and name[2][1:])
    except Exception as e:  # the library and those below it raise errors of many kinds
        why = str(e).strip().partition("\n")[0][:200]
        raise UserError(
            f"init_from={init_from} is no folder here, and could not be fetched from "
            f"the Hugging Face hub: {type(e).__name__}: {why}"
        ) from None
    return f"{name[1]}@{folder.name}"


def folder_of(init_from: str | Path) -> Path:
    """The folder of a model: itself, or that of the hub's cache for a name that `fetched` gave."""
    name = HUB_MODEL.fullmatch(str(init_from))
    return snapshot(name[1], name[2], local_files_only=True) if name else Path(init_from)


def snapshot(name: str, commit: str | None, **how) -> Path:
    """The folder in the hub's cache of a model at a commit."""
    from huggingface_hub import snapshot_download  # it takes a while, and is seldom needed

    return Path(
        snapshot_download(
            name, revision=commit, allow_patterns=FILES, ignore_patterns=["*/*"], **how
        )
    )
