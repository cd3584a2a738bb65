"""Text to token ids and back: characters, BPE trained on your corpus, GPT-2's, behind one small interface."""

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from config import TokenizerConfig, UserError

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 1024
# Where BPE may not merge across: words with the space before them and snake_case whole, numbers of up to
# three digits, runs of signs, line ends with the indentation that follows, other white space.
PATTERN = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+"


class CharTokenizer:
    """One token for each character of an alphabet, in the order of the code points. No end-of-text token."""

    end_of_text = None

    def __init__(self, alphabet: str):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self._points = np.array([ord(c) for c in self.alphabet], dtype=np.uint32)

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of the text, (characters,).

        Raises:
            UserError: a character is not in the alphabet; it is named with its position.
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points).clip(max=max(0, self.vocab_size - 1))
        unknown = np.flatnonzero(self._points[ids] != points) if self.vocab_size else np.arange(len(points))
        if len(unknown):
            at = int(unknown[0])
            raise UserError(f"the character {text[at]!r} at position {at} is not among the {self.vocab_size} "
                            "that this model was trained on: leave it out, or train with tokenizer=bpe, which takes any text")
        return ids

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes that a token stands for."""
        return self.alphabet[id].encode("utf-8", "surrogatepass")

    def to_json(self) -> dict:
        return {"kind": "char", "alphabet": self.alphabet}


class BPETokenizer:
    """Byte-level byte-pair encoding, run by tiktoken. Encodes any text; decoding gives it back exactly.

    Text never produces the end-of-text token: its name in a text is encoded as ordinary characters.
    """

    def __init__(self, pattern: str, tokens: list[bytes]):
        """`tokens` in the order of their ids, which is the order of the merges; end-of-text comes after them."""
        self.pattern, self._tokens = pattern, tokens
        self.end_of_text = len(tokens)
        self.vocab_size = len(tokens) + 1
        self._encoding = tiktoken.Encoding("glassgpt", pat_str=pattern, special_tokens={END_OF_TEXT: self.end_of_text},
                                           mergeable_ranks={token: rank for rank, token in enumerate(tokens)})

    def encode_array(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=())  # as encode_ordinary, without a list

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(ids))

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: none for end-of-text, and perhaps part of a character."""
        return b"" if id == self.end_of_text else self._tokens[id]

    def to_json(self) -> dict:
        return {"kind": "bpe", "pattern": self.pattern,
                "tokens": [base64.b64encode(token).decode() for token in self._tokens]}


Tokenizer = CharTokenizer | BPETokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE vocabulary (Sennrich et al. 2016) of vocab_size tokens, end-of-text included.

    A text with too few pairs to merge gives a smaller vocabulary.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False))
    spelled = _bytes_of_characters()
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(spelled[c] for c in token) for token, _ in by_id]
    return BPETokenizer(PATTERN, tokens)


def _bytes_of_characters() -> dict[str, int]:
    """Which byte each character of the byte-level spelling stands for.

    Printable Latin-1 stands for itself; the other bytes, in their order, for the characters from 256 on
    (Radford et al. 2019).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def gpt2() -> BPETokenizer:
    """GPT-2's vocabulary of 50,257, which tiktoken fetches once and keeps.

    Raises:
        UserError: it is not kept here and cannot be fetched.
    """
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as e:  # requests' errors are OSErrors
        raise UserError("the GPT-2 vocabulary could not be fetched (no network?): set TIKTOKEN_CACHE_DIR to a folder "
                        f"where tiktoken has kept it, now {os.environ.get('TIKTOKEN_CACHE_DIR') or 'not set'}; "
                        f"{type(e).__name__}") from None
    return BPETokenizer(encoding._pat_str, sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.get))


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
        return train_bpe(train_texts, config.vocab_size or DEFAULT_VOCAB_SIZE)
    return gpt2()


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
        tokens = [base64.b64decode(token, validate=True) for token in saved["tokens"]]
        if len(set(tokens)) < len(tokens) or not {bytes([b]) for b in range(256)} <= set(tokens):
            raise ValueError("its tokens are not distinct, or lack a byte")
        return BPETokenizer(saved["pattern"], tokens)
    raise ValueError(f"its kind is {saved['kind']!r}")


def first_token(tokenizer: Tokenizer) -> int:
    """What a text without a prompt starts from: as a new document does, or a new line, or with the alphabet's first character."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    return tokenizer.encode("\n" if "\n" in tokenizer.alphabet else tokenizer.alphabet[0])[0]
