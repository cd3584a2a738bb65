"""Read tokenizers from Hugging Face's files, and run them with the `tokenizers` library."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.files import read_json_object
from common.text import replace_surrogates
from data.panics import is_panic, panics_as_errors

HF_TOKENIZER_FILE = "tokenizer.json"
HF_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Text of all kinds, on which a damaged tokenizer would fail later.
PROBE_TEXT = (
    f" The 1,234th word's {'a' * 64}!\n\n\tx = 'é漢字😀'\r\n\0" + "  " * 32 + "1" * 64 + "." * 64
)
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKEN_ROLES = ("eos_token", "bos_token", "unk_token", "pad_token")
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how byte-fallback vocabularies name a byte


class HFTokenizer:
    """A tokenizer that a tokenizer.json describes.

    The name of a special token in a text is encoded as ordinary text.

    Attributes:
        description: Content of the tokenizer.json.
        vocab_size: One more than the largest id.
        special: Names of the tokens that stand for no text, by id.
        end_of_text: Id of the token that ends a text, or None.
        begin_of_text: Id of the token that the tokenizer puts before a text, or None.
    """

    def __init__(self, description: str, end_of_text: int | None = None) -> None:
        """Build a tokenizer. An `end_of_text` that is not in the vocabulary is ignored.

        Raises:
            ValueError: The vocabulary is empty, or several tokens have the same id.
            Exception: The library cannot read the description.
            BaseException: The library panics, now or with `PROBE_TEXT`; see `panics_as_errors`.
        """
        self._library = _open_library(description)
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self._added = self._library.get_added_tokens_decoder()
        self._vocabulary = {id: token for token, id in self._library.get_vocab().items()}
        self.special = {id: token.content for id, token in self._added.items() if token.special}
        ordinary = self._vocabulary.keys() - self.special.keys()
        if not ordinary:
            raise ValueError("its vocabulary is empty")
        self.description = description
        self.vocab_size = max(self._vocabulary) + 1
        self.end_of_text = end_of_text if end_of_text in self._vocabulary else None
        # What the tokenizer puts before a text is known only by encoding one
        encoded = self._library.encode(self._vocabulary[min(ordinary)])
        has_begin = encoded.special_tokens_mask[:1] == [1] and encoded.ids[0] in self._vocabulary
        self.begin_of_text: int | None = encoded.ids[0] if has_begin else None
        for text in ("", PROBE_TEXT, *PROBE_TEXT.split()):
            with suppress(Exception):  # it may lack characters
                self.decode(self._library.encode(text).ids)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text, without the tokens put before and after it: int64 (tokens,).

        Raises:
            UserError: The tokenizer has no token for a character.
        """
        try:
            self._check_characters(text)
            ids = self._library.encode(text, add_special_tokens=False).ids
        except BaseException as e:  # the library raises plain Exceptions, and panics
            if not isinstance(e, Exception) and not is_panic(e):
                raise
            raise UserError(
                f"this model's tokenizer cannot encode {text[:20]!r} ({e}); leave out the "
                "characters that it does not know"
            ) from None
        return np.array(ids, dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Half a surrogate pair, as in arguments, becomes U+FFFD."""
        with panics_as_errors():
            return self.encode_array(replace_surrogates(text)).tolist()

    def _check_characters(self, text: str) -> None:
        """Raise ValueError if a character has no token, because the library would leave it out."""
        if self._known_characters is None:
            return
        normalizer, splitter = self._library.normalizer, self._library.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        parts = splitter.pre_tokenize_str(text) if splitter else [(text, (0, len(text)))]
        for part, (start, end) in parts:
            if not self._known_characters.issuperset(part):
                raise ValueError(f"it has no token for part of {text[start:end][:20]!r}")

    @cached_property
    def _known_characters(self) -> set[str] | None:
        """The characters, or spelled bytes, with tokens; None if the library leaves out none."""
        content = json.loads(self.description)
        model = content["model"]
        if model.get("type") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
            return None
        prefix = model.get("continuing_subword_prefix") or ""
        suffix = model.get("end_of_word_suffix") or ""
        vocabulary = model["vocab"].keys()
        known = {
            token
            for token in vocabulary
            if len(token) == 1 and {prefix + token, token + suffix} <= vocabulary
        }
        spells_bytes = '"ByteLevel"' in json.dumps(
            [content.get("pre_tokenizer"), content.get("normalizer")]
        )
        if spells_bytes and known >= byte_level_alphabet().keys():
            return None
        ordinary = (token.content for token in self._added.values() if not token.special)
        return known.union(*ordinary)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, or b"" for special tokens and unused ids."""
        return self._bytes.get(id, b"")

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes that each token decodes to; they depend on the decoder in the description."""
        decoder = json.dumps(json.loads(self.description).get("decoder"))
        decoder_types = set(re.findall(r'"type":\s*"(\w+)"', decoder))
        has_byte_tokens = "ByteFallback" in decoder_types
        is_byte_level = "ByteLevel" in decoder_types
        has_space_marks = bool(decoder_types & {"Replace", "Metaspace"})
        byte_of = byte_level_alphabet()

        bytes_of = {}
        for id, token in self._vocabulary.items():
            byte_token = BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
            if id in self.special:
                bytes_of[id] = b""
            elif id in self._added:
                bytes_of[id] = token.encode()
            elif is_byte_level and all(character in byte_of for character in token):
                bytes_of[id] = bytes(byte_of[character] for character in token)
            elif byte_token:
                bytes_of[id] = bytes([int(byte_token[1], 16)])
            elif has_space_marks:
                bytes_of[id] = token.replace("▁", " ").encode()
            else:
                bytes_of[id] = token.encode()
        return bytes_of

    def limit_special_tokens(self, vocab_size: int) -> "HFTokenizer":
        """Return the tokenizer without the special tokens of ids from `vocab_size` on.

        The model lacks them: some, for example for padding, are added after its training. A
        tokenizer that has other tokens of such ids is returned as it is.
        """
        extra = {id for id in self._vocabulary if id >= vocab_size}
        if not extra or extra - self.special.keys():
            return self
        content = json.loads(self.description)
        content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] not in extra]
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            kept: Any = {token: id for token, id in vocabulary.items() if id not in extra}
        else:
            kept = vocabulary[:vocab_size]
        content["model"]["vocab"] = kept
        return HFTokenizer(json.dumps(content), self.end_of_text)

    def to_json(self) -> dict[str, Any]:
        """Return what `load_tokenizer` needs."""
        return {"kind": "hf", "tokenizer": self.description, "end_of_text": self.end_of_text}


def read_tokenizer(folder: Path, config: dict[str, Any]) -> HFTokenizer:
    """Read the tokenizer in a folder of Hugging Face's format.

    The folder's config.json (`config`) names end-of-text if nothing else does.

    Raises:
        UserError: There is no tokenizer.json, or a file is not JSON.
        Exception: The library cannot read the tokenizer.json.
    """
    if not (folder / HF_TOKENIZER_FILE).is_file():
        raise UserError(
            f"{folder} has no {HF_TOKENIZER_FILE}: copy it from the folder of the model that this "
            f"one began with; or, to make it from other tokenizer files here, run "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') with "
            "transformers installed"
        )
    roles = _special_token_names(folder)
    library = _open_library(json.dumps(read_json(folder / HF_TOKENIZER_FILE)))
    known_names = [name for name in roles.values() if library.token_to_id(name) is not None]
    library.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in known_names]
    )
    if "eos_token" in roles:
        end_of_text = library.token_to_id(roles["eos_token"])
    else:
        end_of_text = config.get("eos_token_id")
        if isinstance(end_of_text, list) and end_of_text:
            end_of_text = end_of_text[0]
    return HFTokenizer(library.to_str(), end_of_text if isinstance(end_of_text, int) else None)


def _open_library(description: str) -> Library:
    """Return the tokenizer of a description, always with the same ids for the same text.

    Raises:
        ValueError: Several tokens have the same id.
        Exception: The library cannot read the description.
    """
    library = Library.from_str(description)
    ids = list(library.get_vocab().values())
    if len(set(ids)) < len(ids):
        raise ValueError("several of its tokens have the same id")
    if isinstance(library.model, models.BPE):
        library.model.dropout = None
    return library


def _special_token_names(folder: Path) -> dict[str, str]:
    """Return the names of the special tokens by role, from tokenizer_config.json if it exists."""
    path = folder / HF_TOKENIZER_CONFIG_FILE
    settings = read_json(path) if path.is_file() else {}
    names = {}
    for role in SPECIAL_TOKEN_ROLES:
        name = settings.get(role)
        if isinstance(name, dict):
            name = name.get("content")
        if isinstance(name, str) and name:
            names[role] = name
    return names


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: The file does not hold one.
    """
    try:
        return read_json_object(path)
    except ValueError as e:
        raise UserError(
            f"{path} cannot be read as JSON ({e}); download or export it again"
        ) from None


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Reference:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    # Printable Latin-1 stands for itself; the characters from 256 on for the other bytes, in order
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    other_bytes = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {
        character: ord(character) if ord(character) < 256 else other_bytes[ord(character) - 256]
        for character in alphabet
    }
