"""Tokenizers in Hugging Face's files: read, and run by the `tokenizers` library."""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.files import read_json_object

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"


class HFTokenizer:
    """What a tokenizer.json describes; the name of a special token in a text is ordinary text."""

    def __init__(self, description: str, end_of_text: int | None = None):
        """`description` is the text of a tokenizer.json; what it puts first is `begin_of_text`."""
        self._library = Library.from_str(description)
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self._added = self._library.get_added_tokens_decoder()
        self._vocabulary = {id: token for token, id in self._library.get_vocab().items()}
        self.special = {id: token.content for id, token in self._added.items() if token.special}
        ordinary = self._vocabulary.keys() - self.special.keys()
        if not ordinary:
            raise ValueError("its vocabulary is empty")
        whole = self._library.encode(self._vocabulary[min(ordinary)])
        self.description = description
        self.vocab_size = max(self._vocabulary) + 1
        self.end_of_text = end_of_text if end_of_text in self._vocabulary else None
        self.begin_of_text = whole.ids[0] if whole.special_tokens_mask[:1] == [1] else None

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without what the tokenizer would put before and after it."""
        try:
            return self._library.encode(text, add_special_tokens=False).ids
        except Exception as e:  # it has no class of its own for a character that it does not know
            raise UserError(f"this model's tokenizer cannot encode {text[:20]!r}: {e}") from None

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token: none for a special one, and for ids beyond the vocabulary."""
        return self._bytes.get(id, b"")

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes of every token, as the decoder of the description would have them."""
        decoder = json.dumps(json.loads(self.description)["decoder"])
        kinds, byte_of = set(re.findall(r'"type":\s*"(\w+)"', decoder)), byte_level_alphabet()
        found = {}
        for id, token in self._vocabulary.items():
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token) if "ByteFallback" in kinds else None
            if id in self._added:
                found[id] = b"" if id in self.special else token.encode()
            elif "ByteLevel" in kinds and all(c in byte_of for c in token):
                found[id] = bytes(byte_of[c] for c in token)
            elif byte:
                found[id] = bytes([int(byte[1], 16)])
            else:
                has_spaces = kinds & {"Replace", "Metaspace"}
                found[id] = (token.replace("▁", " ") if has_spaces else token).encode()
        return found

    def to_json(self) -> dict:
        return {"kind": "hf", "tokenizer": self.description, "end_of_text": self.end_of_text}


def read_tokenizer(folder: Path, config: dict) -> HFTokenizer:
    """The tokenizer in a folder of Hugging Face's format, whose config.json is `config`."""
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    names = {
        key: name.get("content") if isinstance(name, dict) else name
        for key in ("eos_token", "bos_token", "unk_token", "pad_token")
        if (name := settings.get(key))
    }
    if not (folder / FILE).is_file():
        raise UserError(
            f"{folder} has no tokenizer.json, so text cannot become tokens: with transformers "
            f"installed, AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') "
            "makes one of other tokenizer files"
        )
    library = Library.from_str(json.dumps(read_json(folder / FILE)))
    library.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in names.values()
            if isinstance(name, str) and library.token_to_id(name) is not None
        ]
    )
    end = config.get("eos_token_id")
    if isinstance(names.get("eos_token"), str):
        end = library.token_to_id(names["eos_token"])
    elif isinstance(end, list) and end:
        end = end[0]
    return HFTokenizer(library.to_str(), end if isinstance(end, int) else None)


def read_json(path: Path) -> dict:
    """The object in a JSON file, or `UserError`."""
    try:
        return read_json_object(path)
    except ValueError as e:
        raise UserError(f"{path} cannot be read as JSON: {e}") from None


def byte_level_alphabet() -> dict[str, int]:
    """Which byte each character of the byte-level alphabet stands for (Radford et al. 2019)."""
    # Printable Latin-1 stands for itself; the characters from 256 on for the other bytes, in order.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = [b for b in range(256) if chr(b) not in alphabet]
    return {c: ord(c) if ord(c) < 256 else others[ord(c) - 256] for c in alphabet}
