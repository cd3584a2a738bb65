"""Token files on disk: prepared once, kept under a fingerprint of what they were made from."""

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from common.errors import UserError
from common.files import ordinary_file, read_json_object, sha256_of_file, sync
from config import Config, DataConfig, TokenizerConfig
from data.cache import cache_root, making
from data.corpus import Corpus, cut_up, is_jsonl, open_corpus
from data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, save_tokenizer

TEXT_FORMAT = 2  # of how text becomes tokens, a part of its fingerprint
FORMAT = 1  # of the files in the cache
FILES = "train.bin", "val.bin", "tokenizer.json"
ONE_IN = 10  # one document of so many validates, or the last tenth of the characters
MANY = 100  # from so many documents on, whole ones validate
SAMPLE = 50_000_000  # characters that a vocabulary is learned from, about
UNBROKEN = 8_000_000  # bytes of text without spaces, of which learning takes 65 times the memory
CHECKED = 1_000_000_000  # bytes of a file that is checked against its hash at each start, at most
Part = tuple[bool, str, bool]  # is it for training, its text, does it begin a document


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids. `train` and `val` are memory-mapped (tokens,) arrays of the smallest
    dtype that fits."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    name: str
    documents: int
    val_documents: int | None  # None: the text is split by position
    characters: int
    bytes: int
    folder: Path  # where they are kept
    ngrams: np.ndarray | None = None  # what `count_ngrams` gives, for a model that takes it

    def summary(self) -> list[str]:
        """What was read and what it became, in lines of at most 80 columns."""
        tokens = len(self.train) + len(self.val)
        plural = "" if self.documents == 1 else "s"
        split = (
            f"{self.val_documents:,} of them, one in ten,"
            if self.val_documents is not None
            else "the last tenth of the characters"
        )
        return [
            f"text     {self.name}",
            f"         {self.documents:,} document{plural}, {self.characters:,} characters",
            f"         {split} for validation",
            f"tokens   {len(self.train):,} for training, {len(self.val):,} for validation",
            f"         vocabulary {self.tokenizer.vocab_size:,}, "
            f"{self.bytes / tokens:.2f} bytes per token",
        ]


def prepare_text(
    config: Config,
    console: Console,
    log: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
    whole: bool = False,
) -> Tokens:
    """The tokens of a configuration's text, as `prepare` makes them."""
    with console.status("preparing the text …"):
        return prepare(config.data, config.tokenizer, log, tokenizer, whole)


def prepare(
    data: DataConfig,
    config: TokenizerConfig,
    log: Callable[[str], None] = print,
    tokenizer: Tokenizer | None = None,
    whole: bool = False,
) -> Tokens:
    """The tokens of the configured text, from the cache or made now. A `tokenizer` from elsewhere
    is used in place of the one that `config` makes of this text. What is in the cache is checked
    against its hashes: files of up to 1 GB, or the `whole`."""
    corpus = open_corpus(data, log)
    fingerprint = corpus_fingerprint(corpus, config)
    made_from = json.dumps([FORMAT, fingerprint, tokenizer and tokenizer.to_json()])
    folder = cache_root() / hashlib.sha256(made_from.encode()).hexdigest()[:16]
    with making(folder.name, log) as part:
        try:
            return _open(folder, corpus.name, fingerprint, math.inf if whole else CHECKED)
        except (OSError, ValueError, KeyError, TypeError, UserError) as e:
            damage = f", where what is kept is damaged: {e}" if folder.exists() else ""
            log(f"preparing {corpus.name} (kept in {folder}{damage})")
        made = part / "tokens"
        made.mkdir()
        _write(corpus, config, tokenizer, made)
        if corpus_fingerprint(corpus, config) != fingerprint:
            raise UserError(f"{corpus.name} changed while it was read: start again")
        shutil.rmtree(folder, ignore_errors=True)  # one that was damaged
        made.rename(folder)
        sync(folder.parent)
        return _open(folder, corpus.name, fingerprint)


def open_tokens(folder: str, name: str, fingerprint: str) -> Tokens | None:
    """What another process has checked, by the name of its folder in the cache; None where it is
    not in this machine's."""
    with suppress(OSError, ValueError, KeyError, TypeError, UserError):
        return _open(cache_root() / folder, name, fingerprint)
    return None


def corpus_fingerprint(corpus: Corpus, config: TokenizerConfig) -> str:
    """Hex digest of what tokens are made from: the text and how it is read, split and encoded."""
    made_from = [TEXT_FORMAT, ONE_IN, MANY, asdict(config)]
    if any(map(is_jsonl, corpus.files)):
        made_from.append(corpus.field)
    if corpus.lines != "kept":
        made_from.append(corpus.lines)
    try:
        text = json.dumps(made_from) + "".join(map(sha256_of_file, corpus.files))
    except OSError as e:
        raise UserError(f"{e.filename} cannot be read: {e.strerror}") from None
    return hashlib.sha256(text.encode()).hexdigest()


