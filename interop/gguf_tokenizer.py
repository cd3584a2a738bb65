"""Build the tokenizer of a .gguf file from its tables of tokens and merges, and write these."""

import json
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.settings import show_value
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import Tokenizer, byte_level_split
from interop.tokenizer_export import begin_id, describe_for_library

PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
# Metadata that name the tokens which end a text, a turn and a message; llama.cpp stops at each, and
# at control tokens of these names.
END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_NAMES = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
NORMAL_TOKEN = 1  # types of tokens in tokenizer.ggml.token_type
CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4
UNUSED_TOKEN = 5
# Of Llama 3 and Qwen 2: how text is split before merging, without the number of digits in a group.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT_GROUPS = {"llama-bpe": "{1,3}", "qwen2": ""}
# How the models of an architecture split text, if an older file does not say so.
DEFAULT_SPLITS = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}
UNSUPPORTED = (
    "this model's tokenizer cannot be written as .gguf, because llama.cpp would split, merge or "
    "end some texts in another way; train with tokenizer=bpe tokenizer.pattern=gpt2, or export the "
    "model to a folder"
)
# Text on which the rules differ: words with _ and capitals, numbers, white space and its ends.
SPLIT_PROBE = (
    f" The 1,234th word's {'a' * 64}!\n\n\tx = 'é漢字😀'\r\n\0{'  ' * 32}{'1' * 64}{'.' * 64}"
    " snake_case __init__ CamelCase I'LL don't x1y22 12345\tTab  \n \t\nx = (1.5);//\n"
    "\n    return\r\n  a  e\u0301\u00a0\u3000\u4e2d\u6587,\u0e44\u0e17 \u00b2\u216f!?\u2026 \n x  "
)


def read_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a .gguf file, which must be byte-level BPE.

    Raises:
        UserError: The tokenizer is of another kind, or splits text in an unknown way.
        Exception: A table is missing or damaged, or the library cannot build the tokenizer.
    """
    kind = metadata[f"{PREFIX}model"]
    tokens = metadata[f"{PREFIX}tokens"]
    if kind != "gpt2":
        raise UserError(
            f"{PREFIX}model={show_value(kind)} is not byte-level BPE (gpt2), the only type that "
            "can be read: use the model's Hugging Face folder instead"
        )
    split = metadata.get(f"{PREFIX}pre") or DEFAULT_SPLITS.get(metadata["general.architecture"])
    token_types = metadata.get(f"{PREFIX}token_type", [])

    library = _build_library(metadata, split)

    # Mark the tokens that the merges do not make
    library.add_tokens(
        [
            AddedToken(token, special=token_type == CONTROL_TOKEN, normalized=False)
            for token, token_type in zip(tokens, token_types)
            if token_type in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
        ]
    )

    # Put begin-of-text before each text
    begin = metadata.get(f"{PREFIX}bos_token_id")
    adds_begin = metadata.get(f"{PREFIX}add_bos_token", split == "llama-bpe")
    if adds_begin and begin is not None:
        library.post_processor = processors.TemplateProcessing(
            single=[tokens[begin], "$A"], special_tokens=[(tokens[begin], begin)]
        )
    ends = [metadata.get(f"{PREFIX}{key}") for key in END_TOKEN_KEYS]
    special = library.get_added_tokens_decoder()
    ends += [id for id, token in special.items() if token.special and token.content in END_NAMES]
    return HFTokenizer(library.to_str(), ends, begin, metadata.get(CHAT_TEMPLATE))


def _build_library(metadata: dict[str, Any], split: str | None) -> Library:
    """Build byte-level BPE from the tables of a file, without the tokens that it does not make."""
    tokens = metadata[f"{PREFIX}tokens"]
    token_types = metadata.get(f"{PREFIX}token_type", [])
    unused_ids = {id for id, token_type in enumerate(token_types) if token_type == UNUSED_TOKEN}
    ids = {token: id for id, token in enumerate(tokens) if id not in unused_ids}
    merges = [tuple(pair.split(" ", 1)) for pair in metadata[f"{PREFIX}merges"]]
    library = Library(models.BPE(ids, merges, ignore_merges=split == "llama-bpe"))
    library.pre_tokenizer = _build_pre_tokenizer(split)
    library.decoder = decoders.ByteLevel()
    if split == "qwen2":
        library.normalizer = normalizers.NFC()
    return library


def describe_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the metadata from which llama.cpp builds an equal tokenizer of `vocab_size` tokens.

    Raises:
        UserError: llama.cpp would turn some texts into other tokens.
    """
    description = describe_for_library(tokenizer)
    content = json.loads(description)
    split = _find_split(Library.from_str(description))
    if split is None or tokenizer.end_of_text is None:
        raise UserError(UNSUPPORTED)

    tokens, types = _list_tokens(content, vocab_size)
    merges = content["model"]["merges"]
    metadata = {
        "model": "gpt2",
        "pre": split,
        "tokens": tokens,
        "token_type": types,
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "add_bos_token": tokenizer.begin_of_text is not None,
        "bos_token_id": begin_id(tokenizer),
        **dict(zip(END_TOKEN_KEYS, tokenizer.end_of_text_ids)),
    }
    metadata = {f"{PREFIX}{name}": value for name, value in metadata.items()}
    if tokenizer.chat_template:
        metadata[CHAT_TEMPLATE] = tokenizer.chat_template
    if not _are_equal(read_gguf_tokenizer(metadata), tokenizer):
        raise UserError(UNSUPPORTED)
    return metadata


def _list_tokens(content: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the tokens of a tokenizer.json by their ids, and the type of each."""
    tokens = [f"[PAD{id}]" for id in range(vocab_size)]
    types = [UNUSED_TOKEN] * vocab_size
    for token, id in content["model"]["vocab"].items():
        tokens[id] = token
        types[id] = NORMAL_TOKEN
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL_TOKEN if added["special"] else USER_DEFINED_TOKEN
    return tokens, types


def _are_equal(restored: Tokenizer, tokenizer: Tokenizer) -> bool:
    """Return whether what llama.cpp reads ends and encodes texts as the original does."""
    tokens = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    texts = (token.decode(errors="replace") for token in tokens)
    ends_alike = {*tokenizer.end_of_text_ids} <= {*restored.end_of_text_ids}
    return ends_alike and all(restored.encode(text) == tokenizer.encode(text) for text in texts)


def _find_split(library: Library) -> str | None:
    """Return llama.cpp's name of the rule by which a tokenizer splits text, or None."""
    if not isinstance(library.model, models.BPE) or library.pre_tokenizer is None:
        return None
    is_normalized = isinstance(library.normalizer, normalizers.NFC)
    if is_normalized != (library.normalizer is not None):
        return None
    pieces = library.pre_tokenizer.pre_tokenize_str(SPLIT_PROBE)
    for split in ["qwen2"] if is_normalized else ["gpt-2", "smollm", "llama-bpe"]:
        if _build_pre_tokenizer(split).pre_tokenize_str(SPLIT_PROBE) == pieces:
            return split
    return None


def _build_pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
    if split in DIGIT_GROUPS:
        return byte_level_split(WORD_PATTERN.format(digits=DIGIT_GROUPS[split]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "gpt-2":
        return byte_level
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    supported = ", ".join(["gpt-2", "smollm", *DIGIT_GROUPS])
    raise UserError(
        f"{PREFIX}pre={show_value(split)}, the rule by which text is split, is not one of "
        f"{supported}, which are supported: use the model's Hugging Face folder instead"
    )
