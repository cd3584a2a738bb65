"""Download tiny Shakespeare, or a Hugging Face dataset, into the cache."""

import hashlib
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from common.files import ordinary_file, sha256_of_file, sync
from common.paths import expand_home
from common.terminal import error_sentence
from data.cache import KEY_LENGTH, open_or_write
from data.sources import find_files

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MAX_SHAKESPEARE_BYTES = 4_000_000  # another page in its place may be endless
TIMEOUT_SECONDS = 20


def download_shakespeare(log: Callable[[str], None]) -> Path:
    """Return tiny Shakespeare's file in the cache, downloaded unless its hash is right."""
    action = f"downloading tiny Shakespeare from {SHAKESPEARE_URL}"
    return open_or_write(
        "tinyshakespeare.txt", _verify_shakespeare, _write_shakespeare, action, log
    )


def _verify_shakespeare(file: Path) -> Path:
    digest = sha256_of_file(file)
    if digest != SHAKESPEARE_SHA256:
        raise ValueError(f"its sha256 is {digest} instead of {SHAKESPEARE_SHA256}")
    return file


def _write_shakespeare(file: Path) -> None:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=TIMEOUT_SECONDS) as response:
            file.write_bytes(response.read(MAX_SHAKESPEARE_BYTES))
        _verify_shakespeare(file)
    except Exception as e:  # networks raise errors of many classes
        raise UserError(
            f"tiny Shakespeare could not be downloaded ({error_sentence(e)}): download "
            f"{SHAKESPEARE_URL} by hand and set data.path=FILE"
        ) from None


def download_dataset(name: str, subset: str | None, split: str, log: Callable[[str], None]) -> Path:
    """Convert a dataset of the hub, or of a local folder, to a .jsonl file in the cache, once."""
    folder = expand_home("data.name", name)
    path = str(folder) if folder.is_dir() else name

    def write(file: Path) -> None:
        try:  # downloads are kept in the library's own cache, where an interrupted one continues
            from datasets import load_dataset

            rows = load_dataset(path, subset, split=split, cache_dir=str(file.parent))
        except ImportError:
            raise UserError(
                "data=hf needs the library datasets, which is not installed: run "
                "pip install datasets"
            ) from None
        except Exception as e:  # the library and those below it raise errors of many classes
            reason = " ".join(str(e.__cause__ or e).split())
            raise UserError(
                f"data.name={name} cannot be read ({reason}): correct data.name, data.subset or "
                "data.split, or without a network set data.name=FOLDER"
            ) from None
        rows.to_json(file, force_ascii=False)
        sync(file)

    key = _hash_dataset(name, subset, split, folder)
    return open_or_write(f"{key}.jsonl", ordinary_file, write, f"downloading {name}", log)


def _hash_dataset(name: str, subset: str | None, split: str, folder: Path) -> str:
    """Return the hash of a dataset; a changed folder is another dataset."""
    stamps = []
    if folder.is_dir():
        for path in sorted(filter(Path.is_file, find_files(folder))):
            state = path.stat()
            stamps.append((path.as_posix(), state.st_size, state.st_mtime_ns))
    identity = json.dumps([name, subset, split, stamps])
    return hashlib.sha256(identity.encode()).hexdigest()[:KEY_LENGTH]
