"""Text to token ids and back: characters, byte-pair encoding, or a model's own tokenizer."""

import base64
import json
import re
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from common.errors import UserError
from common.files import read_json_object
from config import TokenizerConfig
from data.hf_tokenizer import END_OF_TEXT, FILE, SETTINGS, HFTokenizer, byte_level_alphabet

DEFAULT_VOCAB_SIZE = 1024
PATTERNS = {  # how text is split before BPE, which never merges across a split
    # Words with the space before them and snake_case whole, numbers of up to three digits, runs of
    # signs, line ends with the indentation that follows, other white space.
    "code": r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+",
    "gpt2": r50k_pat_str,
}
# Characters that BPE sees as one: its time grows with the square of a run that nothing splits.
LONGEST = 512
LONG_RUN = re.compile(r"(?<!\S)\S{513,}|(?<!\s)\s{513,}")


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
        """Ids of the text, (characters,)."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        unknown = np.flatnonzero(self._points[ids] != points)
        if len(unknown):
            at = int(unknown[0])
            raise UserError(
                f"the character {text[at]!r} in {text[max(0, at - 20) : at + 20]!r} is not among "
                f"the {self.vocab_size} that this model was trained on: leave it out, or train "
                "with tokenizer=bpe, which takes any text"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i : i + 1] for i in ids)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes that a token stands for: none for one beyond the alphabet."""
        return self.alphabet[id : id + 1].encode("utf-8", "surrogatepass")

    def to_json(self) -> dict:
        return {"kind": "char", "alphabet": self.alphabet}


