"""Token files on disk: prepared once, kept under a fingerprint of what they were made from."""

import codecs
import hashlib
import json
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock

from config import DataConfig, TokenizerConfig, UserError
from data.cache import cache_root, locked
from data.corpus import Corpus, cut_up, is_jsonl, is_utf8, open_corpus
from data.tokenizer import (
    Tokenizer,
    UnknownCharacter,
    build_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from files import ordinary, sync

WAITING = "waiting for another process that prepares this text"
TEXT_FORMAT = 2  # of how text becomes tokens, a part of its fingerprint
FORMAT = 3  # of the files in the cache
ONE_IN = 10  # one document of so many validates, or the last tenth of the characters
MANY = 100  # from so many documents on, whole ones validate
SAMPLE = 50_000_000  # characters that a vocabulary is learned from, about
UNBROKEN = 8_000_000  # bytes of text without spaces, of which learning takes 65 times the memory
COUNTS = ("documents", "characters", "bytes", "crlf")  # of a text, saved in meta.json
BLOCK = 1 << 23  # bytes that are hashed together
CHECKED = 32  # blocks of a larger file that are looked at when it is opened, in less than a second
Progress = Callable[[str, int, int | None], None]  # takes a stage, its bytes so far and in all
Part = tuple[bool, str, bool]  # is it for training, its text, does it begin a document


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids.

    `train` and `val` are memory-mapped (tokens,) arrays of the smallest dtype that fits.
    """

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    name: str
    documents: int
    val_documents: int | None  # None: the text is split by position
    characters: int
    bytes: int
    crlf: int  # line ends of carriage return and line feed
    unseen: tuple[int, ...]  # tokens of the validation split that the training split has not
    unseen_share: float  # of the validation split, that are those

    def summary(self) -> list[str]:
        """What was read and what it became, in lines of at most 80 columns."""
        tokens = len(self.train) + len(self.val)
        plural = "" if self.documents == 1 else "s"
        split = (f"{self.val_documents:,} of them, one in ten,"
                 if self.val_documents is not None else "the last tenth of the characters")
        lines = [f"text     {self.name}",
                 f"         {self.documents:,} document{plural}, {self.characters:,} characters",
                 f"         {split} for validation",
                 f"tokens   {len(self.train):,} for training, {len(self.val):,} for validation",
                 f"         vocabulary {self.tokenizer.vocab_size:,}, "
                 f"{self.bytes / tokens:.2f} bytes per token"]
        if self.crlf:
            lines.append(f"         {self.crlf:,} line ends are CR LF, and are kept as they are")
        if self.unseen:
            some = [repr(self.tokenizer.decode([id])) for id in self.unseen[:3]]
            some += ["…"] if len(self.unseen) > 3 else []
            lines.append(f"         {self.unseen_share:.2%} of the validation text is tokens "
                         f"that training never sees: {' '.join(some)}")
        return lines


def prepare(data: DataConfig, config: TokenizerConfig, say=print,
            tokenizer: Tokenizer | None = None, progress: Progress | None = None,
            whole: bool = False) -> Tokens:
    """The tokens of the configured text, from the cache or made now; `say` takes lines to print.

    A `tokenizer` from elsewhere is used in place of the one that `config` makes of this text.
    Files of the cache are checked against their hashes: large ones in places drawn by chance, or
    `whole`.

    Raises:
        UserError: the text or the vocabulary cannot be had, or the tokens not written; the text
            is empty, or changes meanwhile.
    """
    corpus = open_corpus(data, say)
    hashes = corpus.hashes()
    key = fingerprint = corpus_fingerprint(corpus, config, hashes)
    if tokenizer is not None:
        made_from = fingerprint + json.dumps(tokenizer.to_json())
        key = hashlib.sha256(made_from.encode()).hexdigest()
    root = cache_root()
    folder = root / key[:16]
    try:
        with locked(root / f"{folder.name}.lock", say, WAITING):
            try:
                return _open(folder, corpus.name, whole)
            except FileNotFoundError:
                say(f"preparing {corpus.name} (kept in {folder})")
            except ValueError as e:
                say(f"preparing {corpus.name} again: {folder} {e}")
            _clear_stale(root)
            _write(corpus, config, fingerprint, hashes, folder, tokenizer,
                   progress or (lambda stage, done, total: None))
            return _open(folder, corpus.name)
    except BrokenPipeError:  # whoever read our output is gone
        raise
    except OSError as e:
        raise UserError(f"the cache folder {root} cannot be written ({e.strerror or e}): "
                        "make room there, or set GLASSGPT_CACHE to another folder") from None


def _clear_stale(root: Path) -> None:
    """Remove what killed preparations and downloads left: no one holds its lock, or it is old."""
    for part in [*root.glob("*.part"), *root.glob("hf_*/*.part")]:
        name = part.parent.name if part.parent != root else part.name[1:-len(".part")]
        with suppress(OSError):  # Timeout is one
            if part.is_dir() or part.parent != root:
                with FileLock(root / f"{name}.lock", timeout=0):
                    shutil.rmtree(part) if part.is_dir() else part.unlink()
            elif time.time() - part.stat().st_mtime > 3600:
                part.unlink()


def corpus_fingerprint(corpus: Corpus, config: TokenizerConfig,
                       hashes: list[str] | None = None) -> str:
    """Hex digest of what tokens are made from: the text and how it is read, split and encoded."""
    made_from = [TEXT_FORMAT, ONE_IN, MANY, asdict(config)]
    if not is_utf8(corpus.encoding):
        made_from.append(codecs.lookup(corpus.encoding).name)
    if any(map(is_jsonl, corpus.files)):
        made_from.append(corpus.field)
    text = json.dumps(made_from) + "".join(hashes or corpus.hashes())
    return hashlib.sha256(text.encode()).hexdigest()


def _check_unchanged(corpus: Corpus, hashes: list[str]) -> None:
    for path, before, now in zip(corpus.files, hashes, corpus.hashes()):
        if now != before:
            raise UserError(f"{path} changed while it was read: start again")


def split_texts(corpus: Corpus, cut: int | None) -> Iterator[Part]:
    """The parts of the text.

    Characters before `cut` train, the rest validates. Without a cut, whole documents validate: of
    every ten one, drawn by chance, always the same.
    """
    at, document, drawn, rng = 0, -1, -1, np.random.default_rng(0)
    for text, begins in corpus.pieces():
        if cut is None:
            document += begins
            if begins and document % ONE_IN == 0:
                drawn = document + rng.integers(ONE_IN)
            yield document != drawn, text, begins
            continue
        before = text[:max(0, cut - at)]
        if before:
            yield True, before, begins
        if len(before) < len(text):
            yield False, text[len(before):], begins and not before
        at += len(text)


def sample(corpus: Corpus, cut: int | None, characters: int) -> Iterator[str]:
    """What a vocabulary is learned from: the training split, or about SAMPLE characters of it.

    These are pieces drawn at random, always the same. Of text with next to no white space, each
    stretch of which is another, only the first UNBROKEN bytes are taken.
    """
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
        try:
            for part in parts:
                ahead.append((part, pool.submit(tokenizer.encode_array, part[1])))
                if len(ahead) > 2 * cores:
                    yield ahead.popleft()
            yield from ahead
        finally:
            pool.shutdown(cancel_futures=True)


def _locate(corpus: Corpus, character: str) -> str:
    """Where a character first comes in a text, in words."""
    for path in corpus.files:
        document, line = 0, 1
        for text, begins in replace(corpus, files=(path,)).pieces():
            document, line = document + begins, 1 if begins else line
            if (at := text.find(character)) >= 0:
                line += text.count("\n", 0, at)
                where = f"document {document} of {path}" if is_jsonl(path) else path
                return f"in line {line} of {where}"
            line += text.count("\n")
    raise ValueError(f"{character!r} is not in the text")


def utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _count(corpus: Corpus, progress: Progress) -> tuple[dict[str, int], int]:
    """The COUNTS of a text, which is read through, and the characters of its longest document.

    Raises:
        UserError: there is nothing to learn in it.
    """
    counts, size = dict.fromkeys(COUNTS, 0), corpus.size()
    longest, document, distinct = 0, 0, set()
    for text, begins in corpus.pieces():
        document = len(text) + (0 if begins else document)  # characters of this one so far
        longest = max(longest, document)
        counts["documents"] += begins
        counts["characters"] += len(text)
        counts["bytes"] += utf8_length(text)
        counts["crlf"] += text.count("\r\n")
        if len(distinct) < 2:
            distinct.update(text)
        progress("reading", counts["bytes"], size)
    if not distinct:
        raise UserError(f"{corpus.name} holds no text")
    if len(distinct) == 1:
        raise UserError(f"{corpus.name} holds no character but {distinct.pop()!r}, so there is "
                        "nothing to learn: give another text")
    return counts, longest


def _write(corpus: Corpus, config: TokenizerConfig, fingerprint: str, hashes: list[str],
           folder: Path, tokenizer: Tokenizer | None, progress: Progress) -> None:
    """Prepare into a folder beside, and give it its name when all is there and on the disk."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a preparation that was killed
    part.mkdir()
    try:
        counts, longest = _count(corpus, progress)
        characters = counts["characters"]
        # One long document among short ones could leave too little on either side.
        by_document = counts["documents"] >= MANY and longest <= characters / ONE_IN
        cut = None if by_document else characters * (ONE_IN - 1) // ONE_IN
        progress("vocabulary", 0, None)
        if tokenizer is None:
            texts = (text for text, _ in corpus.pieces())
            tokenizer = build_tokenizer(config, texts, sample(corpus, cut, characters))
        written = _write_ids(corpus, tokenizer, cut, counts["bytes"], part, progress)
        _check_unchanged(corpus, hashes)
        save_tokenizer(tokenizer, part / "tokenizer.json")
        files = {path.name: _file_record(path) for path in sorted(part.iterdir())}
        meta = {"format": FORMAT, "fingerprint": fingerprint, **written, **counts, "files": files}
        (part / "meta.json").write_text(json.dumps(meta | {"sha256": _digest_of(meta)}, indent=1))
        for path in (*part.iterdir(), part):
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # one that was damaged
        part.rename(folder)
        sync(folder.parent)
    except UserError as e:
        _check_unchanged(corpus, hashes)  # any error may come of a change
        if isinstance(e, UnknownCharacter):
            raise UnknownCharacter(e.character, _locate(corpus, e.character), e.known) from None
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)  # of a preparation that failed


