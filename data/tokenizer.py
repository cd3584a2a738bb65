"""Text to token ids and back: characters, BPE trained on your corpus, tiktoken's vocabularies, behind one small interface."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from config import TokenizerConfig, UserError

if TYPE_CHECKING:
    from data.hf_tokenizer import HFTokenizer

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 1024
PATTERNS = {  # how text is split before BPE, which never merges across a split
    # Words with the space before them and snake_case whole, numbers of up to three digits, runs of signs, line ends
    # with the indentation that follows, other white space.
    "code": r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+",
    "gpt2": r50k_pat_str,
}
LONGEST = 512  # characters of one kind in a row that BPE sees as one: the time that it takes grows with their square
LITTLE = 100_000  # characters that a vocabulary is learned from in a second or two
# The kinds that patterns keep together; an underscore is a letter to one pattern and a sign to another.
KINDS = [re.compile(kind) for kind in (r"\s+", r"[^\W\d]+", r"\d+", r"_*[^\w\s]+(?:_+[^\w\s]+)*_*")]
ANY_KIND = re.compile("|".join(kind.pattern for kind in KINDS))


class UnknownCharacter(UserError):
    """A character that is not in the alphabet of a tokenizer."""

    def __init__(self, character: str, where: str, known: int):
        super().__init__(f"the character {character!r} {where} is not among the {known} that this model was trained on: "
                         "leave it out, or train with tokenizer=bpe, which takes any text")
        self.character, self.known = character, known


class CharTokenizer:
    """One token for each character of an alphabet, in the order of the code points. No end-of-text token."""

    end_of_text = begin_of_text = None
    special: dict[int, str] = {}  # noqa: RUF012  names of the tokens that stand for no text

    def __init__(self, alphabet: str):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self._points = np.array([ord(c) for c in self.alphabet], dtype=np.uint32)

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of the text, (characters,).

        Raises:
            UnknownCharacter: one is not in the alphabet; it is named with its position.
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points).clip(max=max(0, self.vocab_size - 1))
        unknown = np.flatnonzero(self._points[ids] != points) if self.vocab_size else np.arange(len(points))
        if len(unknown):
            at = int(unknown[0])
            raise UnknownCharacter(text[at], f"at position {at}", self.vocab_size)
        return ids

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i:i + 1] for i in ids)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes that a token stands for: none for what a model has beyond the alphabet."""
        return self.alphabet[id:id + 1].encode("utf-8", "surrogatepass")

    def to_json(self) -> dict:
        return {"kind": "char", "alphabet": self.alphabet}