def split_texts(corpus: Corpus, cut: int | None) -> Iterator[Part]:
    """The parts of the text: characters before `cut` train, the rest validates. Without a cut,
    whole documents validate: of every ten one, drawn by chance, always the same."""
    at, document, drawn, rng = 0, -1, -1, np.random.default_rng(0)
    for text, begins in corpus.pieces():
        if cut is None:
            document += begins
            if begins and document % ONE_IN == 0:
                drawn = document + rng.integers(ONE_IN)
            yield document != drawn, text, begins
            continue
        before = text[: max(0, cut - at)]
        if before:
            yield True, before, begins
        if len(before) < len(text):
            yield False, text[len(before) :], begins and not before
        at += len(text)


def sample(corpus: Corpus, cut: int | None, characters: int) -> Iterator[str]:
    """What a vocabulary is learned from: the training split, or about SAMPLE characters of it.
    These are pieces drawn at random, always the same. Of text with next to no white space, each
    stretch of which is another, only the first UNBROKEN bytes are taken."""
    rng, share = np.random.default_rng(0), SAMPLE / (characters * (ONE_IN - 1) / ONE_IN)
    unbroken = 0
    for is_train, text, _ in split_texts(corpus, cut):
        if not is_train or (share < 1 and rng.random() >= share):
            continue
        if len(text) > 64 * (1 + text.count(" ") + text.count("\n")):
            unbroken += utf8_length(text)
            if unbroken > UNBROKEN:
                continue
        yield from (part for part, _ in cut_up(text, 1 << 16))  # the library takes 256 at a time


def encode_parts(tokenizer: Tokenizer, parts: Iterator[Part]) -> Iterator[tuple[Part, Future]]:
    """The parts in their order, each with its ids to wait for: on all cores, a few ahead."""
    cores, ahead = os.cpu_count() or 1, deque()
    with ThreadPoolExecutor(cores) as pool:  # the encoders let go of Python's lock
        for part in parts:
            ahead.append((part, pool.submit(tokenizer.encode_array, part[1])))
            if len(ahead) > 2 * cores:
                yield ahead.popleft()
        yield from ahead


def utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _count(corpus: Corpus) -> tuple[dict[str, int], int]:
    """What is counted in a text, and the characters of its longest document."""
    counts = dict.fromkeys(("documents", "characters", "bytes"), 0)
    longest, document, distinct = 0, 0, set()
    for text, begins in corpus.pieces():
        document = len(text) + (0 if begins else document)  # characters of this one so far
        longest = max(longest, document)
        counts["documents"] += begins
        counts["characters"] += len(text)
        counts["bytes"] += utf8_length(text)
        if len(distinct) < 2:
            distinct.update(text)
    if len(distinct) < 2:
        found = f"no character but {distinct.pop()!r}" if distinct else "no text"
        raise UserError(f"{corpus.name} holds {found}: give another text")
    return counts, longest


def _write(
    corpus: Corpus, config: TokenizerConfig, tokenizer: Tokenizer | None, part: Path
) -> None:
    """Write FILES into a folder, then meta.json, and wait until all is on the disk."""
    counts, longest = _count(corpus)
    characters = counts["characters"]
    # One long document among short ones could leave too little on either side.
    by_document = counts["documents"] >= MANY and longest <= characters / ONE_IN
    cut = None if by_document else characters * (ONE_IN - 1) // ONE_IN
    if tokenizer is None:
        texts = (text for text, _ in corpus.pieces())
        tokenizer = build_tokenizer(config, texts, sample(corpus, cut, characters))
    save_tokenizer(tokenizer, part / "tokenizer.json")
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    between = [id for id in (tokenizer.end_of_text, tokenizer.begin_of_text) if id is not None]
    val_documents = 0
    with (part / "train.bin").open("wb") as train, (part / "val.bin").open("wb") as val:
        parts = split_texts(corpus, cut)
        for (is_train, _, begins), encoded in encode_parts(tokenizer, parts):
            ids, file = encoded.result(), train if is_train else val
            if begins and file.tell():
                ids = np.concatenate((np.array(between, dtype=ids.dtype), ids))
            file.write(ids.astype(dtype).tobytes())
            val_documents += begins and not is_train
    figures = {**counts, "val_documents": val_documents if by_document else None}
    files = {name: [(part / name).stat().st_size, sha256_of_file(part / name)] for name in FILES}
    (part / "meta.json").write_text(json.dumps({"files": files, "figures": figures}, indent=1))
    for path in (*part.iterdir(), part):
        sync(path)


def _open(folder: Path, name: str, fingerprint: str, checked: float = 0) -> Tokens:
    """The tokens in a folder. Raises an OSError, ValueError, KeyError, TypeError or UserError where
    they are not there as they were written, by their hash in files of up to `checked` bytes."""
    meta = read_json_object(folder / "meta.json")
    for file in FILES:
        size, written = meta["files"][file]
        found = ordinary_file(folder / file).stat().st_size
        if found != size or (size <= checked and sha256_of_file(folder / file) != written):
            raise ValueError(f"{file} is not as it was written")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    train, val = (
        np.memmap(path, dtype=dtype, mode="r")
        if path.stat().st_size
        else np.empty(0, dtype)  # numpy maps no empty file
        for path in (folder / "train.bin", folder / "val.bin")
    )
    return Tokens(train, val, tokenizer, fingerprint, name, folder=folder, **meta["figures"])
