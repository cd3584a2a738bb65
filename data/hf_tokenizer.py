"""Read tokenizers from Hugging Face's files, and run them with the `tokenizers` library."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Encoding, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.files import read_json_object
from common.terminal import error_sentence
from common.text import replace_surrogates

HF_TOKENIZER_FILE = "tokenizer.json"
HF_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
HF_CHAT_TEMPLATE_FILE = "chat_template.jinja"
HF_GENERATION_FILE = "generation_config.json"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKEN_ROLES = ("eos_token", "bos_token", "unk_token", "pad_token")
MAX_VOCAB_SIZE = 10_000_000
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how byte-fallback vocabularies name a byte


class HFTokenizer:
    """A tokenizer of a tokenizer.json; names of special tokens in a text are ordinary text."""

    def __init__(
        self,
        description: str,
        end_of_text: int | Iterable[int | None] | None = None,
        bos_token_id: int | None = None,
        chat_template: Any = None,
    ) -> None:
        """Build a tokenizer. Ids that are not in the vocabulary are ignored.

        Each id in `end_of_text` ends a text; the first one separates documents in training.
        `bos_token_id` and `chat_template`, which is never rendered, are kept for exports only.
        """
        self._library = build_library(description)
        if isinstance(self._library.model, models.BPE):
            self._library.model.dropout = None  # always the same ids for the same text
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self._added = self._library.get_added_tokens_decoder()
        self._vocabulary = {id: token for token, id in self._library.get_vocab().items()}
        self.special = {id: token.content for id, token in self._added.items() if token.special}
        self.description = description
        self.vocab_size = max(self._vocabulary) + 1
        ends = end_of_text if isinstance(end_of_text, Iterable) else [end_of_text]
        known_ends = dict.fromkeys(id for id in ends if id is not None and id in self._vocabulary)
        self.end_of_text_ids = tuple(known_ends)
        self.end_of_text = next(iter(self.end_of_text_ids), None)
        self.begin_of_text = self._find_begin()
        self.bos_token_id = self.begin_of_text
        if self.begin_of_text is None and bos_token_id in self._vocabulary:
            self.bos_token_id = bos_token_id
        is_text = isinstance(chat_template, str)
        self.chat_template = replace_surrogates(chat_template) if is_text else None

    def _find_begin(self) -> int | None:
        """Return the id that is put before each text, which is known only by encoding one."""
        ordinary = self._vocabulary.keys() - self.special.keys()
        with panics_as_errors():
            encoded = self._library.encode(self._vocabulary[min(ordinary)])
        has_begin = encoded.special_tokens_mask[:1] == [1]
        return encoded.ids[0] if has_begin else None

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 (tokens,), without tokens put before and after it."""
        return np.array(self._encode(text).ids, dtype=np.int64)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and the UTF-8 bytes of it that each token stands for.

        Both are int64 (tokens,). The bytes are those of the text before it is normalized; a
        character that has no token, or several, counts for one of its neighbors, or the first.
        """
        encoding = self._encode(text)
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        sizes = sum((code_points >= limit).astype(np.int64) for limit in (0, 0x80, 0x800, 0x10000))
        bytes_before = np.concatenate(([0], np.cumsum(sizes)))  # each character, and the end
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        ends[-1:] = len(text)
        byte_ends = bytes_before[np.maximum.accumulate(ends)]
        return np.array(encoding.ids, dtype=np.int64), np.diff(byte_ends, prepend=0)

    def _encode(self, text: str) -> Encoding:
        try:
            with panics_as_errors():
                return self._library.encode(text, add_special_tokens=False)
        except Exception as e:  # the library raises plain Exceptions
            raise UserError(
                f"this model's tokenizer cannot encode {text[:20]!r} ({error_sentence(e)}): "
                "leave out the characters that it does not know"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Half a surrogate pair, as in arguments, becomes U+FFFD."""
        return self.encode_array(replace_surrogates(text)).tolist()

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
        has_byte_tokens = '"ByteFallback"' in decoder
        has_space_marks = '"Replace"' in decoder or '"Metaspace"' in decoder
        byte_of = byte_level_alphabet() if '"ByteLevel"' in decoder else {}

        bytes_of = {}
        for id, token in self._vocabulary.items():
            byte_token = BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
            if id in self._added:
                bytes_of[id] = b"" if id in self.special else token.encode()
            elif byte_token:
                bytes_of[id] = bytes.fromhex(byte_token[1])
            elif all(character in byte_of for character in token):
                bytes_of[id] = bytes(byte_of[character] for character in token)
            else:
                bytes_of[id] = (token.replace("▁", " ") if has_space_marks else token).encode()
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
        kept_for_exports = self.bos_token_id, self.chat_template
        return HFTokenizer(json.dumps(content), self.end_of_text_ids, *kept_for_exports)

    def to_json(self) -> dict[str, Any]:
        """Return what `load_tokenizer` needs."""
        return {
            "kind": "hf",
            "tokenizer": self.description,
            "end_of_text": self.end_of_text_ids,
            "bos_token_id": self.bos_token_id,
            "chat_template": self.chat_template,
        }