class BPETokenizer:
    """Byte-level byte-pair encoding, run by tiktoken. Encodes any text; decoding gives it back exactly.

    Text never produces the end-of-text token: its name in a text is encoded as ordinary characters.
    Ids are those of every other byte-pair encoder, but in runs of more than LONGEST letters, digits,
    signs or white space, which `bounded` cuts first.
    """

    begin_of_text = None  # texts are kept apart, and begun, by end-of-text

    def __init__(self, pattern: str, tokens: list[bytes | None], end_of_text: int | None = None):
        """`tokens` in the order of their ids, which is the order of the merges; None for an id that no text has.

        End-of-text comes after them, or is one of the ids that no text has.
        """
        self.pattern, self._tokens = pattern, tokens
        self.end_of_text = len(tokens) if end_of_text is None else end_of_text
        self.special = {self.end_of_text: END_OF_TEXT}
        self.vocab_size = max(len(tokens), self.end_of_text + 1)
        self._encoding = tiktoken.Encoding("glassgpt", pat_str=pattern, special_tokens={END_OF_TEXT: self.end_of_text},
                                           mergeable_ranks={token: rank for rank, token in enumerate(tokens) if token is not None})

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of the text, (tokens,).

        Raises:
            UserError: the splitting pattern fails on it, as one that is not GlassGPT's own may.
        """
        try:
            with as_value_error():  # encode_to_numpy is encode_ordinary without a list
                ids = [self._encoding.encode_to_numpy(part, disallowed_special=())
                       for part in bounded(text)]
        except ValueError as e:
            raise UserError(f"this tokenizer's splitting pattern fails on {text[:20]!r}: {e}") from None
        return np.concatenate(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of the text; half a surrogate pair, which a command line can hold, becomes U+FFFD."""
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.encode_array(whole).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([id for id in ids if id == self.end_of_text or self.token_bytes(id)])

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: none for end-of-text, and perhaps part of a character."""
        return (self._tokens[id] or b"") if id < len(self._tokens) else b""

    def to_json(self) -> dict:
        return {"kind": "bpe", "pattern": self.pattern, "end_of_text": self.end_of_text,
                "tokens": [token and base64.b64encode(token).decode() for token in self._tokens]}


Tokenizer = Union[CharTokenizer, BPETokenizer, "HFTokenizer"]


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: str = PATTERNS["code"]) -> BPETokenizer:
    """Train a byte-level BPE vocabulary (Sennrich et al. 2016) of vocab_size tokens, end-of-text included.

    A text with too few pairs to merge gives a smaller vocabulary. Runs are cut as in encoding.
    """
    spelled = byte_spelling()
    by_id = sorted(learn(texts, vocab_size, pattern).items(), key=lambda item: item[1])
    return BPETokenizer(pattern, [bytes(spelled[c] for c in token) for token, _ in by_id])


def learn(texts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    """A vocabulary, less end-of-text: the tokens in the byte-level spelling with their ids.

    More than a little text is learned in a process of its own, which Ctrl-C ends at once: the library cannot be stopped.

    Raises:
        UserError: that process ended before it was done.
    """
    parts, first, length = (part for text in texts for part in bounded(text)), [], 0
    for part in parts:
        first.append(part)
        length += len(part)
        if length > LITTLE:
            return _learn_apart(chain(first, parts), vocab_size, pattern)
    return learn_here(first, vocab_size, pattern)


def _learn_apart(parts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    command = [sys.executable, "-m", "data.learn", str(vocab_size), pattern]
    child = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             start_new_session=True)  # Ctrl-C in a terminal is for this process alone
    try:
        with suppress(BrokenPipeError):
            for part in parts:
                child.stdin.write(json.dumps(part).encode() + b"\n")
            child.stdin.close()
        learned = child.stdout.read()
        if child.wait():
            raise UserError(f"learning the vocabulary ended with status {child.returncode} (too little memory?): "
                            "lower tokenizer.vocab_size, or give less text")
        return json.loads(learned)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def learn_here(parts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    """`learn` in this process, of text that `bounded` has cut."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return trained.get_vocab()


def bounded(text: str) -> list[str]:
    """The text cut after each LONGEST characters of a longer run of one kind; most texts are left whole.

    A run that long fills one of the blocks of half its length, so only the beginning of each is looked at.
    """
    cuts, half = [0], LONGEST // 2
    for end in range(half, len(text) + 1, half):
        if end > cuts[-1] + half and ANY_KIND.fullmatch(text, end - half, end):
            kind = next(kind for kind in KINDS if kind.fullmatch(text, end - half, end))
            before = kind.match(text[max(cuts[-1], end - LONGEST):end - half][::-1])
            begin = end - half - (before.end() if before else 0)
            cuts += range(begin + LONGEST, kind.match(text, begin).end(), LONGEST)
    return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


@contextmanager
def as_value_error() -> Iterator[None]:
    """Make a ValueError of one line of all that a library raises; where it panics, that is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise ValueError("".join(c if c.isprintable() else " " for c in f"{e}" or type(e).__name__)[:200]) from None


def byte_spelling() -> dict[str, int]:
    """Which byte each character of the byte-level spelling stands for.

    Printable Latin-1 stands for itself; the other bytes, in their order, for the characters from 256 on
    (Radford et al. 2019).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def of_tiktoken(name: str) -> BPETokenizer:
    """A vocabulary that tiktoken knows by name, which it fetches once and keeps: GPT-2's 50,257 tokens, cl100k_base, …

    Of its special tokens only end-of-text is taken.

    Raises:
        UserError: it is not kept here and cannot be fetched.
    """
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as e:  # requests' errors are OSErrors
        raise UserError(f"the vocabulary {name} could not be fetched (no network?): set TIKTOKEN_CACHE_DIR to a folder "
                        f"where tiktoken has kept it, now {os.environ.get('TIKTOKEN_CACHE_DIR') or 'not set'}; "
                        f"{type(e).__name__}") from None
    by_id = {id: token for token, id in encoding._mergeable_ranks.items()}
    return BPETokenizer(encoding._pat_str, [by_id.get(id) for id in range(max(by_id) + 1)], encoding._special_tokens.get(END_OF_TEXT))


