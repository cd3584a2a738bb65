"""Models of the Hugging Face hub by name, in the hub's own cache."""

import re
from pathlib import Path

from config import FETCHED, UserError

# What is fetched: weights without pickle, settings, the tokenizer; nothing in folders.
WEIGHTS, SHARDS = "model.safetensors", "model-*-of-*.safetensors"
FILES = [WEIGHTS, SHARDS, "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
         "merges.txt"]


def fetched(init_from: str) -> str:
    """A folder as it is; a name on the hub with its commit, once its files are in the cache.

    Raises:
        UserError: there is neither such a folder nor such a model, or it cannot be fetched.
    """
    name = re.fullmatch(r"(\w[\w.-]*/[\w.-]+?)(@[0-9a-f]{40})?", init_from)
    if Path(init_from).exists():
        return init_from
    if not name:
        raise UserError(f"init_from={init_from} does not exist: give the folder of a run or of "
                        "Hugging Face weights, or a name on their hub")
    from httpx import HTTPError
    from huggingface_hub import errors, snapshot_download  # it takes a while, and is seldom needed

    try:
        folder = snapshot_download(name[1], revision=name[2] and name[2][1:],
                                   allow_patterns=FILES, ignore_patterns=["*/*"])
    except errors.GatedRepoError:
        raise UserError(f"init_from={init_from} asks for consent on its page on the hub, and for "
                        "your token: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"init_from={init_from} is neither a folder here nor a model on the "
                        "Hugging Face hub: check the name") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(f"init_from={init_from} is no folder here, and the Hugging Face hub cannot "
                        "be reached (no network, or HF_HUB_OFFLINE is set)") from None
    except (HTTPError, OSError, ValueError) as e:
        why = str(e).strip().partition("\n")[0][:200]
        raise UserError(f"init_from={init_from} could not be fetched; what came is kept, so try "
                        f"again: {type(e).__name__}: {why}") from None
    return f"{name[1]}@{Path(folder).name}"


def folder_of(init_from: str | Path) -> Path:
    """The folder of a model: itself, or that of the hub's cache for a name that `fetched` gave."""
    name = FETCHED.fullmatch(str(init_from))
    if not name:
        return Path(init_from)
    from huggingface_hub import constants

    cached = f"models--{name[1].replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE, cached, "snapshots", name[2])
