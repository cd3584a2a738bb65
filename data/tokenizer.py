"""Convert text to token ids and back: characters, byte pairs, or a model's own tokenizer."""

import base64
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.files import read_json_object
from common.terminal import error_sentence
from common.text import REPLACEMENT, pluralize, replace_surrogates
from config import TokenizerConfig
from data.hf_tokenizer import (
    END_OF_TEXT,
    HFTokenizer,
    byte_level_alphabet,
    check_vocab_size,
    read_tokenizer,
)

DEFAULT_VOCAB_SIZE = 1024
# How text is split before byte-pair encoding, which never merges across a split.
PATTERNS = {
    # Words with the space before them and snake_case in one, numbers of up to three digits, runs of
    # punctuation, line ends with the indentation that follows, other white space.
    "code": r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+",
    "gpt2": r50k_pat_str,
}
# The time of byte-pair encoding grows with the square of a run that no pattern splits.
MAX_RUN_CHARS = 512
LONG_RUN = re.compile(r"(?<!\S)\S{513,}|(?<!\s)\s{513,}")
# Unicode normal forms → what a text is that should be converted to it
OTHER_FORMS: dict[Literal["NFC", "NFD"], str] = {
    "NFC": "decomposed (Unicode form NFD: an accent is a character of its own)",
    "NFD": "composed (Unicode form NFC: a letter and its accent are one character)",
}
MAX_FORM_CHARS = 10_000  # of a text whose normal form is looked at


class CharTokenizer:
    """A tokenizer with one token for each character of an alphabet, in code-point order."""

    end_of_text = None  # id of the token that separates documents
    end_of_text_ids: tuple[int, ...] = ()  # each of them ends a text
    begin_of_text = None  # id of the token that begins a text
    bos_token_id = chat_template = None  # only imported tokenizers have these

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self.special: dict[int, str] = {}  # names of the tokens that stand for no text, by id
        # Ends with a code point that no character has, so that a search always finds an entry
        code_points = [ord(character) for character in self.alphabet]
        self._code_points = np.array([*code_points, 2**32 - 1], dtype=np.uint32)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text: (characters,)."""
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._code_points, code_points)
        unknown = np.flatnonzero(self._code_points[ids] != code_points)
        if len(unknown):
            raise UserError(
                f"the character {text[unknown[0]]!r} is not among the "
                f"{pluralize(self.vocab_size, 'character')} that this model was trained on "
                f"({self.alphabet!r:.100}): {self._advice(text)}"
            )
        return ids

    def _advice(self, text: str) -> str:
        for form, other in OTHER_FORMS.items():
            if set(self.alphabet).issuperset(normalize(form, text)):
                return f"the text is {other}: convert it to the form {form}"
        return "leave it out, or train on text with tokenizer=bpe, which takes any text"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; see `encode_array`."""
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; ids outside the alphabet have none."""
        return "".join(self.alphabet[id : id + 1] for id in ids)

    def token_bytes(self, id: int) -> bytes:
        """Return the UTF-8 bytes of a token, or none for an id outside the alphabet."""
        return self.alphabet[id : id + 1].encode("utf-8", "surrogatepass")

    def to_json(self) -> dict[str, Any]:
        """Return what `load_tokenizer` needs."""
        return {"kind": "char", "alphabet": self.alphabet}


class BPETokenizer:
    """A byte-level byte-pair encoding tokenizer, run by tiktoken; decoding is exact.

    The name of the end-of-text token is encoded as ordinary characters. Ids are those of every
    other byte-pair encoder, except in runs of more than `MAX_RUN_CHARS` characters that are all
    white space or have none: `split_long_runs` cuts these first.

    Reference: Sennrich et al. 2016; Radford et al. 2019 (bytes).
    """

    begin_of_text = bos_token_id = None  # end-of-text begins a text
    chat_template = None

    def __init__(
        self, pattern: str, tokens: list[bytes | None], end_of_text: int | None = None
    ) -> None:
        """Build a tokenizer from the bytes of its tokens by id, in the order of the merges.

        `pattern` splits text before merging. A token that is None is an unused id. `end_of_text` is
        one of these; None: the id after all tokens.
        """
        ids = {token: id for id, token in enumerate(tokens) if token is not None}
        self.pattern = pattern
        self._tokens = tokens
        self.end_of_text = len(tokens) if end_of_text is None else end_of_text
        self.end_of_text_ids = (self.end_of_text,)
        self.special = {self.end_of_text: END_OF_TEXT}
        self.vocab_size = max(len(tokens), self.end_of_text + 1)
        self._encoding = tiktoken.Encoding(
            "glassgpt",
            pat_str=pattern,
            special_tokens={END_OF_TEXT: self.end_of_text},
            mergeable_ranks=ids,
        )

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text: (tokens,)."""
        parts = split_long_runs(text)
        encode_part = self._encoding.encode_to_numpy
        return np.concatenate([encode_part(part, disallowed_special=()) for part in parts])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Half a surrogate pair, as in arguments, becomes U+FFFD."""
        return self.encode_array(replace_surrogates(text)).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; unused ids have none."""
        used = [id for id in ids if id == self.end_of_text or self.token_bytes(id)]
        return self._encoding.decode(used)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, perhaps part of a character; end-of-text has none."""
        if id >= len(self._tokens):
            return b""
        return self._tokens[id] or b""

    def to_json(self) -> dict[str, Any]:
        """Return what `load_tokenizer` needs."""
        return {
            "kind": "bpe",
            "pattern": self.pattern,
            "end_of_text": self.end_of_text,
            "tokens": [token and base64.b64encode(token).decode() for token in self._tokens],
        }


Tokenizer = CharTokenizer | BPETokenizer | HFTokenizer


def build_tokenizer(
    config: TokenizerConfig, all_text: Iterable[str], training_text: Iterable[str]
) -> Tokenizer:
    """Build the tokenizer that the configuration names.

    `char` takes its alphabet from the whole text, `bpe` learns from the training split.
    """
    if config.name == "char":
        return CharTokenizer("".join(set(chain.from_iterable(all_text))))
    if config.name == "bpe":
        vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
        return train_bpe(training_text, vocab_size, PATTERNS[config.pattern])
    return load_tiktoken(config.name)


def train_bpe(
    texts: Iterable[str], vocab_size: int, pattern: str = PATTERNS["code"]
) -> BPETokenizer:
    """Learn a byte-level byte-pair encoding (Sennrich et al. 2016).

    It has `vocab_size` tokens with end-of-text, or fewer if the texts have too few pairs.
    """
    library = Library(models.BPE())
    library.pre_tokenizer = byte_level_split(pattern)
    parts = (part for text in texts for part in split_long_runs(text))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(parts, trainer)
    byte_of = byte_level_alphabet()
    ids: dict[str, int] = library.get_vocab()
    tokens_by_id = sorted(ids, key=lambda token: ids[token])
    return BPETokenizer(pattern, [bytes(byte_of[c] for c in token) for token in tokens_by_id])


def byte_level_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer that splits text by a pattern and spells it in bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def split_long_runs(text: str) -> list[str]:
    """Cut runs of white space, or of other characters, after every `MAX_RUN_CHARS` characters."""
    cuts = [
        position
        for run in LONG_RUN.finditer(text)
        for position in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)
    ]
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def load_tiktoken(name: str) -> BPETokenizer:
    """Load a vocabulary that tiktoken knows by name, with end-of-text as its only special token."""
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:
        raise UserError(
            f"the vocabulary tokenizer={name} is not in tiktoken's cache, which TIKTOKEN_CACHE_DIR "
            f"names, and cannot be downloaded ({error_sentence(e)})"
        ) from None
    token_of = {id: token for token, id in encoding._mergeable_ranks.items()}
    tokens = [token_of.get(id) for id in range(max(token_of) + 1)]
    return BPETokenizer(encoding._pat_str, tokens, encoding._special_tokens.get(END_OF_TEXT))


def read_tokenizer_file(path: str) -> HFTokenizer:
    """Read a tokenizer.json of Hugging Face's format, and the roles of its tokens beside it."""
    try:
        return read_tokenizer(Path(path), {})
    except Exception as e:  # the library raises plain Exceptions
        raise UserError(
            f"tokenizer={path} cannot be read ({error_sentence(e)}): give a tokenizer.json of "
            "Hugging Face's format"
        ) from None


