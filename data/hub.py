"""A dataset of the Hugging Face hub, or a folder of its files, streamed once into .jsonl.gz files that are read like any others."""

import gzip
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from config import DataConfig, UserError
from files import atomic_write

DOCUMENTS = 10_000  # in a file; what came is kept file by file, and an interrupted download goes on after the last


def hub_files(config: DataConfig, root: Path, say: Callable[[str], None]) -> tuple[Path, ...]:
    """The documents of config.name, a {"text": …} to a line, in files that are kept below `root`.

    Raises:
        UserError: there is no such dataset, subset, split or field, it cannot be fetched, or `datasets` is not installed.
    """
    folder = root / f"hf_{identity(config)[:16]}"
    with FileLock(folder.with_suffix(".lock")):
        complete = folder / "complete"
        if not complete.exists():
            fetch(config, folder, say)
            complete.touch()
    return tuple(sorted(folder.glob("*.jsonl.gz")))


def identity(config: DataConfig) -> str:
    """Hex digest of what is asked for; of a folder, also of the sizes and times of its files."""
    local = Path(config.name).expanduser()
    files = [(p.as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(local.rglob("*")) if p.is_file()] if local.is_dir() else []
    return hashlib.sha256(json.dumps([config.name, config.subset, config.split, config.field, files]).encode()).hexdigest()


def fetch(config: DataConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Stream the documents that the folder does not have yet into it."""
    try:
        from datasets import load_dataset
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError("data=hf needs the library datasets, which is not installed: pip install datasets") from None

    logging.set_verbosity_error()  # it tries again by itself, and says so each time
    local = Path(config.name).expanduser()
    have = len(list(folder.glob("*.jsonl.gz")))
    say(f"fetching {config.name} (kept in {folder})" + (f": going on after {have * DOCUMENTS:,} documents" if have else ""))
    try:
        rows = load_dataset(str(local) if local.is_dir() else config.name, config.subset, split=config.split, streaming=True)
        rows = iter(rows.skip(have * DOCUMENTS) if have else rows)
        folder.mkdir(exist_ok=True)
        for number in itertools.count(have):
            some = list(itertools.islice(rows, DOCUMENTS))
            if not some:
                break
            # Without a time or a name in it the file has the same bytes whenever it is made.
            with atomic_write(folder / f"{number:06}.jsonl.gz") as part, part.open("wb") as raw, gzip.GzipFile("", "wb", 5, raw, 0) as file:
                file.writelines(line(row, config.field) for row in some)
            if (number + 1) % 10 == 0:
                say(f"fetched {(number + 1) * DOCUMENTS:,} documents")
    except UserError:
        raise
    except Exception as e:  # the library and those below it raise errors of many kinds
        why = " ".join(str(e).split()) or type(e).__name__
        by_hand = "" if local.is_dir() else "; without a network, fetch its files elsewhere and give their folder as data.name=FOLDER"
        raise UserError(f"data.name={config.name} cannot be read: {why if len(why) < 300 else why[:300] + '…'}{by_hand}") from None
    if number == 0:
        raise UserError(f"data.name={config.name} has no documents in data.split={config.split}")


def line(row: dict, field: str) -> bytes:
    """A document as it is kept."""
    if not isinstance(row.get(field), str):
        texts = ", ".join(key for key, value in row.items() if isinstance(value, str))
        raise UserError(f"the dataset has no text in data.field={field} (fields with text: {texts or 'none'})")
    return json.dumps({"text": row[field]}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