def _write_ids(corpus: Corpus, tokenizer: Tokenizer, cut: int | None, size: int, part: Path,
               progress: Progress) -> dict:
    """Write train.bin and val.bin; return their figures for meta.json."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    between = [id for id in (tokenizer.end_of_text, tokenizer.begin_of_text) if id is not None]
    done = val_documents = 0
    with (part / "train.bin").open("wb") as train, (part / "val.bin").open("wb") as val:
        seen = {file: np.zeros(tokenizer.vocab_size, np.int64) for file in (train, val)}
        parts = split_texts(corpus, cut)
        for (is_train, text, begins), encoded in encode_parts(tokenizer, parts):
            ids, file = encoded.result(), train if is_train else val
            if begins and file.tell():
                ids = np.concatenate((np.array(between, dtype=ids.dtype), ids))
            file.write(ids.astype(dtype).tobytes())
            seen[file] += np.bincount(ids, minlength=tokenizer.vocab_size)
            val_documents += begins and not is_train
            done += utf8_length(text)
            progress("tokens", done, size)
    train, val = seen[train], seen[val]  # how often each token is there
    unseen = np.flatnonzero((train == 0) & (val > 0))
    return {"dtype": dtype.name, "train_tokens": int(train.sum()), "val_tokens": int(val.sum()),
            "val_documents": val_documents if cut is None else None, "unseen": unseen.tolist(),
            "unseen_share": float(val[unseen].sum() / max(1, val.sum()))}


def _file_record(path: Path) -> dict:
    """Size and hashes of a file, each of a block."""
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(BLOCK), b"")
        hashes = [hashlib.sha256(block).hexdigest() for block in blocks]
    return {"bytes": path.stat().st_size, "sha256": hashes}


def _verify(path: Path, recorded: dict, whole: bool) -> None:
    """Raise ValueError where a file is not as it was written.

    Of a large one only some blocks are looked at, unless `whole`.
    """
    hashes, size = recorded["sha256"], ordinary(path).stat().st_size  # to read a pipe never ends
    if size != recorded["bytes"]:
        raise ValueError(f"{path.name} has {size} bytes where {recorded['bytes']} were written")
    blocks = range(len(hashes))
    if not whole and len(hashes) > CHECKED:  # others each time, whatever the seed
        blocks = sorted({0, *random.Random().sample(blocks, CHECKED)})
    with path.open("rb") as file:
        for block in blocks:
            file.seek(block * BLOCK)
            if hashlib.sha256(file.read(BLOCK)).hexdigest() != hashes[block]:
                raise ValueError(f"{path.name} is not as it was written, at or after byte "
                                 f"{block * BLOCK}")


def _digest_of(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, name: str, whole: bool = False) -> Tokens:
    """The tokens prepared in a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: something in it is not as it was written; the message follows the folder's name.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        meta = json.loads(ordinary(folder / "meta.json").read_text())
        digest = meta.pop("sha256", None)
        if meta["format"] != FORMAT:
            raise ValueError(f"it is of format {meta['format']}, "
                             f"and this GlassGPT keeps format {FORMAT}")
        if digest != _digest_of(meta):
            raise ValueError("meta.json is not as it was written")
        for file in ("train.bin", "val.bin", "tokenizer.json"):
            _verify(folder / file, meta["files"][file], whole)
        train, val = (np.memmap(path, dtype=meta["dtype"], mode="r") if path.stat().st_size
                      else np.empty(0, meta["dtype"])  # numpy maps no empty file
                      for path in (folder / "train.bin", folder / "val.bin"))
        figures = {key: meta[key] for key in (*COUNTS, "fingerprint", "val_documents",
                                              "unseen_share")}
        return Tokens(train, val, load_tokenizer(folder / "tokenizer.json"), name=name,
                      unseen=tuple(meta["unseen"]), **figures)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        why = e if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(f"is damaged, or of another version ({why})") from e