def encode_with_bytes(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a text, and the UTF-8 bytes of it that each token stands for: (tokens,)."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_with_bytes(text)
    ids = tokenizer.encode_array(text)
    used_ids, index = np.unique(ids, return_inverse=True)
    sizes = [len(tokenizer.token_bytes(int(id))) for id in used_ids]
    return ids, np.array(sizes, dtype=np.int64)[index]


def start_token(tokenizer: Tokenizer) -> int:
    """Return the token that starts a text without a prompt.

    It is begin-of-text, or else end-of-text, because these come before each document in training.
    Without both it is a newline, or else id 0.
    """
    for id in (tokenizer.begin_of_text, tokenizer.end_of_text):
        if id is not None:
            return id
    newlines = (id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\n")
    return next(newlines, 0)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids with which a model reads a text, as transformers' tokenizers do.

    They begin with begin-of-text, if the tokenizer has it. An empty text is the `start_token`.
    """
    ids = tokenizer.encode(text)
    if not ids:
        return [start_token(tokenizer)]
    if tokenizer.begin_of_text is None:
        return ids
    return [tokenizer.begin_of_text, *ids]


def decode_characters(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text of ids without special tokens and parts of characters."""
    ordinary = [id for id in ids if id not in tokenizer.special]
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.decode(ordinary).replace(REPLACEMENT, "")
    return b"".join(map(tokenizer.token_bytes, ordinary)).decode(errors="ignore")


def normal_form_note(tokenizer: Tokenizer, text: str) -> str | None:
    """Return a note if a text has fewer tokens in another Unicode normal form.

    Then the model was probably trained on text in that form, and reads this one as rare tokens.
    """
    start = text[:MAX_FORM_CHARS]
    count = len(tokenizer.encode(start))
    for form, other in OTHER_FORMS.items():
        with suppress(UserError):  # characters that the tokenizer does not know
            converted_count = len(tokenizer.encode(normalize(form, start)))
            if converted_count < count:
                return (
                    f"note: the text is {other}; converted to the form {form}, it would have "
                    f"{pluralize(converted_count, 'token')} instead of {count:,}"
                )
    return None


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer to a file."""
    path.write_text(json.dumps(tokenizer.to_json()), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer that `save_tokenizer` wrote."""
    try:
        tokenizer = _from_json(read_json_object(path))
        check_vocab_size(tokenizer.vocab_size)
        return tokenizer
    except OSError:  # it can be intact
        raise
    except Exception as e:  # the libraries raise plain Exceptions
        raise UserError(
            f"{path} does not hold a tokenizer ({error_sentence(e)}): restore it, or train again"
        ) from None


def _from_json(saved: dict[str, Any]) -> Tokenizer:
    if saved["kind"] == "char":
        return CharTokenizer(saved["alphabet"])
    if saved["kind"] == "hf":
        kept_for_exports = saved.get("bos_token_id"), saved.get("chat_template")
        return HFTokenizer(saved["tokenizer"], saved["end_of_text"], *kept_for_exports)
    tokens = [token and base64.b64decode(token, validate=True) for token in saved["tokens"]]
    return BPETokenizer(saved["pattern"], tokens, saved["end_of_text"])
