"""Text to token ids and back: characters, byte-pair encoding, or a model's own tokenizer."""

import base64
import json
import os
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from config import TokenizerConfig, UserError
from data.hf_tokenizer import (
    END_OF_TEXT,
    FILE,
    SETTINGS,
    HFTokenizer,
    as_value_error,
    byte_level_alphabet,
    special_token,
)
from data.learn import bounded, learn

DEFAULT_VOCAB_SIZE = 1024
PATTERNS = {  # how text is split before BPE, which never merges across a split
    # Words with the space before them and snake_case whole, numbers of up to three digits, runs of
    # signs, line ends with the indentation that follows, other white space.
    "code": r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+",
    "gpt2": r50k_pat_str,
}


class UnknownCharacter(UserError):
    """A character that is not in the alphabet of a tokenizer."""

    def __init__(self, character: str, where: str, known: int):
        super().__init__(f"the character {character!r} {where} is not among the {known} that this "
                         "model was trained on: leave it out, or train with tokenizer=bpe, which "
                         "takes any text")
        self.character, self.known = character, known


class CharTokenizer:
    """One token for each character of an alphabet, in the order of the code points."""

    end_of_text = begin_of_text = None

    def __init__(self, alphabet: str):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.vocab_size = len(self.alphabet)
        self.special: dict[int, str] = {}  # names of the tokens that stand for no text
        # At the end what no character is, so that every one has a place to compare with.
        self._points = np.array([*map(ord, self.alphabet), 2**32 - 1], dtype=np.uint32)

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of the text, (characters,).

        Raises:
            UnknownCharacter: one is not in the alphabet; it is named with its position.
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        unknown = np.flatnonzero(self._points[ids] != points)
        if len(unknown):
            at = int(unknown[0])
            raise UnknownCharacter(text[at], f"at position {at}", self.vocab_size)
        return ids

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i:i + 1] for i in ids)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes that a token stands for: none for one beyond the alphabet."""
        return self.alphabet[id:id + 1].encode("utf-8", "surrogatepass")

    def to_json(self) -> dict:
        return {"kind": "char", "alphabet": self.alphabet}


class BPETokenizer:
    """Byte-level byte-pair encoding, run by tiktoken. Decoding gives any text back exactly.

    Text never produces the end-of-text token: its name in a text is encoded as ordinary characters.
    Ids are those of every other byte-pair encoder, but in runs of more than LONGEST letters,
    digits, signs or white space, which `bounded` cuts first.
    """

    begin_of_text = None  # texts are kept apart, and begun, by end-of-text

    def __init__(self, pattern: str, tokens: list[bytes | None], end_of_text: int | None = None):
        """`tokens` in the order of their ids, which is the order of the merges.

        A token is None where no text has its id. End-of-text has such an id, or one after them all.
        """
        self.pattern, self._tokens = pattern, tokens
        self.end_of_text = len(tokens) if end_of_text is None else end_of_text
        self.special = {self.end_of_text: END_OF_TEXT}
        self.vocab_size = max(len(tokens), self.end_of_text + 1)
        self._encoding = tiktoken.Encoding(
            "glassgpt", pat_str=pattern, special_tokens={END_OF_TEXT: self.end_of_text},
            mergeable_ranks={token: id for id, token in enumerate(tokens) if token is not None})

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
            raise UserError(f"this tokenizer's splitting pattern fails on {text[:20]!r}: {e}"
                            ) from None
        return np.concatenate(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of the text; half a surrogate pair, which a command line can hold, becomes U+FFFD."""
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.encode_array(whole).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        known = [id for id in ids if id == self.end_of_text or self.token_bytes(id)]
        return self._encoding.decode(known)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token: none for end-of-text, and perhaps part of a character."""
        return (self._tokens[id] or b"") if id < len(self._tokens) else b""

    def to_json(self) -> dict:
        return {"kind": "bpe", "pattern": self.pattern, "end_of_text": self.end_of_text,
                "tokens": [token and base64.b64encode(token).decode() for token in self._tokens]}


Tokenizer = CharTokenizer | BPETokenizer | HFTokenizer


def build_tokenizer(config: TokenizerConfig, all_texts: Iterable[str],
                    train_texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that the configuration names.

    BPE learns from the training split alone. The alphabet of `char` is that of the whole text, so
    that a symbol which only the validation split holds is a token that training never saw, not an
    error.
    """
    if config.name == "char":
        return CharTokenizer("".join(set(chain.from_iterable(all_texts))))
    if config.name == "bpe":
        size, pattern = config.vocab_size or DEFAULT_VOCAB_SIZE, PATTERNS[config.pattern]
        return train_bpe(train_texts, size, pattern)
    return of_tiktoken(config.name)


def train_bpe(texts: Iterable[str], vocab_size: int,
              pattern: str = PATTERNS["code"]) -> BPETokenizer:
    """A tokenizer with a vocabulary learned by byte-level BPE (Sennrich et al. 2016).

    It has vocab_size tokens, end-of-text included. A text with too few pairs to merge gives
    a smaller vocabulary. Runs are cut as in encoding.
    """
    byte_of, ids = byte_level_alphabet(), learn(texts, vocab_size, pattern)
    tokens = [bytes(byte_of[c] for c in token) for token in sorted(ids, key=ids.get)]
    return BPETokenizer(pattern, tokens)


def of_tiktoken(name: str) -> BPETokenizer:
    """A vocabulary that tiktoken knows by name, and fetches once: gpt2, cl100k_base, …

    Of its special tokens only end-of-text is taken.

    Raises:
        UserError: it is not kept here and cannot be fetched.
    """
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as e:  # requests' errors are OSErrors
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or "not set"
        raise UserError(f"the vocabulary {name} could not be fetched (no network?): set "
                        "TIKTOKEN_CACHE_DIR to a folder where tiktoken has kept it, now "
                        f"{folder}; {type(e).__name__}") from None
    by_id = {id: token for token, id in encoding._mergeable_ranks.items()}
    return BPETokenizer(encoding._pat_str, [by_id.get(id) for id in range(max(by_id) + 1)],
                        encoding._special_tokens.get(END_OF_TEXT))


