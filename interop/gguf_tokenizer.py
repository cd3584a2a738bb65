"""Build the tokenizer of a .gguf file from its tables of tokens and merges."""

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.settings import show_value
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import byte_level_split
from interop.gguf_header import Metadata

PREFIX = "tokenizer.ggml."
CONTROL_TOKEN = 3  # types of tokens in tokenizer.ggml.token_type
USER_DEFINED_TOKEN = 4
# Of Llama 3 and Qwen 2: how text is split before merging, without the number of digits in a group.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT_GROUPS = {"llama-bpe": "{1,3}", "qwen2": ""}
# How the models of an architecture split text, if an older file does not say so.
DEFAULT_SPLITS = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}


def read_gguf_tokenizer(path: Path, metadata: Metadata) -> HFTokenizer:
    """Return the byte-level BPE tokenizer of a .gguf file.

    Raises:
        UserError: The tokenizer is of another kind, or splits text in an unknown way.
        ValueError: A table is missing or damaged.
        Exception: The library cannot build the tokenizer.
    """
    kind = metadata.read(f"{PREFIX}model", str)
    if kind != "gpt2":
        raise UserError(
            f"{path}: its tokenizer, {PREFIX}model={show_value(kind)}, is not byte-level BPE "
            "(gpt2), the only type that can be read; use the model's Hugging Face folder instead"
        )
    architecture = metadata.read("general.architecture", str) or ""
    split = metadata.read(f"{PREFIX}pre", str) or DEFAULT_SPLITS.get(architecture)
    tokens = metadata.read_list(f"{PREFIX}tokens", str)
    merges = metadata.read_list(f"{PREFIX}merges", str)
    if not tokens or merges is None:
        raise ValueError(f"{PREFIX}tokens or {PREFIX}merges is missing")
    token_types = metadata.read_list(f"{PREFIX}token_type", int) or []

    # Build the vocabulary and the merges
    ids = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(pair.split(" ", 1)) for pair in merges]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"{PREFIX}merges has {pair[0]!r:.40}, which is not two tokens")
    library = Library(models.BPE(ids, pairs, ignore_merges=split == "llama-bpe"))
    library.pre_tokenizer = _build_pre_tokenizer(path, split)
    library.decoder = decoders.ByteLevel()
    if split == "qwen2":
        library.normalizer = normalizers.NFC()

    # Mark the tokens that the merges do not make
    library.add_tokens(
        [
            AddedToken(token, special=token_type == CONTROL_TOKEN, normalized=False)
            for token, token_type in zip(tokens, token_types)
            if token_type in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
        ]
    )

    # Put begin-of-text before each text
    adds_begin = metadata.read(f"{PREFIX}add_bos_token", bool)
    begin = metadata.read(f"{PREFIX}bos_token_id", int)
    if adds_begin is None:
        adds_begin = split == "llama-bpe" and begin is not None
    if adds_begin:
        if begin is None or not 0 <= begin < len(tokens):
            raise ValueError(f"{PREFIX}bos_token_id={begin} is none of its {len(tokens):,} tokens")
        library.post_processor = processors.TemplateProcessing(
            single=[tokens[begin], "$A"], special_tokens=[(tokens[begin], begin)]
        )
    return HFTokenizer(library.to_str(), metadata.read(f"{PREFIX}eos_token_id", int))


def _build_pre_tokenizer(path: Path, split: str | None) -> pre_tokenizers.PreTokenizer:
    """Return the rule by which a family of models splits text before merging."""
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
        f"{path}: the rule by which text is split, {PREFIX}pre={show_value(split)}, is not "
        f"one of {supported}, which are supported; use the model's Hugging Face folder instead"
    )
