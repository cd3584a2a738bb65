"""Token files on disk: prepared once, kept under a fingerprint of all they were made from, memory-mapped."""

import codecs
import hashlib
import json
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from files import sha256_of, sync

WAITING = "waiting for another process that prepares this text"
TEXT_FORMAT = 2  # of how text becomes tokens, a part of its fingerprint
FORMAT = 3  # of what is kept
ONE_IN = 10  # of so many documents one validates, or of the characters the last tenth
MANY = 100  # documents, from which on they are split as wholes
Progress = Callable[[str, int, int | None], None]  # takes what is being done, how many bytes are, and of how many
SAMPLE = 50_000_000  # characters that a vocabulary is learned from, about
UNBROKEN = 8_000_000  # bytes of text without spaces among them: learning takes 65 times their memory
BLOCK = 1 << 23  # bytes that are hashed together
CHECKED = 32  # blocks of a larger file that are looked at when it is opened: as many as take less than a second


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids: `train` and `val` are memory-mapped (tokens,) arrays of the smallest fitting dtype."""

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
        split = "the last tenth of the characters" if self.val_documents is None else f"{self.val_documents:,} of them, one drawn from every ten,"
        lines = [f"text     {self.name}",
                 f"         {self.documents:,} document{'s' * (self.documents > 1)}, {self.characters:,} characters",
                 f"         {split} to validate",
                 f"tokens   {len(self.train):,} to train on and {len(self.val):,} to validate",
                 f"         vocabulary {self.tokenizer.vocab_size:,}, {self.bytes / tokens:.2f} bytes per token"]
        if self.crlf:
            lines.append(f"         {self.crlf:,} line ends are CR LF, and are kept as they are")
        if self.unseen:
            some = " ".join(repr(self.tokenizer.decode([id])) for id in self.unseen[:3]) + " …" * (len(self.unseen) > 3)
            lines.append(f"         {self.unseen_share:.2%} of the validation text is tokens that training never sees: {some}")
        return lines


def prepare(data: DataConfig, tokenizer: TokenizerConfig, say=print, kept: Tokenizer | None = None,
            progress: Progress | None = None, whole: bool = False) -> Tokens:
    """The tokens of the configured text, from the cache or made now; `say` takes lines for the user.

    A tokenizer `kept` from elsewhere is used in place of the one that the settings would make of this text.
    Files of the cache are checked against their hashes: large ones in places drawn by chance, or `whole`.

    Raises:
        UserError: the text or the vocabulary cannot be had, or kept; the text is empty, or changes meanwhile.
    """
    corpus = open_corpus(data, say)
    before = _stamps(corpus)
    fingerprint = corpus_fingerprint(corpus, tokenizer)
    root = cache_root()
    key = fingerprint if kept is None else hashlib.sha256((fingerprint + json.dumps(kept.to_json())).encode()).hexdigest()
    folder = root / key[:16]
    try:
        with locked(root / f"{key[:16]}.lock", say, WAITING):
            try:
                return _open(folder, corpus.name, whole)
            except FileNotFoundError:
                say(f"preparing {corpus.name} (kept in {folder})")
            except ValueError as e:
                say(f"preparing {corpus.name} again: {folder} {e}")
            _clear_stale(root)
            _write(corpus, tokenizer, fingerprint, before, folder, kept, progress or (lambda stage, done, total: None))
            return _open(folder, corpus.name)
    except BrokenPipeError:  # whoever read what is said
        raise
    except OSError as e:
        raise UserError(f"the cache folder {root} cannot be written ({e.strerror or e}): "
                        "make room there, or set GLASSGPT_CACHE to another folder") from None


def _clear_stale(root: Path) -> None:
    """Remove what preparations and downloads left that were killed: nobody holds their lock, or works so long."""
    for part in [*root.glob("*.part"), *root.glob("hf_*/*.part")]:
        name = part.parent.name if part.parent != root else part.name[1:-len(".part")]
        with suppress(OSError):  # Timeout is one
            if part.is_dir() or part.parent != root:
                with FileLock(root / f"{name}.lock", timeout=0):
                    shutil.rmtree(part) if part.is_dir() else part.unlink()
            elif time.time() - part.stat().st_mtime > 3600:
                part.unlink()


def corpus_fingerprint(corpus: Corpus, tokenizer: TokenizerConfig) -> str:
    """Hex digest of the text's bytes, their encoding, the split and the tokenizer's settings: of all that tokens are made from."""
    read_as = [] if is_utf8(corpus.encoding) else [codecs.lookup(corpus.encoding).name]
    read_as += [corpus.field] if any(map(is_jsonl, corpus.files)) else []
    made_from = hashlib.sha256(json.dumps([TEXT_FORMAT, ONE_IN, MANY, asdict(tokenizer), *read_as]).encode())
    for path in corpus.files:
        try:
            made_from.update(sha256_of(path).encode())
        except OSError as e:
            raise UserError(f"{path} cannot be read: {e.strerror}") from None
    return made_from.hexdigest()


def _stamps(corpus: Corpus) -> dict[Path, tuple[int, ...]]:
    """What differs in a file that was written meanwhile: its number, size and times."""
    try:
        found = {path: path.stat() for path in corpus.files}
    except OSError as e:
        raise UserError(f"{e.filename} cannot be read: {e.strerror}") from None
    return {path: (at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for path, at in found.items()}


def _check_unchanged(corpus: Corpus, before: dict[Path, tuple[int, ...]]) -> None:
    now = _stamps(corpus)
    if changed := [path for path in corpus.files if now[path] != before[path]]:
        raise UserError(f"{changed[0]} changed while it was read: start again")


def split_texts(corpus: Corpus, cut: int | None) -> Iterator[tuple[bool, str, bool]]:
    """Yield (is training, text, begins a document) pieces: characters before `cut` train, the rest validates.

    Without a cut, whole documents validate: of every ten one, drawn by chance, always the same.
    """
    at, document, drawn, random = 0, -1, -1, np.random.default_rng(0)
    for text, begins in corpus.pieces():
        if cut is None:
            document += begins
            if begins and document % ONE_IN == 0:
                drawn = document + random.integers(ONE_IN)
            yield document != drawn, text, begins
            continue
        before = text[:max(0, cut - at)]
        if before:
            yield True, before, begins
        if len(before) < len(text):
            yield False, text[len(before):], begins and not before
        at += len(text)


def sample(corpus: Corpus, cut: int | None, characters: int) -> Iterator[str]:
    """The training split, or where it is large a random choice of its pieces, always the same, of about SAMPLE characters.

    Of text with next to no white space, each stretch of which is another, only the first UNBROKEN bytes.
    """
    choice, share = np.random.default_rng(0), SAMPLE / (characters * (ONE_IN - 1) / ONE_IN)
    unbroken = 0
    for training, text, _ in split_texts(corpus, cut):
        if not training or (share < 1 and choice.random() >= share):
            continue
        if len(text) > 64 * (1 + text.count(" ") + text.count("\n")):
            unbroken += utf8_length(text)
            if unbroken > UNBROKEN:
                continue
        yield from (part for part, _ in cut_up(text, 1 << 16))  # the library takes 256 at a time


def encoded(tokenizer: Tokenizer, parts: Iterator[tuple[bool, str, bool]]) -> Iterator[tuple[bool, np.ndarray, bool, int]]:
    """The parts in their order with their ids in place of their text, and its bytes: encoded on all cores, a few ahead."""
    cores, ahead = os.cpu_count() or 1, deque()
    with ThreadPoolExecutor(cores) as pool:  # the encoders let go of Python's lock
        try:
            for is_train, text, begins in parts:
                ahead.append((is_train, pool.submit(tokenizer.encode_array, text), begins, utf8_length(text)))
                if len(ahead) > 2 * cores:
                    is_train, ids, begins, length = ahead.popleft()
                    yield is_train, ids.result(), begins, length
            for is_train, ids, begins, length in ahead:
                yield is_train, ids.result(), begins, length
        finally:
            pool.shutdown(cancel_futures=True)


def _place(corpus: Corpus, character: str) -> str:
    """Where a character first comes in a text, as words for a message."""
    for path in corpus.files:
        document, line = 0, 1
        for text, begins in replace(corpus, files=(path,)).pieces():
            document, line = document + begins, 1 if begins else line
            if (at := text.find(character)) >= 0:
                line += text.count("\n", 0, at)
                return f"in line {line} of {f'document {document} of ' if is_jsonl(path) else ''}{path}"
            line += text.count("\n")
    raise ValueError(f"{character!r} is not in the text")


def utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


@dataclass
class _Count:
    """What is counted as a text is read first."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0
    crlf: int = 0
    longest: int = 0  # document, in characters
    alike: bool = True  # all its characters are one