def first_token(tokenizer: Tokenizer) -> int:
    """What a text without a prompt starts from.

    As a new document does, else with a new line, else with the alphabet's first character.
    """
    for id in (tokenizer.begin_of_text, tokenizer.end_of_text):
        if id is not None:
            return id
    return tokenizer.encode("\n" if "\n" in tokenizer.alphabet else tokenizer.alphabet[0])[0]


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a model continues: the prompt's ids, after the tokenizer's begin-of-text, if it has one.

    For an empty prompt it is `first_token`.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        return [first_token(tokenizer)]
    return ids if tokenizer.begin_of_text is None else [tokenizer.begin_of_text, *ids]


# --- on disk --------------------------------------------------------------------------------------


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    path.write_text(json.dumps(tokenizer.to_json()), encoding="utf-8")


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
        return _bpe_from(saved)
    if saved["kind"] == "hf":
        return HFTokenizer(saved["tokenizer"], saved["end_of_text"])
    raise ValueError(f"its kind is {saved['kind']!r}")


def _bpe_from(saved: dict) -> BPETokenizer:
    _check_pattern(saved["pattern"])
    tokens = [token if token is None else base64.b64decode(token, validate=True)
              for token in saved["tokens"]]
    known = [token for token in tokens if token is not None]
    end = saved.get("end_of_text", len(tokens))
    if len(set(known)) < len(known) or not {bytes([b]) for b in range(256)} <= set(known):
        raise ValueError("its tokens are not distinct, or lack a byte")
    if not 0 <= end < len(tokens) + 4096 or (end < len(tokens) and tokens[end] is not None):
        raise ValueError("its end-of-text token has the id of another, or none that fits")
    return BPETokenizer(saved["pattern"], tokens, end)


def _check_pattern(pattern: str) -> None:
    """Raise ValueError for a pattern that is none, leaves characters out, or matches nothing.

    The last would end tiktoken.
    """
    # With a token of its own, an empty match can be seen.
    ranks = {bytes([b]): b for b in range(256)} | {b"": 256}
    probe = "It's 1234 words\u3000of  漢字, café_x!\r\n\n\t\tend  "
    with as_value_error():
        split = tiktoken.Encoding("probe", pat_str=pattern, special_tokens={},
                                  mergeable_ranks=ranks)
        if split.encode_ordinary(probe) != list(probe.encode()):
            raise ValueError(f"its pattern {pattern[:40]!r} leaves characters out, "
                             "or matches where there are none")


# --- in Hugging Face's files ----------------------------------------------------------------------


def hf_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """The files, name → text, from which transformers' AutoTokenizer makes this tokenizer.

    It has the same ids of any text there.

    Raises:
        UserError: the splitting pattern means something else to the `tokenizers` library.
    """
    if isinstance(tokenizer, HFTokenizer):
        library = Library.from_str(tokenizer.description)
    elif isinstance(tokenizer, CharTokenizer):
        # Without an unknown token a character outside the alphabet is an error there too.
        ids = {c: id for id, c in enumerate(tokenizer.alphabet)}
        library = Library(models.WordLevel(ids, unk_token="<unk>"))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    else:
        library = _byte_level(tokenizer)
    end = tokenizer.special.get(tokenizer.end_of_text)
    names = {"eos_token": end, "pad_token": end,  # where rows are filled up, it is not looked at
             "bos_token": tokenizer.special.get(tokenizer.begin_of_text)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False, "model_max_length": block_size,
                **{key: name for key, name in names.items() if name is not None}}
    return {FILE: library.to_str(), SETTINGS: json.dumps(settings, indent=1)}


def _byte_level(tokenizer: BPETokenizer) -> Library:
    character = {byte: c for c, byte in byte_level_alphabet().items()}
    ids = {token: id for id in range(tokenizer.vocab_size) if (token := tokenizer.token_bytes(id))}
    name_of = {token: "".join(character[b] for b in token) for token in ids}
    merges = [(name_of[pair[0]], name_of[pair[1]])
              for token in ids if len(pair := last_pair(token, ids)) == 2]
    vocabulary = {name_of[token]: id for token, id in ids.items()}
    vocabulary |= {name: id for id, name in tokenizer.special.items()}
    library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
    # {1,3}+ is possessive to tiktoken; there it would repeat the repetition.
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.pattern)
    try:
        with as_value_error():
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except ValueError as e:
        raise UserError(f"this tokenizer's splitting pattern is none to transformers ({e}), "
                        "so it cannot be exported") from None
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([special_token(name) for name in tokenizer.special.values()])
    library.encode_special_tokens = True
    for token in ids:  # the two engines of regular expressions are not the same
        word = token.decode(errors="replace")
        text = f"{word} 12345 'sX\n\n  \t{word}"
        if library.encode(text).ids != tokenizer.encode(text):
            raise UserError("this tokenizer's splitting pattern means something else to "
                            f"transformers, which makes other tokens of {text!r}, so it cannot "
                            "be exported")
    library.encode_special_tokens = False
    return library


def last_pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that byte-pair encoding joins last into a token.

    A byte is one part; what no merge leads to, more. Wherever the token comes about within a text,
    its bytes have been joined among themselves alone and in this same order, so that these two are
    the only ones that ever become it: one merge for each token is all.
    """
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i)
                       for i in range(len(parts) - 1))
        if rank == len(ranks):
            break
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts
