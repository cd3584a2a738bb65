"""Token files on disk: prepared once, kept under a fingerprint of all they were made from, memory-mapped."""

import codecs
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from config import DataConfig, TokenizerConfig, UserError
from data.corpus import Corpus, cache_root, is_jsonl, is_utf8, open_corpus
from data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, save_tokenizer
from files import sha256_of

FORMAT = 2
ONE_IN = 10  # of so many documents one validates, or of the characters the last tenth
MANY = 100  # documents, from which on they are split as wholes
Progress = Callable[[str, int, int | None], None]  # takes what is being done, how many bytes are, and of how many
SAMPLE = 50_000_000  # characters that a vocabulary is learned from, about


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


def prepare(data: DataConfig, tokenizer: TokenizerConfig, say=print, kept: Tokenizer | None = None, progress: Progress | None = None) -> Tokens:
    """The tokens of the configured text, from the cache or made now; `say` takes lines for the user.

    A tokenizer `kept` from elsewhere is used in place of the one that the settings would make of this text.

    Raises:
        UserError: the text or the vocabulary cannot be had, or the text is empty.
    """
    corpus = open_corpus(data, say)
    fingerprint = corpus_fingerprint(corpus, tokenizer)
    root = cache_root()
    key = fingerprint if kept is None else hashlib.sha256((fingerprint + json.dumps(kept.to_json())).encode()).hexdigest()
    folder = root / key[:16]
    # Jobs that want the same text wait for the one that prepares it.
    with FileLock(root / f"{key[:16]}.lock"):
        try:
            return _open(folder, corpus.name)
        except FileNotFoundError:
            say(f"preparing {corpus.name} (kept in {folder})")
        except ValueError as e:
            say(f"preparing {corpus.name} again: {folder} is damaged ({e})")
        try:
            _write(corpus, tokenizer, fingerprint, folder, kept,
                   progress or (lambda stage, done, total: None))
        except OSError as e:
            raise UserError(f"the cache folder {root} cannot be written ({e.strerror or e}): "
                            "make room there, or set GLASSGPT_CACHE to another folder") from None
        return _open(folder, corpus.name)


def corpus_fingerprint(corpus: Corpus, tokenizer: TokenizerConfig) -> str:
    """Hex digest of the text's bytes, their encoding, the split and the tokenizer's settings: of all that tokens are made from."""
    read_as = [] if is_utf8(corpus.encoding) else [codecs.lookup(corpus.encoding).name]
    read_as += [corpus.field] if any(map(is_jsonl, corpus.files)) else []
    made_from = hashlib.sha256(json.dumps([FORMAT, ONE_IN, MANY, asdict(tokenizer), *read_as]).encode())
    for path in corpus.files:
        try:
            made_from.update(sha256_of(path).encode())
        except OSError as e:
            raise UserError(f"{path} cannot be read: {e.strerror}") from None
    return made_from.hexdigest()


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
    """The training split, or where it is large a random choice of its pieces, always the same, of about SAMPLE characters."""
    random, share = np.random.default_rng(0), SAMPLE / (characters * (ONE_IN - 1) / ONE_IN)
    return (text for training, text, _ in split_texts(corpus, cut) if training and (share >= 1 or random.random() < share))


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


def utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _write(corpus: Corpus, config: TokenizerConfig, fingerprint: str, folder: Path, kept: Tokenizer | None, progress: Progress) -> None:
    """Prepare into a folder beside, and give it its name when all is there."""
    documents = characters = size = crlf = document = longest = done = 0
    total = corpus.size()
    for text, begins in corpus.pieces():
        crlf += text.count("\r\n")
        document = len(text) + (0 if begins else document)  # characters of this one so far
        documents, characters, size, longest = documents + begins, characters + len(text), size + utf8_length(text), max(longest, document)
        progress("reading", size, total)
    if not characters:
        raise UserError(f"{corpus.name} holds no text")
    # One long document among short ones could leave too little on either side.
    cut = None if documents >= MANY and longest <= characters / ONE_IN else characters * (ONE_IN - 1) // ONE_IN
    progress("vocabulary", 0, None)
    tokenizer = kept or build_tokenizer(config, (text for text, _ in corpus.pieces()), sample(corpus, cut, characters))
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a preparation that was killed
    part.mkdir()
    try:
        with (part / "train.bin").open("wb") as train, (part / "val.bin").open("wb") as val:
            count = {train: np.zeros(tokenizer.vocab_size, np.int64), val: np.zeros(tokenizer.vocab_size, np.int64)}  # of each token
            val_documents, some = 0, {train: False, val: False}
            for is_train, ids, begins, length in encoded(tokenizer, split_texts(corpus, cut)):
                done, file = done + length, train if is_train else val
                if begins and some[file]:
                    between = [id for id in (tokenizer.end_of_text, tokenizer.begin_of_text) if id is not None]
                    ids = np.concatenate((np.array(between, dtype=ids.dtype), ids))
                file.write(ids.astype(dtype).tobytes())
                count[file] += np.bincount(ids, minlength=tokenizer.vocab_size)
                some[file] |= len(ids) > 0
                val_documents += begins and not is_train
                progress("tokens", done, size)
        save_tokenizer(tokenizer, part / "tokenizer.json")
        unseen = (count[train] == 0) & (count[val] > 0)
        meta = {"format": FORMAT, "fingerprint": fingerprint, "dtype": dtype.name, "train_tokens": int(count[train].sum()),
                "val_tokens": int(count[val].sum()), "documents": documents, "val_documents": val_documents if cut is None else None,
                "characters": characters, "bytes": size, "crlf": crlf,
                "unseen": np.flatnonzero(unseen).tolist(), "unseen_share": float(count[val][unseen].sum() / max(1, count[val].sum()))}
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        shutil.rmtree(folder, ignore_errors=True)  # one that was damaged
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _open(folder: Path, name: str) -> Tokens:
    """The tokens prepared in a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: something in it is not as it was written.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype, arrays = np.dtype(meta["dtype"]), {}
        for split in ("train", "val"):
            path, count = folder / f"{split}.bin", meta[f"{split}_tokens"]
            if path.stat().st_size != count * dtype.itemsize:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes where {count * dtype.itemsize} were written")
            arrays[split] = np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype)
        return Tokens(arrays["train"], arrays["val"], load_tokenizer(folder / "tokenizer.json"), meta["fingerprint"], name,
                      meta["documents"], meta["val_documents"], meta["characters"], meta["bytes"], meta["crlf"],
                      tuple(meta["unseen"]), meta["unseen_share"])
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e
