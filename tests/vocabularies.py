"""Small tokenizers of every kind that a model may bring, by name."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from data.hf_tokenizer import END_OF_TEXT, HFTokenizer
from data.tokenizer import CharTokenizer, Tokenizer, train_bpe

TEXT = "the cat sat on the mat, Thé Cat! 漢字 cafe\u0301 straße ﬁn\n\t x\u00a0  "
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = "▁abcdefghijklmnopqrstuvwxyz"
SPACES_AS_MARKS = normalizers.Replace(" ", "▁")


def import_library(library: Library, end_of_text: str = "</s>", begin: bool = False) -> HFTokenizer:
    """Return a tokenizer of the library as it is read from a tokenizer.json."""
    library.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    end = library.token_to_id(end_of_text)
    if begin:
        pairs = [("<s>", library.token_to_id("<s>"))]
        library.post_processor = processors.TemplateProcessing("<s> $A", None, pairs)
    return HFTokenizer(library.to_str(), end)


def byte_fallback(letters: str, *steps, begin: bool = False) -> HFTokenizer:
    """Return a tokenizer of letters, with bytes for other characters, after normalizing."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {name: id for id, name in enumerate(names)}
    library = Library(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([*steps, SPACES_AS_MARKS])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return import_library(library, begin=begin)


def byte_level() -> HFTokenizer:
    """Return a byte-level tokenizer that puts a space before a text and trims offsets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: id for id, name in enumerate([*alphabet, "th", "the", *SPECIAL])}
    library = Library(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    return import_library(library)


def words(model, unknown: str) -> HFTokenizer:
    """Return a tokenizer of a few words in lower case; others, and accents, are lost."""
    names = [unknown, "the", "cat", "##s", "e", "##e"]
    library = Library(model({name: id for id, name in enumerate(names)}, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return import_library(library, end_of_text=unknown)  # what is unknown is no separator


def pieces() -> HFTokenizer:
    """Return a tokenizer of pieces with scores, as SentencePiece has."""
    scores = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("at", -2.5), ("t", -4.0)]
    library = Library(models.Unigram(scores, unk_id=0))
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    return import_library(library, begin=True)


TOKENIZERS: dict[str, Tokenizer] = {
    "characters": CharTokenizer(TEXT),
    "byte pairs": train_bpe([TEXT * 4], 290),
    "byte level": byte_level(),
    "byte fallback": byte_fallback(LETTERS, normalizers.Prepend("▁"), begin=True),
    "no mark of spaces": byte_fallback(LETTERS[1:], normalizers.Prepend("▁")),
    "composed": byte_fallback(LETTERS, normalizers.NFKC(), normalizers.Strip()),
    "decomposed": byte_fallback(LETTERS, normalizers.NFD(), normalizers.StripAccents()),
    "words": words(models.WordLevel, END_OF_TEXT),
    "word pieces": words(models.WordPiece, "[UNK]"),
    "pieces": pieces(),
    "dropped": import_library(Library(models.BPE({"a": 0, "t": 1}, []))),
}
