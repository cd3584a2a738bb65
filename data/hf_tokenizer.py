"""Tokenizers in Hugging Face's files: read, run by the `tokenizers` library, and written for the models that leave."""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from config import UserError
from data.tokenizer import END_OF_TEXT, BPETokenizer, CharTokenizer, Tokenizer, as_value_error, byte_spelling

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
LARGEST = 100_000_000  # bytes of a JSON file that is read


class HFTokenizer:
    """What a tokenizer.json describes. Text never produces a special token: its name in a text is encoded as ordinary characters."""

    def __init__(self, description: str, end_of_text: int | None = None):
        """`description` is the text of a tokenizer.json; what it puts before every text is `begin_of_text`.

        Raises:
            ValueError: it describes no tokenizer.
        """
        with as_value_error():
            self._library = Library.from_str(description)
            self._library.no_truncation()
            self._library.no_padding()
            self._library.encode_special_tokens = True
            self._vocabulary = {id: token for token, id in self._library.get_vocab().items()}
            self.special = {id: token.content for id, token in self._library.get_added_tokens_decoder().items() if token.special}
            ordinary = self._vocabulary.keys() - self.special.keys()
            if not ordinary:
                raise ValueError("its vocabulary is empty")
            whole = self._library.encode(self._vocabulary[min(ordinary)])
        self.description = description
        self.vocab_size = max(self._vocabulary) + 1
        self.end_of_text = end_of_text if end_of_text in self._vocabulary else None
        self.begin_of_text = whole.ids[0] if whole.special_tokens_mask[:1] == [1] else None

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without what the tokenizer would put before and after it.

        Raises:
            UserError: the tokenizer does not know a character.
        """
        try:
            with as_value_error():
                return self._library.encode(text, add_special_tokens=False).ids
        except ValueError as e:
            raise UserError(f"this model's tokenizer cannot encode {text[:20]!r}: {e}") from None

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: none for a special one and for ids that a model has beyond its tokenizer's."""
        return self._bytes.get(id, b"")

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes of every token, as the decoder of the description would have them."""
        kinds = set(re.findall(r'"type":\s*"(\w+)"', json.dumps(json.loads(self.description)["decoder"])))
        added, spelled, made = self._library.get_added_tokens_decoder(), byte_spelling(), {}
        for id, token in self._vocabulary.items():
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token) if "ByteFallback" in kinds else None
            if id in added:
                made[id] = b"" if added[id].special else token.encode()
            elif "ByteLevel" in kinds and all(c in spelled for c in token):
                made[id] = bytes(spelled[c] for c in token)
            else:
                made[id] = bytes([int(byte[1], 16)]) if byte else (token.replace("▁", " ") if kinds & {"Replace", "Metaspace"} else token).encode()
        return made

    @cached_property
    def alphabet(self) -> str:
        """The characters that are tokens by themselves."""
        texts = (token.decode(errors="ignore") for token in self._bytes.values())
        return "".join(sorted({text for text in texts if len(text) == 1}))

    def to_json(self) -> dict:
        return {"kind": "hf", "tokenizer": self.description, "end_of_text": self.end_of_text}


def read_tokenizer(folder: Path, config: dict) -> HFTokenizer:
    """The tokenizer in a folder of Hugging Face's format, whose config.json is `config`.

    Raises:
        UserError: there is none, or none that can be read without running code of others.
    """
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    named = {key: name.get("content") if isinstance(name, dict) else name
             for key in ("eos_token", "bos_token", "unk_token", "pad_token") if (name := settings.get(key))}
    try:
        if (folder / FILE).is_file():
            description = json.dumps(read_json(folder / FILE))
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and config.get("model_type") == "gpt2":
            description = _gpt2_files(folder)
            named.setdefault("eos_token", END_OF_TEXT)
        else:
            raise UserError(f"{folder} has no tokenizer.json, so text cannot become tokens: with transformers installed, "
                            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') makes one of other tokenizer files")
        with as_value_error():
            library = Library.from_str(description)
            library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in named.values()
                                        if isinstance(name, str) and library.token_to_id(name) is not None])
        end = config.get("eos_token_id")
        if isinstance(named.get("eos_token"), str):
            end = library.token_to_id(named["eos_token"])
        elif isinstance(end, list) and end:
            end = end[0]
        return HFTokenizer(library.to_str(), end if isinstance(end, int) else None)
    except ValueError as e:
        raise UserError(f"{folder} holds no tokenizer that can be read: {e}") from None


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, or is no JSON object.
    """
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST:,} bytes" if path.is_file() else "there is no such file")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
        return value
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} cannot be read as JSON: {getattr(e, 'strerror', None) or e}") from None


def _gpt2_files(folder: Path) -> str:
    """A tokenizer.json of GPT-2's own two files."""
    with as_value_error():
        library = Library(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return library.to_str()


def hf_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """The files, name → text, from which transformers' AutoTokenizer makes this tokenizer: the same ids of any text.

    Raises:
        UserError: the splitting pattern means something else to the `tokenizers` library.
    """
    if isinstance(tokenizer, HFTokenizer):
        library = Library.from_str(tokenizer.description)
    elif isinstance(tokenizer, CharTokenizer):
        # No unknown token stands for a character outside the alphabet: it is an error there as it is here.
        library = Library(models.WordLevel({c: id for id, c in enumerate(tokenizer.alphabet)}, unk_token="<unk>"))
        library.pre_tokenizer, library.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    else:
        library = _byte_level(tokenizer)
    special = tokenizer.special
    names = {"eos_token": special.get(tokenizer.end_of_text), "bos_token": special.get(tokenizer.begin_of_text)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": block_size,
                **{key: name for key, name in names.items() if name is not None}}
    return {FILE: library.to_str(), SETTINGS: json.dumps(settings, indent=1)}


def _byte_level(tokenizer: BPETokenizer) -> Library:
    character = {byte: c for c, byte in byte_spelling().items()}
    ids = {token: id for id in range(tokenizer.vocab_size) if id not in tokenizer.special and (token := tokenizer.token_bytes(id))}
    spelled = {token: "".join(character[b] for b in token) for token in ids}
    merges = [tuple(map(spelled.get, pair)) for token in ids if len(pair := last_pair(token, ids)) == 2]
    vocabulary = {spelled[token]: id for token, id in ids.items()} | {name: id for id, name in tokenizer.special.items()}
    library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.pattern)  # {1,3}+ is possessive to tiktoken; there it would repeat the repetition
    try:
        with as_value_error():
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except ValueError as e:
        raise UserError(f"this tokenizer's splitting pattern is none to transformers ({e}), so it cannot be exported") from None
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokenizer.special.values()])
    library.encode_special_tokens = True
    for token in ids:  # the two engines of regular expressions are not the same
        text = token.decode(errors="replace") + " 12345 'sX\n\n  \t" + token.decode(errors="replace")
        if library.encode(text).ids != tokenizer.encode(text):
            raise UserError("this tokenizer's splitting pattern means something else to transformers, "
                            f"which makes other tokens of {text!r}, so it cannot be exported")
    library.encode_special_tokens = False
    return library


def last_pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that byte-pair encoding joins last into a token (a byte is one part; what no merge leads to, more).

    Wherever the token comes about within a text, its bytes have been joined among themselves alone and in this same order, so
    that these two are the only ones that ever become it: one merge a token says all.
    """
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1))
        if rank == len(ranks):
            break
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts
