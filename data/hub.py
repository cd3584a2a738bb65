"""A dataset of the Hugging Face hub, or a folder of its files, kept as .jsonl.gz files."""

import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from config import DataConfig, UserError
from data.cache import locked
from files import atomic_write

DOCUMENTS = 10_000  # in a file; an interrupted download goes on after the last whole file


def hub_files(config: DataConfig, root: Path, say: Callable[[str], None]) -> tuple[Path, ...]:
    """The documents of config.name, a {"text": …} to a line, in files that are kept below `root`.

    Raises:
        UserError: there is no such dataset, subset, split or field, it cannot be fetched, or
            the library `datasets` is not installed.
    """
    folder = root / f"hf_{identity(config)[:16]}"
    waiting = f"waiting for another process to fetch {config.name}"
    with locked(folder.with_suffix(".lock"), say, waiting):
        if not (folder / "complete").exists():
            fetch(config, folder, say)
            (folder / "complete").touch()
    return tuple(sorted(folder.glob("*.jsonl.gz")))


def identity(config: DataConfig) -> str:
    """Hex digest of what is asked for; of a folder, also of the sizes and times of its files."""
    local = Path(config.name).expanduser()
    paths = sorted(local.rglob("*")) if local.is_dir() else []
    files = [(p.as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.is_file()]
    asked = [config.name, config.subset, config.split, config.field, files]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def fetch(config: DataConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Stream the documents that the folder does not have yet into it."""
    local, have = Path(config.name).expanduser(), len(list(folder.glob("*.jsonl.gz")))
    source, origin, by_hand = str(local), "", ""
    if not local.is_dir():
        source, origin = config.name, " from the Hugging Face hub"
        by_hand = ("; without a network, fetch its files elsewhere and give their folder as "
                   "data.name=FOLDER")
    resumed = f": going on after {have * DOCUMENTS:,} documents" if have else ""
    say(f"fetching {config.name}{origin} (kept in {folder}){resumed}")
    try:
        from datasets import load_dataset
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError("data=hf needs the library datasets, which is not installed: "
                        "pip install datasets") from None

    logging.set_verbosity_error()  # it tries again by itself, and says so each time
    try:
        if origin:
            reach_hub()
        rows = load_dataset(source, config.subset, split=config.split, streaming=True)
        rows = iter(rows.skip(have * DOCUMENTS) if have else rows)
        folder.mkdir(exist_ok=True)
        for number in itertools.count(have):
            documents = list(itertools.islice(rows, DOCUMENTS))
            if not documents:
                break
            # Without a time or a name in it the file has the same bytes whenever it is made.
            with (atomic_write(folder / f"{number:06}.jsonl.gz") as part, part.open("wb") as raw,
                  gzip.GzipFile("", "wb", 5, raw, 0) as file):
                file.writelines(line(row, config.field) for row in documents)
            if (number + 1) % 10 == 0:
                say(f"fetched {(number + 1) * DOCUMENTS:,} documents")
    except UserError:
        raise
    except Exception as e:  # the library and those below it raise errors of many kinds
        why = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"data.name={config.name} cannot be read: {why[:300]}{by_hand}") from None
    if number == 0:
        raise UserError(f"data.name={config.name} has no documents in data.split={config.split}")


def reach_hub() -> None:
    """Ask the hub once, since the library tries for half a minute where nothing can answer.

    Raises:
        ConnectionError: its name is not known, or the connection is refused.
    """
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except httpx.ConnectError as e:
        raise ConnectionError(f"no connection to {constants.ENDPOINT} ({e})") from None
    except httpx.HTTPError:
        return  # there is a network, if a slow one: the library has more patience


def line(row: dict, field: str) -> bytes:
    """A document as a line of the file."""
    text = row_text(row, field)
    if text is None:
        raise UserError(f"the dataset has no text in data.field={field} "
                        f"(fields with text: {text_fields(row)})")
    return json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def row_text(row: dict, field: str) -> str | None:
    """The text in a field of a row; None where there is none.

    `a.b` is the field b of the object in a; the texts of a list are joined by blank lines.
    """
    try:
        texts = list(_texts(row, field)) if isinstance(row, dict) else []
    except (TypeError, RecursionError):
        return None
    return "\n\n".join(texts) if texts else None


def _texts(value, field: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _texts(item, field)
    elif isinstance(value, dict) and field:
        name, _, rest = (field, "", "") if field in value else field.partition(".")
        yield from _texts(value.get(name), rest)
    elif isinstance(value, str) and not field:
        yield value
    elif value is not None:
        raise TypeError(value)


def text_fields(row) -> str:
    """The names of the fields of a row that hold texts, as `row_text` takes them."""
    return ", ".join(_text_fields(row)) or "none"


def _text_fields(value, name: str = "") -> list[str]:
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict) and name.count(".") < 4:
        return [field for key in value for field in _text_fields(value[key], f"{name}.{key}")]
    return [name.removeprefix(".")] if isinstance(value, str) and name else []