def _count(corpus: Corpus, progress: Progress) -> _Count:
    """Read a text through.

    Raises:
        UserError: there is nothing to learn in it.
    """
    count, total, document, first = _Count(), corpus.size(), 0, ""
    for text, begins in corpus.pieces():
        first = first or text[:1]
        document = len(text) + (0 if begins else document)  # characters of this one so far
        count.documents += begins
        count.characters += len(text)
        count.bytes += utf8_length(text)
        count.crlf += text.count("\r\n")
        count.longest = max(count.longest, document)
        count.alike = count.alike and (not text or text.count(first) == len(text))
        progress("reading", count.bytes, total)
    if not count.characters:
        raise UserError(f"{corpus.name} holds no text")
    if count.alike:
        raise UserError(f"{corpus.name} holds no character but {first!r}, so there is nothing to learn: give another text")
    return count


def _write(corpus: Corpus, config: TokenizerConfig, fingerprint: str, before: dict, folder: Path, kept: Tokenizer | None,
           progress: Progress) -> None:
    """Prepare into a folder beside, and give it its name when all is there and on the disk."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a preparation that was killed
    part.mkdir()
    try:
        count = _count(corpus, progress)
        # One long document among short ones could leave too little on either side.
        by_document = count.documents >= MANY and count.longest <= count.characters / ONE_IN
        cut = None if by_document else count.characters * (ONE_IN - 1) // ONE_IN
        progress("vocabulary", 0, None)
        tokenizer = kept or build_tokenizer(config, (text for text, _ in corpus.pieces()), sample(corpus, cut, count.characters))
        written = _write_ids(corpus, tokenizer, cut, count.bytes, part, progress)
        if corpus_fingerprint(corpus, config) != fingerprint:
            raise UserError(f"{corpus.name} changed while it was read: start again")
        _check_unchanged(corpus, before)
        save_tokenizer(tokenizer, part / "tokenizer.json")
        counted = {name: value for name, value in asdict(count).items() if name not in ("longest", "alike")}
        files = {path.name: _recorded(path) for path in sorted(part.iterdir())}
        meta = {"format": FORMAT, "fingerprint": fingerprint, **written, **counted, "files": files}
        (part / "meta.json").write_text(json.dumps(meta | {"sha256": _digest_of(meta)}, indent=1))
        for path in (*part.iterdir(), part):
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # one that was damaged
        part.rename(folder)
        sync(folder.parent)
    except BaseException as e:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(e, UserError):
            _check_unchanged(corpus, before)  # of which anything may come
        if isinstance(e, UnknownCharacter):
            raise UnknownCharacter(e.character, _place(corpus, e.character), e.known) from None
        raise


def _write_ids(corpus: Corpus, tokenizer: Tokenizer, cut: int | None, size: int, part: Path, progress: Progress) -> dict:
    """Write train.bin and val.bin, and give what is to be known of them."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    between = [id for id in (tokenizer.end_of_text, tokenizer.begin_of_text) if id is not None]
    done = val_documents = 0
    with (part / "train.bin").open("wb") as train, (part / "val.bin").open("wb") as val:
        count = {file: np.zeros(tokenizer.vocab_size, np.int64) for file in (train, val)}  # of each token
        for is_train, ids, begins, length in encoded(tokenizer, split_texts(corpus, cut)):
            done, file = done + length, train if is_train else val
            if begins and file.tell():
                ids = np.concatenate((np.array(between, dtype=ids.dtype), ids))
            file.write(ids.astype(dtype).tobytes())
            count[file] += np.bincount(ids, minlength=tokenizer.vocab_size)
            val_documents += begins and not is_train
            progress("tokens", done, size)
    unseen = (count[train] == 0) & (count[val] > 0)
    return {"dtype": dtype.name, "train_tokens": int(count[train].sum()), "val_tokens": int(count[val].sum()),
            "val_documents": val_documents if cut is None else None, "unseen": np.flatnonzero(unseen).tolist(),
            "unseen_share": float(count[val][unseen].sum() / max(1, count[val].sum()))}