class BPETokenizer:
    """Byte-level byte-pair encoding, run by tiktoken. Decoding gives any text back exactly. Text
    never produces the end-of-text token: its name in a text is encoded as ordinary characters. Ids
    are those of every other byte-pair encoder, but in runs of more than LONGEST characters of white
    space or without any, which `bounded` cuts first."""

    begin_of_text = None  # texts are kept apart, and begun, by end-of-text

    def __init__(self, pattern: str, tokens: list[bytes | None], end_of_text: int | None = None):
        """`tokens` in the order of their ids, which is the order of the merges. A token is None
        where no text has its id. End-of-text has such an id, or one after them all."""
        self.pattern, self._tokens = pattern, tokens
        self.end_of_text = len(tokens) if end_of_text is None else end_of_text
        self.special = {self.end_of_text: END_OF_TEXT}
        self.vocab_size = max(len(tokens), self.end_of_text + 1)
        self._encoding = tiktoken.Encoding(
            "glassgpt",
            pat_str=pattern,
            special_tokens={END_OF_TEXT: self.end_of_text},
            mergeable_ranks={token: id for id, token in enumerate(tokens) if token is not None},
        )

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of the text, (tokens,)."""
        return np.concatenate(
            [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in bounded(text)]
        )

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
        return {
            "kind": "bpe",
            "pattern": self.pattern,
            "end_of_text": self.end_of_text,
            "tokens": [token and base64.b64encode(token).decode() for token in self._tokens],
        }


Tokenizer = CharTokenizer | BPETokenizer | HFTokenizer


def build_tokenizer(
    config: TokenizerConfig, all_texts: Iterable[str], train_texts: Iterable[str]
) -> Tokenizer:
    """The tokenizer that the configuration names. BPE learns from the training split alone; the
    alphabet of `char` is that of the whole text."""
    if config.name == "char":
        return CharTokenizer("".join(set(chain.from_iterable(all_texts))))
    if config.name == "bpe":
        size, pattern = config.vocab_size or DEFAULT_VOCAB_SIZE, PATTERNS[config.pattern]
        return train_bpe(train_texts, size, pattern)
    return of_tiktoken(config.name)


def train_bpe(
    texts: Iterable[str], vocab_size: int, pattern: str = PATTERNS["code"]
) -> BPETokenizer:
    """A tokenizer of at most vocab_size tokens learned by byte-level BPE (Sennrich et al. 2016)."""
    library = Library(models.BPE())
    library.pre_tokenizer = _split(pattern)
    parts = (part for text in texts for part in bounded(text))
    library.train_from_iterator(
        parts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    byte_of, ids = byte_level_alphabet(), library.get_vocab()
    tokens = [bytes(byte_of[c] for c in token) for token in sorted(ids, key=ids.get)]
    return BPETokenizer(pattern, tokens)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def bounded(text: str) -> list[str]:
    """The text cut after each LONGEST characters of a longer run, of white space or without any."""
    cuts = [
        at
        for run in LONG_RUN.finditer(text)
        for at in range(run.start() + LONGEST, run.end(), LONGEST)
    ]
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def of_tiktoken(name: str) -> BPETokenizer:
    """A vocabulary that tiktoken knows by name, with end-of-text alone of its special tokens."""
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as e:  # requests' errors are OSErrors
        raise UserError(
            f"the vocabulary {name} could not be fetched ({type(e).__name__}): set "
            "TIKTOKEN_CACHE_DIR to a folder where tiktoken has kept it"
        ) from None
    by_id = {id: token for token, id in encoding._mergeable_ranks.items()}
    return BPETokenizer(
        encoding._pat_str,
        [by_id.get(id) for id in range(max(by_id) + 1)],
        encoding._special_tokens.get(END_OF_TEXT),
    )


def first_token(tokenizer: Tokenizer) -> int:
    """What a text without a prompt starts from: as a document does, else a new line, else id 0."""
    marks = [id for id in (tokenizer.begin_of_text, tokenizer.end_of_text) if id is not None]
    lines = (id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\n")
    return next(chain(marks, lines), 0)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a model continues: begin-of-text, if there is one, and the prompt; or `first_token`."""
    ids = tokenizer.encode(prompt)
    begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
    return begin + ids if ids else [first_token(tokenizer)]


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    path.write_text(json.dumps(tokenizer.to_json()), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer kept at path."""
    try:
        saved = read_json_object(path)
        if saved["kind"] == "char":
            return CharTokenizer(saved["alphabet"])
        if saved["kind"] == "hf":
            return HFTokenizer(saved["tokenizer"], saved["end_of_text"])
        tokens = [token and base64.b64decode(token, validate=True) for token in saved["tokens"]]
        return BPETokenizer(saved["pattern"], tokens, saved["end_of_text"])
    except Exception as e:  # the libraries have no classes of their own
        raise UserError(f"{path} does not hold a tokenizer: {e}") from None


def hf_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """The files, name → text, from which transformers' AutoTokenizer makes this tokenizer."""
    if isinstance(tokenizer, HFTokenizer):
        library = Library.from_str(tokenizer.description)
    elif isinstance(tokenizer, CharTokenizer):
        # There a character outside the alphabet becomes a space, as no token is spare.
        ids = {c: id for id, c in enumerate(tokenizer.alphabet)}
        unknown = " " if " " in ids else tokenizer.alphabet[0]
        library = Library(models.WordLevel(ids, unk_token=unknown))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    else:
        library = _byte_level(tokenizer)
    end = tokenizer.special.get(tokenizer.end_of_text)
    names = {
        "eos_token": end,
        "pad_token": end,  # where rows are filled up, it is not looked at
        "bos_token": tokenizer.special.get(tokenizer.begin_of_text),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
        **{key: name for key, name in names.items() if name is not None},
    }
    return {FILE: library.to_str(), SETTINGS: json.dumps(settings, indent=1)}


def _byte_level(tokenizer: BPETokenizer) -> Library:
    character = {byte: c for c, byte in byte_level_alphabet().items()}
    ids = {token: id for id in range(tokenizer.vocab_size) if (token := tokenizer.token_bytes(id))}
    name_of = {token: "".join(character[b] for b in token) for token in ids}
    merges = [
        (name_of[pair[0]], name_of[pair[1]])
        for token in ids
        if len(pair := last_pair(token, ids)) == 2
    ]
    vocabulary = {name_of[token]: id for token, id in ids.items()}
    vocabulary |= {name: id for id, name in tokenizer.special.items()}
    library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in tokenizer.special.values()]
    )
    words = (token.decode(errors="replace") for token in ids)
    probes = (f"{word} 12345 'sX\n\n  \t{word}" for word in words)
    try:  # the two engines of regular expressions are not the same
        # {1,3}+ is possessive to tiktoken; there it would repeat the repetition.
        library.pre_tokenizer = _split(re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.pattern))
        is_same = all(library.encode(text).ids == tokenizer.encode(text) for text in probes)
    except Exception:
        is_same = False
    if not is_same:
        raise UserError(
            "this tokenizer's splitting pattern means something else to transformers, "
            "so it cannot be exported"
        )
    return library


def last_pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that byte-pair encoding joins last into a token. A byte is one part; what no
    merge leads to, more. Wherever the token comes about, its bytes have been joined in this same
    order: no other two ever become it, and one merge a token is all."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, at = min(
            (ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)
        )
        if rank == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