# --- the library ----------------------------------------------------------------------------------


def build_library(description: str) -> Library:
    """Build the tokenizer of a tokenizer.json.

    Raises:
        UserError: It has too high an id.
        Exception: It cannot be read.
    """
    with panics_as_errors():
        library = Library.from_str(description)
    check_vocab_size(max(library.get_vocab().values()) + 1)
    return library


def check_vocab_size(vocab_size: int) -> None:
    """Raise `UserError` if a vocabulary is too large: memory is taken for every id up to its size.

    A few bytes of a file can hold a high id.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise UserError(
            f"its {HF_TOKENIZER_FILE} has the id {vocab_size - 1:,}, above the {MAX_VOCAB_SIZE:,} "
            "tokens that are supported: use the original file of the model"
        )


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of the library, which is no `Exception`, into one."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise ValueError(str(e)) from None


# --- files ----------------------------------------------------------------------------------------


def read_tokenizer(file: Path, config: dict[str, Any]) -> HFTokenizer:
    """Read a tokenizer.json and the files beside it; `config` is the config.json of its model.

    Any `Exception` may come from the library if it cannot read the tokenizer.json.
    """
    folder = file.parent
    if not file.is_file():
        raise UserError(
            f"{folder} has no {HF_TOKENIZER_FILE}: copy it from the folder of the model that this "
            f"one began with; or, to make it from other tokenizer files here, run "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') with "
            "transformers installed"
        )
    settings_file = folder / HF_TOKENIZER_CONFIG_FILE
    settings = read_json(settings_file) if settings_file.is_file() else {}
    roles = {
        role: name["content"] if isinstance(name, dict) else name
        for role in SPECIAL_TOKEN_ROLES
        if (name := settings.get(role))
    }
    library = build_library(json.dumps(read_json(file)))
    known_names = [name for name in roles.values() if library.token_to_id(name) is not None]
    library.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in known_names]
    )

    generation_file = folder / HF_GENERATION_FILE
    generation = read_json(generation_file) if generation_file.is_file() else {}
    ends = [library.token_to_id(roles.get("eos_token", ""))]
    ends += _read_ids(config, "eos_token_id") + _read_ids(generation, "eos_token_id")
    begins = _read_ids(config, "bos_token_id")
    if "bos_token" in settings:  # even null prevails
        begins = [library.token_to_id(roles.get("bos_token", ""))]
    template = _read_chat_template(folder, settings)
    return HFTokenizer(library.to_str(), ends, next(iter(begins), None), template)


def _read_ids(settings: dict[str, Any], name: str) -> list[int | None]:
    """Return the token ids in a setting: an id, a list of ids, or null."""
    value = settings.get(name)
    return value if isinstance(value, list) else [value]


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> Any:
    path = folder / HF_CHAT_TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):  # of several, each with a name
        named = [entry for entry in template if isinstance(entry, dict)]
        return next((t.get("template") for t in named if t.get("name") == "default"), None)
    return template


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        return read_json_object(path)
    except ValueError as e:
        raise UserError(
            f"{path} cannot be read as JSON ({e}): download or export it again"
        ) from None


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet (Radford et al. 2019, GPT-2)."""
    # Printable Latin-1 stands for itself; the characters from 256 on for the other bytes, in order
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    other_bytes = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {
        character: ord(character) if ord(character) < 256 else other_bytes[ord(character) - 256]
        for character in alphabet
    }