def _recorded(path: Path) -> dict:
    """Size and hashes of a file, each of a block."""
    with path.open("rb") as file:
        hashes = [hashlib.sha256(block).hexdigest() for block in iter(lambda: file.read(BLOCK), b"")]
    return {"bytes": path.stat().st_size, "sha256": hashes}


def _verify(path: Path, recorded: dict, whole: bool) -> None:
    """Raise ValueError where a file is not as it was written; of a large one only some blocks are looked at, unless `whole`."""
    hashes, size = recorded["sha256"], path.stat().st_size
    if size != recorded["bytes"]:
        raise ValueError(f"{path.name} has {size} bytes where {recorded['bytes']} were written")
    blocks = range(len(hashes))
    if not whole and len(hashes) > CHECKED:
        blocks = sorted({0, *random.Random().sample(blocks, CHECKED)})  # others each time, whatever the seed
    with path.open("rb") as file:
        for block in blocks:
            file.seek(block * BLOCK)
            if hashlib.sha256(file.read(BLOCK)).hexdigest() != hashes[block]:
                raise ValueError(f"{path.name} is not as it was written, at or after byte {block * BLOCK}")


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
        if odd := [path.name for path in folder.iterdir() if not path.is_file()]:  # to read a pipe would never end
            raise ValueError(f"{odd[0]} is no file")
        meta = json.loads((folder / "meta.json").read_text())
        digest = meta.pop("sha256", None)
        if meta["format"] != FORMAT:
            raise ValueError(f"it is of format {meta['format']}, and this GlassGPT keeps format {FORMAT}")
        if digest != _digest_of(meta):
            raise ValueError("meta.json is not as it was written")
        for file in ("train.bin", "val.bin", "tokenizer.json"):
            _verify(folder / file, meta["files"][file], whole)
        dtype, arrays = np.dtype(meta["dtype"]), {}
        for split in ("train", "val"):
            count = meta[f"{split}_tokens"]
            if count * dtype.itemsize != meta["files"][f"{split}.bin"]["bytes"]:
                raise ValueError(f"{split}.bin has another size than {count} tokens have")
            arrays[split] = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r") if count else np.empty(0, dtype)
        return Tokens(arrays["train"], arrays["val"], load_tokenizer(folder / "tokenizer.json"), meta["fingerprint"], name,
                      meta["documents"], meta["val_documents"], meta["characters"], meta["bytes"], meta["crlf"],
                      tuple(meta["unseen"]), meta["unseen_share"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        why = e if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(f"is damaged, or of another version ({why})") from e