def build_tokenizer(config: TokenizerConfig, all_texts: Iterable[str], train_texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that the configuration names.

    BPE learns from the training split alone. The alphabet of `char` is that of the whole text, so that a
    symbol which only the validation split holds is a token that training never saw, not an error.
    """
    if config.name == "char":
        alphabet = set()
        for text in all_texts:
            alphabet.update(text)
        return CharTokenizer("".join(alphabet))
    if config.name == "bpe":
        return train_bpe(train_texts, config.vocab_size or DEFAULT_VOCAB_SIZE, PATTERNS[config.pattern])
    return of_tiktoken(config.name)


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    path.write_text(json.dumps(tokenizer.to_json(), ensure_ascii=True), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer kept at path.

    Raises:
        ValueError: the file does not hold a tokenizer.
    """
    try:
        return tokenizer_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{path} does not hold a tokenizer: {e}") from e


def tokenizer_from(saved: dict) -> Tokenizer:
    """The tokenizer whose `to_json` was saved.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    if saved["kind"] == "char" and isinstance(saved["alphabet"], str):
        return CharTokenizer(saved["alphabet"])
    if saved["kind"] == "bpe":
        _check_pattern(saved["pattern"])
        tokens = [None if token is None else base64.b64decode(token, validate=True) for token in saved["tokens"]]
        some, end = [token for token in tokens if token is not None], saved.get("end_of_text", len(tokens))
        if len(set(some)) < len(some) or not {bytes([b]) for b in range(256)} <= set(some):
            raise ValueError("its tokens are not distinct, or lack a byte")
        if not 0 <= end < len(tokens) + 4096 or (end < len(tokens) and tokens[end] is not None):
            raise ValueError("its end-of-text token has the id of another, or none that fits")
        return BPETokenizer(saved["pattern"], tokens, end)
    if saved["kind"] == "hf":
        from data.hf_tokenizer import HFTokenizer  # which stands on this module

        return HFTokenizer(saved["tokenizer"], saved["end_of_text"])
    raise ValueError(f"its kind is {saved['kind']!r}")


def _check_pattern(pattern: str) -> None:
    """Raise ValueError where a pattern is none, leaves out characters, or matches nothing at all, which ends tiktoken."""
    ranks = {bytes([b]): b for b in range(256)} | {b"": 256}  # with a token of its own nothing can be seen
    probe = "It's 1234 words\u3000of  漢字, café_x!\r\n\n\t\tend  "
    with as_value_error():
        split = tiktoken.Encoding("probe", pat_str=pattern, special_tokens={}, mergeable_ranks=ranks)
        if split.encode_ordinary(probe) != list(probe.encode()):
            raise ValueError(f"its pattern {pattern[:40]!r} leaves characters out, or matches where there are none")


def first_token(tokenizer: Tokenizer) -> int:
    """What a text without a prompt starts from: as a new document does, or a new line, or with the alphabet's first character."""
    for id in (tokenizer.begin_of_text, tokenizer.end_of_text):
        if id is not None:
            return id
    return tokenizer.encode("\n" if "\n" in tokenizer.alphabet else tokenizer.alphabet[0])[0]


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a model continues: the prompt's ids, after the token that its tokenizer begins every text with, where it has one."""
    ids = tokenizer.encode(prompt)
    if not ids:
        return [first_token(tokenizer)]
    return ids if tokenizer.begin_of_text is None else [tokenizer.begin_of_text, *ids]
