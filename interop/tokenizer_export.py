"""Write tokenizers as the files from which transformers' AutoTokenizer builds them."""

import json
import re
from itertools import pairwise

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from common.errors import UserError
from data.hf_tokenizer import (
    HF_TOKENIZER_CONFIG_FILE,
    HF_TOKENIZER_FILE,
    HFTokenizer,
    byte_level_alphabet,
)
from data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, byte_level_split


def export_tokenizer(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """Return the content of a tokenizer's files by their names.

    Raises:
        UserError: The `tokenizers` library would turn some texts into other tokens.
    """
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
    }
    roles = {
        "eos_token": tokenizer.end_of_text,
        "pad_token": tokenizer.end_of_text,  # fills up rows of different lengths
        "bos_token": tokenizer.bos_token_id,
    }
    for role, id in roles.items():
        if id is not None and id in tokenizer.special:
            settings[role] = tokenizer.special[id]
    if tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template
    return {
        HF_TOKENIZER_FILE: describe_for_library(tokenizer),
        HF_TOKENIZER_CONFIG_FILE: json.dumps(settings, indent=1),
    }


def begin_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that begins a text in other libraries."""
    begin = tokenizer.bos_token_id
    return tokenizer.end_of_text if begin is None else begin


def describe_for_library(tokenizer: Tokenizer) -> str:
    """Return the content of the tokenizer.json of a tokenizer; see `export_tokenizer`."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.description
    if isinstance(tokenizer, CharTokenizer):
        return _characters_to_library(tokenizer).to_str()
    return _bpe_to_library(tokenizer).to_str()


def _characters_to_library(tokenizer: CharTokenizer) -> Library:
    """Build a word-level tokenizer. It turns unknown characters into spaces, or into token 0."""
    ids = {character: id for id, character in enumerate(tokenizer.alphabet)}
    unknown = " " if " " in ids else tokenizer.alphabet[0]
    library = Library(models.WordLevel(ids, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return library


def _bpe_to_library(tokenizer: BPETokenizer) -> Library:
    tokens = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    tokens.pop(b"", None)  # special tokens and unused ids
    library = _build_bpe(tokens, tokenizer.special)
    # {1,3}+ is a possessive quantifier in tiktoken, and a repeated one in the library
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.pattern)
    try:
        library.pre_tokenizer = byte_level_split(pattern)
        is_equal = all(_encode_alike(library, tokenizer, token) for token in tokens)
    except Exception:  # the library cannot read the pattern
        is_equal = False
    if not is_equal:
        raise UserError(
            "the tokenizer cannot be exported: with its pattern "
            f"{tokenizer.pattern!r}, transformers would turn some texts into other tokens: "
            "to export the model alone, call interop.save_hf(model, folder) in Python"
        )
    return library


def _build_bpe(tokens: dict[bytes, int], special: dict[int, str]) -> Library:
    """Build a tokenizer from the ids of tokens and the names of special tokens, without a split."""
    # The library spells every token in the byte-level alphabet
    character_of = {byte: character for character, byte in byte_level_alphabet().items()}
    name_of = {token: "".join(character_of[byte] for byte in token) for token in tokens}
    vocabulary = {name_of[token]: id for token, id in tokens.items()}
    vocabulary |= {name: id for id, name in special.items()}

    merges = []
    for token in tokens:
        if parts := _find_last_merge(token, tokens):
            left, right = parts
            merges.append((name_of[left], name_of[right]))

    library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special.values()]
    )
    return library


def _encode_alike(library: Library, tokenizer: BPETokenizer, token: bytes) -> bool:
    """Return whether a text with this token becomes the same tokens with both tokenizers."""
    word = token.decode(errors="replace")
    text = f"{word} 12345 'sX\n\n  \t{word}"
    return library.encode(text).ids == tokenizer.encode(text)


def _find_last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two parts that byte-pair encoding joins last into a token, if any.

    The bytes of a token are always joined in the same order, wherever it occurs. So no other two
    parts ever become it, and one merge per token describes the encoding.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    unmergeable = len(ranks)
    while len(parts) > 2:
        joined = [left + right for left, right in pairwise(parts)]
        joined_ranks = [ranks.get(part, unmergeable) for part in joined]
        rank = min(joined_ranks)
        if rank == unmergeable:
            break
        first = joined_ranks.index(rank)
        parts[first : first + 2] = [joined[first]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
