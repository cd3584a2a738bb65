"""Write tokenizers as the files from which transformers' AutoTokenizer builds them."""

import json
import re
from collections.abc import Iterable
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

    Args:
        tokenizer: The tokenizer.
        block_size: Context length of its model, in tokens.

    Raises:
        UserError: The `tokenizers` library would turn some texts into other tokens.
    """
    # In transformers end-of-text also fills up rows of different lengths
    end_name = _name_of(tokenizer, tokenizer.end_of_text)
    begin_name = _name_of(tokenizer, tokenizer.begin_of_text)
    names = {"eos_token": end_name, "pad_token": end_name, "bos_token": begin_name}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
        **{role: name for role, name in names.items() if name is not None},
    }
    return {
        HF_TOKENIZER_FILE: _to_library(tokenizer).to_str(),
        HF_TOKENIZER_CONFIG_FILE: json.dumps(settings, indent=1),
    }


def find_last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two parts that byte-pair encoding joins last into a token.

    The bytes of a token are always joined in the same order, wherever it occurs. So no other two
    parts ever become it, and one merge per token describes the encoding.

    Args:
        token: The bytes of the token.
        ranks: Rank of every token's merge.

    Returns:
        The two parts, or None for a single byte and for a token that no merge leads to.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    unmergeable = len(ranks)
    while len(parts) > 2:
        merges = [
            (ranks.get(left + right, unmergeable), i)
            for i, (left, right) in enumerate(pairwise(parts))
        ]
        rank, i = min(merges)
        if rank == unmergeable:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _name_of(tokenizer: Tokenizer, id: int | None) -> str | None:
    return None if id is None else tokenizer.special.get(id)


def _to_library(tokenizer: Tokenizer) -> Library:
    if isinstance(tokenizer, HFTokenizer):
        return Library.from_str(tokenizer.description)
    if isinstance(tokenizer, CharTokenizer):
        return _characters_to_library(tokenizer)
    return _bpe_to_library(tokenizer)


def _characters_to_library(tokenizer: CharTokenizer) -> Library:
    """Build a word-level tokenizer. It turns unknown characters into spaces, or into token 0."""
    ids = {character: id for id, character in enumerate(tokenizer.alphabet)}
    unknown = " " if " " in ids else tokenizer.alphabet[0]
    library = Library(models.WordLevel(ids, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return library


def _bpe_to_library(tokenizer: BPETokenizer) -> Library:
    # Spell every token in the byte-level alphabet
    character_of = {byte: character for character, byte in byte_level_alphabet().items()}
    ids = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    ids.pop(b"", None)  # special tokens and unused ids
    name_of = {token: "".join(character_of[byte] for byte in token) for token in ids}

    # Recover the merges
    merges = []
    for token in ids:
        pair = find_last_merge(token, ids)
        if pair is not None:
            merges.append((name_of[pair[0]], name_of[pair[1]]))

    # Build the library's tokenizer
    vocabulary = {name_of[token]: id for token, id in ids.items()}
    vocabulary |= {name: id for id, name in tokenizer.special.items()}
    library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in tokenizer.special.values()]
    )
    # {1,3}+ is possessive in tiktoken; the library would read it as a repeated repetition
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.pattern)
    if not _splits_alike(library, pattern, tokenizer, ids):
        raise UserError(
            "the tokenizer cannot be exported: with its pattern "
            f"{tokenizer.pattern!r}, transformers would turn some texts into other tokens; "
            "to export the model alone, call interop.save_hf(model, folder) in Python"
        )
    return library


def _splits_alike(
    library: Library, pattern: str, tokenizer: BPETokenizer, tokens: Iterable[bytes]
) -> bool:
    """Return whether the library with a pattern and the tokenizer give texts the same ids.

    Their regular expressions differ in details. They are compared on a text around each token. The
    library's pre-tokenizer is set to the pattern.
    """
    try:
        library.pre_tokenizer = byte_level_split(pattern)
        for token in tokens:
            word = token.decode(errors="replace")
            text = f"{word} 12345 'sX\n\n  \t{word}"
            if library.encode(text).ids != tokenizer.encode(text):
                return False
        return True
    except Exception:  # the library cannot read the pattern
        return False
