"""Prepare the token files of a text once, and keep them in the cache."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from common.errors import UserError
from common.files import read_json_object, seal, sha256_of_file, sync
from common.limits import count_processors
from common.text import pluralize
from config import Config, DataConfig, TokenizerConfig
from data.cache import KEY_LENGTH, open_or_write
from data.corpus import Corpus, FileHash, open_corpus
from data.splits import (
    MIN_DOCUMENTS_TO_SPLIT,
    VALIDATION_PERIOD,
    CorpusSize,
    SplitPiece,
    count_corpus,
    find_split_position,
    sample_training_text,
    split_corpus,
    utf8_length,
)
from data.synthetic import Task, make_task
from data.text_files import has_records
from data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    encode_with_bytes,
    load_tokenizer,
    read_tokenizer_file,
    save_tokenizer,
)

TEXT_FORMAT = 3  # version of how a text is read and split; part of its fingerprint
CACHE_FORMAT = 4  # version of the files in a cache entry
MIN_COPIED_SHARE = 0.01  # of a text; fewer copies hardly change the validation loss
# The files of a cache entry.
TRAIN_FILE = "train.bin"
VAL_FILE = "val.bin"
VAL_BYTES_FILE = "val_bytes.bin"
CACHED_TOKENIZER_FILE = "tokenizer.json"
META_FILE = "meta.json"  # has the hashes of the others
TOKEN_FILES = (TRAIN_FILE, VAL_FILE, VAL_BYTES_FILE, CACHED_TOKENIZER_FILE)
SEPARATOR = -1  # in `Tokens.val_bytes`: a token between documents, which is not text
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids, memory-mapped and of the smallest dtype that holds the vocabulary."""

    train: np.ndarray  # ids of the training split, (tokens,)
    val: np.ndarray  # ids of the validation split, (tokens,)
    tokenizer: Tokenizer
    fingerprint: str  # hash (hex) of the text, whatever tokenizer it is read with
    name: str  # what the text is called in messages
    size: CorpusSize
    # UTF-8 bytes of text that each token of `val` stands for, or SEPARATOR: int32 (tokens,)
    val_bytes: np.ndarray | None = None
    copies: int = 0  # see `count_copies`
    ngrams: np.ndarray | None = None  # frequent ones, for a model with an n-gram table
    task: Task | None = None  # generates the sequences, of which `train` and `val` are samples

    def summary(self) -> list[str]:
        """Describe the text and its tokens in lines of at most 80 columns."""
        if self.task:
            return self.task.summary()
        size = self.size
        tokens = len(self.train) + len(self.val)
        by_document = find_split_position(size) is None
        validation = "one document in ten" if by_document else "the last tenth of the characters"
        lines = [
            f"text     {self.name}",
            f"         {pluralize(size.documents, 'document')}, {size.characters:,} characters",
            f"         {validation} for validation",
            f"tokens   {len(self.train):,} for training, {len(self.val):,} for validation",
            f"         vocabulary {self.tokenizer.vocab_size:,}, "
            f"{size.bytes / tokens:.2f} bytes per token",
        ]
        if self.copies:
            files = pluralize(self.copies, "file")
            lines.append(
                f"note     {files} copied from others may make the validation loss too low"
            )
        return lines


def prepare(
    data: DataConfig,
    config: TokenizerConfig,
    log: Callable[[str], None] = print,
    tokenizer: Tokenizer | None = None,
) -> Tokens:
    """Turn the configured text into tokens, or open them if they are in the cache.

    `tokenizer` is that of another model, used instead of the one that `config` describes.
    """
    if config.is_file:
        tokenizer = tokenizer or read_tokenizer_file(config.name)
    corpus = open_corpus(data, log)
    hashes = corpus.hash_files()
    fingerprint = corpus_fingerprint(corpus, hashes)

    def write(entry: Path) -> None:
        entry.mkdir()
        _write_entry(corpus, config, tokenizer, entry, log)
        if corpus.hash_files() != hashes:
            raise UserError(f"{corpus.name} changed while it was being read: start again")

    tokens = open_or_write(
        _entry_name(fingerprint, tokenizer or config),
        lambda entry: _open_entry(entry, corpus.name, fingerprint),
        write,
        f"preparing {corpus.name}",
        log,
    )
    return replace(tokens, copies=count_copies(hashes))


def generate_tokens(config: Config, tokenizer: Tokenizer | None) -> Tokens:
    """Return a task with samples of its sequences; every process makes the same ones."""
    task = make_task(config, tokenizer)
    # Random probes draw tokens from `train`, so it lacks the begin symbol
    train = task.training.tokens[:, int(config.data.begin) :]
    return Tokens(
        train=train.ravel(),
        val=task.validation.tokens.ravel(),
        tokenizer=task.tokenizer,
        fingerprint=task.fingerprint(),
        name=f"data.task={config.data.task}",
        size=CorpusSize(),
        task=task,
    )


def count_copies(hashes: Sequence[FileHash]) -> int:
    """Return how many files are equal to others, or 0 if they are less than 1% of the text."""
    distinct = dict(hashes)
    total = sum(size for _, size in hashes)
    is_much = total - sum(distinct.values()) >= MIN_COPIED_SHARE * total
    return len(hashes) - len(distinct) if is_much else 0


def corpus_fingerprint(corpus: Corpus, hashes: Sequence[FileHash]) -> str:
    """Return the hash (hex) of a text and of how it is read and split."""
    made_from: list[object] = [TEXT_FORMAT, VALIDATION_PERIOD, MIN_DOCUMENTS_TO_SPLIT]
    are_records = [has_records(file) for file in corpus.files]
    if any(are_records):
        made_from += [corpus.field, are_records]
    text = json.dumps(made_from) + "".join(digest for digest, _ in hashes)
    return hashlib.sha256(text.encode()).hexdigest()


def encode_pieces(
    encode: Callable[[SplitPiece], Encoded], pieces: Iterator[SplitPiece]
) -> Iterator[tuple[SplitPiece, Future[Encoded]]]:
    """Encode pieces on all cores, and yield each with the result to wait for, in their order.

    Only a few pieces are read ahead, so memory stays bounded.
    """
    cores = count_processors()
    encoding: deque[tuple[SplitPiece, Future[Encoded]]] = deque()
    with ThreadPoolExecutor(cores) as pool:  # the encoders release the interpreter's lock
        for piece in pieces:
            encoding.append((piece, pool.submit(encode, piece)))
            if len(encoding) > 2 * cores:
                yield encoding.popleft()
        yield from encoding


def _write_entry(
    corpus: Corpus,
    config: TokenizerConfig,
    tokenizer: Tokenizer | None,
    folder: Path,
    log: Callable[[str], None],
) -> None:
    # Count and split the text, and learn a vocabulary
    size = count_corpus(corpus, log)
    split_position = find_split_position(size)
    if tokenizer is None:
        all_text = (piece.text for piece in corpus.pieces())
        training_text = sample_training_text(corpus, split_position, size.characters)
        tokenizer = build_tokenizer(config, all_text, training_text)
    save_tokenizer(tokenizer, folder / CACHED_TOKENIZER_FILE)

    _write_splits(split_corpus(corpus, split_position), tokenizer, folder)

    # Describe and sync the files
    hashes = {name: sha256_of_file(folder / name) for name in TOKEN_FILES}
    facts = {"hashes": hashes, "size": asdict(size)}
    meta = json.dumps(facts, indent=1)
    (folder / META_FILE).write_text(seal(meta))
    for path in (*folder.iterdir(), folder):
        sync(path)


def _write_splits(pieces: Iterator[SplitPiece], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the ids of both splits with separators between documents, and `Tokens.val_bytes`."""
    dtype = _token_dtype(tokenizer)
    ends = (tokenizer.end_of_text, tokenizer.begin_of_text)
    separator = np.array([id for id in ends if id is not None], dtype=dtype)
    separator_bytes = np.full(len(separator), SEPARATOR, dtype=np.int32)

    def encode(piece: SplitPiece) -> tuple[np.ndarray, np.ndarray | None]:
        if piece.is_train:
            return tokenizer.encode_array(piece.text), None
        return encode_with_bytes(tokenizer, piece.text)

    with (
        (folder / TRAIN_FILE).open("wb") as train,
        (folder / VAL_FILE).open("wb") as val,
        (folder / VAL_BYTES_FILE).open("wb") as val_bytes,
    ):
        bytes_without_token = 0  # of validation text: they count for the next token
        for piece, encoded in encode_pieces(encode, pieces):
            ids, sizes = encoded.result()
            file = train if piece.is_train else val
            is_separated = piece.begins_document and file.tell() > 0
            if is_separated:
                file.write(separator.tobytes())
            file.write(ids.astype(dtype).tobytes())
            if sizes is None:
                continue
            if is_separated:
                val_bytes.write(separator_bytes.tobytes())
            if len(sizes):
                sizes[0] += bytes_without_token
                bytes_without_token = 0
            else:
                bytes_without_token += utf8_length(piece.text)
            val_bytes.write(sizes.astype(np.int32).tobytes())


def _entry_name(fingerprint: str, tokenizer: Tokenizer | TokenizerConfig) -> str:
    """Return the name of the entry of a text's tokens, by their tokenizer or its description."""
    key = tokenizer.to_json() if isinstance(tokenizer, Tokenizer) else asdict(tokenizer)
    made_from = json.dumps([CACHE_FORMAT, fingerprint, key])
    return hashlib.sha256(made_from.encode()).hexdigest()[:KEY_LENGTH]


def _open_entry(entry: Path, name: str, fingerprint: str) -> Tokens:
    """Open a cache entry; raise one of `ENTRY_ERRORS` if it is absent or damaged."""
    meta = read_json_object(entry / META_FILE, must_be_sealed=True)
    for file in TOKEN_FILES:
        if sha256_of_file(entry / file) != meta["hashes"][file]:
            raise ValueError(f"{file} has changed since it was written")
    tokenizer = load_tokenizer(entry / CACHED_TOKENIZER_FILE)
    dtype = _token_dtype(tokenizer)
    return Tokens(
        train=_map_array(entry / TRAIN_FILE, dtype),
        val=_map_array(entry / VAL_FILE, dtype),
        val_bytes=_map_array(entry / VAL_BYTES_FILE, np.dtype(np.int32)),
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        name=name,
        size=CorpusSize(**meta["size"]),
    )


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def _map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
